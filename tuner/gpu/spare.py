"""Children in reserve: torch imported, nothing of the GPU held.

Replacing a child costs an import of torch (3 to 5 s) and a CUDA context. A spare has the import behind it. It has no
context, so it takes no memory of the card, no fault of another context can reach it, and NVML does not list it.

Its import takes a CPU core for some seconds. A new spare is started when a child is handed the GPU: until that child
has its context and its baselines, no candidate is timed. Should the import last longer, a timing does not feel it:
bursts are CUDA graphs, timed by events on the card, launched under a spin that covers the host's part, and the compile
pool keeps the other cores busy all the time anyway. Spares are not stopped by a signal while candidates are timed: a
stopped process could not see that its parent is gone, and would outlive a tuner that was killed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.gpu.process import ChildProcess

MAX_DEATHS = 3  # in a row, of spares that nobody had used; then something is wrong, and no more are started


class Spares:
    """A few children that wait to be handed the GPU. Not thread-safe: whoever holds the turn of the GPU calls.

    start: starts a child
    count: children in reserve; 0 for none
    """

    def __init__(self, start: Callable[[], ChildProcess], count: int) -> None:
        self._start, self._count = start, count
        self._waiting: list[ChildProcess] = []
        self._deaths = 0

    def take(self) -> ChildProcess | None:
        """The oldest living one, which may still be importing. None when there is none."""
        self._bury()
        if not self._waiting:
            return None
        self._deaths = 0
        return self._waiting.pop(0)

    def refill(self) -> None:
        """Replace the dead and the taken. Returns at once: the new ones import by themselves."""
        self._bury()
        if self._deaths < MAX_DEATHS:
            self._waiting += [self._start() for _ in range(self._count - len(self._waiting))]

    def close(self) -> None:
        """End them all."""
        for child in self._waiting:
            _kill(child)
        self._waiting.clear()

    def _bury(self) -> None:
        for child in [child for child in self._waiting if child.is_gone]:
            self._waiting.remove(child)
            self._deaths += 1
            _kill(child)


def _kill(child: ChildProcess) -> None:
    with contextlib.suppress(TimeoutError):  # nobody waits for a spare: one that cannot be ended holds nothing up
        child.kill()
