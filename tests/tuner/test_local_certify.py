"""The local engine certifies: builds compile while the GPU serves others."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from kernels.artifacts import ArtifactStore
from tests.tuner.support import PROFILE
from tests.tuner.test_certify import CLEAN, JOB, SOAKED, StubChild, StubPool
from tuner.engine import local
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.fake import fake_device
from tuner.engine.local import LocalEngine, LocalMachine, LocalOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tuner.engine.compile_pool import PoolReply

WAIT_S = 30.0
DEVICE = fake_device(PROFILE)


class HeldPool(StubPool):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.held: list[Future[PoolReply]] = []

    def submit(self, *arguments: Any, urgent: bool = False) -> Future[PoolReply]:
        """See CompilePool."""
        done = super().submit(*arguments).result()
        future: Future[PoolReply] = Future()

        def compiled() -> None:
            self.go.wait(WAIT_S)
            if future.set_running_or_notify_cancel():
                future.set_result(done)

        threading.Thread(target=compiled, daemon=True).start()
        self.held.append(future)
        return future

    def drop(self, futures: Any) -> None:
        """See CompilePool."""
        for future in futures:
            future.cancel()

    def close(self) -> None:
        """See CompilePool."""
        self.go.set()


class ClosableChild(StubChild):
    """A child that only stresses."""

    def close(self) -> None:
        """See Child."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    """An engine with one stub GPU, a pool that is held, and a sanitizer that finds nothing."""
    monkeypatch.setattr(local, "memcheck", lambda launches, device, stop: CLEAN)
    monkeypatch.setattr(local, "soak", lambda job, device, stop: SOAKED)
    machine = LocalMachine(
        LocalOptions(compile=CompilePoolOptions(processes=1)),
        ArtifactStore(tmp_path / "artifacts"),
        list_gpus=lambda: (DEVICE,),
        start_child=lambda index: ClosableChild(),  # type: ignore[arg-type,return-value]
    )
    machine.pool.close()
    machine.pool = HeldPool()  # type: ignore[assignment]
    yield machine.engine(DEVICE.profile, live=True)
    machine.close()


def pool_of(engine: LocalEngine) -> HeldPool:
    """The held pool behind the engine."""
    pool = engine._machine.pool
    assert isinstance(pool, HeldPool)
    return pool


def test_gpu_serves_others_while_the_builds_compile(engine: LocalEngine) -> None:
    """A job that needs the GPU ends while a certification still compiles; then that one ends too."""
    certifying = engine.certify(JOB)
    assert engine._on_gpu(lambda child: "served").result(WAIT_S) == "served"
    assert not certifying.done()
    pool_of(engine).go.set()
    reply = certifying.result(WAIT_S)
    assert reply.certified
    assert [check.name for check in reply.checks] == ["structure", "stress", "soak", "memcheck"]


def test_dropped_certification_takes_its_compiles_back(engine: LocalEngine) -> None:
    """Cancelled while compiling: the future ends, no compile goes on, and the GPU was never asked."""
    certifying = engine.certify(JOB)
    engine.drop([certifying])
    assert all(future.cancelled() for future in pool_of(engine).held)
    done = threading.Event()
    certifying.add_done_callback(lambda _: done.set())
    assert done.wait(WAIT_S)
    assert certifying.cancelled()
