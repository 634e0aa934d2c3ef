"""The whole table by replay: every sampler with every starting source, and the anchors, over all landscapes.

A cell is one row on one landscape. Cells are appended to a file as they are done, so that a table which was cut short
goes on where it stopped; a cell is used again only where landscapes, options and seeds are what they were.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pictures.ratios import class_of
from search_space.features import features
from search_space.heuristics import ASKED, heuristic_configs
from search_space.heuristics import is_available as heuristics_are_available
from search_space.samplers import WORTH_A_TRIAL, missing_modules
from search_space.starting import SOURCES
from tuner import landscape
from tuner.replay import ReplayError, Strategy, cutoff, score, simulate
from tuner.replay_report import BUDGETS, Plan, arena_of, complete, interval, landscape_facts, random_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tuner.landscape import Landscape
    from tuner.replay import Arena, Course, ReplayOptions

    Json = dict[str, Any]

SCHEMA = 1
CELLS, TABLE, ANCHOR = "cells.jsonl", "table.json", "kernel_tuner.json"
# A study of Optuna's GP takes seconds of a core, one of TPE or CMA-ES half a second, one of the others less: what each
# source alone is worth to those two is shown with fewer seeds.
GP_SEEDS, SOURCE_SEEDS = 5, 10
HEURISTICS_ALONE = "heuristics alone"
STOPPING = "learned, stops early"
COLD = "learned, nothing stored"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One row.

    name: what it is called
    strategy: sampler and sources; None for the heuristics alone
    stops_early: end when the sampler expects to gain less than the noise
    cold: with nothing learned from other problems
    """

    name: str
    strategy: Strategy | None
    stops_early: bool = False
    cold: bool = False

    def seeds(self, wanted: int, slow: int) -> int:
        """Of so many that are wanted, and so many of the samplers that take a core for half a second a study."""
        if self.strategy is None:
            return 1
        if self.strategy.sampler == "gp":
            return min(wanted, GP_SEEDS)
        if self.strategy.sampler in ("tpe", "cmaes"):
            return min(wanted, slow, SOURCE_SEEDS if len(self.strategy.sources) == 1 else wanted)
        return wanted

    @property
    def knows_others(self) -> bool:
        """Whether it uses what was measured on other landscapes."""
        return self.strategy is not None and (
            (self.strategy.sampler == "learned" and not self.cold) or "neighbours" in self.strategy.sources
        )


def rows() -> list[TableRow]:
    """All of them, those that matter most first.

    Samplers that cost little are run with each source alone, with all, and with all but one; others without, with each
    and with all.
    """
    alone = [(source,) for source in SOURCES]
    all_but_one = [tuple(kept for kept in SOURCES if kept != source) for source in SOURCES]
    wanted: list[tuple[str, tuple[str, ...]]] = [
        *((sampler, ()) for sampler in ("learned", "tpe", "cmaes", "random", "brute")),
        *((sampler, SOURCES) for sampler in ("learned", "tpe", "cmaes", "random", "brute")),
        *(("random", sources) for sources in (*alone, *all_but_one)),
        *(("learned", sources) for sources in alone),
        *(("gp", sources) for sources in ((), SOURCES)),
        *((sampler, sources) for sampler in ("tpe", "cmaes") for sources in alone),
    ]
    strategies = [Strategy(sampler, sources) for sampler, sources in wanted]
    return [
        TableRow(name=HEURISTICS_ALONE, strategy=None),
        TableRow(name=STOPPING, strategy=Strategy("learned"), stops_early=True),
        TableRow(name=COLD, strategy=Strategy("learned"), cold=True),
        *(TableRow(name=strategy.name, strategy=strategy) for strategy in strategies),
    ]


def unusable(row: TableRow) -> str | None:
    """Why the row cannot be made on this machine, or None."""
    if row.strategy is None or "heuristics" in row.strategy.sources:
        if not heuristics_are_available():
            return "nvidia-matmul-heuristics is not installed"
        if row.strategy is None:
            return None
    missing = missing_modules(row.strategy.sampler)
    return f"{' and '.join(missing)} not installed" if missing else None


def make_table(
    plan: Plan,
    folder: Path,
    *,
    processes: int,
    say: Callable[[str], None],
    only: Sequence[str] = (),
    slow_seeds: int | None = None,
) -> Json:
    """Make what is missing of the table, and sum up. Raises LandscapeError, ReplayError and OSError.

    plan: landscapes, seeds and options; its strategies are not used
    folder: of the cells and of the table
    only: names of rows to make now; all that can be made where none is named
    slow_seeds: of TPE and CMA-ES; None for as many as of the others
    """
    wanted = rows()
    if unknown := [name for name in only if name not in {row.name for row in wanted}]:
        raise ReplayError(f"unknown row {unknown[0]!r}: rows are {', '.join(row.name for row in wanted)}")
    landscapes = complete(plan.folder)
    digests = _digests(plan)
    seeds = {row.name: row.seeds(plan.seeds, slow_seeds or plan.seeds) for row in wanted}
    plans = {name: replace(plan, seeds=count) for name, count in seeds.items()}
    keys = {(row.name, one.name): _key(plans[row.name], row, one.name, digests) for row in wanted for one in landscapes}
    done = read_cells(folder, keys)
    usable = [row for row in wanted if unusable(row) is None and (not only or row.name in only)]
    # A landscape after the other: what was learned for it serves all rows.
    jobs = [
        (row, one.name, seeds[row.name]) for one in landscapes for row in usable if (row.name, one.name) not in done
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    folder.mkdir(parents=True, exist_ok=True)
    _end_last_line(folder / CELLS)
    with (folder / CELLS).open("a", encoding="utf-8") as file:
        for count, made in enumerate(_cells(plan, jobs, processes), start=1):
            place = made["row"], made["landscape"]
            done[place] = made
            file.write(json.dumps({"key": keys[place], **made}, sort_keys=True) + "\n")
            file.flush()
            say(f"{count} of {len(jobs)}: {made['row']} on {made['landscape']}")
    return _summary(plan, landscapes, done, folder)


def _cells(plan: Plan, jobs: Sequence[tuple[TableRow, str, int]], processes: int) -> Any:
    if processes == 1 or len(jobs) < 2:
        return (cell(plan, *job) for job in jobs)
    return _pooled(plan, jobs, processes)


def _pooled(plan: Plan, jobs: Sequence[tuple[TableRow, str, int]], processes: int) -> Any:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(cell, plan, *job) for job in jobs]
        for future in waiting:
            yield future.result()


def _digests(plan: Plan) -> dict[str, str]:
    """Of the files of all landscapes, by path."""
    folders = [plan.folder, *([plan.train] if plan.train else [])]
    paths = sorted(chain.from_iterable(folder.glob(f"*{landscape.PLAIN}*") for folder in folders))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _key(plan: Plan, row: TableRow, name: str, digests: Mapping[str, str]) -> str:
    """Of what a cell depends on: seeds, options, its landscape, and all others where the row uses them."""
    used = [digest for path, digest in digests.items() if row.knows_others or Path(path).name.startswith(f"{name}.")]
    tuned = [f"{one.problem.key} {one.config.key} {one.device}" for one in plan.tuned] if row.knows_others else []
    content = json.dumps([SCHEMA, row.name, name, plan.seeds, asdict(plan.options), sorted(used), tuned])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _end_last_line(path: Path) -> None:
    """Drop a last line that was cut short: the next cell would be written behind it, and neither could be read."""
    content = path.read_bytes() if path.is_file() else b""
    if not content.endswith(b"\n") and content:
        os.truncate(path, content.rfind(b"\n") + 1)


def read_cells(folder: Path, keys: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], Json]:
    """Cells with these keys, by row and landscape. A last line that was cut short is left out."""
    path = folder / CELLS
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    found = {(cell["row"], cell["landscape"], cell["key"]): cell for cell in map(json.loads, lines)}
    return {place: found[*place, key] for place, key in keys.items() if (*place, key) in found}


# ---------------------------------------------------------------------- one cell


def cell(plan: Plan, row: TableRow, name: str, seeds: int) -> Json:
    """One row on one landscape: per seed what was reached at each budget, the score, and the seconds."""
    arena = arena_of(plan, name)
    if row.strategy is None:
        return _heuristics_cell(arena, plan.options.trials)
    if row.cold:
        arena = arena.without_model()
    options = replace(plan.options, stop_gain=WORTH_A_TRIAL if row.stops_early else 0.0)
    courses = [simulate(arena, row.strategy, seed, options) for seed in range(seeds)]
    return _cell(row.name, arena, courses, options)


def _cell(row: str, arena: Arena, courses: Sequence[Course], options: ReplayOptions) -> Json:
    times_us = list(arena.times_us.values())
    draws = min(options.trials, cutoff(times_us))
    budgets = _budgets(options.trials)
    return {
        "row": row,
        "landscape": arena.landscape.name,
        "seeds": len(courses),
        "shares": {
            str(budget): [round(arena.best_us / _at(course.best_us, budget), 5) for course in courses]
            for budget in budgets
        },
        "wall_s": {str(budget): [round(_at(course.wall_s, budget), 2) for course in courses] for budget in budgets},
        "trials": [len(course.best_us) for course in courses],
        "scores": [round(score(course, times_us, draws=draws), 5) for course in courses],
    }


def _at(values: Sequence[float], budget: int) -> float:
    """After so many candidates; what stands where there were fewer."""
    return values[min(budget, len(values)) - 1] if values else inf


def _budgets(trials: int) -> list[int]:
    return [budget for budget in BUDGETS if budget <= trials] or [trials]


def _heuristics_cell(arena: Arena, trials: int) -> Json:
    """The library's first 16 kernels in our knobs, each as the nearest config of the landscape, in its order."""
    one = arena.landscape
    wanted = arena.nearest(heuristic_configs(one.problem, one.profile, ASKED))
    times_us = [arena.times_us[config] for config in wanted if config in arena.times_us]
    best = np.minimum.accumulate(times_us).tolist() if times_us else []
    budgets = _budgets(trials)
    return {
        "row": HEURISTICS_ALONE,
        "landscape": one.name,
        "seeds": 1,
        "shares": {str(budget): [round(arena.best_us / _at(best, budget), 5)] for budget in budgets},
        "wall_s": {},
        "trials": [len(times_us)],
        "scores": [],
    }


# ---------------------------------------------------------------------- summing up


def _summary(plan: Plan, landscapes: Sequence[Landscape], done: Mapping[tuple[str, str], Json], folder: Path) -> Json:
    budgets = _budgets(plan.options.trials)
    names = [one.name for one in landscapes]
    found = []
    for row in rows():
        cells = {name: done[row.name, name] for name in names if (row.name, name) in done}
        if len(cells) == len(names):
            found.append(summed(row.name, cells, budgets))
    missing = {
        row.name: unusable(row) or "not made yet"
        for row in rows()
        if any((row.name, name) not in done for name in names)
    }
    return {
        "schema": SCHEMA,
        "kind": "replay table",
        "seeds": plan.seeds,
        "options": asdict(plan.options),
        "budgets": budgets,
        "landscapes": [landscape_facts(one, budgets) for one in landscapes],
        "random": random_facts(landscapes, budgets, plan.options.trials),
        "rows": found + _anchors(folder / ANCHOR, names, budgets),
        "missing": missing,
        "correlation": correlations(plan, landscapes),
    }


def _anchors(path: Path, names: Sequence[str], budgets: Sequence[int]) -> list[Json]:
    """Rows of other tuners, recorded by scripts of their own environments; none where a landscape is missing."""
    if not path.is_file():
        return []
    by_row: dict[str, dict[str, Json]] = {}
    for one in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        by_row.setdefault(one["row"], {})[one["landscape"]] = one
    return [
        summed(row, {name: cells[name] for name in names}, budgets)
        for row, cells in by_row.items()
        if set(names) <= set(cells)
    ]


def summed(name: str, cells: Mapping[str, Json], budgets: Sequence[int]) -> Json:
    """A row over all its landscapes, with 95 % intervals: landscapes are drawn anew, and seeds within each."""
    content: Json = {"name": name, "seeds": min(one["seeds"] for one in cells.values()), "at": {}}
    for budget in map(str, budgets):
        shares = {place: one["shares"][budget] for place, one in cells.items()}
        content["at"][budget] = {
            "median": interval(shares, lambda values: float(np.median(values))),
            "worst_decile": interval(shares, lambda values: float(np.quantile(values, 0.1))),
            "mean": interval(shares, lambda values: float(np.mean(values))),
        }
    scores = {place: one["scores"] for place, one in cells.items() if one["scores"]}
    content["score"] = interval(scores, lambda values: float(np.mean(values))) if len(scores) == len(cells) else None
    content["wall_s"] = {
        budget: float(np.median(list(chain.from_iterable(one["wall_s"][budget] for one in cells.values()))))
        for budget in map(str, budgets)
        if all(budget in one["wall_s"] for one in cells.values())
    }
    content["trials"] = float(np.mean(list(chain.from_iterable(one["trials"] for one in cells.values()))))
    content["by_landscape"] = {
        place: {budget: float(np.median(values)) for budget, values in one["shares"].items()}
        for place, one in cells.items()
    }
    return content


# ---------------------------------------------------------------------- how well times are predicted


def correlations(plan: Plan, landscapes: Sequence[Landscape]) -> list[Json]:
    """Spearman's rank correlation of predicted with measured times, for each landscape.

    Of the performance model, and of what the trees that never saw the shape make of it; over all configs, and over the
    faster half of them.
    """
    return [_correlation(plan, one) for one in landscapes]


def _correlation(plan: Plan, one: Landscape) -> Json:
    measured = np.array(list(one.times_us.values()))
    described = [features(one.problem, one.configs[index], one.profile) for index in one.times_us]
    modeled = np.log([each.model_us for each in described])
    found: Json = {
        "landscape": one.name,
        "class": class_of(one.problem.m, one.problem.n),
        "model": _both(modeled, measured),
    }
    model = arena_of(plan, one.name).model
    if model is not None:
        error, _ = model.predict(np.array([each.values for each in described]))
        found["trees"] = _both(modeled + error, measured)
    return found


def _both(predicted: Any, measured: Any) -> Json:
    better = measured <= np.median(measured)
    return {
        "all": round(spearman(predicted, measured), 4),
        "better_half": round(spearman(predicted[better], measured[better]), 4),
    }


def spearman(left: Any, right: Any) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Any) -> Any:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]


# ---------------------------------------------------------------------- as Markdown


def markdown(content: Json) -> str:
    """The tables for the docs."""
    return "\n\n".join((_rows_text(content), _landscapes_text(content), _correlation_text(content)))


def _rows_text(content: Json) -> str:
    budgets = [str(budget) for budget in content["budgets"]]
    last = budgets[-1]
    heads = ["search", "seeds", *(f"median, worst decile at {budget}" for budget in budgets), "score", f"s at {last}"]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for one in content["rows"]:
        cells = [f"{_share(one['at'][b]['median'])}, {_share(one['at'][b]['worst_decile'])}" for b in budgets]
        score_text = _number(one["score"]) if one["score"] else "-"
        seconds = f"{one['wall_s'][last]:.0f}" if last in one["wall_s"] else "-"
        lines.append(_line([one["name"], str(one["seeds"]), *cells, score_text, seconds]))
    expected = [f"{100 * content['random']['at'][budget]:.1f} (mean)" for budget in budgets]
    lines.append(_line(["random, expected exactly", "-", *expected, "0", "-"]))
    return "\n".join(lines)


def _landscapes_text(content: Json) -> str:
    budgets = [str(budget) for budget in content["budgets"]]
    heads = ["landscape", "configs", "best, us", "within 1 %", "within 3 %", *(f"random at {b}" for b in budgets)]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for one in content["landscapes"]:
        shares = [f"{one['within_1']:.1%}", f"{one['within_3']:.1%}"]
        expected = [f"{100 * one['random'][budget]:.1f}" for budget in budgets]
        lines.append(_line([one["name"], str(one["timed"]), f"{one['best_us']:.2f}", *shares, *expected]))
    return "\n".join(lines)


def _correlation_text(content: Json) -> str:
    by_class: dict[str, list[Json]] = {}
    for one in content["correlation"]:
        by_class.setdefault(one["class"], []).append(one)
    heads = ["class", "landscapes", "model, all", "model, better half", "trees, all", "trees, better half"]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for name, members in by_class.items():
        cells = []
        for kind in ("model", "trees"):
            for part in ("all", "better_half"):
                values = [one[kind][part] for one in members if kind in one]
                cells.append(f"{np.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-")
        lines.append(_line([name, str(len(members)), *cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(found: Json) -> str:
    return f"{100 * found['value']:.1f} ({100 * found['low']:.1f}-{100 * found['high']:.1f})"


def _number(found: Json) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})"
