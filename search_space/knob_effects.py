"""What each knob did in a study, read from its trials: shares of the spread, and the best time for each value.

The shares are those of a one-way analysis of variance of log time. A search does not draw its configs evenly, and
knobs that changed together share what they explain: the shares say where to look, not what would happen.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import log
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_TRIALS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The trials that had one value of a knob.

    value: of the knob
    trials: how many
    best_us, median_us: of their times
    """

    value: Any
    trials: int
    best_us: float
    median_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One knob.

    name: of the knob
    share: of the variance of log time that lies between its values, from 0 to 1
    slices: by value
    """

    name: str
    share: float
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two knobs together: the best time of each combination that was tried.

    row_knob, column_knob: names
    rows, columns: values, in order
    best_us: by row and column value; None where nothing was tried
    """

    row_knob: str
    column_knob: str
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    best_us: tuple[tuple[float | None, ...], ...]


def effects(trials: Sequence[tuple[dict[str, Any], float]]) -> list[Effect]:
    """Knobs that had more than one value, the one with the largest share first; empty for a handful of trials."""
    if len(trials) < FEWEST_TRIALS:
        return []
    logs = [log(time_us) for _, time_us in trials]
    mean = fmean(logs)
    spread = sum((value - mean) ** 2 for value in logs)
    found = []
    for name in trials[0][0]:
        groups: defaultdict[Any, list[float]] = defaultdict(list)
        for config, time_us in trials:
            groups[config.get(name)].append(time_us)
        if len(groups) > 1:
            found.append(Effect(name=name, share=_share(groups, mean, spread), slices=_slices(groups)))
    return sorted(found, key=lambda effect: -effect.share)


def _share(groups: dict[Any, list[float]], mean: float, spread: float) -> float:
    between = sum(len(times) * (fmean(map(log, times)) - mean) ** 2 for times in groups.values())
    return between / spread if spread else 0.0


def _slices(groups: dict[Any, list[float]]) -> tuple[Slice, ...]:
    return tuple(
        Slice(value=value, trials=len(groups[value]), best_us=min(groups[value]), median_us=median(groups[value]))
        for value in sorted(groups, key=_in_order)
    )


def pair(trials: Sequence[tuple[dict[str, Any], float]], row_knob: str, column_knob: str) -> Pair:
    """The best time by the values of two knobs."""
    best: dict[tuple[Any, Any], float] = {}
    for config, time_us in trials:
        place = config.get(row_knob), config.get(column_knob)
        best[place] = min(time_us, best.get(place, time_us))
    rows = tuple(sorted({row for row, _ in best}, key=_in_order))
    columns = tuple(sorted({column for _, column in best}, key=_in_order))
    return Pair(
        row_knob=row_knob,
        column_knob=column_knob,
        rows=rows,
        columns=columns,
        best_us=tuple(tuple(best.get((row, column)) for column in columns) for row in rows),
    )


def _in_order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then the rest by name; a missing knob last."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))
