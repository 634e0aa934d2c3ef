"""How many sets of operands the launches of a burst walk over. Needs no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.problem import GemmProblem

POOL_OVER_L2 = 3
MAX_SETS = 1024
# Where a set lies in memory is worth about 3 % of a memory-bound kernel's time, and the next process places it anew:
# torch took 15.73, 16.05 and 16.22 us for 1x6144x4096 over three placements of 5 sets, 15.84 to 16.13 over 16 sets
# (results/h200/placement.json). The mean over 64 placements is known to half a percent.
ENOUGH_SETS = 64
POOL_BYTES = 8 << 30  # that more sets than L2 asks for may take


def set_count(problem: GemmProblem, l2_bytes: int) -> int:
    """At least two, three times L2 in all, and enough placements where memory allows."""
    past_l2 = math.ceil(POOL_OVER_L2 * l2_bytes / problem.min_bytes) + 1
    placements = min(ENOUGH_SETS, POOL_BYTES // problem.min_bytes)
    return max(2, min(MAX_SETS, max(past_l2, placements)))
