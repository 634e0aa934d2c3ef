"""The results of a device under its roof: what the memory and the tensor cores allow, and what was reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictures.svg import FAINT, GRID, INK, OURS, THEIRS, LogScale, Picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.devices import DeviceProfile

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 860, 70, 30, 34, 400
_BOTTOM = _TOP + _HEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One result.

    name: the problem
    flops_per_byte: its work over the bytes of A, B and D, each moved once
    tflops: what was reached, 10^12 floating-point operations a second
    modeled: whether the time is an estimate
    link: where the point leads, empty for nowhere
    """

    name: str
    flops_per_byte: float
    tflops: float
    modeled: bool = False
    link: str = ""


def picture(points: Sequence[Point], profile: DeviceProfile) -> Picture:
    """Both axes logarithmic. Operands that stay in L2 from one launch to the next may lie above the memory's slope."""
    peak, bandwidth = profile.peak_flops / 1e12, profile.bandwidth_bytes_per_s / 1e12
    ridge = peak / bandwidth
    xs, ys = [point.flops_per_byte for point in points], [point.tflops for point in points]
    across = LogScale(
        low=min([*xs, ridge / 20]) / 1.5, high=max([*xs, ridge * 4]) * 1.5, start=_LEFT, length=_WIDTH - _LEFT - _RIGHT
    )
    up = LogScale(low=min([*ys, peak / 100]) / 1.5, high=peak * 1.6, start=_BOTTOM, length=-_HEIGHT)
    drawn = Picture(
        width=_WIDTH,
        height=_BOTTOM + 48,
        title=f"Roofline of {profile.name}: {len(points)} results under {peak:.0f} TFLOP/s and {bandwidth:.2f} TB/s",
    )
    for mark in across.marks():
        drawn.line(across.at(mark), _TOP, across.at(mark), _BOTTOM, GRID)
        drawn.text(across.at(mark), _BOTTOM + 17, f"{mark:g}", size=11, anchor="middle", fill=FAINT)
    for mark in up.marks():
        drawn.line(_LEFT, up.at(mark), _WIDTH - _RIGHT, up.at(mark), GRID)
        drawn.text(_LEFT - 6, up.at(mark) + 4, f"{mark:g}", size=11, anchor="end", fill=FAINT)
    first = max(across.low, up.low / bandwidth)
    drawn.path([(across.at(x), up.at(min(peak, x * bandwidth))) for x in (first, ridge, across.high)], INK, width=1.5)
    drawn.text(
        across.at(ridge) + 8, up.at(peak) - 7, f"tensor cores at {profile.clock_mhz} MHz: {peak:.0f} TFLOP/s", size=11
    )
    drawn.text(_LEFT, _TOP - 12, "TFLOP/s", size=11, fill=FAINT)
    drawn.text(_WIDTH - _RIGHT, _BOTTOM + 38, "flops a byte", size=11, anchor="end", fill=FAINT)
    for point in points:
        roof = min(peak, point.flops_per_byte * bandwidth)
        modeled = " (modeled)" if point.modeled else ""
        tip = f"{point.name}: {point.tflops:.3g} TFLOP/s{modeled}, {point.tflops / roof:.0%} of the roof"
        x, y = across.at(point.flops_per_byte), up.at(point.tflops)
        drawn.dot(x, y, THEIRS if point.modeled else OURS, radius=5, tip=tip, link=point.link)
    return drawn
