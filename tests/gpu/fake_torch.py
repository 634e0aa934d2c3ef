"""A torch that notes what is asked of the card, in order, so that the clock can be tested without one.

Kernels are told to the card by `launch`; a graph remembers what was launched while it was captured, and a replay takes
as long as its kernels. Time stands still but for that.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Modules that hold on to torch: imported anew with the fake, and forgotten afterwards.
USERS = ("clock", "baselines", "cublaslt", "inputs", "referee", "context", "evaluate", "finals", "device")


class Card:
    """What happened.

    log: "sleep", "begin" and "end" of a timed part, and the launches in between, by operand set
    now_us: time of the card
    host_us: what a launch from the host costs; inside a graph it costs nothing
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.now_us = 0.0
        self.host_us = 5.0
        self.capturing: Graph | None = None

    def launch(self, what: Any, time_us: float) -> None:
        """A kernel: now, or as part of the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.nodes.append((what, time_us))
            return
        self.log.append(what)
        self.now_us += max(time_us, self.host_us)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.nodes: list[tuple[Any, float]] = []

    def capture_begin(self) -> None:
        self._card.capturing = self

    def capture_end(self) -> None:
        self._card.capturing = None

    def replay(self) -> None:
        self._card.log.append("replay")
        for what, time_us in self.nodes:
            self._card.log.append(what)
            self._card.now_us += time_us


class Event:
    """torch.cuda.Event."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = self._card.now_us
        self._card.log.append("event")

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) / 1000.0

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True


class Stream:
    """torch.cuda.Stream, also as a context."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing runs ahead."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def install(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Put the fake in torch's place until the test ends; returns its card."""
    card = Card()
    torch = ModuleType("torch")
    stream = Stream()

    def sleep(cycles: int) -> None:
        card.log.append("sleep")

    cuda = SimpleNamespace(
        CUDAGraph=lambda: Graph(card),
        Event=lambda enable_timing=False: Event(card),
        Stream=Stream,
        stream=lambda one: one,
        current_stream=lambda: stream,
        current_device=lambda: 0,
        synchronize=lambda: None,
        _sleep=sleep,
    )
    for name in ("bfloat16", "float16", "float32", "float64", "int16", "uint8"):
        setattr(torch, name, name)
    torch.cuda = cuda  # type: ignore[attr-defined]
    torch.OutOfMemoryError = MemoryError  # type: ignore[attr-defined]
    for name in USERS:
        monkeypatch.delitem(sys.modules, f"tuner.gpu.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return card


def forget() -> None:
    """Drop the modules that hold on to the fake."""
    for name in USERS:
        sys.modules.pop(f"tuner.gpu.{name}", None)
