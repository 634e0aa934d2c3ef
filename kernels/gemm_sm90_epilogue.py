"""How a consumer of the Hopper template writes its accumulators to D.

`StagedEpilogue`: registers -> swizzled staging buffer -> TMA store, which drains under the next tile's mainloop.
`RegisterEpilogue`: registers -> D, for swap_ab: D is small there, and staging it would only lengthen the kernel's end.

A wgmma leaves float32 in registers: thread g * 4 + t of warp w has, of each 8 columns, columns 2 t and 2 t + 1 of rows
16 w + g and 16 w + g + 8. Rows and columns are positions in shared memory: where K is not a multiple of 8 they stand
for other rows of A and B (`gemm_sm90_plan.row_at`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from kernels.gemm_sm90_emit import Variant, i32, named, shared_address
from kernels.gemm_sm90_plan import row_at
from kernels.problem import ELEMENT_BYTES
from kernels.resources import WGMMA_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvm.backend.cuda.lang.pipeline import PipelineState

    from kernels.gemm_sm90_plan import Plan

_TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


@dataclass(frozen=True, kw_only=True)
class Thread:
    """Where a consumer thread stands, as expressions.

    rank: CTA within the cluster
    warpgroup: consumer
    warp: within the warpgroup
    lane: within the warp
    """

    rank: Any
    warpgroup: Any
    warp: Any
    lane: Any

    @property
    def number(self) -> Any:
        """Within the warpgroup."""
        return self.warp * 32 + self.lane

    def sync(self) -> None:
        """Barrier of the warpgroup. Barrier 0 is the CTA's."""
        T.evaluate(T.cuda.warpgroup_sync(self.warpgroup + 1))

    def row(self, half: int, period: int) -> Any:
        """Row of the 64-row block that this thread's accumulators of one half belong to."""
        return row_at(self.warp * 16 + (self.lane >> 2) + 8 * half, period)


def _convert(plan: Plan, packed: Any, index: int, acc: Any, low: int, high: int) -> None:
    """Two accumulators to 16 bits each."""
    T.evaluate(T.ptx[f"cvt.rn.{plan.short_dtype}x2.f32"](packed[index], acc[high], acc[low]))


class Epilogue:
    """Writes the chunks of a tile that belong to this CTA."""

    def __init__(self, plan: Plan, variant: Variant, thread: Thread) -> None:
        self.plan, self.variant, self.thread = plan, variant, thread

    def write(self, acc: Any, first_row: Any, first_col: Any) -> None:
        """The tile of this consumer, whose first element of D is given."""
        config = self.plan.config
        for chunk in range(config.chunks):
            if config.split_k == 1:
                self.chunk(acc, chunk, first_row, first_col)
            else:
                with T.If(self.thread.rank == chunk % config.split_k), T.Then():
                    self.chunk(acc, chunk, first_row, first_col)

    def chunk(self, acc: Any, chunk: int, first_row: Any, first_col: Any) -> None:
        """One piece of 64 x epi_n accumulators."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last tile."""


class StagedEpilogue(Epilogue):
    """Round, stage in shared memory, store by TMA, chunk by chunk.

    A chunk is 64 rows x epi_n columns of accumulators; it takes one staging buffer, in boxes of `store_cols` columns.
    Within a box the rows of one tensor map of D stand together.
    """

    def __init__(
        self, plan: Plan, variant: Variant, thread: Thread, ring: PipelineState, staging: Any, maps: dict[int, Any]
    ) -> None:
        super().__init__(plan, variant, thread)
        self.ring, self.staging, self.maps = ring, staging, maps
        self.packed = T.alloc_local((4,), "uint32")
        self.places = tuple(self._places())

    @property
    def row_bytes(self) -> int:
        return self.plan.store_cols * ELEMENT_BYTES

    @property
    def buffer_bytes(self) -> int:
        return WGMMA_ROWS * self.plan.config.epi_n * ELEMENT_BYTES

    @property
    def by_matrix(self) -> bool:
        """Whether stmatrix does: columns of D in registers as they are in memory."""
        return self.plan.b.matrix.period == 1

    def _places(self) -> Iterator[tuple[Any, Any]]:
        """Address in the first buffer of each row that this thread writes, and the swizzle of its 16-byte column.

        The column is xored with the row within each 128 bytes of rows, as the TMA store of a swizzled box expects.
        """
        lane = self.thread.lane
        if self.by_matrix:
            # stmatrix: lane l holds the address of row l % 16, column half l / 16, of its warp's 16 x 16 piece
            yield self._place("st", row_at(self.thread.warp * 16 + (lane & 15), self.plan.a.matrix.period), lane >> 4)
            return
        column, _ = self._run()
        for half in range(2):
            yield self._place(f"st{half}", self.thread.row(half, self.plan.a.matrix.period), column)

    def _place(self, name: str, row_of_block: Any, column: Any) -> tuple[Any, Any]:
        period = self.plan.d.period
        row = row_of_block
        if period > 1:
            row = (row_of_block & (period - 1)) * (WGMMA_ROWS // period) + row_of_block // period
        row = named(f"{name}_row", "int32", row)
        buffers = self.thread.warpgroup * (self.plan.config.epi_stages * self.buffer_bytes)
        first = shared_address(self.staging.ptr_to([0, 0, 0])) + T.cast(buffers + row * self.row_bytes, "uint32")
        swizzle = ((column ^ ((row * self.row_bytes) >> 7)) & (self.row_bytes // 16 - 1)) << 4
        return named(f"{name}_address", "uint32", first), named(f"{name}_xor", "uint32", T.cast(swizzle, "uint32"))

    def chunk(self, acc: Any, chunk: int, first_row: Any, first_col: Any) -> None:
        config, variant, thread = self.plan.config, self.variant, self.thread
        fixed = self.plan.fixed_buffers or variant.fault == "epilogue_restart"
        buffer = chunk // config.split_k % config.epi_stages if fixed else self.ring.stage
        block, col = divmod(chunk * config.epi_n, config.blk_n)
        if variant.fault != "no_store_wait":
            # Stores complete in order: at most epi_stages - 1 still reading means that this buffer's has finished.
            # The thread that committed them is the only one that can wait for them.
            with T.If(thread.number == 0), T.Then():
                T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](config.epi_stages - 1))
        thread.sync()
        variant.pause("epilogue_stage")
        if self.by_matrix:
            self._stage(acc, block * self.plan.accumulators + col // 2, buffer)
        else:
            self._stage_runs(acc, block * self.plan.accumulators + col // 2, buffer)
        if variant.fault != "no_proxy_fence":
            T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
        if variant.fault != "no_stage_barrier":
            thread.sync()
        with T.If(thread.number == 0), T.Then():
            variant.pause("epilogue_store")
            shift = 1 if variant.fault == "wrong_row" and chunk == config.chunks - 1 else 0
            self._store(buffer, first_row + block * WGMMA_ROWS, shift, first_col + col)
        if not fixed:
            self.ring.advance()

    def _offset(self, buffer: Any, box: int) -> Any:
        offset = buffer * self.buffer_bytes + box * WGMMA_ROWS * self.row_bytes
        if self.variant.fault == "illegal_address":
            offset = offset + (1 << 20)
        return T.cast(offset, "uint32")

    def _stage(self, acc: Any, register: int, buffer: Any) -> None:
        """16 columns at a time by stmatrix."""
        (address, swizzle), packed = self.places[0], self.packed
        for j in range(self.plan.config.epi_n // 16):
            for q in range(4):
                low = register + 8 * j + 2 * q
                _convert(self.plan, packed, q, acc, low, low + 1)
            box, piece = divmod(j, self.plan.store_cols // 16)
            target = address + self._offset(buffer, box) + (swizzle ^ T.uint32(piece * 32))
            T.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared::cta.b16"](target, *[packed[q] for q in range(4)]))

    # Columns that came in bands: of the 8 * period columns of a band a thread holds 2 * period that follow one another
    # in D, one of each alignment for its even, then for its odd column. They are 32, 16 or 8 bytes.

    def _run(self) -> tuple[Any, int]:
        """16-byte column of the band where this thread's columns start, and its 16-byte columns in each band."""
        period, t = self.plan.b.matrix.period, self.thread.lane & 3
        return {8: (t * 2, 2), 4: (t, 1), 2: (t >> 1, 1)}[period]

    def _stage_runs(self, acc: Any, register: int, buffer: Any) -> None:
        period, store_cols = self.plan.b.matrix.period, self.plan.store_cols
        words = min(4, period)  # of 32 bits in one store
        store = f"st.shared::cta.v{words}.b32"
        packed = self.packed
        _, pieces = self._run()
        for band in range(self.plan.config.epi_n // (8 * period)):
            box, col = divmod(band * 8 * period, store_cols)
            for half in range(2):
                address, swizzle = self.places[half]
                run = [
                    register + band * 4 * period + 4 * alignment + 2 * half + odd
                    for odd in range(2)
                    for alignment in range(period)
                ]
                for piece in range(pieces):
                    for q in range(words):
                        _convert(self.plan, packed, q, acc, *run[2 * (piece * words + q) :][:2])
                    target = address + self._offset(buffer, box) + (swizzle ^ T.uint32((col // 8 + piece) * 16))
                    if period == 2:
                        target = target + T.cast((self.thread.lane & 1) * 8, "uint32")
                    T.evaluate(T.ptx[store](target, *[packed[q] for q in range(words)]))

    def _store(self, buffer: Any, row: Any, shift: int, col: Any) -> None:
        """One group of TMA stores: every box, and in it the rows of every tensor map."""
        matrix, store_cols = self.plan.d, self.plan.store_cols
        for box in range(self.plan.config.epi_n // store_cols):
            for number in matrix.maps:
                first = box * WGMMA_ROWS + number * (WGMMA_ROWS // matrix.period)
                T.evaluate(
                    T.ptx[_TMA_STORE](
                        T.address_of(self.maps[number]), i32(col + box * store_cols + number * matrix.cols),
                        i32((row // matrix.period if matrix.period > 1 else row) + shift),
                        self.staging.ptr_to([self.thread.warpgroup, buffer, first * store_cols]),
                    )
                )  # fmt: skip
        T.evaluate(T.ptx["cp.async.bulk.commit_group"]())

    def finish(self) -> None:
        """D is complete when the kernel ends."""
        with T.If(self.thread.number == 0), T.Then():
            T.evaluate(T.ptx["cp.async.bulk.wait_group"](0))


class RegisterEpilogue(Epilogue):
    """Store from registers, with the 64-row side of wgmma along N.

    Two accumulators that follow one another are two rows of D. An 8 x 8 transpose among the lanes of a warp
    (movmatrix) gives each thread two columns instead, for one 32-bit store: 8 rows of 16 bytes for each warp.
    """

    def __init__(self, plan: Plan, variant: Variant, thread: Thread, d: Any) -> None:
        super().__init__(plan, variant, thread)
        self.d = d
        self.packed = T.alloc_local((2,), "uint32")
        self.rounded = T.alloc_local((1,), "uint16")

    @property
    def in_pairs(self) -> bool:
        """Whether two columns of D that follow one another are one aligned word."""
        return self.plan.problem.n % 2 == 0 and self.plan.b.matrix.period == 1

    def chunk(self, acc: Any, chunk: int, first_row: Any, first_col: Any) -> None:
        config = self.plan.config
        self.variant.pause("epilogue_store")
        block, narrow = divmod(chunk * config.epi_n, config.blk_n)
        col = first_col + block * WGMMA_ROWS
        if self.variant.fault == "wrong_row" and chunk == config.chunks - 1:
            first_row = first_row + 1
        for j in range(narrow // 8, (narrow + config.epi_n) // 8):
            for half in range(2):
                register = block * self.plan.accumulators + 4 * j + 2 * half
                if self.in_pairs:
                    self._store_pair(acc, register, first_row, 8 * j, col, half)
                else:
                    self._store_elements(acc, register, first_row, 8 * j, col, half)

    def _store_pair(self, acc: Any, register: int, first_row: Any, position: int, col: Any, half: int) -> None:
        lane, packed = self.thread.lane, self.packed
        _convert(self.plan, packed, 0, acc, register, register + 1)
        T.evaluate(T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](packed[1], packed[0]))
        row = first_row + row_at((lane >> 2) + position, self.plan.a.matrix.period)
        self._store("b32", packed[1], row, col + self.thread.warp * 16 + 8 * half + (lane & 3) * 2)

    def _store_elements(self, acc: Any, register: int, first_row: Any, position: int, col: Any, half: int) -> None:
        rounded = self.rounded
        for odd in range(2):
            T.evaluate(T.ptx[f"cvt.rn.{self.plan.short_dtype}.f32"](rounded[0], acc[register + odd]))
            row = first_row + row_at((self.thread.lane & 3) * 2 + position + odd, self.plan.a.matrix.period)
            self._store("b16", rounded[0], row, col + self.thread.row(half, self.plan.b.matrix.period))

    def _store(self, kind: str, value: Any, row: Any, col: Any) -> None:
        problem = self.plan.problem
        inside = T.And(row < problem.m, col < problem.n)
        place = T.cast(row, "int64")
        if self.variant.fault == "illegal_address":
            place = place + T.int64(1 << 40)
        T.evaluate(T.ptx[f"st.global.{kind}"](self.d.ptr_to([place, T.cast(col, "int64")]), value, pred=inside))
