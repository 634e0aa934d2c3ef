"""How a persistent grid walks the tiles of a problem: waves, and which settings of the order knobs mean one order."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.stream_k import StreamK
from search_space.space import choices

if TYPE_CHECKING:
    from kernels.problem import GemmProblem

PLAIN_RASTER, PLAIN_GROUP = "m", 1
# A problem has about 130 grids of tiles, each with 24 orders. Those of the studies at work are kept, not those of every
# problem that a process ever saw: kept for good they took 1.5 MB a problem.
GRIDS_KEPT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The tiles of one problem under one config.

    tiles_m: cluster tiles along M
    tiles_n: cluster tiles along N
    clusters: clusters launched
    waves: tiles that the busiest cluster computes; with stream-K, tiles that it computes whole or pieces of
    k_blocks: stages that one CTA consumes for a tile, at most
    split: how stream-K shares tiles out, if it does
    """

    tiles_m: int
    tiles_n: int
    clusters: int
    waves: int
    k_blocks: int
    split: StreamK | None = None

    @property
    def stages(self) -> int:
        """Stages that the busiest CTA consumes in all."""
        return self.waves * self.k_blocks if self.split is None else self.split.stages

    @property
    def tiles(self) -> int:
        """Cluster tiles of D."""
        return self.tiles_m * self.tiles_n

    @property
    def wave_efficiency(self) -> float:
        """Share of the launched clusters' time that has a tile to work on."""
        if self.split is not None:
            return self.tiles * self.k_blocks / (self.stages * self.clusters)
        return self.tiles / (self.waves * self.clusters)


def walk_of(problem: GemmProblem, config: GemmConfig, sm_count: int) -> Walk:
    """Needs a device that holds at least one cluster of the config."""
    tiles_m, tiles_n = config.cluster_tiles(problem)
    clusters = config.clusters(problem, sm_count)
    split = None
    if isinstance(config, Sm90GemmConfig) and config.scheduler == "stream_k":
        split = StreamK(tiles=tiles_m * tiles_n, k_blocks=config.k_blocks(problem), clusters=clusters)
    return Walk(
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        clusters=clusters,
        waves=ceil(tiles_m * tiles_n / clusters),
        k_blocks=config.cta_k_blocks(problem),
        split=split,
    )


def epilogue_chunks(config: GemmConfig) -> int:
    """Chunks of a tile that one consumer of one CTA writes, at most."""
    assert isinstance(config, Sm90GemmConfig | Sm100GemmConfig)
    return ceil(config.chunks / config.split_k)


def stages_by_threads(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether threads store D from the staging buffer, because TMA cannot write rows that are no whole 16 bytes."""
    return isinstance(config, Sm90GemmConfig) and problem.n % 8 != 0 and not config.swap_ab


def loaded_rows(problem: GemmProblem, config: GemmConfig) -> tuple[int, int]:
    """Rows of A and of B that arrive in one CTA with each stage.

    The Hopper template fetches no more rows than there are where a whole matrix is shorter than the tile, unless a pair
    of CTAs shares it.
    """
    if not isinstance(config, Sm90GemmConfig):
        return config.cta_rows, config.cta_cols
    shared = config.share if config.cta_group == 2 else ""
    a_rows = config.cta_rows if shared == "A" else min(config.cta_rows, problem.m)
    return a_rows, config.cta_cols if shared == "B" else min(config.cta_cols, problem.n)


@cache
def _group_sizes(arch: str) -> tuple[int, ...]:
    return tuple(sorted(int(size) for size in choices(arch)["l2_group_size"]))


def _covering(arch: str, lines: int) -> int | None:
    """The smallest group size of the space that holds this many lines of tiles."""
    sizes = _group_sizes(arch)
    at = bisect_left(sizes, lines)
    return sizes[at] if at < len(sizes) else None


def plain_order(arch: str, tiles_m: int, tiles_n: int, raster: str, group: int) -> tuple[str, int]:
    """The plainest (raster, l2_group_size) of the space that walks a grid of tiles in the same order.

    Tiles are grouped by lines (rows of tiles for "m", columns for "n"); within a group the line changes fastest.
    """
    if min(tiles_m, tiles_n) == 1:  # one row or column of tiles has one order
        return PLAIN_RASTER, PLAIN_GROUP
    along_n, serpentine = raster.startswith("n"), raster.endswith("-serpentine")
    lines, across = (tiles_n, tiles_m) if along_n else (tiles_m, tiles_n)
    if group < lines:
        if serpentine or not along_n or group > 1:
            return raster, group
        # groups of one column run down each column, as one group of all rows does
        rows = _covering(arch, across)
        return (raster, group) if rows is None else ("m", rows)
    # One group holds every line, so no second group is there to turn round.
    if along_n:
        return PLAIN_RASTER, PLAIN_GROUP  # along each row of tiles, as groups of one row do
    return "m", _covering(arch, lines) or group


@cache
def _all_orders(arch: str) -> tuple[tuple[str, int], ...]:
    values = choices(arch)
    return tuple((str(raster), int(group)) for group in values["l2_group_size"] for raster in values["raster"])


@lru_cache(maxsize=GRIDS_KEPT)
def plain_orders(arch: str, tiles_m: int, tiles_n: int) -> tuple[tuple[str, int], ...]:
    """Every distinct (raster, l2_group_size) of the space for this grid of tiles, in the order of the choices."""
    return tuple(order for order in _all_orders(arch) if plain_order(arch, tiles_m, tiles_n, *order) == order)
