"""Numbers of the Hopper template that follow from problem, config and SM count. Imports no tvm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

from kernels.problem import ELEMENT_BYTES, FLOAT_BYTES, TMA_ALIGNMENT, GemmProblem, row_period
from kernels.resources import WGMMA_ROWS
from kernels.rules import MAX_TMA_BOX_ROWS

if TYPE_CHECKING:
    from kernels.config import Sm90GemmConfig

SWIZZLE_ROWS = 8  # rows after which the swizzle pattern of shared memory repeats


def row_at(position: Any, period: int) -> Any:
    """Row of a tile at a row position of shared memory. Takes and gives an integer or an expression.

    Rows come in bands of `8 * period`; a band holds the rows with the first alignment, then those with the second, ...
    """
    if period == 1:
        return position
    band = SWIZZLE_ROWS * period
    within = position & (band - 1)
    return position - within + (within & (SWIZZLE_ROWS - 1)) * period + (within >> 3)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One operand as tensor maps describe it.

    A tensor map needs a row stride that is a multiple of 16 bytes. Where a row is not, `period` rows together are: the
    matrix is described once for each row of such a long row, with the same start and stride, and ends where that row
    ends. Row r is then row r // period of map r % period, its columns start at (r % period) * cols, and what lies past
    its end is filled with zeros or not stored, as for an aligned matrix.

    operand: "A", "B" or "D"
    rows, cols: extents
    """

    operand: str
    rows: int
    cols: int

    @property
    def period(self) -> int:
        """Maps that are needed: rows after which one starts at a 16-byte boundary again."""
        return row_period(self.rows, self.cols)

    @property
    def maps(self) -> range:
        """Maps that have at least one row."""
        return range(min(self.period, self.rows))

    def rows_of(self, number: int) -> int:
        """Rows of one map."""
        return ceil((self.rows - number) / self.period)

    def cols_of(self, number: int) -> int:
        """Columns of one map."""
        return (number + 1) * self.cols

    @property
    def stride_bytes(self) -> int:
        """From one row of a map to its next. The stride of a single row is never used and may be rounded up."""
        return ceil(self.period * self.cols * ELEMENT_BYTES / TMA_ALIGNMENT) * TMA_ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One box that a CTA fetches for each slab of a stage.

    map: number of the tensor map
    row: first row of the box, counted in rows of that map from the start of the CTA's part
    rows: of the box
    position: row of the part in shared memory where the box goes
    """

    map: int
    row: int
    rows: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Operand:
    """How A or B reaches shared memory.

    matrix: the whole operand
    tile_rows: rows that one CTA stages
    parts: CTAs of the cluster that each fetch an equal part of the tile and multicast it; 1 where nothing is shared
    """

    matrix: Matrix
    tile_rows: int
    parts: int

    @property
    def part_rows(self) -> int:
        """Rows that this CTA fetches."""
        return self.tile_rows // self.parts

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """What this CTA fetches for each slab.

        A box that lies partly outside of the matrix is slow: M = 16 took 21.96 us with a 64-row box and 16.75 us with a
        16-row one (H200, 16x7168x4096). So a short matrix gets short boxes; the rows never fetched only feed elements
        of D that are not stored.
        """
        rows, period = self.matrix.rows, self.matrix.period
        if period == 1:
            short = self.parts == 1 and rows < self.tile_rows and rows <= MAX_TMA_BOX_ROWS
            part = rows if short else self.part_rows
            box = part // ceil(part / MAX_TMA_BOX_ROWS)
            return tuple(Copy(map=0, row=at, rows=box, position=at) for at in range(0, part, box))
        band = SWIZZLE_ROWS * period
        if self.parts == 1 and rows <= band:
            return tuple(
                Copy(map=n, row=0, rows=self.matrix.rows_of(n), position=SWIZZLE_ROWS * n) for n in self.matrix.maps
            )
        bands = ceil((min(rows, self.part_rows) if self.parts == 1 else self.part_rows) / band)
        return tuple(
            Copy(map=n, row=SWIZZLE_ROWS * b, rows=SWIZZLE_ROWS, position=b * band + SWIZZLE_ROWS * n)
            for b in range(bands)
            for n in range(period)
        )

    @property
    def box_rows(self) -> dict[int, int]:
        """Rows of every box, by map."""
        return {copy.map: copy.rows for copy in self.copies}

    @property
    def fetched_rows(self) -> int:
        """Rows that arrive in one CTA with each stage, whoever fetched them."""
        return self.parts * sum(copy.rows for copy in self.copies)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbers that follow from problem, config and SM count."""

    problem: GemmProblem
    config: Sm90GemmConfig
    sm_count: int

    @property
    def short_dtype(self) -> str:
        """Element type in the names of PTX instructions."""
        return {"float16": "f16", "bfloat16": "bf16"}[self.problem.dtype.long_name]

    # ------------------------------------------------------------------ operands

    @cached_property
    def a(self) -> Operand:
        problem, config = self.problem, self.config
        parts = config.cta_group if config.share == "A" else 1
        return Operand(
            matrix=Matrix(operand="A", rows=problem.m, cols=problem.k), tile_rows=config.cta_rows, parts=parts
        )

    @cached_property
    def b(self) -> Operand:
        problem, config = self.problem, self.config
        parts = config.cta_group if config.share == "B" else 1
        return Operand(
            matrix=Matrix(operand="B", rows=problem.n, cols=problem.k), tile_rows=config.cta_cols, parts=parts
        )

    @cached_property
    def d(self) -> Matrix:
        return Matrix(operand="D", rows=self.problem.m, cols=self.problem.n)

    @property
    def wide(self) -> Operand:
        """The operand on the 64-row side of wgmma."""
        return self.b if self.config.swap_ab else self.a

    @property
    def narrow(self) -> Operand:
        """The operand on the other side, of blk_n rows."""
        return self.a if self.config.swap_ab else self.b

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
    def k_share(self) -> tuple[int, int]:
        """Blocks of K of each part, and how many of the first parts have one more."""
        return divmod(self.config.k_blocks(self.problem), self.config.split_k)

    @property
    def owners(self) -> int:
        """CTAs of the cluster that sum and store a chunk or more: chunk c belongs to CTA c % split_k."""
        return min(self.config.split_k, self.config.chunks)

    @property
    def owned_chunks(self) -> int:
        """Chunks of one consumer that the CTA with most of them owns."""
        return ceil(self.config.chunks / self.config.split_k)

    @property
    def part_bytes(self) -> int:
        """float32 accumulators of one chunk."""
        return FLOAT_BYTES * WGMMA_ROWS * self.config.epi_n

    # ------------------------------------------------------------------ stores

    @property
    def store_cols(self) -> int:
        """Columns of one TMA store box: the widest swizzle row that divides an epilogue chunk."""
        return next(cols for cols in (64, 32, 16) if self.config.epi_n % cols == 0)

    @property
    def store_rows(self) -> dict[int, int]:
        """Rows of a TMA store box by map of D: those of a block of 64 that the map has."""
        return dict.fromkeys(self.d.maps, WGMMA_ROWS // self.d.period)

    @property
    def fixed_buffers(self) -> bool:
        """Whether the staging buffer of a chunk is the same for every tile.

        Where a tile's chunks come round to buffer 0 the index that runs on is a constant; elsewhere it is a register.
        Restarting it at 0 there would rewrite a buffer whose store the waits do not cover.
        """
        return self.config.chunks % (self.config.epi_stages * self.config.split_k) == 0
