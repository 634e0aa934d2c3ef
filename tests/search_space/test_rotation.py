"""How many sets of operands a burst walks over."""

from __future__ import annotations

import pytest

from kernels.problem import GemmProblem
from search_space.rotation import ENOUGH_SETS, MAX_SETS, POOL_BYTES, POOL_OVER_L2, set_count

L2_BYTES = 60 << 20


@pytest.mark.parametrize("shape", ["1x6144x4096", "128x4096x7168", "4096x4096x4096", "64x57344x8192"])
def test_usual_shapes_average_over_enough_placements(shape: str) -> None:
    """E12: placement alone moves a memory-bound kernel by percents."""
    problem = GemmProblem.parse(shape)
    sets = set_count(problem, L2_BYTES)
    assert sets >= min(ENOUGH_SETS, POOL_BYTES // problem.min_bytes) >= 8
    assert sets * problem.min_bytes <= POOL_BYTES


@pytest.mark.parametrize("shape", ["16x2880x360", "1x1024x1024", "32x2560x5120"])
def test_small_operands_do_not_stay_in_l2(shape: str) -> None:
    """As many sets as three times L2 takes, where that is more."""
    problem = GemmProblem.parse(shape)
    assert set_count(problem, L2_BYTES) * problem.min_bytes > POOL_OVER_L2 * L2_BYTES


def test_counts_have_ends() -> None:
    """Tiny operands stop at the most a graph walks over; operands larger than the pool still take turns."""
    assert set_count(GemmProblem.parse("8x8x8"), L2_BYTES) == MAX_SETS
    assert set_count(GemmProblem.parse("65536x65536x32768"), L2_BYTES) == 2
