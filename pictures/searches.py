"""How searches compare on recorded landscapes: the share of the optimum they have reached, and how soon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictures.svg import FAINT, GRID, INK, OURS, THEIRS, THIRD, LogScale, Picture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Json = dict[str, Any]

# The three of the palette, then others that keep apart from them in lightness as well as in hue.
COLOURS = (OURS, THEIRS, THIRD, "#882255", "#6b7280", "#56b4e9", "#a16207", "#4d7c0f", "#334155", "#be185d")
LOWEST_SHARE = 0.6
_LEFT, _TOP, _WIDTH, _GAP, _HEIGHT, _LEGEND = 56, 66, 370, 56, 300, 200
_BOTTOM = _TOP + _HEIGHT
_MARKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Curve:
    """One search: what it had reached (share of the optimum) at these places."""

    name: str
    colour: str
    places: Sequence[float]
    shares: Sequence[float]


def by_candidates(content: Json) -> Picture:
    """The median and the worst decile of each strategy after each measured candidate, of a replay's document."""
    median = _curves(content, "median_share")
    mean = content["random"]["mean_share"]
    median.append(_Curve(name="random, expected mean", colour=INK, places=range(1, len(mean) + 1), shares=mean))
    panels = {"median": median, "worst decile": _curves(content, "worst_decile_share")}
    return _panels(f"Share of the optimum after so many candidates: {_what(content)}", panels, "measured candidates")


def by_seconds(content: Json) -> Picture:
    """The median of each strategy against the seconds that its study is reckoned to have taken."""
    curves = _curves(content, "median_share", "median_wall_s")
    title = f"Share of the optimum after so many seconds: {_what(content)}"
    return _panels(title, {"median": curves}, "simulated seconds")


def _what(content: Json) -> str:
    return f"{_landscapes(content)}, {_seeds(content['seeds'])}"


def _landscapes(content: Json) -> str:
    made_up = " (made up)" if any(one["synthetic"] for one in content["landscapes"]) else ""
    devices = " and ".join(sorted({one["device"] for one in content["landscapes"]}))
    return f"{len(content['landscapes'])} landscapes of an {devices}{made_up}"


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _curves(content: Json, shares: str, places: str = "") -> list[_Curve]:
    return [
        _Curve(
            name=one["name"],
            colour=COLOURS[number % len(COLOURS)],
            places=one[places] if places else range(1, len(one[shares]) + 1),
            shares=one[shares],
        )
        for number, one in enumerate(content["strategies"])
    ]


def _panels(title: str, panels: dict[str, list[_Curve]], unit: str) -> Picture:
    """Panels side by side with one scale, and the names of the first one's curves."""
    legend = _LEFT + len(panels) * (_WIDTH + _GAP) - _GAP + 20
    drawn = Picture(width=legend + _LEGEND, height=_BOTTOM + 44, title=title)
    drawn.text(_LEFT, 22, title, size=13)
    last = max(2.0, *(curve.places[-1] for curves in panels.values() for curve in curves))
    for column, (caption, curves) in enumerate(panels.items()):
        start = _LEFT + column * (_WIDTH + _GAP)
        across = LogScale(low=1.0, high=last, start=start, length=_WIDTH)
        drawn.text(start, _TOP - 12, caption)
        drawn.text(start + _WIDTH, _BOTTOM + 36, unit, size=11, anchor="end", fill=FAINT)
        _frame(drawn, across)
        # Ours is drawn last, over the others where they have met.
        for curve in reversed(curves):
            steps = [(across.at(x), _height(y)) for x, y in zip(curve.places, curve.shares, strict=True) if x >= 1]
            drawn.steps(steps, curve.colour, width=1.6)
    for number, curve in enumerate(next(iter(panels.values()))):
        y = _TOP + 14 + 18 * number
        drawn.rect(legend, y - 9, 18, 9, curve.colour)
        drawn.text(legend + 26, y, curve.name)
    return drawn


def _height(share: float) -> float:
    return _BOTTOM - _HEIGHT * (max(LOWEST_SHARE, share) - LOWEST_SHARE) / (1 - LOWEST_SHARE)


def _frame(drawn: Picture, across: LogScale) -> None:
    left, right = across.start, across.start + across.length
    for percent in range(int(100 * LOWEST_SHARE), 101, 5):
        y = _height(percent / 100)
        drawn.line(left, y, right, y, GRID)
        label = f"to {percent} %" if percent == int(100 * LOWEST_SHARE) else f"{percent} %"
        drawn.text(left - 8, y + 4, label, size=11, anchor="end", fill=FAINT)
    for mark in (one for one in _MARKS if one <= across.high):
        drawn.line(across.at(mark), _TOP, across.at(mark), _BOTTOM, GRID)
        drawn.text(across.at(mark), _BOTTOM + 18, str(mark), size=11, anchor="middle", fill=FAINT)
    drawn.line(left, _BOTTOM, right, _BOTTOM, INK)


# ---------------------------------------------------------------------- bars

_ROW, _BAR, _SPACE, _LETTER = 24, 190, 50, 7


def at_budgets(content: Json) -> Picture:
    """What each search had reached at a few budgets, of a replay's document or of the whole table.

    A bar is the median, the line on it its 95 % interval, the mark across the worst decile.
    """
    budgets, searches = content["budgets"], content.get("strategies") or content["rows"]
    names = [f"{one['name']}, {_seeds(one.get('seeds', content['seeds']))}" for one in searches]
    first = 20 + _LETTER * max(map(len, names))
    title = f"Share of the optimum: median with its 95 % interval, and | the worst decile; {_landscapes(content)}"
    height = _TOP + _ROW * len(searches) + 24
    drawn = Picture(width=first + (_BAR + _SPACE) * len(budgets), height=height, title=title)
    drawn.text(10, 22, title, size=13)
    for column, budget in enumerate(budgets):
        along = _along(first + (_BAR + _SPACE) * column)
        drawn.text(along(LOWEST_SHARE), _TOP - 12, f"after {budget} candidates")
        for percent in range(int(100 * LOWEST_SHARE), 101, 10):
            drawn.line(along(percent / 100), _TOP, along(percent / 100), height - 22, GRID)
            drawn.text(along(percent / 100), height - 8, f"{percent} %", size=10, anchor="middle", fill=FAINT)
        for line, one in enumerate(searches):
            _bar(drawn, one["at"][str(budget)], along, _TOP + _ROW * line, ours=one["name"].startswith("learned"))
    for line, name in enumerate(names):
        drawn.text(10, _TOP + _ROW * line + 15, name)
    return drawn


def _along(start: float) -> Callable[[float], float]:
    return lambda share: start + _BAR * (max(LOWEST_SHARE, share) - LOWEST_SHARE) / (1 - LOWEST_SHARE)


def _bar(drawn: Picture, at: Json, along: Callable[[float], float], y: float, *, ours: bool) -> None:
    median, worst = at["median"], at["worst_decile"]["value"]
    tip = f"median {median['value']:.4f} ({median['low']:.4f} to {median['high']:.4f}), worst decile {worst:.4f}"
    start, end = along(LOWEST_SHARE), along(median["value"])
    drawn.rect(start, y + 4, end - start, _ROW - 10, OURS if ours else "load", tip=tip)
    drawn.line(along(median["low"]), y + _ROW / 2 - 1, along(median["high"]), y + _ROW / 2 - 1, INK)
    if worst >= LOWEST_SHARE:
        drawn.rect(along(worst) - 1, y + 2, 2, _ROW - 6, INK)
    drawn.text(
        along(max(median["high"], median["value"])) + 5, y + 15, f"{100 * median['value']:.1f}", size=10, fill=FAINT
    )
