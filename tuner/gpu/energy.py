"""Power of one kernel under steady load, from the card's energy counter.

The counter of a data-centre card moves in steps, tens of milliseconds apart, so the difference over a burst alone can
be off by a step at each end. Between two of its own steps it is exact: the meter is looked at all through a burst,
notes when the counter moved, and divides the energy between the first and the last move by the time between them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST_S = 0.05  # between the first and the last move: less would rest on when we happened to look


@dataclass(kw_only=True)
class EnergyMeter:
    """Of one burst.

    read_mj: the counter in millijoules, None where the card has none
    clock: seconds
    """

    read_mj: Callable[[], float | None]
    clock: Callable[[], float] = time.monotonic
    _seen_mj: float | None = None
    _moves: list[tuple[float, float]] = field(default_factory=list)

    def look(self) -> None:
        """Read the counter. Called every few milliseconds while the kernel runs."""
        value_mj = self.read_mj()
        if value_mj is None:
            return
        if self._seen_mj is not None and value_mj != self._seen_mj:
            self._moves.append((self.clock(), value_mj))
        self._seen_mj = value_mj

    def power_w(self) -> float | None:
        """Mean power between the first and the last move; None when the counter moved too seldom to tell."""
        if len(self._moves) < 2:
            return None
        (first_s, first_mj), (last_s, last_mj) = self._moves[0], self._moves[-1]
        if last_s - first_s < SHORTEST_S or last_mj <= first_mj:
            return None
        return (last_mj - first_mj) / 1000.0 / (last_s - first_s)
