"""The knobs: one frozen class per architecture, holding exactly what its template reads. Everything else is derived.

A knob is a field with a default. A stored config that lacks a newer knob means its default, so old records stay
readable; an unknown knob is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kernels.arch import SM_90A, SM_100A, Arch, arch_named
from kernels.errors import ConfigError
from kernels.problem import ELEMENT_BYTES, FLOAT_BYTES, GemmProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

Rasters = ("m", "n", "m-serpentine", "n-serpentine")
TAIL_BYTES = 16  # of each row that starts within 16 bytes: they end in one piece of 16 bytes more
GPC_SMS = 16  # SMs that most GPCs of an H100 or H200 have at least
Schedules = ("cooperative", "pingpong")
Schedulers = {"sm_90a": ("static", "stream_k"), "sm_100a": ("static", "clc")}
Loads = ("tma", "cp_async")

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # made once: keys are asked for often


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """Knobs that both templates read.

    pipe_depth: stages of the shared-memory ring that TMA fills and the MMA drains
    cta_group: CTAs of a cluster that share a staged operand
    num_consumers: MMA consumers of a CTA, each with its own rows of A, sharing the staged B tile
    blk_m: rows of A that one consumer of one CTA owns
    blk_n: rows of B that one CTA stages
    blk_k: K elements of one stage
    l2_group_size: rows of tiles walked together so that B stays in L2
    raster: which way tiles are numbered first, and whether blocks of tiles are walked in a serpentine
    epi_n: columns of one epilogue chunk
    epi_stages: staging buffers of the epilogue, per consumer
    """

    arch: ClassVar[Arch]

    pipe_depth: int = 4
    cta_group: int = 1
    num_consumers: int = 2
    blk_m: int = 64
    blk_n: int = 256
    blk_k: int = 64
    l2_group_size: int = 8
    raster: str = "m"
    epi_n: int = 64
    epi_stages: int = 2

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)):
            value = getattr(self, name)
            if type(value) is not kind:
                raise ConfigError(f"knob {name} must be {kind.__name__}, got {value!r}", knob=name)
            if type(value) is int and value < 1:
                raise ConfigError(f"knob {name} must be at least 1, got {value}", knob=name)
        if self.raster not in Rasters:
            raise ConfigError(f"knob raster must be one of {', '.join(Rasters)}, got {self.raster!r}", knob="raster")

    @classmethod
    def knobs(cls) -> tuple[str, ...]:
        """Names of the knobs, in the order in which they are printed."""
        return tuple(name for name, _ in _kinds(cls))

    @classmethod
    def from_dict(cls, knobs: dict[str, Any]) -> Self:
        """Raises ConfigError for an unknown knob or a value of the wrong type."""
        unknown = sorted(set(knobs) - set(cls.knobs()))
        if unknown:
            raise ConfigError(
                f"unknown knob {unknown[0]!r} for {cls.arch.name}: knobs are {', '.join(cls.knobs())}", knob=unknown[0]
            )
        return cls(**knobs)

    def to_dict(self) -> dict[str, Any]:
        """Every knob with its value."""
        return {name: getattr(self, name) for name, _ in _kinds(type(self))}

    def with_choices(self, choices: Mapping[str, Any]) -> Self:
        """As `dataclasses.replace` for values that a space lists: not checked again, which takes most of the time."""
        made = object.__new__(type(self))
        made.__dict__.update({**self.to_dict(), **choices})
        return made

    @property
    def key(self) -> str:
        """Canonical text: equal for equal configs of one architecture."""
        return f"{self.arch.name}:{_canonical(self.to_dict())}"

    # ------------------------------------------------------------------ derived geometry

    @property
    def cta_rows(self) -> int:
        """Rows of A that one CTA stages."""
        return self.num_consumers * self.blk_m

    @property
    def cta_cols(self) -> int:
        """Rows of B, which are columns of D, that one CTA stages."""
        return self.blk_n

    @property
    def cluster_size(self) -> int:
        """CTAs of one cluster."""
        return self.cta_group

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of D that one cluster computes at a time."""
        raise NotImplementedError

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of one CTA, in bytes."""
        return ELEMENT_BYTES * self.blk_k * (self.cta_rows + self.cta_cols)

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory that one CTA needs between its accumulators and D, in bytes."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return 128 * (self.num_consumers + 1)

    @property
    def epilogue_cols(self) -> int:
        """Columns of accumulators that epilogue chunks divide."""
        return self.blk_n

    @property
    def serpentine(self) -> bool:
        """Whether blocks of tiles are walked in a serpentine."""
        return self.raster.endswith("-serpentine")

    @property
    def along_n(self) -> bool:
        """Whether groups are formed from columns of tiles instead of rows."""
        return self.raster.startswith("n")

    def cluster_tiles(self, problem: GemmProblem) -> tuple[int, int]:
        """Cluster tiles along M and N."""
        rows, cols = self.cluster_tile
        return ceil(problem.m / rows), ceil(problem.n / cols)

    def resident_clusters(self, sm_count: int) -> int:
        """Clusters that run at once, at one CTA for each SM.

        A cluster lies within one GPC, and GPCs differ: a pair always finds its place, but an H200 of 132 SMs did not
        hold 8 clusters of 16 (8x512x500000: 155 us, with 8 of 8 123 us) nor 16 of 8 (128x256x7168: 12.5 us, with 8 of 8
        7.5 us). So larger clusters are counted as if one GPC were missing and each other had 16 SMs. A cluster more
        than there is room for would wait for a whole tile; one fewer costs its share of the SMs.
        """
        if self.cluster_size <= 2:
            return sm_count // self.cluster_size
        return max(1, (sm_count // GPC_SMS - 1) * (GPC_SMS // self.cluster_size))

    def clusters(self, problem: GemmProblem, sm_count: int) -> int:
        """Clusters that share the tiles: persistent, so at most what the SMs hold."""
        tiles_m, tiles_n = self.cluster_tiles(problem)
        return min(self.resident_clusters(sm_count), tiles_m * tiles_n)

    def k_blocks(self, problem: GemmProblem) -> int:
        """Blocks of K that one tile needs."""
        return ceil(problem.k / self.blk_k)

    def cta_k_blocks(self, problem: GemmProblem) -> int:
        """Stages that one CTA consumes for a tile, at most."""
        return self.k_blocks(problem)


_KINDS: dict[type[GemmConfig], tuple[tuple[str, type], ...]] = {}


def _kinds(config_class: type[GemmConfig]) -> tuple[tuple[str, type], ...]:
    """Name and type of each knob. Kept: spaces make tens of thousands of configs."""
    if config_class not in _KINDS:
        _KINDS[config_class] = tuple((field.name, type(field.default)) for field in fields(config_class))
    return _KINDS[config_class]


@dataclass(frozen=True, kw_only=True)
class Sm90GemmConfig(GemmConfig):
    """Knobs of the Hopper template (TMA, wgmma, clusters).

    share: operand that a cluster of two multicasts: "B" stacks the CTAs along M, "A" along N
    schedule: "cooperative" consumers share a tile, "pingpong" consumers take turns with whole tiles, so that one's
        epilogue runs beside the other's mainloop
    swap_ab: rows of B ride the 64-row side of wgmma and rows of A its narrow side, for small M; blk_m then counts
        rows of B of one consumer, and blk_n rows of A
    split_k: CTAs of a cluster that each compute a part of K of the same tile; float32 sums meet in shared memory
    load: "tma" needs rows of A and B that start at multiples of 16 bytes, "cp_async" takes any
    scheduler: "static" clusters compute whole tiles, "stream_k" clusters share the last waves of tiles evenly, in
        blocks of K; float32 sums of tiles that several have worked on meet in a workspace
    """

    arch: ClassVar[Arch] = SM_90A

    share: str = "B"
    schedule: str = "cooperative"
    swap_ab: bool = False
    split_k: int = 1
    load: str = "tma"
    scheduler: str = "static"

    def __post_init__(self) -> None:
        super().__post_init__()
        known_values = (("share", ("A", "B")), ("schedule", Schedules), ("load", Loads))
        for knob, allowed in (*known_values, ("scheduler", Schedulers["sm_90a"])):
            if (value := getattr(self, knob)) not in allowed:
                known = " or ".join(map(repr, allowed))
                raise ConfigError(f"knob {knob} must be {known}, got {value!r}", knob=knob)

    @property
    def mma_rows(self) -> int:
        """Rows of the tile of one CTA on the 64-row side of wgmma."""
        return self.blk_m * (1 if self.schedule == "pingpong" else self.num_consumers)

    @property
    def cta_rows(self) -> int:
        """Rows of A that one CTA stages."""
        return self.blk_n if self.swap_ab else self.mma_rows

    @property
    def cta_cols(self) -> int:
        """Rows of B, which are columns of D, that one CTA stages."""
        return self.mma_rows if self.swap_ab else self.blk_n

    @property
    def tail_bytes(self) -> int:
        """Shared memory of one stage for what cp_async copies of each row beyond its place in the stage."""
        return TAIL_BYTES * (self.cta_rows + self.cta_cols) if self.load == "cp_async" else 0

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of one CTA, in bytes."""
        return super().stage_bytes + self.tail_bytes

    @property
    def cluster_size(self) -> int:
        """CTAs of one cluster: those that share an operand, or those that share the work on K."""
        return self.cta_group * self.split_k

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """A pair that shares B stands along M, one that shares A along N; parts of K share a tile."""
        if self.share == "B":
            return self.cta_group * self.cta_rows, self.cta_cols
        return self.cta_rows, self.cta_group * self.cta_cols

    @property
    def chunks(self) -> int:
        """Pieces of 64 x epi_n accumulators in which one consumer writes its tile."""
        return self.blk_m // 64 * (self.blk_n // self.epi_n)

    @property
    def staging_bytes(self) -> int:
        """Buffers for TMA stores, of 64 rows each: what one wgmma of a warpgroup produces. None with swap_ab."""
        return 0 if self.swap_ab else ELEMENT_BYTES * self.num_consumers * self.epi_stages * 64 * self.epi_n

    @property
    def exchange_bytes(self) -> int:
        """Buffers for the float32 sums that the other parts of K send: every chunk has one owner in the cluster."""
        owned = ceil(self.chunks / self.split_k)
        return FLOAT_BYTES * self.num_consumers * owned * (self.split_k - 1) * 64 * self.epi_n

    @property
    def epilogue_bytes(self) -> int:
        """Staging for TMA stores and sums from the other parts of K."""
        return self.staging_bytes + self.exchange_bytes

    def clusters(self, problem: GemmProblem, sm_count: int) -> int:
        """Where tiles are shared out, as many as the SMs hold and there are blocks of K."""
        if self.scheduler == "static":
            return super().clusters(problem, sm_count)
        tiles_m, tiles_n = self.cluster_tiles(problem)
        return min(self.resident_clusters(sm_count), tiles_m * tiles_n * self.k_blocks(problem))

    def cta_k_blocks(self, problem: GemmProblem) -> int:
        """Stages that the CTA with the largest part of K consumes for a tile."""
        return ceil(self.k_blocks(problem) / self.split_k)


@dataclass(frozen=True, kw_only=True)
class Sm100GemmConfig(GemmConfig):
    """Knobs of the Blackwell template (TMA, tcgen05, tensor memory, CTA pair).

    acc_stages: accumulator slots in tensor memory of each consumer, so that writeback overlaps the next tile
    swap_ab: rows of B ride the 128-row side of the MMA and rows of A its narrow side, for small M; blk_m then counts
        rows of B of one consumer, and blk_n rows of A of one CTA
    split_k: CTAs of a cluster that each compute a part of K of the same tile; float32 sums meet in shared memory
    scheduler: "static" clusters count on to their next tile, "clc" clusters take over tiles of clusters that the
        hardware has not launched yet (cluster launch control)
    """

    arch: ClassVar[Arch] = SM_100A

    blk_m: int = 128
    blk_n: int = 128
    cta_group: int = 2
    epi_stages: int = 1
    acc_stages: int = 1
    swap_ab: bool = False
    split_k: int = 1
    scheduler: str = "static"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduler not in Schedulers["sm_100a"]:
            known = " or ".join(map(repr, Schedulers["sm_100a"]))
            raise ConfigError(f"knob scheduler must be {known}, got {self.scheduler!r}", knob="scheduler")

    def launched_clusters(self, problem: GemmProblem, sm_count: int) -> int:
        """One for each tile where clusters take tiles over from one another's launch."""
        tiles_m, tiles_n = self.cluster_tiles(problem)
        return tiles_m * tiles_n if self.scheduler == "clc" else self.clusters(problem, sm_count)

    @property
    def wide_rows(self) -> int:
        """Rows of the tile of one CTA on the side of the MMA that has a row for each lane of tensor memory."""
        return self.num_consumers * self.blk_m

    @property
    def cta_rows(self) -> int:
        """Rows of A that one CTA stages."""
        return self.blk_n if self.swap_ab else self.wide_rows

    @property
    def cta_cols(self) -> int:
        """Rows of B, which are columns of D, that one CTA stages."""
        return self.wide_rows if self.swap_ab else self.blk_n

    @property
    def cluster_size(self) -> int:
        """CTAs of one cluster: the pair of one MMA, or those that share the work on K."""
        return self.cta_group * self.split_k

    @property
    def mma_n(self) -> int:
        """Columns of one MMA, and of one accumulator slot."""
        return self.cta_group * self.blk_n

    @property
    def epilogue_cols(self) -> int:
        """Columns of accumulators that epilogue chunks divide."""
        return self.mma_n

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Both CTAs of a pair hold their own rows of A and their own half of the columns of B; parts share a tile."""
        return self.cta_group * self.cta_rows, self.cta_group * self.cta_cols

    @property
    def chunks(self) -> int:
        """Pieces of blk_m x epi_n accumulators in which one consumer of one CTA writes its tile."""
        return self.mma_n // self.epi_n

    @property
    def staging_bytes(self) -> int:
        """Buffers for TMA stores, of the blk_m lanes that a writeback warpgroup owns."""
        return ELEMENT_BYTES * self.num_consumers * self.epi_stages * self.blk_m * self.epi_n

    @property
    def exchange_bytes(self) -> int:
        """Buffers for the float32 sums that the other parts of K send: every chunk has one owner in the cluster."""
        owned = ceil(self.chunks / self.split_k)
        return FLOAT_BYTES * self.num_consumers * owned * (self.split_k - 1) * self.blk_m * self.epi_n

    @property
    def epilogue_bytes(self) -> int:
        """Staging for TMA stores and sums from the other parts of K."""
        return self.staging_bytes + self.exchange_bytes

    @property
    def tmem_columns(self) -> int:
        """Tensor-memory columns that hold accumulators."""
        return self.num_consumers * self.acc_stages * self.mma_n

    @property
    def answer_readers(self) -> int:
        """Threads of a cluster that read which tile is next: producer, scheduler, writeback; MMA in the leader."""
        return self.cta_group * (2 + 128 * self.num_consumers) + self.num_consumers

    def clusters(self, problem: GemmProblem, sm_count: int) -> int:
        """Where tiles are shared out, as many as the SMs hold and there are blocks of K."""
        if self.scheduler == "static":
            return super().clusters(problem, sm_count)
        tiles_m, tiles_n = self.cluster_tiles(problem)
        return min(self.resident_clusters(sm_count), tiles_m * tiles_n * self.k_blocks(problem))

    def cta_k_blocks(self, problem: GemmProblem) -> int:
        """Stages that the CTA with the largest part of K consumes for a tile."""
        return ceil(self.k_blocks(problem) / self.split_k)


CONFIG_CLASSES: dict[str, type[GemmConfig]] = {"sm_90a": Sm90GemmConfig, "sm_100a": Sm100GemmConfig}


def config_from_dict(arch: str, knobs: dict[str, Any]) -> GemmConfig:
    """Build the config class of an architecture from its knobs. Raises ConfigError."""
    return CONFIG_CLASSES[arch_named(arch).name].from_dict(knobs)
