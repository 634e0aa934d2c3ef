"""What a study found out about its knobs: importance, slices, pairs, and what was covered and turned away."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pictures.svg import FAINT, GRID, INK, OURS, PAPER, THEIRS, LinearScale, LogScale, Picture

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from search_space.knob_effects import Effect, Pair

_LEFT, _TOP, _ROW, _LENGTH, _RIGHT = 150, 56, 26, 420, 120
_WIDTH = _LEFT + _LENGTH + _RIGHT
_SLICE_WIDTH, _SLICE_HEIGHT, _COLUMNS, _MARGIN = 300, 170, 3, 46
_CELL_WIDTH, _CELL_HEIGHT = 74, 30
CROWDED = 8  # values side by side, from which every other one is written lower
MOST_REASONS = 12  # a study has a few reasons with many configs each, and a long tail
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def importance(shares: Mapping[str, float], *, method: str, trials: int) -> Picture:
    """One bar a knob, the most important first.

    shares: of what the method explains, by knob; they add up to 1
    method: name of the evaluator
    trials: how many it was given
    """
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    title = f"Knob importance by {method}, from {trials} timed trials"
    drawn = Picture(width=_WIDTH, height=_TOP + _ROW * len(ordered) + 16, title=title)
    drawn.text(16, 26, title, size=15)
    drawn.text(16, 44, "share of the spread of log time; the trials are not drawn evenly", size=11, fill=FAINT)
    _bars(drawn, ordered, lambda share: f"{share:.1%}", OURS)
    return drawn


def _bars(drawn: Picture, ordered: Sequence[tuple[str, float]], words: Any, colour: str) -> None:
    """Named bars from the left, each with its value in words; the longest fills the room."""
    most = max((value for _, value in ordered), default=0.0) or 1.0
    across = LinearScale(low=0.0, high=most, start=_LEFT, length=_LENGTH)
    for row, (name, value) in enumerate(ordered):
        y = _TOP + _ROW * row
        drawn.text(_LEFT - 8, y + 15, name, anchor="end")
        drawn.rect(_LEFT, y + 4, across.at(value) - _LEFT, _ROW - 9, colour, tip=f"{name}: {words(value)}")
        drawn.text(across.at(value) + 6, y + 15, words(value), size=11, fill=FAINT)


def slices(effects: Sequence[Effect], trials: Sequence[tuple[Mapping[str, Any], float]]) -> Picture:
    """Time against the value of each knob: one dot a trial, a tick at the best of each value.

    effects: knobs to draw, in this order
    trials: configs with their times (us)
    """
    times = [time_us for _, time_us in trials]
    rows = -(-len(effects) // _COLUMNS)
    title = f"Time by value of each knob, {len(trials)} timed trials"
    height = _TOP + rows * (_SLICE_HEIGHT + _MARGIN)
    drawn = Picture(width=_COLUMNS * _SLICE_WIDTH + 2 * _MARGIN, height=height, title=title)
    drawn.text(16, 26, title, size=15)
    for place, effect in enumerate(effects):
        row, column = divmod(place, _COLUMNS)
        left, top = _MARGIN + column * _SLICE_WIDTH + 10, _TOP + row * (_SLICE_HEIGHT + _MARGIN)
        up = LogScale(low=min(times) / 1.03, high=max(times) * 1.03, start=top + _SLICE_HEIGHT, length=-_SLICE_HEIGHT)
        _slice(drawn, effect, trials, left, up)
    return drawn


def _slice(
    drawn: Picture, effect: Effect, trials: Sequence[tuple[Mapping[str, Any], float]], left: float, up: LogScale
) -> None:
    width, bottom = _SLICE_WIDTH - _MARGIN, up.start
    drawn.text(
        left, bottom + up.length - 6, f"{effect.name} ({effect.share:.0%} of the spread between values)", size=12
    )
    for mark in up.marks()[:8]:
        drawn.line(left, up.at(mark), left + width, up.at(mark), GRID)
        drawn.text(left - 4, up.at(mark) + 4, f"{mark:.4g}", size=9, anchor="end", fill=FAINT)
    step = width / len(effect.slices)
    for place, one in enumerate(effect.slices):
        x = left + step * (place + 0.5)
        for config, time_us in trials:
            if config.get(effect.name) == one.value:
                drawn.dot(x, up.at(time_us), OURS, radius=2)
        tip = f"{effect.name} {one.value}: best {one.best_us:.2f} us of {one.trials}"
        drawn.rect(x - min(10, step / 3), up.at(one.best_us) - 1, 2 * min(10, step / 3), 2, THEIRS, tip=tip)
        lower = 11 * (place % 2) * (len(effect.slices) > CROWDED)
        drawn.text(x, bottom + 14 + lower, str(one.value), size=10, anchor="middle", fill=FAINT)


def pairs(found: Sequence[Pair]) -> Picture:
    """The best time of each combination of two knobs, darker where it is shorter; one table a pair."""
    title = "Best time (us) by two knobs; empty: not tried"
    width = max(_LEFT + _CELL_WIDTH * len(pair.columns) + 24 for pair in found)
    height = _TOP + sum(_CELL_HEIGHT * (len(pair.rows) + 1) + 44 for pair in found)
    drawn = Picture(width=max(width, 480), height=height, title=title)
    drawn.text(16, 26, title, size=15)
    top = float(_TOP)
    for pair in found:
        top = _pair(drawn, pair, top)
    return drawn


def _pair(drawn: Picture, pair: Pair, top: float) -> float:
    known = [time_us for row in pair.best_us for time_us in row if time_us is not None]
    best = min(known)
    drawn.text(16, top, f"{pair.row_knob} (down) against {pair.column_knob} (across)", size=13)
    for column, value in enumerate(pair.columns):
        drawn.text(_LEFT + _CELL_WIDTH * (column + 0.5), top + 22, str(value), size=11, anchor="middle", fill=FAINT)
    for row, value in enumerate(pair.rows):
        y = top + 30 + _CELL_HEIGHT * row
        drawn.text(_LEFT - 8, y + 19, str(value), size=11, anchor="end", fill=FAINT)
        for column, time_us in enumerate(pair.best_us[row]):
            x = _LEFT + _CELL_WIDTH * column
            good = time_us is not None and time_us <= 1.03 * best
            drawn.rect(x + 1, y + 1, _CELL_WIDTH - 2, _CELL_HEIGHT - 2, OURS if good else GRID if time_us else PAPER)
            if time_us is not None:
                fill = PAPER if good else INK
                drawn.text(x + _CELL_WIDTH / 2, y + 19, f"{time_us:.2f}", size=11, anchor="middle", fill=fill)
    return top + 30 + _CELL_HEIGHT * len(pair.rows) + 44


def coverage(covered: Mapping[str, int]) -> Picture:
    """How much of the space was looked at, on a logarithmic axis: askable, asked, rejected, compiled, timed."""
    rows = [(name, count) for name, count in covered.items() if isinstance(count, int)]
    askable, asked = covered.get("askable", 0), covered.get("asked", 0)
    share = f": {asked / askable:.2%} of {askable:,} configs were asked" if askable else ""
    title = f"Coverage of the space{share}"
    drawn = Picture(width=_WIDTH, height=_TOP + _ROW * len(rows) + 16, title=title)
    drawn.text(16, 26, title, size=15)
    across = LogScale(low=0.7, high=max(10, *(count for _, count in rows)), start=_LEFT, length=_LENGTH)
    for row, (name, count) in enumerate(rows):
        y = _TOP + _ROW * row
        drawn.text(_LEFT - 8, y + 15, name, anchor="end")
        if count:
            drawn.rect(_LEFT, y + 4, across.at(count) - _LEFT, _ROW - 9, OURS, tip=f"{name}: {count}")
        drawn.text((across.at(count) if count else _LEFT) + 6, y + 15, f"{count:,}", size=11, fill=FAINT)
    return drawn


def reasons(texts: Iterable[str]) -> Picture:
    """Why configs were turned away: one bar a reason, numbers in it left out so that equal reasons count together."""
    counts = Counter(_NUMBER.sub("#", text.partition(":")[0])[:90] for text in texts)
    ordered: list[tuple[str, float]] = [(reason, float(count)) for reason, count in counts.most_common(MOST_REASONS)]
    left_out = len(counts) - len(ordered)
    title = f"Why the space shrank: {sum(counts.values())} configs without a time, by reason"
    drawn = Picture(width=_WIDTH, height=_TOP + 2 * _ROW * len(ordered) + 30, title=title)
    drawn.text(16, 26, title, size=15)
    across = LinearScale(low=0.0, high=max((count for _, count in ordered), default=1.0), start=16, length=_LENGTH)
    for row, (reason, count) in enumerate(ordered):
        y = _TOP + 2 * _ROW * row
        drawn.text(16, y + 12, reason, size=11)
        drawn.rect(16, y + 18, across.at(count) - 16, _ROW - 9, THEIRS, tip=f"{reason}: {count:.0f}")
        drawn.text(across.at(count) + 6, y + 30, f"{count:.0f}", size=11, fill=FAINT)
    if left_out:
        drawn.text(16, _TOP + 2 * _ROW * len(ordered) + 14, f"and {left_out} other reasons", size=11, fill=FAINT)
    return drawn
