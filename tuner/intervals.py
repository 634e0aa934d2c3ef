"""95 % intervals of a median from order statistics.

The d-th smallest and largest of n values hold the true median with probability 1 - 2 P(Binomial(n, 1/2) < d), whatever
the distribution. That jumps with d (n = 9: 99.6, 96.1, 82.0 %), so the ends lie between two neighbours, at the place
that makes it the same for any n (Hettmansperger and Sheather 1986). No random number is drawn: the same samples always
give the same interval. Below six values no pair reaches 95 %; the smallest and the largest are given then, and only a
trial that was stopped early has so few. docs/decisions/0010 says why the aim is a little above 95 %.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Every interval is meant to hold the truth 95 times in 100 on a real card. For independent rounds it would 96.5 times:
# stopping when it is narrow costs it 0.5 to 1 in 100, and where a module lies in memory as much (200 A/A pairs, H200).
AIM = 0.965


def median_interval(values: Iterable[float]) -> tuple[float, float]:
    """95 % interval of the median by order statistics. Raises ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values, no interval")
    depth, weight = _depth(len(ordered))
    low, high = ordered[depth - 1], ordered[-depth]
    if weight:
        low += weight * (ordered[depth] - low)
        high += weight * (ordered[-depth - 1] - high)
    return low, high


@lru_cache(maxsize=1024)
def _depth(count: int) -> tuple[int, float]:
    """Which values from each end the interval lies between, and how far it is on the way to the inner one.

    The weight is the interpolation of Hettmansperger and Sheather, "Confidence intervals based on interpolated order
    statistics" (1986): nearly exact for any symmetric distribution.
    """
    all_orders = 1 << count
    depth, below = 1, 1  # orders in which fewer than `depth` values lie below the median
    while 2 * (depth + 1) <= count and 1 - 2 * (below + comb(count, depth)) / all_orders >= AIM:
        below += comb(count, depth)
        depth += 1
    coverage, inner = 1 - 2 * below / all_orders, 1 - 2 * (below + comb(count, depth)) / all_orders
    if coverage <= AIM:
        return depth, 0.0
    excess = (coverage - AIM) / (coverage - inner)
    return depth, (count - depth) * excess / (depth + (count - 2 * depth) * excess)
