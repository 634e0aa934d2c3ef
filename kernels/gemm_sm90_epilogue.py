"""How a consumer of the Hopper template writes its accumulators to D.

`StagedEpilogue`: registers -> swizzled staging buffer -> TMA store, which drains under the next tile's mainloop.
`MaskedEpilogue`: registers -> swizzled staging buffer -> D, element by element, where rows of D are no whole 16 bytes.
`RegisterEpilogue`: registers -> D, for swap_ab: D is small there, and staging it would only lengthen the kernel's end.

A wgmma leaves float32 in registers: thread g * 4 + t of warp w has, of each 8 columns, columns 2 t and 2 t + 1 of rows
16 w + g and 16 w + g + 8.

A TMA store writes whole 16 bytes, also past the end of a row: 1 x 1001 spilt 7 elements behind D (H200). So D needs
rows of whole 16 bytes there; the two others store any N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from kernels.gemm_sm90_emit import Variant, i32, kept, named, shared_address
from kernels.problem import ELEMENT_BYTES
from kernels.resources import WGMMA_ROWS

if TYPE_CHECKING:
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


class Output:
    """D for stores by threads: 64-bit addresses, for it may have more than 2^31 elements, and any row stride."""

    def __init__(self, plan: Plan, variant: Variant, matrix: Any, stride: Any, rows: Any) -> None:
        """stride: elements from one row to the next, an int32; rows: an int or an int32."""
        self.cols, self.rows, self.variant, self.stride = plan.problem.n, rows, variant, stride
        self.base = kept("uint64", T.reinterpret("uint64", matrix.ptr_to([0, 0])))

    def store(self, kind: str, value: Any, row: Any, col: Any) -> None:
        """Write one or two elements, if the first lies in D: two only where N is even."""
        inside = T.And(row < self.rows, col < self.cols)
        place = T.cast(row, "int64") * T.cast(self.stride, "int64") + T.cast(col, "int64")
        if self.variant.fault == "illegal_address":
            place = place + T.int64(1 << 40)
        address = T.reinterpret("int64", self.base) + place * T.int64(ELEMENT_BYTES)
        T.evaluate(T.ptx[f"st.global.{kind}"](T.reinterpret("uint64", address), value, pred=inside))


class StagedEpilogue(Epilogue):
    """Round, stage in shared memory, store by TMA, chunk by chunk.

    A chunk is 64 rows x epi_n columns of accumulators; it takes one staging buffer, in boxes of `store_cols` columns.
    """

    def __init__(
        self, plan: Plan, variant: Variant, thread: Thread, ring: PipelineState, staging: Any, d_map: Any
    ) -> None:
        super().__init__(plan, variant, thread)
        self.ring, self.staging, self.d_map = ring, staging, d_map
        self.start = shared_address(staging.ptr_to([0, 0, 0]))
        self.packed = T.alloc_local((4,), "uint32")
        # stmatrix: lane l of a warp holds the address of row l % 16, column half l / 16, of its 16 x 16 piece; the
        # store box is swizzled, so the 16-byte column is xored with the row within each 128 bytes of rows
        row = named("st_row", "int32", thread.warp * 16 + (thread.lane & 15))
        first = thread.warpgroup * (plan.config.epi_stages * self.buffer_bytes) + row * self.row_bytes
        self.address = named("st_address", "uint32", self.start + T.cast(first, "uint32"))
        column = ((thread.lane >> 4) ^ ((row * self.row_bytes) >> 7)) & (self.row_bytes // 16 - 1)
        self.swizzle = named("st_xor", "uint32", T.cast(column << 4, "uint32"))

    @property
    def row_bytes(self) -> int:
        return self.plan.store_cols * ELEMENT_BYTES

    @property
    def buffer_bytes(self) -> int:
        return WGMMA_ROWS * self.plan.config.epi_n * ELEMENT_BYTES

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
        self._stage(acc, block * self.plan.accumulators + col // 2, buffer)
        if variant.fault != "no_proxy_fence":
            T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
        if variant.fault != "no_stage_barrier":
            thread.sync()
        with T.If(thread.number == 0), T.Then():
            variant.pause("epilogue_store")
            shift = 1 if variant.fault == "wrong_row" and chunk == config.chunks - 1 else 0
            self._store(buffer, first_row + block * WGMMA_ROWS + shift, first_col + col)
        if not fixed:
            self.ring.advance()

    def _offset(self, buffer: Any, box: int) -> Any:
        offset = buffer * self.buffer_bytes + box * WGMMA_ROWS * self.row_bytes
        if self.variant.fault == "illegal_address":
            offset = offset + (1 << 20)
        return T.cast(offset, "uint32")

    def _stage(self, acc: Any, register: int, buffer: Any) -> None:
        """16 columns at a time by stmatrix."""
        for j in range(self.plan.config.epi_n // 16):
            for q in range(4):
                low = register + 8 * j + 2 * q
                _convert(self.plan, self.packed, q, acc, low, low + 1)
            box, piece = divmod(j, self.plan.store_cols // 16)
            target = self.address + self._offset(buffer, box) + (self.swizzle ^ T.uint32(piece * 32))
            values = [self.packed[q] for q in range(4)]
            T.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared::cta.b16"](target, *values))

    def _store(self, buffer: Any, row: Any, col: Any) -> None:
        """One group of TMA stores."""
        store_cols = self.plan.store_cols
        for box in range(self.plan.config.epi_n // store_cols):
            T.evaluate(
                T.ptx[_TMA_STORE](
                    T.address_of(self.d_map), i32(col + box * store_cols), i32(row),
                    self.staging.ptr_to([self.thread.warpgroup, buffer, box * WGMMA_ROWS * store_cols]),
                )
            )  # fmt: skip
        T.evaluate(T.ptx["cp.async.bulk.commit_group"]())

    def finish(self) -> None:
        """D is complete when the kernel ends."""
        with T.If(self.thread.number == 0), T.Then():
            T.evaluate(T.ptx["cp.async.bulk.wait_group"](0))


class MaskedEpilogue(StagedEpilogue):
    """Round, stage in shared memory, store by threads, chunk by chunk.

    What a warp stages it also stores, 16 rows of a chunk, so it only waits for its own lanes. Lanes take words of a row
    one after the other, where N is even; where it is odd every other row of D starts between words, and they take
    elements.
    """

    def __init__(
        self, plan: Plan, variant: Variant, thread: Thread, ring: PipelineState, staging: Any, output: Output
    ) -> None:
        super().__init__(plan, variant, thread, ring, staging, None)
        self.output = output
        self.loaded = T.alloc_local((1,), "uint32" if self.unit == 2 else "uint16")

    @property
    def unit(self) -> int:
        """Elements of one store."""
        return 2 if self.plan.problem.n % 2 == 0 else 1

    def chunk(self, acc: Any, chunk: int, first_row: Any, first_col: Any) -> None:
        config, variant = self.plan.config, self.variant
        block, col = divmod(chunk * config.epi_n, config.blk_n)
        if variant.fault != "no_store_wait":
            T.evaluate(T.cuda.warp_sync())  # all lanes have read what they staged before
        variant.pause("epilogue_stage")
        self._stage(acc, block * self.plan.accumulators + col // 2, 0)
        if variant.fault != "no_stage_barrier":
            T.evaluate(T.cuda.warp_sync())
        variant.pause("epilogue_store")
        shift = 1 if variant.fault == "wrong_row" and chunk == config.chunks - 1 else 0
        for box in range(config.epi_n // self.plan.store_cols):
            self._store_box(box, first_row + block * WGMMA_ROWS + shift, first_col + col + box * self.plan.store_cols)

    def _store_box(self, box: int, first_row: Any, first_col: Any) -> None:
        """The 16 rows of one box that this warp has staged."""
        units = self.plan.store_cols // self.unit
        lanes = min(units, 32)  # of one row
        position = self.thread.lane % lanes
        for first in range(0, 16, 32 // lanes):
            row = self.thread.warp * 16 + first + self.thread.lane // lanes
            for part in range(units // lanes):
                col = (part * lanes + position) * self.unit
                T.evaluate(T.ptx[f"ld.shared.b{16 * self.unit}"](self.loaded[0], self._place(box, row, col)))
                self.output.store(f"b{16 * self.unit}", self.loaded[0], first_row + row, first_col + col)

    def _place(self, box: int, row: Any, col: Any) -> Any:
        """Address of an element in the swizzled box."""
        piece = ((col * ELEMENT_BYTES) >> 4) ^ (((row * self.row_bytes) >> 7) & (self.row_bytes // 16 - 1))
        within = row * self.row_bytes + (piece << 4) + ((col * ELEMENT_BYTES) & 15)
        buffer = self.thread.warpgroup * (self.plan.config.epi_stages * self.buffer_bytes)
        return self.start + T.cast(buffer + box * WGMMA_ROWS * self.row_bytes + within, "uint32")

    def finish(self) -> None:
        """Stores by threads are complete when the kernel ends."""


class RegisterEpilogue(Epilogue):
    """Store from registers, with the 64-row side of wgmma along N.

    Two accumulators that follow one another are two rows of D. An 8 x 8 transpose among the lanes of a warp
    (movmatrix) gives each thread two columns instead, for one 32-bit store: 8 rows of 16 bytes for each warp.
    """

    def __init__(self, plan: Plan, variant: Variant, thread: Thread, output: Output) -> None:
        super().__init__(plan, variant, thread)
        self.output = output
        self.packed = T.alloc_local((2,), "uint32")
        self.rounded = T.alloc_local((1,), "uint16")

    def chunk(self, acc: Any, chunk: int, first_row: Any, first_col: Any) -> None:
        config = self.plan.config
        self.variant.pause("epilogue_store")
        block, narrow = divmod(chunk * config.epi_n, config.blk_n)
        if self.variant.fault == "wrong_row" and chunk == config.chunks - 1:
            first_row = first_row + 1
        for position in range(narrow, narrow + config.epi_n, 8):
            for half in range(2):
                register = block * self.plan.accumulators + position // 2 + 2 * half
                row, col = first_row + position, first_col + block * WGMMA_ROWS + self.thread.warp * 16 + 8 * half
                if self.plan.problem.n % 2 == 0:
                    self._store_pair(acc, register, row, col)
                else:
                    self._store_elements(acc, register, row, col)

    def _store_pair(self, acc: Any, register: int, row: Any, col: Any) -> None:
        """An 8 x 8 block in aligned words of two columns."""
        lane = self.thread.lane
        _convert(self.plan, self.packed, 0, acc, register, register + 1)
        T.evaluate(T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](self.packed[1], self.packed[0]))
        self.output.store("b32", self.packed[1], row + (lane >> 2), col + (lane & 3) * 2)

    def _store_elements(self, acc: Any, register: int, row: Any, col: Any) -> None:
        """An 8 x 8 block element by element: with an odd N every other row starts between words."""
        lane = self.thread.lane
        for odd in range(2):
            T.evaluate(T.ptx[f"cvt.rn.{self.plan.short_dtype}.f32"](self.rounded[0], acc[register + odd]))
            self.output.store("b16", self.rounded[0], row + (lane & 3) * 2 + odd, col + (lane >> 2))
