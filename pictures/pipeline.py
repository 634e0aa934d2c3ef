"""The pipeline of one CTA over time, as the performance model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pictures.svg import FAINT, GRID, Picture
from search_space.model import predict
from search_space.timeline import timeline

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from search_space.timeline import Timeline

LEGEND = (
    ("load", "TMA load under way"),
    ("full", "full, waits for the MMA"),
    ("multiply", "being multiplied"),
    ("held", "held until the next stage is issued"),
    ("drain", "epilogue: read back and stored"),
)
_LEFT, _TOP, _LANE, _LENGTH = 130, 104, 26, 1080


def timeline_picture(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Picture:
    """The pipeline of one CTA over its first tiles: ring slots, MMA, accumulators, writeback."""
    line = timeline(problem, config, profile)
    lanes, predicted = line.lanes, predict(problem, config, profile)
    height = _TOP + _LANE * len(lanes) + 74
    title = f"Pipeline of one CTA: {problem} on {profile.name}"
    drawn = Picture(width=_LEFT + _LENGTH + 30, height=height, title=title)
    drawn.text(16, 26, title, size=17)
    drawn.text(16, 46, f"modeled, not measured: durations of the performance model ({predicted.bound}-bound, "
               f"{predicted.time_us:.1f} us in all)", fill=FAINT)  # fmt: skip
    _legend(drawn, line)
    _axis(drawn, line, _TOP + _LANE * len(lanes))
    for place, lane in enumerate(lanes):
        _lane(drawn, line, lane, _TOP + place * _LANE)
    shown = f"{line.tiles} of {predicted.waves} tiles of this CTA"
    if line.k_blocks < line.whole_k_blocks:
        shown += f", {line.k_blocks} of the {line.whole_k_blocks} blocks of K of each"
    drawn.text(16, height - 28, f"shown: {shown}", size=11, fill=FAINT)
    knobs = ", ".join(f"{name} {value}" for name, value in config.to_dict().items())
    drawn.text(16, height - 12, knobs, size=10, fill=FAINT)
    return drawn


def _legend(drawn: Picture, line: Timeline) -> None:
    used, x = {span.kind for span in line.spans}, 16.0
    for kind, text in LEGEND:
        if kind in used:
            drawn.rect(x, 62, 12, 12, kind)
            drawn.text(x + 18, 73, text)
            x += 40 + 6.6 * len(text)


def _axis(drawn: Picture, line: Timeline, bottom: float) -> None:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if line.end_us / s <= 14)
    for mark in range(0, int(line.end_us) + 1, step):
        x = _LEFT + _LENGTH * mark / line.end_us
        drawn.line(x, _TOP - 6, x, bottom, GRID)
        drawn.text(x, bottom + 16, f"{mark} us", size=11, anchor="middle", fill=FAINT)


def _lane(drawn: Picture, line: Timeline, lane: str, y: float) -> None:
    drawn.text(16, y + 16, lane)
    scale = _LENGTH / line.end_us
    for span in (span for span in line.spans if span.lane == lane):
        width = (span.end_us - span.start_us) * scale
        block = f", block {span.block}" if span.block >= 0 else ""
        tip = f"tile {span.tile}{block}: {span.kind}, {span.start_us:.2f} to {span.end_us:.2f} us"
        # A gap of half a pixel tells one stage from the next.
        drawn.rect(_LEFT + span.start_us * scale, y + 3, max(width - 0.5, 0.3), _LANE - 7, span.kind, tip=tip)
