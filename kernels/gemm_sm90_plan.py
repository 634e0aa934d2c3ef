"""Numbers of the Hopper template that follow from problem, config and SM count. Imports no tvm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from kernels.problem import ELEMENT_BYTES, FLOAT_BYTES, GemmProblem
from kernels.resources import WGMMA_ROWS
from kernels.rules import MAX_TMA_BOX_ROWS
from kernels.split_plan import PartsOfK
from kernels.stream_k import Workspace, workspace_of

if TYPE_CHECKING:
    from kernels.config import Sm90GemmConfig


PRODUCER_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class Operand:
    """How A or B reaches shared memory.

    name: "A" or "B"
    rows: of the whole operand; None where that is known when the kernel is called
    tile_rows: rows that one CTA stages
    parts: CTAs of the cluster that each fetch an equal part of the tile and multicast it; 1 where nothing is shared
    """

    name: str
    rows: int | None
    tile_rows: int
    parts: int

    @property
    def part_rows(self) -> int:
        """Rows of the tile that this CTA is there for."""
        return self.tile_rows // self.parts

    @property
    def copied_rows(self) -> int:
        """Rows that this CTA fetches with each stage.

        A box that lies partly outside of the matrix is slow: M = 16 took 21.96 us with a 64-row box and 16.75 us with a
        16-row one (H200, 16x7168x4096). So a short matrix gets a short box; the rows never fetched only feed elements
        of D that are not stored.
        """
        if self.rows is None or self.parts > 1 or self.rows > MAX_TMA_BOX_ROWS:
            return self.part_rows
        return min(self.rows, self.part_rows)

    @property
    def box_rows(self) -> int:
        """Rows of one copy: all that is fetched, cut into equal boxes of at most 256 rows."""
        return self.copied_rows // ceil(self.copied_rows / MAX_TMA_BOX_ROWS)

    @property
    def copies(self) -> range:
        """First row of each copy, within the part."""
        return range(0, self.copied_rows, self.box_rows)

    @property
    def fetched_rows(self) -> int:
        """Rows that arrive in one CTA with each stage, whoever fetched them."""
        return self.parts * self.copied_rows


@dataclass(frozen=True, kw_only=True)
class Plan(PartsOfK):
    """Numbers that follow from problem, config and SM count.

    dynamic_m: whether M is known only when the kernel is called
    """

    problem: GemmProblem
    config: Sm90GemmConfig
    sm_count: int
    dynamic_m: bool = False

    @property
    def short_dtype(self) -> str:
        """Element type in the names of PTX instructions."""
        return {"float16": "f16", "bfloat16": "bf16"}[self.problem.dtype.long_name]

    @property
    def clusters(self) -> int:
        """Clusters launched: all that run at once where the number of tiles is not known."""
        if self.dynamic_m:
            return self.config.resident_clusters(self.sm_count)
        return self.config.clusters(self.problem, self.sm_count)

    # ------------------------------------------------------------------ operands

    @cached_property
    def a(self) -> Operand:
        parts = self.config.cta_group if self.config.share == "A" else 1
        rows = None if self.dynamic_m else self.problem.m
        return Operand(name="A", rows=rows, tile_rows=self.config.cta_rows, parts=parts)

    @cached_property
    def b(self) -> Operand:
        parts = self.config.cta_group if self.config.share == "B" else 1
        return Operand(name="B", rows=self.problem.n, tile_rows=self.config.cta_cols, parts=parts)

    @property
    def slab_cols(self) -> int:
        """K elements of one swizzled slab: a shared-memory row of at most 128 bytes."""
        return min(self.config.blk_k, 64)

    @property
    def slab_row_bytes(self) -> int:
        return self.slab_cols * ELEMENT_BYTES

    @property
    def slabs(self) -> int:
        return self.config.blk_k // self.slab_cols

    @property
    def filled_bytes(self) -> int:
        """Bytes that arrive on one tma2mma barrier: all of this CTA's stage, whoever fetched them."""
        return ELEMENT_BYTES * self.config.blk_k * (self.a.fetched_rows + self.b.fetched_rows)

    @property
    def short_box(self) -> bool:
        """Whether the box of A gets as many rows as A when the kernel is called, where those are fewer than a tile's.

        A box that lies partly outside is slow (see `copied_rows`). More than one box would have to become fewer.
        """
        return self.dynamic_m and self.config.load == "tma" and self.a.box_rows == self.a.tile_rows

    @property
    def copies(self) -> bool:
        """Whether the producer warpgroup copies A and B by cp.async (`gemm_sm90_copy`)."""
        return self.config.load == "cp_async"

    @property
    def tail_stage_bytes(self) -> int:
        """Tails of one stage, of A behind those of B."""
        return self.config.tail_bytes

    @property
    def fill_arrivals(self) -> int:
        """Arrivals that fill a stage: of the thread that announces TMA's bytes, or one of each warp that copies."""
        return PRODUCER_WARPS if self.copies else 1

    @property
    def stages_under_way(self) -> int:
        """Stages whose copies have begun when one is waited for.

        The slot of the next is free when the stage `pipe_depth` before it has been released, and a consumer does that
        once it has the stage behind that one: it must have been handed over, so the last two are never under way.
        """
        return self.config.pipe_depth - 2

    # ------------------------------------------------------------------ consumers

    @property
    def stage_consumers(self) -> int:
        """Consumers that read each stage: with pingpong a stage belongs to one of them."""
        return 1 if self.config.schedule == "pingpong" else self.config.num_consumers

    @property
    def accumulators(self) -> int:
        """float32 accumulators of one 64-row wgmma in each thread."""
        return self.config.blk_n // 2

    @property
    def wgmmas(self) -> int:
        """Blocks of 64 rows of one consumer."""
        return self.config.blk_m // WGMMA_ROWS

    # ------------------------------------------------------------------ parts of K

    @property
    def part_bytes(self) -> int:
        """float32 accumulators of one chunk."""
        return FLOAT_BYTES * WGMMA_ROWS * self.config.epi_n

    @cached_property
    def workspace(self) -> Workspace:
        """Where parts of a tile meet with scheduler = stream_k."""
        return workspace_of(self.problem, self.config, self.sm_count)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a launch needs beside its operands."""
        return self.workspace.size_bytes if self.config.scheduler == "stream_k" else 0

    # ------------------------------------------------------------------ stores

    @property
    def tma_stores(self) -> bool:
        """Whether D is stored by TMA: from staging buffers, and where its rows are whole 16 bytes."""
        return not self.config.swap_ab and self.problem.n % 8 == 0

    @property
    def store_cols(self) -> int:
        """Columns of one TMA store box: the widest swizzle row that divides an epilogue chunk."""
        return next(cols for cols in (64, 32, 16) if self.config.epi_n % cols == 0)

    @property
    def fixed_buffers(self) -> bool:
        """Whether the staging buffer of a chunk is the same for every tile.

        Where a tile's chunks come round to buffer 0 the index that runs on is a constant; elsewhere it is a register.
        Restarting it at 0 there would rewrite a buffer whose store the waits do not cover.
        """
        return self.config.chunks % (self.config.epi_stages * self.config.split_k) == 0
