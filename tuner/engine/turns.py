"""Who is next where several studies wait: what stands between a finished search and its result goes before candidates.

A final, and the builds and checks of its winner, end a study: seconds later its result is there, and a campaign that is
cut loses less. Candidates are not starved: after some urgent jobs in a row one of them has its turn, and a study has
one final for all of its candidates.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

URGENT_IN_A_ROW = 8


def _usual() -> int:
    return URGENT_IN_A_ROW


class Turns[Item]:
    """A queue with two classes; within a class first come, first served. Thread-safe."""

    def __init__(self, in_a_row: Callable[[], int] = _usual) -> None:
        """in_a_row: how many urgent items may pass an ordinary one that waits; asked at each turn, waits for nothing"""
        self._in_a_row = in_a_row
        self._urgent: deque[Item] = deque()
        self._ordinary: deque[Item] = deque()
        self._passed = 0  # urgent ones since an ordinary one had its turn
        self._changed = threading.Condition()

    def put(self, item: Item, *, urgent: bool = False) -> None:
        """Queue it."""
        with self._changed:
            (self._urgent if urgent else self._ordinary).append(item)
            self._changed.notify()

    def take(self) -> Item:
        """The next one; waits for it."""
        with self._changed:
            while not (self._urgent or self._ordinary):
                self._changed.wait()
            if self._urgent and not (self._ordinary and self._passed >= self._in_a_row()):
                self._passed += 1
                return self._urgent.popleft()
            self._passed = 0
            return self._ordinary.popleft()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def drain(self) -> list[Item]:
        """Take all that wait."""
        with self._changed:
            found = [*self._urgent, *self._ordinary]
            self._urgent.clear()
            self._ordinary.clear()
            return found


@dataclass(frozen=True, slots=True)
class Turn[Reply]:
    """Work that waits for its turn, and the future that it ends."""

    work: Callable[[], Reply]
    future: Future[Reply]

    def run(self) -> None:
        """Do it, unless it was cancelled meanwhile."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as error:  # a thread's end: whatever it is belongs to whoever waits for the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class TurnPool:
    """Threads that take turns, as a ThreadPoolExecutor with two classes of work."""

    def __init__(self, threads: int, name: str, in_a_row: Callable[[], int] = _usual) -> None:
        self._turns: Turns[Turn[Any]] = Turns(in_a_row)
        self._threads = ThreadPoolExecutor(threads, name)

    def submit[Reply](self, work: Callable[[], Reply], *, urgent: bool = False) -> Future[Reply]:
        """Run it in its turn."""
        future: Future[Reply] = Future()
        self._turns.put(Turn(work, future), urgent=urgent)
        self._threads.submit(lambda: self._turns.take().run())  # as many as there are turns: `take` never waits
        return future

    @property
    def waiting(self) -> int:
        """Turns that nobody has taken yet, cancelled ones too."""
        return len(self._turns)

    def close(self) -> None:
        """Cancel what waits, and await what runs."""
        self._threads.shutdown(cancel_futures=True)  # first, so that no thread waits for a turn that is taken back here
        for turn in self._turns.drain():
            turn.future.cancel()
