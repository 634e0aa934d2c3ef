"""What was good for one problem, made legal for another: the nearest config that can be asked.

A tile that won at M = 64 may be twice too high for M = 32, and a ring that fitted beside one epilogue may not fit
beside another. The knobs are moved one after another, the shortest way first, until no check turns the config away.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import count
from math import log2
from typing import TYPE_CHECKING, Any

from kernels.rules import violation
from search_space.checks import plainest, rejection
from search_space.space import choices, is_searched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

MAX_TRIED = 100  # configs looked at, 0.2 s: what lies further is another config
# What a step costs: a tile that changes is another kernel, the depth of a ring or the order of tiles hardly.
COSTS = {
    "pipe_depth": 0.2,
    "l2_group_size": 0.1,
    "raster": 0.1,
    "epi_n": 0.2,
    "epi_stages": 0.2,
    "acc_stages": 0.5,
    "share": 0.3,
    "schedule": 1.0,
    "cta_group": 1.0,
    "num_consumers": 1.5,
    "swap_ab": 3.0,
    "load": 3.0,
    "scheduler": 1.0,
    "split_k": 0.7,
    "blk_m": 1.5,
    "blk_n": 1.0,
    "blk_k": 1.5,
}


def translated(config: GemmConfig, problem: GemmProblem, profile: DeviceProfile) -> GemmConfig | None:
    """The config itself where it can be asked for the problem, else the nearest one found; None where none was.

    A config of another architecture has no translation.
    """
    if config.arch.name != profile.arch.name:
        return None
    order = count()
    waiting = [(0.0, next(order), config)]
    seen = {config}
    for _ in range(MAX_TRIED):
        if not waiting:
            return None
        cost, _, nearest = heapq.heappop(waiting)
        if (legal := _legal(nearest, problem, profile)) is not None:
            return legal
        for neighbour, step in _steps(nearest):
            if neighbour not in seen:
                seen.add(neighbour)
                heapq.heappush(waiting, (cost + step, next(order), neighbour))
    return None


def _legal(config: GemmConfig, problem: GemmProblem, profile: DeviceProfile) -> GemmConfig | None:
    """The plainest config that does the same, if it can be asked."""
    if rejection(problem, config, profile) is None:
        return config
    if not is_searched(config) or violation(problem, config, profile.sm_count):
        return None
    plain = plainest(problem, config, profile)
    return plain if rejection(problem, plain, profile) is None else None


def _steps(config: GemmConfig) -> Iterator[tuple[GemmConfig, float]]:
    """Configs that differ in one knob by one choice, with what the step costs."""
    for knob, values in choices(config.arch).items():
        here = getattr(config, knob)
        for value in _next_to(here, values):
            size = abs(log2(value / here)) if _is_number(here) else 1.0
            yield replace(config, **{knob: value}), COSTS[knob] * size


def _next_to(here: Any, values: tuple[Any, ...]) -> Iterator[Any]:
    if not _is_number(here):
        yield from (value for value in values if value != here)
        return
    below = [value for value in values if value < here]
    above = [value for value in values if value > here]
    if below:
        yield max(below)
    if above:
        yield min(above)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
