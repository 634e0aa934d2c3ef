"""Checks of winners share a GPU with one another, never with a timing."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tuner.engine import together
from tuner.engine.together import MOST, Together

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0


class Gpu:
    """One GPU that runs one job at a time; `busy` says that something waits to be timed."""

    def __init__(self) -> None:
        self.busy = False
        self.batches = 0
        self.error: Exception | None = None
        self.threads = ThreadPoolExecutor(1)

    def take(self, work: Any) -> Future[Any]:
        """Run it in its turn."""

        def run() -> None:
            if self.error is not None:
                raise self.error
            self.batches += 1
            work("GPU-0")

        return self.threads.submit(run)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A GPU, ended with the test."""
    made = Gpu()
    yield made
    made.threads.shutdown()


def test_works_run_side_by_side_in_one_turn(gpu: Gpu) -> None:
    """While something is to be timed they wait until MOST have come; then all of them meet on the GPU."""
    gpu.busy = True
    works = Together(gpu.take, lambda _: not gpu.busy)
    meet = threading.Barrier(MOST)

    def work(uuid: str) -> str:
        meet.wait(WAIT_S)  # breaks unless all run at once
        return uuid

    futures = [works.submit(work) for _ in range(MOST - 1)]
    assert not any(future.running() or future.done() for future in futures)
    futures.append(works.submit(work))
    assert [future.result(WAIT_S) for future in futures] == ["GPU-0"] * MOST
    assert gpu.batches == 1


def test_idle_gpu_is_taken_at_once(gpu: Gpu) -> None:
    """Nothing to be timed: one work alone need not wait; one that came while it ran has the next turn."""
    works = Together(gpu.take, lambda _: not gpu.busy)
    go = threading.Event()
    first = works.submit(lambda _: go.wait(WAIT_S))
    while not first.running():
        pass
    second = works.submit(lambda _: "second")
    go.set()
    assert first.result(WAIT_S)
    assert second.result(WAIT_S) == "second"


def test_gpu_that_falls_idle_takes_those_who_wait(gpu: Gpu) -> None:
    """`look` is called when a timing has ended."""
    gpu.busy = True
    works = Together(gpu.take, lambda _: not gpu.busy)
    future = works.submit(lambda _: 1)
    gpu.busy = False
    works.look()
    assert future.result(WAIT_S) == 1


def test_nobody_waits_for_ever(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is never idle is asked for after a while."""
    monkeypatch.setattr(together, "LONGEST_WAIT_S", 0.05)
    gpu.busy = True
    assert Together(gpu.take, lambda _: not gpu.busy).submit(lambda _: 1).result(WAIT_S) == 1


def test_failure_is_its_own(gpu: Gpu) -> None:
    """A work that raises does not disturb its neighbours."""
    gpu.busy = True
    works = Together(gpu.take, lambda _: not gpu.busy)
    bad = works.submit(lambda _: 1 // 0)
    good = [works.submit(lambda _: 1) for _ in range(MOST - 1)]
    assert [future.result(WAIT_S) for future in good] == [1] * (MOST - 1)
    assert isinstance(bad.exception(WAIT_S), ZeroDivisionError)


def test_no_gpu_is_everybodys_failure(gpu: Gpu) -> None:
    """A GPU that cannot be taken leaves no one waiting, and the next work asks again."""
    works = Together(gpu.take, lambda _: True)
    gpu.error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        works.submit(lambda _: 1).result(WAIT_S)
    gpu.error = None
    assert works.submit(lambda _: 2).result(WAIT_S) == 2


def test_cancelled_works_do_not_run(gpu: Gpu) -> None:
    """Neither one that was cancelled while it waited, nor any after the end."""
    gpu.busy = True
    works = Together(gpu.take, lambda _: not gpu.busy)
    ran: list[int] = []
    first, second = works.submit(lambda _: ran.append(1)), works.submit(lambda _: ran.append(2))
    assert first.cancel()
    works.close()
    with pytest.raises(CancelledError):
        second.result(WAIT_S)
    gpu.busy = False
    works.look()
    assert works.submit(lambda _: "after").result(WAIT_S) == "after"
    assert ran == []
