"""Sleeps at the barrier points of a template, for stress builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.script import tirx as T

from kernels.errors import ConfigError
from kernels.gemm_names import DELAY_POINTS

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_delays(delays_ns: Mapping[str, int]) -> None:
    """Raises ConfigError for an unknown point, or a delay that is no power of two."""
    if unknown := set(delays_ns) - set(DELAY_POINTS):
        raise ConfigError(f"unknown delay point {sorted(unknown)[0]!r}: use one of {', '.join(DELAY_POINTS)}")
    if any(longest < 1 or longest & (longest - 1) for longest in delays_ns.values()):
        raise ConfigError("delays must be powers of two")


def pause(delays_ns: Mapping[str, int], point: str) -> None:
    """Sleep for a time that differs from thread to thread and launch to launch: a hash of the SM's clock."""
    if longest_ns := delays_ns.get(point):
        ticks = T.call_extern("int64", "clock64")
        drawn = T.bitwise_and(T.shift_right(ticks * T.int64(2654435761), T.int64(20)), T.int64(longest_ns - 1))
        T.evaluate(T.cuda.nano_sleep(T.cast(drawn, "uint64")))
