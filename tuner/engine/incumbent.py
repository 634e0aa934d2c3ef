"""What a trial races against: the best of those that were told when it was asked.

A time means nothing across a change of the clock: on a card that has become 20 % slower every later candidate looks
slow. So a candidate races on its ratio to torch.matmul in the same rounds, which the clock moves alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tuner.records import Measurement

BASELINE = "torch"  # the same implementation in every trial; what `cublaslt_best` is may change with the child


@dataclass(frozen=True, kw_only=True, slots=True)
class Incumbent:
    """The best trial so far.

    time_us: its median
    ratio: of BASELINE's time to its own, median of its paired rounds; None where BASELINE was not timed
    """

    time_us: float
    ratio: float | None = None

    @classmethod
    def of(cls, measurement: Measurement) -> Incumbent:
        """A trial as others race against it."""
        timed = BASELINE in measurement.baselines_us
        return cls(time_us=measurement.median_us(), ratio=measurement.ratio(BASELINE).median if timed else None)

    def slowdowns(self, ours_us: Sequence[float], baseline_us: Sequence[float]) -> list[float]:
        """A candidate's time as a multiple of this one's, round by round: above 1 it is slower.

        By ratio; by time only where this one has no ratio, or the candidate's rounds hold no BASELINE (empty).
        """
        if self.ratio is None or not baseline_us:
            return [us / self.time_us for us in ours_us]
        return [self.ratio * ours / theirs for ours, theirs in zip(ours_us, baseline_us, strict=True)]

    def text(self) -> str:
        """For people."""
        return f"{self.time_us:.2f} us" if self.ratio is None else f"{self.ratio:.3f}x {BASELINE}"


def best_of(told: Iterable[Incumbent | None]) -> Incumbent | None:
    """The one to race against: by ratio where all have one, else by time. None where there is none."""
    known = [one for one in told if one is not None]
    ratios = [one.ratio for one in known if one.ratio is not None]
    if len(ratios) == len(known):
        return max(known, key=lambda one: one.ratio or 0.0, default=None)
    return min(known, key=lambda one: one.time_us)
