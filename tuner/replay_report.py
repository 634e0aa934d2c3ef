"""Many replays side by side, what they come to, and pictures of it."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np

from pictures import searches
from search_space.features import features
from search_space.starting import Tuned
from tuner import landscape
from tuner.replay import Arena, Course, ReplayOptions, Strategy, cutoff, expected_minimum, score, simulate
from tuner.search.cost_model import CostModel, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pictures.svg import Picture
    from tuner.landscape import Landscape

    Json = dict[str, Any]

SCHEMA = 1
BUDGETS = (8, 16, 48)
RESAMPLES = 1000  # of the bootstrap
PICTURES = {"candidates": searches.by_candidates, "seconds": searches.by_seconds, "budgets": searches.at_budgets}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is replayed.

    folder: of the landscapes
    strategies: samplers with their starting sources
    seeds: 0, 1, ... one less than this
    options: of each simulated study
    tuned: winners that were published for other problems, beside those of the other landscapes
    train: folder of more landscapes that are learned from and not replayed, such as trials of studies
    """

    folder: Path
    strategies: tuple[Strategy, ...]
    seeds: int
    options: ReplayOptions
    tuned: tuple[Tuned, ...] = ()
    train: Path | None = None


def replay(plan: Plan, *, processes: int, say: Callable[[str], None]) -> Json:
    """Run every strategy with every seed on every landscape, and sum up. Raises LandscapeError and ReplayError."""
    names = [one.name for one in complete(plan.folder)]
    jobs = list(product(names, plan.strategies))
    courses: dict[tuple[str, str], list[Course]] = {}
    # One thread each: the processes share the cores among themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if processes == 1:
        for name, strategy in jobs:
            courses[name, strategy.name] = _run(plan, name, strategy)
            say(f"{len(courses)} of {len(jobs)}: {strategy.name} on {name}")
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            runs = [(name, strategy, pool.submit(_run, plan, name, strategy)) for name, strategy in jobs]
            for name, strategy, run in runs:
                courses[name, strategy.name] = run.result()
                say(f"{len(courses)} of {len(jobs)}: {strategy.name} on {name}")
    return summary(plan, complete(plan.folder), courses)


def complete(folder: Path) -> list[Landscape]:
    """The landscapes of a folder whose every config was tried: of the others nobody knows the optimum.

    Raises LandscapeError where there is none.
    """
    found = [one for one in _landscapes(folder) if not one.missing]
    if not found:
        raise landscape.LandscapeError(f"no landscape in {folder} is complete: go on with `landscape record`")
    return found


def _run(plan: Plan, name: str, strategy: Strategy) -> list[Course]:
    arena = arena_of(plan, name)
    return [simulate(arena, strategy, seed, plan.options) for seed in range(plan.seeds)]


@lru_cache(maxsize=4)
def _landscapes(folder: Path) -> tuple[Landscape, ...]:
    return tuple(landscape.read_folder(folder))


@lru_cache(maxsize=4)
def _samples(folder: Path) -> tuple[tuple[Landscape, tuple[Sample, ...]], ...]:
    return tuple((one, tuple(samples_of(one))) for one in _landscapes(folder))


def samples_of(one: Landscape) -> Iterable[Sample]:
    """The times of a landscape, for a model to learn from."""
    for index, time_us in one.times_us.items():
        described = features(one.problem, one.configs[index], one.profile)
        yield Sample(features=described, time_us=time_us, group=f"{one.problem.key} {one.profile.name}")


def winner_of(one: Landscape) -> Tuned:
    """The fastest config of a landscape that holds a time."""
    best = min(one.times_us, key=lambda index: one.times_us[index])
    return Tuned(problem=one.problem, config=one.configs[best], device=one.profile.name)


@lru_cache(maxsize=2)
def arena_of(plan: Plan, name: str) -> Arena:
    """A landscape with what was learned from all others: nothing of its own shape, in whatever dtype."""
    (own,) = (one for one in _landscapes(plan.folder) if one.name == name)
    folders = [plan.folder, *([plan.train] if plan.train else [])]
    known = [one for folder in folders for one in _landscapes(folder) if one.problem.shape != own.problem.shape]
    others = [one for one in known if one.times_us]
    tuned = {one.problem: one for one in plan.tuned if one.problem.shape != own.problem.shape}
    tuned |= {other.problem: winner_of(other) for other in reversed(others)}
    return Arena(own, tuned=tuned.values(), learn=lambda: _learned(plan, own.problem.shape))


def _learned(plan: Plan, shape: str) -> CostModel | None:
    """From all landscapes but those of a shape."""
    folders = [plan.folder, *([plan.train] if plan.train else [])]
    pairs = [pair for folder in folders for pair in _samples(folder)]
    return CostModel.train([sample for one, samples in pairs for sample in samples if one.problem.shape != shape])


# ---------------------------------------------------------------------- summing up


def summary(plan: Plan, landscapes: Sequence[Landscape], courses: Mapping[tuple[str, str], Sequence[Course]]) -> Json:
    """The document: what each strategy reached, on each landscape and on all."""
    trials = plan.options.trials
    budgets = [budget for budget in BUDGETS if budget <= trials] or [trials]
    by_name = {one.name: one for one in landscapes}
    strategies = []
    for strategy in plan.strategies:
        shares = {name: _shares(courses[name, strategy.name], by_name[name], trials) for name in by_name}
        walls = {name: _walls(courses[name, strategy.name], trials) for name in by_name}
        scores = {name: _scores(courses[name, strategy.name], by_name[name], trials) for name in by_name}
        strategies.append(_strategy(strategy, shares, walls, scores, budgets))
    return {
        "schema": SCHEMA,
        "kind": "replay",
        "seeds": plan.seeds,
        "options": asdict(plan.options),
        "budgets": budgets,
        "landscapes": [landscape_facts(one, budgets) for one in landscapes],
        "strategies": strategies,
        "random": random_facts(landscapes, budgets, trials),
    }


def _shares(courses: Sequence[Course], one: Landscape, trials: int) -> Any:
    """Optimum over best so far, a row for each seed; after a sampler ran dry its last value stands."""
    rows = [_padded(course.best_us, trials) for course in courses]
    return one.best_us / np.array(rows)


def _walls(courses: Sequence[Course], trials: int) -> Any:
    return np.array([_padded(course.wall_s, trials) for course in courses])


def _scores(courses: Sequence[Course], one: Landscape, trials: int) -> list[float]:
    times_us = list(one.times_us.values())
    draws = min(trials, cutoff(times_us))
    return [score(course, times_us, draws=draws) for course in courses]


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[values[-1] if values else np.inf] * (length - len(values))]


def _strategy(
    strategy: Strategy,
    shares: Mapping[str, Any],
    walls: Mapping[str, Any],
    scores: Mapping[str, list[float]],
    budgets: Sequence[int],
) -> Json:
    everywhere = np.concatenate(list(shares.values()))
    return {
        "name": strategy.name,
        "sampler": strategy.sampler,
        "sources": list(strategy.sources),
        "at": {str(budget): _at(shares, budget) for budget in budgets},
        "score": interval(scores, lambda values: float(np.mean(values))),
        "wall_s": {
            str(budget): float(np.median([wall[:, budget - 1] for wall in walls.values()])) for budget in budgets
        },
        "median_share": np.median(everywhere, axis=0).round(5).tolist(),
        "worst_decile_share": np.quantile(everywhere, 0.1, axis=0).round(5).tolist(),
        "median_wall_s": np.median(np.concatenate(list(walls.values())), axis=0).round(2).tolist(),
        "by_landscape": {
            name: {
                "score": float(np.mean(scores[name])),
                **{str(budget): _spread(shares[name][:, budget - 1]) for budget in budgets},
            }
            for name in shares
        },
    }


def _at(shares: Mapping[str, Any], budget: int) -> Json:
    columns = {name: values[:, budget - 1] for name, values in shares.items()}
    return {
        "median": interval(columns, lambda values: float(np.median(values))),
        "worst_decile": interval(columns, lambda values: float(np.quantile(values, 0.1))),
        "mean": interval(columns, lambda values: float(np.mean(values))),
    }


def _spread(values: Any) -> Json:
    return {"median": float(np.median(values)), "worst_decile": float(np.quantile(values, 0.1))}


def interval(by_landscape: Mapping[str, Any], statistic: Callable[[Any], float]) -> Json:
    """A statistic of all runs with its 95 % interval: landscapes are drawn anew, and seeds within each."""
    rng = np.random.default_rng(0)
    columns = [np.asarray(values) for values in by_landscape.values()]
    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(len(columns), size=len(columns))
        parts = [columns[at][rng.integers(len(columns[at]), size=len(columns[at]))] for at in chosen]
        drawn.append(statistic(np.concatenate(parts)))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"value": statistic(np.concatenate(columns)), "low": float(low), "high": float(high)}


def landscape_facts(one: Landscape, budgets: Sequence[int]) -> Json:
    times_us = np.array(list(one.times_us.values()))
    return {
        "name": one.name,
        "shape": one.problem.shape,
        "dtype": one.problem.dtype.value,
        "device": one.profile.name,
        "synthetic": one.synthetic,
        "configs": len(one.configs),
        "missing": len(one.missing),
        "timed": len(times_us),
        "best_us": one.best_us,
        "within_1": float(np.mean(times_us <= 1.01 * one.best_us)),
        "within_3": float(np.mean(times_us <= 1.03 * one.best_us)),
        "cutoff": cutoff(times_us.tolist()),
        "random": {str(budget): _expected_share(one, budget) for budget in budgets},
    }


def _expected_share(one: Landscape, draws: int) -> float:
    """Expected optimum over best of a random search without repetition."""
    shares = [-one.best_us / time_us for time_us in one.times_us.values()]
    return -expected_minimum(shares, min(draws, len(shares)))


def random_facts(landscapes: Sequence[Landscape], budgets: Sequence[int], trials: int) -> Json:
    curve = [float(np.mean([_expected_share(one, number) for one in landscapes])) for number in range(1, trials + 1)]
    return {"mean_share": curve, "at": {str(budget): curve[budget - 1] for budget in budgets}}


# ---------------------------------------------------------------------- pictures


def plots(content: Json) -> dict[str, Picture]:
    """Pictures by file name: against candidates, against simulated seconds, and at a few budgets."""
    return {f"{name}.svg": draw(content) for name, draw in PICTURES.items()}
