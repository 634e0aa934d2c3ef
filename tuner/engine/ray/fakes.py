"""Invented GPUs of one node: several cards, each evaluates one candidate at a time and has an identity of its own."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuner.engine.fake import FakeEngine, FakeOptions, FakeTimes, fake_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kernels.artifacts import ArtifactStore
    from kernels.devices import DeviceProfile
    from tuner.engine.base import (
        CertifyJob,
        CertifyReply,
        CompileJob,
        CompileReply,
        DeviceFacts,
        EvaluateJob,
        EvaluateReply,
        FinalJob,
        FinalReply,
    )


class FakeMachine:
    """What `tuner.engine.local.LocalMachine` is for real processes."""

    def __init__(
        self,
        profiles: Sequence[DeviceProfile],
        *,
        node: str,
        artifacts: ArtifactStore,
        compile_processes: int,
        scale: float,
    ) -> None:
        times = FakeTimes(scale=scale, compile_workers=compile_processes, gpus=1)
        self._options = FakeOptions(times=times)
        self._artifacts = artifacts
        self._cards = [(profile, f"{node}/{index}") for index, profile in enumerate(profiles)]
        self.gpus: tuple[DeviceFacts, ...] = tuple(fake_device(profile, card=card) for profile, card in self._cards)
        self._compiler = FakeEngine(profiles[0], options=self._options, artifacts=artifacts) if profiles else None
        self._engines: dict[str, FakeCards] = {}
        self._lock = threading.Lock()

    def engine(self, profile: DeviceProfile, *, live: bool) -> FakeCards:
        """The engine of the cards of this name; any engine compiles for all."""
        name = profile.name if live else ""
        with self._lock:
            if name not in self._engines:
                cards = [
                    FakeEngine(mine, options=self._options, artifacts=self._artifacts, card=card)
                    for (mine, card), facts in zip(self._cards, self.gpus, strict=True)
                    if facts.name == name
                ]
                self._engines[name] = FakeCards(cards, self._compiler or self._compile_only(profile))
            return self._engines[name]

    def _compile_only(self, profile: DeviceProfile) -> FakeEngine:
        self._compiler = FakeEngine(profile, options=replace(self._options, live=False), artifacts=self._artifacts)
        return self._compiler

    def close(self) -> None:
        """End every thread."""
        for engine in self._engines.values():
            engine.close()
        if self._compiler is not None:
            self._compiler.close()


class FakeCards:
    """See `tuner.engine.base.Engine`. Jobs wait, first come, first served, until a card is idle."""

    def __init__(self, cards: Sequence[FakeEngine], compiler: FakeEngine) -> None:
        self._cards, self._compiler = tuple(cards), compiler
        self._idle = deque(self._cards)
        self._waiting: deque[tuple[Future[Any], Callable[[FakeEngine], Future[Any]]]] = deque()
        self._lock = threading.Lock()

    @property
    def device(self) -> DeviceFacts:
        """See Engine."""
        return self._cards[0].device if self._cards else self._compiler.device

    def compile(self, job: CompileJob) -> Future[CompileReply]:
        """See Engine."""
        return self._compiler.compile(job)

    def evaluate(self, job: EvaluateJob) -> Future[EvaluateReply]:
        """See Engine."""
        return self._on_card(lambda card: card.evaluate(job))

    def final(self, job: FinalJob) -> Future[FinalReply]:
        """See Engine."""
        return self._on_card(lambda card: card.final(job))

    def certify(self, job: CertifyJob) -> Future[CertifyReply]:
        """See Engine."""
        return self._on_card(lambda card: card.certify(job))

    def module_path(self, sha256: str) -> Path:
        """See Engine."""
        return self._compiler.module_path(sha256)

    def has_module(self, sha256: str) -> bool:
        """See Engine."""
        return self._compiler.has_module(sha256)

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """See Engine."""
        for future in futures:
            future.cancel()

    def close(self) -> None:
        """See Engine."""
        for card in self._cards:
            card.close()

    def _on_card(self, work: Callable[[FakeEngine], Future[Any]]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, work))
        self._start()
        return future

    def _start(self) -> None:
        while True:
            with self._lock:
                if not (self._idle and self._waiting):
                    return
                future, work = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                card = self._idle.popleft()
            self._run(card, future, work)

    def _run(self, card: FakeEngine, future: Future[Any], work: Callable[[FakeEngine], Future[Any]]) -> None:
        def finished(done: Future[Any]) -> None:
            with self._lock:
                self._idle.append(card)
            if done.cancelled():
                future.set_exception(RuntimeError("the card was closed"))
            elif (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())
            self._start()

        work(card).add_done_callback(finished)
