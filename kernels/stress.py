"""Builds that make a race likely to show: the knobs of a winner on the shortest K over many tiles, and with delays.

Why: the epilogue race that `FAULTS["epilogue_restart"]` plants passed 200 of 200 launches at K = 4096 and failed 200 of
200 at K = 128 with the same knobs (H200). A long mainloop gives every store time to drain; a short one does not.

A delay is drawn anew by each thread at each pass of a delay point, uniformly below the point's longest one, from a hash
of the SM's clock. So no two launches sleep alike; what a build fixes is which points sleep and for how long at most,
and with that which roles lag behind. Those are drawn from a seed: DELAY_SEEDS of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.gemm_names import DELAY_POINTS
from kernels.problem import GemmProblem

if TYPE_CHECKING:
    from kernels.config import GemmConfig

# Tiles for each cluster: enough that every staging buffer, pipeline stage and barrier phase comes round several times.
TILES_PER_CLUSTER = 6
DELAY_SEEDS = 20
# From less than a wait on a barrier that is already there to more than the whole mainloop of the shortest K.
LONGEST_DELAYS_NS = (0, 0, 128, 512, 2048, 8192)
_LONGEST_OF_ONE_ROLE_NS = 2048
_ROLES = ("producer", "consumer", "epilogue", "")


@dataclass(frozen=True, kw_only=True)
class StressBuild:
    """One build to verify.

    label: what is special about it
    problem: what it computes
    delays_ns: longest sleep by delay point; empty for none
    """

    label: str
    problem: GemmProblem
    delays_ns: dict[str, int] = field(default_factory=dict)


def stress_builds(
    problem: GemmProblem, config: GemmConfig, sm_count: int, *, seeds: int = DELAY_SEEDS
) -> tuple[StressBuild, ...]:
    """Builds for one winner, in the order in which they are run: those without delays are the quickest to fail.

    seeds: builds with delays; of the first four each slows one role, the last of them all roles

    Where K is split, the k-blocks of a label are those of each part.
    """
    wrap = config.pipe_depth + 1
    shortest = tuple(_short(problem, config, sm_count, blocks) for blocks in (1, 2, wrap))
    plain = (
        StressBuild(label=f"{blocks} k-block{'s' * (blocks > 1)}", problem=short)
        for blocks, short in zip((1, 2, wrap), shortest, strict=True)
    )
    delayed = (
        StressBuild(label=_label(seed), problem=shortest[2 - seed % 3], delays_ns=_delays_ns(seed))
        for seed in range(seeds)
    )
    return (*plain, *delayed)


def _label(seed: int) -> str:
    if seed >= len(_ROLES):
        return f"delays of seed {seed}"
    return f"{_ROLES[seed]} delayed" if _ROLES[seed] else "all delayed"


def _delays_ns(seed: int) -> dict[str, int]:
    if seed < len(_ROLES):
        return {point: _LONGEST_OF_ONE_ROLE_NS for point in DELAY_POINTS if point.startswith(_ROLES[seed])}
    draw = random.Random(seed)
    longest: dict[str, int] = {}
    while not longest:
        drawn = {point: draw.choice(LONGEST_DELAYS_NS) for point in DELAY_POINTS}
        longest = {point: value for point, value in drawn.items() if value}
    return longest


def _parts(config: GemmConfig) -> int:
    """CTAs that share the K of a tile."""
    return config.cluster_size // config.cta_group


def _short(problem: GemmProblem, config: GemmConfig, sm_count: int, k_blocks: int) -> GemmProblem:
    """The problem with `k_blocks` blocks of K for each part and just enough tiles, as ragged as the original.

    A problem of one row of tiles keeps its M: the template fetches fewer rows of A for it, which is a path of its own.
    With stream-K the tiles leave a rest, so that some are shared; with one block of K none can be.
    """
    assert isinstance(config, Sm90GemmConfig | Sm100GemmConfig)
    rows, cols = config.cluster_tile
    clusters = max(1, config.resident_clusters(sm_count))
    wanted = TILES_PER_CLUSTER * clusters
    tiles_m, tiles_n = config.cluster_tiles(problem)
    if tiles_m * tiles_n > wanted:
        tiles_m = min(tiles_m, max(1, ceil(wanted / tiles_n)))
        tiles_n = min(tiles_n, ceil(wanted / tiles_m))
    elif tiles_m == 1:
        tiles_n = wanted
    else:
        tiles_m = ceil(wanted / tiles_n)
    m = problem.m if tiles_m == 1 else _ragged(tiles_m, rows, problem.m)
    n = problem.n if tiles_n == 1 else _ragged(tiles_n, cols, problem.n)
    if config.scheduler == "stream_k" and tiles_m * tiles_n % clusters == 0:
        tiles_m, tiles_n = (tiles_m, tiles_n + 1) if tiles_n > 1 or tiles_m == 1 else (tiles_m + 1, tiles_n)
    k = k_blocks * _parts(config) * config.blk_k - (-problem.k) % config.blk_k
    return GemmProblem(m=m, n=n, k=k, dtype=problem.dtype, layout=problem.layout)


def _ragged(tiles: int, tile: int, extent: int) -> int:
    """`tiles` tiles whose last one is as full as the last one of `extent`."""
    return (tiles - 1) * tile + (extent % tile or tile)
