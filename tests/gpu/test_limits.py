"""Times that cannot be true."""

from __future__ import annotations

import pytest

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from tuner.gpu.limits import impossible

H200 = profile_named("h200")
CUBE = GemmProblem(m=4096, n=4096, k=4096)


def test_time_below_the_tensor_core_rate_is_impossible_and_says_so() -> None:
    """4096^3 needs 128.4 us at 132 SMs x 4096 FLOP x 1980 MHz; a clock that says 100 us is wrong."""
    reason = impossible((180.0, 100.0), CUBE, H200, 10**9)
    assert "100.000 us" in reason
    assert "128.3" in reason
    assert "132 SMs" in reason
    assert not impossible((175.0, 176.0), CUBE, H200, 10**9)


def test_time_below_the_memory_rate_is_impossible_for_operands_larger_than_l2() -> None:
    """1 x 28672 x 4096 reads 235 MB: 48.9 us at 4.8 TB/s, less what L2 may hold of the pool."""
    decode = GemmProblem(m=1, n=28672, k=4096)
    assert "TB/s" in impossible((30.0,), decode, H200, 2 * decode.min_bytes)
    assert not impossible((54.0,), decode, H200, 2 * decode.min_bytes)
    assert not impossible((45.0,), decode, H200, 2 * decode.min_bytes)


def test_operands_that_fit_l2_have_no_memory_limit() -> None:
    """They need not come from memory at all."""
    small = GemmProblem(m=16, n=4096, k=4096)
    assert not impossible((2.0,), small, H200, small.min_bytes)


@pytest.mark.parametrize("sample", [0.0, -1.0, float("nan")])
def test_time_that_is_not_positive_is_impossible(sample: float) -> None:
    """E6: a broken clock gives such values."""
    assert "positive" in impossible((sample,), CUBE, H200, 10**9)


def test_limit_follows_the_highest_clock_seen_and_never_a_lower_one() -> None:
    """E9: a card above its stated clock raises the limit; a reading of a throttled one makes no good time false."""
    assert impossible((120.0,), CUBE, H200, 10**9)
    assert not impossible((120.0,), CUBE, H200, 10**9, seen_mhz=2200.0)
    assert "2050 MHz" in impossible((120.0,), CUBE, H200, 10**9, seen_mhz=2050.0)
    assert not impossible((175.0,), CUBE, H200, 10**9, seen_mhz=345.0)
