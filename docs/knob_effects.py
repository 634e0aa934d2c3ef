"""What each knob did in the recorded landscapes: the measured part of the knobs' reference.

A landscape holds 408 configs of one problem, each timed, so two questions have exact answers there. What does a value
cost, once everything else may be chosen anew? And what does the knob alone do, all else alike?
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kernels.config import Sm90GemmConfig
from tuner.replay_report import complete

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernels.config import GemmConfig

RESULTS = Path(__file__).parents[1] / "results"
LANDSCAPES = RESULTS / "landscapes"
PUBLISHED = RESULTS / "h200" / "dev.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One complete landscape.

    problem: shape and dtype
    device, arch: that it was recorded on
    times_us: of every config that was right
    """

    problem: str
    device: str
    arch: str
    times_us: dict[GemmConfig, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What it costs to keep a knob at one value.

    value: of the knob
    landscapes: how many hold configs with it
    least, middle, most: best time with the value over the best time of all, among the landscapes
    """

    value: Any
    landscapes: int
    least: float
    middle: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """What a knob does by itself.

    sets: groups of two or more configs that differ in this knob only
    middle, most: slowest over fastest of a group, among the groups
    """

    sets: int
    middle: float
    most: float


@cache
def recorded(folder: Path = LANDSCAPES) -> tuple[Timed, ...]:
    """The landscapes of which every config was tried. Raises LandscapeError for a folder without any."""
    return tuple(
        Timed(
            problem=f"{one.problem.shape} {one.problem.dtype}",
            device=one.profile.name,
            arch=one.profile.arch.name,
            times_us={one.configs[index]: time_us for index, time_us in one.times_us.items()},
        )
        for one in complete(folder)
    )


def costs(knob: str, landscapes: Iterable[Timed]) -> list[Cost]:
    """Of each value that was timed, numbers in order."""
    ratios: dict[Any, list[float]] = defaultdict(list)
    for one in landscapes:
        best_us = min(one.times_us.values())
        fastest: dict[Any, float] = {}
        for config, time_us in one.times_us.items():
            value = getattr(config, knob)
            fastest[value] = min(time_us, fastest.get(value, time_us))
        for value, time_us in fastest.items():
            ratios[value].append(time_us / best_us)
    return [
        Cost(value=value, landscapes=len(found), least=min(found), middle=median(found), most=max(found))
        for value, found in sorted(ratios.items())
    ]


def alone(knob: str, landscapes: Iterable[Timed]) -> Alone | None:
    """None where no two configs differ in this knob only."""
    spreads = []
    for one in landscapes:
        others = [name for name in next(iter(one.times_us)).knobs() if name != knob]
        rest_of = attrgetter(*others)
        alike: dict[Any, list[float]] = defaultdict(list)
        for config, time_us in one.times_us.items():
            alike[rest_of(config)].append(time_us)
        spreads += [max(times) / min(times) for times in alike.values() if len(times) > 1]
    return Alone(sets=len(spreads), middle=median(spreads), most=max(spreads)) if spreads else None


# ---------------------------------------------------------------------- as text

# Knobs of which the landscapes hold one value, and where else they were measured.
ELSEWHERE = {
    "raster": "one value in the landscapes, `m`. Of the published kernels {published}",
    "load": "one value in the landscapes, `tma`: `cp_async` serves what `tma` cannot load; 23 such kernels ran right "
    "([cp_async.json](../../results/verify/cp_async.json))",
    "scheduler": "one value in the landscapes, `static`: on eight shapes the best `stream_k` config took 1.06 to "
    "1.55 times as long as the best static one ([0013](../decisions/0013-stream-k-without-waiting.md))",
}


def rows(knobs: Sequence[str], landscapes: Sequence[Timed]) -> list[tuple[str, str, str]]:
    """Knob, what it does alone, and what each value costs, as cells of a table."""
    return [_row(knob, costs(knob, landscapes), alone(knob, landscapes)) for knob in knobs]


def _row(knob: str, found: Sequence[Cost], by_itself: Alone | None) -> tuple[str, str, str]:
    if len(found) < 2:
        return f"`{knob}`", "", ELSEWHERE[knob].format(published=_published(knob))
    sets = "never alone" if by_itself is None else f"{_percent(by_itself.middle)}, {_percent(by_itself.most)}"
    counted = "" if by_itself is None else f" ({by_itself.sets})"
    return f"`{knob}`", sets + counted, "; ".join(_cost(one) for one in found)


def _published(knob: str) -> str:
    """`78 have m, 1 has n-serpentine`."""
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    values = Counter(getattr(Sm90GemmConfig.from_dict(row["config"]), knob) for row in rows)
    return ", ".join(f"{count} {'has' if count == 1 else 'have'} `{value}`" for value, count in values.most_common())


def _cost(one: Cost) -> str:
    spread = _percent(one.middle) if one.landscapes == 1 else f"{_percent(one.middle)}, {_percent(one.most)}"
    return f"`{one.value}`: {spread} ({one.landscapes})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"
