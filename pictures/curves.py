"""How a search and a measurement went: the best time so far, and the samples of a result beside the library's."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from pictures.svg import FAINT, GRID, INK, OURS, THEIRS, THIRD, LinearScale, LogScale, Picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 760, 64, 24, 24, 260
_BOTTOM = _TOP + _HEIGHT
_LENGTH = _WIDTH - _LEFT - _RIGHT
_SAMPLE_COLOURS = (THEIRS, THIRD, FAINT)


def best_so_far(improvements: Sequence[tuple[int, float]], last: int, *, library_us: float | None = None) -> Picture:
    """The best time after each trial, as steps on a logarithmic axis.

    improvements: number and time (us) of each trial that was better than all before, in order; at least one
    last: number of the newest trial
    library_us: the vendor library's time, drawn as a dashed line
    """
    times = [time_us for _, time_us in improvements] + ([library_us] if library_us else [])
    drawn = Picture(width=_WIDTH, height=_BOTTOM + 44, title=_curve_title(improvements, last, library_us))
    across = LinearScale(low=0, high=max(last, 1), start=_LEFT, length=_LENGTH)
    up = LogScale(low=min(times) / 1.05, high=max(times) * 1.08, start=_BOTTOM, length=-_HEIGHT)
    for mark in up.marks():
        drawn.line(_LEFT, up.at(mark), _LEFT + _LENGTH, up.at(mark), GRID)
        drawn.text(_LEFT - 6, up.at(mark) + 4, f"{mark:.4g}", size=11, anchor="end", fill=FAINT)
    for mark in across.marks():
        drawn.text(across.at(mark), _BOTTOM + 17, f"{mark:.0f}", size=11, anchor="middle", fill=FAINT)
    drawn.text(_LEFT, _TOP - 9, "best time so far, us", size=11, fill=FAINT)
    drawn.text(_LEFT + _LENGTH, _BOTTOM + 36, "trial", size=11, anchor="end", fill=FAINT)
    if library_us:
        drawn.line(_LEFT, up.at(library_us), _LEFT + _LENGTH, up.at(library_us), THEIRS, dashed=True)
        drawn.text(
            _LEFT + 0.3 * _LENGTH, up.at(library_us) - 5, f"vendor library, {library_us:.4g} us", size=11, fill=THEIRS
        )
    reached = [(across.at(number), up.at(time_us)) for number, time_us in improvements]
    drawn.steps([*reached, (across.at(last), reached[-1][1])], OURS)
    for number, time_us in improvements:
        drawn.dot(across.at(number), up.at(time_us), OURS, tip=f"trial {number}: {time_us:.2f} us")
    return drawn


def _curve_title(improvements: Sequence[tuple[int, float]], last: int, library_us: float | None) -> str:
    (first, first_us), (best, best_us) = improvements[0], improvements[-1]
    title = f"Best time so far over {last + 1} trials: {first_us:.2f} us at trial {first}, {best_us:.2f} us at {best}"
    return f"{title}; vendor library {library_us:.2f} us" if library_us else title


def samples(ours_us: Sequence[float], baselines_us: Mapping[str, Sequence[float]]) -> Picture:
    """The time of each round, ours beside each baseline's; rounds are pairs, so what shakes one shakes the other."""
    series = {"ours": (ours_us, OURS)}
    series |= {
        name: (values, colour)
        for (name, values), colour in zip(baselines_us.items(), _SAMPLE_COLOURS, strict=False)
        if values
    }
    everything = [value for values, _ in series.values() for value in values]
    spread = max(everything) - min(everything) or max(everything) * 0.01
    words = ", ".join(f"{name} {median(values):.2f} us" for name, (values, _) in series.items())
    drawn = Picture(
        width=_WIDTH, height=_BOTTOM + 44, title=f"Samples of {len(ours_us)} paired rounds; medians: {words}"
    )
    rounds = max(len(values) for values, _ in series.values())
    across = LinearScale(low=0.5, high=rounds + 0.5, start=_LEFT, length=_LENGTH)
    up = LinearScale(
        low=min(everything) - 0.1 * spread, high=max(everything) + 0.1 * spread, start=_BOTTOM, length=-_HEIGHT
    )
    for mark in up.marks():
        drawn.line(_LEFT, up.at(mark), _LEFT + _LENGTH, up.at(mark), GRID)
        drawn.text(_LEFT - 6, up.at(mark) + 4, f"{mark:.6g}", size=11, anchor="end", fill=FAINT)
    x = float(_LEFT)
    for name, (values, colour) in series.items():
        drawn.rect(x, _TOP - 18, 11, 11, colour)
        drawn.text(x + 16, _TOP - 8, name, size=11, fill=INK)
        x += 40 + 7 * len(name)
        drawn.path([(across.at(place + 1), up.at(value)) for place, value in enumerate(values)], colour, width=1)
        for place, value in enumerate(values):
            drawn.dot(across.at(place + 1), up.at(value), colour, tip=f"{name}, round {place + 1}: {value:.3f} us")
    drawn.text(_LEFT + _LENGTH, _TOP - 8, "us", size=11, anchor="end", fill=FAINT)
    for mark in across.marks():
        if mark == int(mark) and mark >= 1:
            drawn.text(across.at(mark), _BOTTOM + 17, f"{mark:.0f}", size=11, anchor="middle", fill=FAINT)
    drawn.text(_LEFT + _LENGTH, _BOTTOM + 36, "round", size=11, anchor="end", fill=FAINT)
    return drawn
