"""Kernel Tuner's simulation mode on the recorded landscapes, for the table of replays.

    python -m pip install kernel-tuner
    python -m tests.soak.kernel_tuner_replay --seeds 50 --out results/replay/kernel_tuner.json

Kernel Tuner searches the very configs of a landscape, from a cache file written of it, with the recorded times; what it
found is judged as ours: by candidates with a time. It resumes: cells that the file holds already are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.soak.report import write_json
from tuner.landscape_export import kernel_tuner_cache
from tuner.replay import Course, cutoff, score
from tuner.replay_report import BUDGETS, complete

if TYPE_CHECKING:
    from tuner.landscape import Landscape

    Json = dict[str, Any]

# The best of the classic ones in Willemsen et al. (FGCS 2024), and one of the two that came with 1.3. Its greedy_ils
# stops with an error at configs that no other one of the space differs from in one knob only.
STRATEGIES = ("genetic_algorithm", "hybrid_vndx")
TRIALS = 48
SPARE = 12  # evaluations beyond the budget, for configs without a time: those do not count


def only_recorded(cache: Json) -> Any:
    """A restriction that admits the configs of the cache alone, and turns away what none of them begins with.

    One that judges whole configs would be asked about every product of 18 knobs.
    """
    from constraint import FunctionConstraint

    knobs = cache["tune_params_keys"]
    configs = [tuple(one[knob] for knob in knobs) for one in cache["cache"].values()]
    with_value: defaultdict[tuple[str, Any], set[int]] = defaultdict(set)
    for number, config in enumerate(configs):
        for knob, value in zip(knobs, config, strict=True):
            with_value[knob, value].add(number)

    class OnlyRecorded(FunctionConstraint):  # type: ignore[misc]
        def __call__(self, variables: Any, domains: Any, assignments: Any, *_: Any) -> bool:
            return bool(set.intersection(*(with_value[item] for item in assignments.items())))

        def __deepcopy__(self, memo: Any) -> OnlyRecorded:
            return self  # nothing of it changes, and it is copied for every search

    known = set(configs)
    return OnlyRecorded(lambda *values: values in known)


def times_found(cache_path: Path, cache: Json, restriction: Any, strategy: str, seed: int) -> list[float]:
    """Times (us) in the order in which Kernel Tuner looked at configs that have one."""
    from kernel_tuner import tune_kernel

    random.seed(seed)
    np.random.seed(seed)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results, _ = tune_kernel(
            cache["kernel_name"],
            "// recorded",
            tuple(cache["problem_size"]),
            [],
            cache["tune_params"],
            restrictions=[restriction],
            strategy=strategy,
            strategy_options={"max_fevals": TRIALS + SPARE},
            simulation_mode=True,
            cache=str(cache_path),
            lang="C",
            quiet=True,
        )
    return [one["time"] * 1e3 for one in results if isinstance(one["time"], float)]


def cell_of(one: Landscape, strategy: str, seeds: int, folder: Path) -> Json:
    """A cell of the table of replays."""
    cache = kernel_tuner_cache(one)
    path = folder / f"{one.name}.json"
    path.write_text(json.dumps(cache))
    cache = json.loads(path.read_text())
    restriction = only_recorded(cache)
    courses = []
    for seed in range(seeds):
        times = times_found(path, cache, restriction, strategy, seed)[:TRIALS]
        courses.append(Course(best_us=tuple(np.minimum.accumulate(times).tolist()), wall_s=(), asked=len(times)))
    times_us = list(one.times_us.values())
    draws = min(TRIALS, cutoff(times_us))
    return {
        "row": f"Kernel Tuner, {strategy}",
        "landscape": one.name,
        "seeds": seeds,
        "shares": {
            str(budget): [
                round(one.best_us / course.best_us[min(budget, len(course.best_us)) - 1], 5) for course in courses
            ]
            for budget in BUDGETS
        },
        "wall_s": {},
        "trials": [len(course.best_us) for course in courses],
        "scores": [round(score(course, times_us, draws=draws), 5) for course in courses],
    }


def main() -> None:
    """Make what is missing, a cell at a time."""
    parser = argparse.ArgumentParser(description="Kernel Tuner's simulation mode on recorded landscapes.")
    parser.add_argument("--dir", type=Path, default=Path("results/landscapes"))
    parser.add_argument("--out", type=Path, default=Path("results/replay/kernel_tuner.json"))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--wall-s", type=float, default=3600.0, help="begin no cell after so many seconds")
    options = parser.parse_args()
    try:
        import kernel_tuner
    except ImportError:
        parser.error("kernel_tuner is not installed: python -m pip install kernel-tuner")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began_s = time.monotonic()
    known: list[Json] = json.loads(options.out.read_text())["cells"] if options.out.is_file() else []
    cells = {(one["row"], one["landscape"]): one for one in known if one["seeds"] == options.seeds}
    with tempfile.TemporaryDirectory() as folder:
        for one in complete(options.dir):
            for strategy in options.strategies:
                place = (f"Kernel Tuner, {strategy}", one.name)
                if place in cells or time.monotonic() - began_s > options.wall_s:
                    continue
                cells[place] = cell_of(one, strategy, options.seeds, Path(folder))
                content = {"version": kernel_tuner.__version__, "cells": list(cells.values())}
                write_json(options.out, content)
                print(f"{time.monotonic() - began_s:6.0f} s: {place[0]} on {one.name}", flush=True)


if __name__ == "__main__":
    main()
