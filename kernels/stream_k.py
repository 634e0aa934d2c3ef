"""Stream-K: how the last waves of tiles are shared out in blocks of K. Imports no tvm.

A persistent grid that gives whole tiles to clusters leaves most of them idle in a last wave that is not full. Here the
tiles of the last full wave and of the rest (all tiles, where there is no full wave) are shared tiles: their blocks of
K, laid end to end, are cut into one span of equal length for each cluster. The tiles before them stay whole. This is
the two-tile hybrid of Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
Multiplication on the GPU" (PPoPP 2023).

A cluster walks its span first and its whole tiles after it. Its span gives it pieces: a piece is what it computes of
one tile. A tile that lies in more than one span has several parts; each is written to a workspace, and the consumer
that is the last to arrive adds them up (`gemm_sm90_stream_k`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from kernels.config import Sm90GemmConfig
    from kernels.problem import GemmProblem

COUNTER_BYTES = 4
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks [first, first + count) of K of a cluster tile, which one cluster computes.

    tile: in the order of the walk
    """

    tile: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamK:
    """Who computes which blocks of K of which tile.

    tiles: cluster tiles of D
    k_blocks: blocks of K of each
    clusters: that share them, no more than there are blocks
    """

    tiles: int
    k_blocks: int
    clusters: int

    @property
    def shared_tiles(self) -> int:
        """Tiles that are shared out by blocks of K: the first of the walk."""
        waves, rest = divmod(self.tiles, self.clusters)
        return rest + self.clusters if waves else rest

    @property
    def units(self) -> int:
        """Blocks of K of all shared tiles."""
        return self.shared_tiles * self.k_blocks

    @property
    def share(self) -> tuple[int, int]:
        """Units of each cluster's span, and how many of the first spans have one more."""
        return divmod(self.units, self.clusters)

    @property
    def whole_waves(self) -> int:
        """Whole tiles of each cluster: what is left fills every wave."""
        return (self.tiles - self.shared_tiles) // self.clusters

    @property
    def stages(self) -> int:
        """Blocks of K that the busiest cluster computes."""
        least, extra = self.share
        return least + (extra > 0) + self.whole_waves * self.k_blocks

    @property
    def at_most_two_parts(self) -> bool:
        """Whether no tile has more than two parts: spans are no shorter than tiles."""
        return self.share[0] >= self.k_blocks

    @property
    def most_parts(self) -> int:
        """Parts of a tile, at most, whatever tile it is; 1 where spans end where tiles end."""
        least, extra = self.share
        if extra == 0 and least % self.k_blocks == 0:
            return 1
        return 1 + -(-(self.k_blocks - 1) // least)

    def first_unit(self, cluster: int) -> int:
        """Where the span of a cluster begins; that of the cluster after the last is the end."""
        least, extra = self.share
        return cluster * least + min(cluster, extra)

    def owner(self, unit: int) -> int:
        """The cluster whose span holds a unit."""
        least, extra = self.share
        longer = extra * (least + 1)
        return unit // (least + 1) if unit < longer else extra + (unit - longer) // least

    def pieces(self, cluster: int) -> tuple[Piece, ...]:
        """What a cluster computes, in its order: pieces of shared tiles, then whole tiles."""
        found = []
        unit, end = self.first_unit(cluster), self.first_unit(cluster + 1)
        while unit < end:
            tile, first = divmod(unit, self.k_blocks)
            count = min(self.k_blocks - first, end - unit)
            found.append(Piece(tile, first, count))
            unit += count
        whole = range(self.shared_tiles + cluster, self.tiles, self.clusters)
        return (*found, *(Piece(tile, 0, self.k_blocks) for tile in whole))

    def parts(self, tile: int) -> tuple[int, ...]:
        """The clusters that compute a shared tile, in the order of K."""
        first = tile * self.k_blocks
        return tuple(range(self.owner(first), self.owner(first + self.k_blocks - 1) + 1))

    def slot(self, cluster: int, *, begins_tile: bool) -> int:
        """Where a cluster writes its part of a tile. A span has at most one that begins its tile and one that does not.

        Parts that are a whole tile are never written.
        """
        return 2 * cluster + begins_tile

    @property
    def slots(self) -> int:
        return 2 * self.clusters


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Device memory of one launch: a counter for each consumer's tile, then the parts.

    Counters are zero before and after each launch. Parts need no initial value.

    split: who computes what
    ctas: of a cluster
    consumers: of a CTA
    part_bytes: float32 sums of one consumer
    """

    split: StreamK
    ctas: int
    consumers: int
    part_bytes: int

    @property
    def lanes(self) -> int:
        """Consumers of a cluster: each adds up its own rows."""
        return self.ctas * self.consumers

    @property
    def counters_bytes(self) -> int:
        needed = self.split.shared_tiles * self.lanes * COUNTER_BYTES
        return -(-needed // _ALIGNMENT) * _ALIGNMENT

    @property
    def size_bytes(self) -> int:
        return self.counters_bytes + self.split.slots * self.lanes * self.part_bytes


def stream_k_of(problem: GemmProblem, config: Sm90GemmConfig, sm_count: int) -> StreamK:
    """Needs a config whose scheduler is stream_k."""
    tiles_m, tiles_n = config.cluster_tiles(problem)
    return StreamK(
        tiles=tiles_m * tiles_n, k_blocks=config.k_blocks(problem), clusters=config.clusters(problem, sm_count)
    )


def workspace_of(problem: GemmProblem, config: Sm90GemmConfig, sm_count: int) -> Workspace:
    """Needs a config whose scheduler is stream_k."""
    return Workspace(
        split=stream_k_of(problem, config, sm_count),
        ctas=config.cluster_size,
        consumers=config.num_consumers,
        part_bytes=FLOAT_BYTES * config.blk_m * config.blk_n,
    )
