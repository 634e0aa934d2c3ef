"""How the Hopper template loads rows that TMA cannot describe: any row stride, any start, 2-byte alignment.

A tensor map needs a start and a row stride that are multiples of 16 bytes. Here the four warps of the producer
warpgroup fetch whole aligned pieces of 16 bytes by cp.async instead, each row from the piece in which it starts, and
move the values to their place afterwards. Copies land in the stage itself: piece j of a row where the swizzle wants the
row's columns 8 j to 8 j + 7, and one piece more, the tail, beside the stage. A row that starts s elements into its
first piece is then off by s. So every lane reads the piece that is there and the one behind it, shifts the two by s,
and writes the result over the first. Nothing but the tails takes memory beside the ring, and `pipe_depth` - 2 stages
are under way while one is moved.

What a warp copies it also moves, so lanes wait for lanes of their own warp only. Sixteen rows are a step: warp w takes
rows 4 w to 4 w + 3, eight lanes each. s is the same for all rows of a lane: they are 16 apart, and 16 rows are a
multiple of 16 bytes whatever the stride.

K ends within a piece: cp.async fills what lies behind with zeros. Rows past the end of the matrix are not copied; they
only feed elements of D that are not stored.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from kernels.config import TAIL_BYTES
from kernels.gemm_sm90_emit import Variant, i32, kept, shared_address
from kernels.problem import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.gemm_sm90_epilogue import Thread
    from kernels.gemm_sm90_plan import Operand, Plan

_COPY = "cp.async.cg.shared.global"  # .cg: past L1, which a deep ring leaves too small to keep anything
_PIECE_BYTES = 16
_PIECE = _PIECE_BYTES // ELEMENT_BYTES  # elements
_ROW_BYTES = 128  # of a slab: eight pieces, one for each lane of a row
_STEP_ROWS = 16
_STEP_BYTES = _STEP_ROWS * _ROW_BYTES
_MOVED_AT_ONCE = 4  # pieces that a lane holds: 12 registers each


class Walking:
    """An address that goes on by equal steps. As multiples of the step, nvcc would keep each in its own registers."""

    def __init__(self, dtype: str, start: Any, step: Any) -> None:
        self._register, self._step = T.alloc_local((1,), dtype), step
        T.buffer_store(self._register, start, [0])

    @property
    def now(self) -> Any:
        return self._register[0]

    def go_on(self) -> None:
        """To the next."""
        T.buffer_store(self._register, self._register[0] + self._step, [0])


class RowCopies:
    """One operand on its way to shared memory, as one thread of the producer warpgroup sees it.

    Call only while a kernel is traced. `begin` first, outside of all loops.
    """

    def __init__(self, plan: Plan, variant: Variant, operand: Operand, thread: Thread) -> None:
        self.plan, self.variant, self.operand, self.thread = plan, variant, operand, thread

    @property
    def _steps(self) -> range:
        """Steps of 16 rows, as far as the matrix has rows."""
        return range(-(-self.operand.copied_rows // _STEP_ROWS))

    def begin(self, matrix: Any, stride: Any, rows: Any, smem: Any, tails: Any, first_tail: int) -> None:
        """Emit what stays the same for all stages.

        matrix: the operand in global memory
        stride: elements from one row to the next, an int32
        rows: of the matrix, an int or an int32
        smem: ring of stages
        tails: ring of tails, of both operands
        first_tail: byte within the tails of a stage where those of this operand start
        """
        lane = self.thread.lane
        self.rows = rows
        self.stride = kept("int64", T.cast(stride, "int64"))
        self.row = kept("int32", self.thread.warp * 4 + (lane >> 3))
        self.piece = kept("int32", lane & 7)
        self.base = kept("uint64", T.reinterpret("uint64", matrix.ptr_to([0, 0])))
        start = T.cast(T.shift_right(self.base, T.uint64(1)) & T.uint64(_PIECE - 1), "int32")
        start = start + (self.row & (_PIECE - 1)) * (stride & (_PIECE - 1))
        self.shift = kept("int32", start & (_PIECE - 1))
        self.step = kept("int64", self.stride * T.int64(_STEP_ROWS * ELEMENT_BYTES))
        self._begin_places(smem, tails, first_tail)

    def _begin_places(self, smem: Any, tails: Any, first_tail: int) -> None:
        """Addresses in stage 0: of this lane's piece in each slab, and of the piece behind it."""
        ring = kept("uint32", shared_address(smem.ptr_to([0, 0])))
        in_tails = T.cast(first_tail + self.row * TAIL_BYTES, "uint32")
        self.tail = kept("uint32", shared_address(tails.ptr_to([0])) + in_tails)
        in_row = self.row * _ROW_BYTES
        self.own = kept("uint32", ring + T.cast(in_row + self._swizzled(self.piece), "uint32"))
        following = self._swizzled((self.piece + 1) & 7)
        within = kept("uint32", ring + T.cast(in_row + following, "uint32"))
        last = self.piece == 7
        # Behind the last piece of a row in one slab comes the first one in the next slab, behind the last of all the
        # tail, which lies elsewhere: with other distances from one stage, and from one step, to the next.
        self.next = [
            kept("uint32", within + T.Select(last, T.uint32(slab + 1), T.uint32(slab)) * T.uint32(self._slab_bytes))
            for slab in range(self.plan.slabs - 1)
        ]
        end = T.uint32((self.plan.slabs - 1) * self._slab_bytes)
        self.end = kept("uint32", T.Select(last, self.tail, within + end))
        self.end_stage = kept("uint32", T.Select(last, T.uint32(self._tail_stage), T.uint32(self._stage_bytes)))
        self.end_step = kept("uint32", T.Select(last, T.uint32(_STEP_ROWS * TAIL_BYTES), T.uint32(_STEP_BYTES)))

    def _swizzled(self, piece: Any) -> Any:
        """Byte of a piece within a row: the 128-byte swizzle exchanges pieces by the row's number modulo 8."""
        return (piece ^ (self.row & 7)) << 4

    @property
    def _slab_bytes(self) -> int:
        return self.operand.tile_rows * _ROW_BYTES

    @property
    def _stage_bytes(self) -> int:
        return self.plan.slabs * self._slab_bytes

    @property
    def _tail_stage(self) -> int:
        return self.plan.tail_stage_bytes

    @contextmanager
    def _warps_of(self, step: int) -> Iterator[None]:
        """For the warps whose rows of a step lie in the tile: its rows are a multiple of 8, not of 16."""
        if self._is_whole(step):
            yield
        else:
            with T.If(self.thread.warp < 2), T.Then():
                yield

    def _is_whole(self, step: int) -> bool:
        return self.operand.tile_rows - step * _STEP_ROWS >= _STEP_ROWS

    # ------------------------------------------------------------------ copies

    def copy(self, stage: Any, first_row: Any, col: Any) -> None:
        """Start the copies of one stage.

        first_row: of the tile, in the matrix
        col: first column
        """
        row = kept("int32", i32(first_row + self.row))
        first = kept("int32", i32(col) - self.shift + self.piece * _PIECE)
        place = T.cast(row, "int64") * self.stride + T.cast(first, "int64")
        start = kept("int64", T.reinterpret("int64", self.base) + place * T.int64(ELEMENT_BYTES))
        target = kept("uint32", self.own + T.cast(stage * self._stage_bytes, "uint32"))
        sizes = [kept("uint32", self._size(first + s * 64)) for s in range(self.plan.slabs)]
        tail_size = kept("uint32", self._size(first + (self.plan.slabs - 1) * 64 + _PIECE))
        tail = kept("uint32", self.tail + T.cast(stage * self._tail_stage, "uint32"))
        source = Walking("int64", start, self.step)
        for step in self._steps:
            place = target + T.uint32(step * _STEP_BYTES)
            with self._warps_of(step):
                self._copy_step(place, self._inside(row, step), source.now, sizes)
            source.go_on()
        with T.If((self.thread.lane & 7) == 7), T.Then():
            source = Walking("int64", start + T.int64((self.plan.slabs - 1) * _ROW_BYTES + _PIECE_BYTES), self.step)
            for step in self._steps:
                place = tail + T.uint32(step * _STEP_ROWS * TAIL_BYTES)
                with self._warps_of(step):
                    self._one(place, self._inside(row, step), source.now, tail_size)
                source.go_on()

    def _inside(self, row: Any, step: int) -> Any:
        return row + step * _STEP_ROWS < self.rows

    def _size(self, col: Any) -> Any:
        """Bytes of a piece that starts at a column and lie before the end of K."""
        if self.variant.fault == "whole_pieces":
            return T.uint32(_PIECE_BYTES)
        left = T.int32(self.plan.problem.k) - col
        return T.cast(T.max(T.min(left, T.int32(_PIECE)), T.int32(0)) * ELEMENT_BYTES, "uint32")

    def _copy_step(self, place: Any, inside: Any, source: Any, sizes: list[Any]) -> None:
        for slab, size in enumerate(sizes):
            self._one(place + T.uint32(slab * self._slab_bytes), inside, source + T.int64(slab * _ROW_BYTES), size)

    def _one(self, place: Any, inside: Any, source: Any, size: Any) -> None:
        T.evaluate(T.ptx[_COPY](place, T.reinterpret("uint64", source), _PIECE_BYTES, size, pred=inside))

    # ------------------------------------------------------------------ moves

    def move(self, stage: Any) -> None:
        """Shift what has been copied into a stage to its place. All lanes of a warp."""
        target = kept("uint32", self.own + T.cast(stage * self._stage_bytes, "uint32"))
        in_ring = T.cast(stage * self._stage_bytes, "uint32")
        following = [Walking("uint32", first + in_ring, T.uint32(_STEP_BYTES)) for first in self.next]
        end = self.end + T.cast(stage, "uint32") * self.end_stage
        following.append(Walking("uint32", end, self.end_step))
        at_once = max(1, _MOVED_AT_ONCE // self.plan.slabs)
        for first in range(0, len(self._steps), at_once):
            steps = list(self._steps)[first : first + at_once]
            whole = [step for step in steps if self._is_whole(step)]
            for batch in (whole, steps[len(whole) :]):
                if batch:
                    with self._warps_of(batch[0]):
                        self._move(batch, target, following)

    def _move(self, steps: list[int], target: Any, following: list[Walking]) -> None:
        """Read both pieces of each row and slab, then let the whole warp have read, then write."""
        held = T.alloc_local((len(steps) * self.plan.slabs * 8,), "uint32")
        moves = [(step, slab) for step in steps for slab in range(self.plan.slabs)]
        for number, (step, slab) in enumerate(moves):
            own = target + T.uint32(step * _STEP_BYTES + slab * self._slab_bytes)
            for half, address in enumerate((own, following[slab].now)):
                words = [held[number * 8 + half * 4 + word] for word in range(4)]
                T.evaluate(T.ptx["ld.shared.v4.b32"](*words, address))
            following[slab].go_on()
        if self.variant.fault != "no_read_barrier":
            T.evaluate(T.cuda.warp_sync())
        for number, (step, slab) in enumerate(moves):
            own = target + T.uint32(step * _STEP_BYTES + slab * self._slab_bytes)
            T.evaluate(T.ptx["st.shared.v4.b32"](own, *self._shifted(held, number * 8)))

    def _shifted(self, held: Any, first: int) -> list[Any]:
        """Four words, `shift` elements into eight."""
        words = [held[first + word] for word in range(8)]
        for distance in (4, 2):
            taken = T.bitwise_and(self.shift, T.int32(distance)) != 0
            ahead = distance // 2
            words = [kept("uint32", T.Select(taken, words[i + ahead], words[i])) for i in range(len(words) - ahead)]
        bits = T.cast(T.bitwise_and(self.shift, T.int32(1)) * 16, "uint32")
        result = T.alloc_local((4,), "uint32")
        for i in range(4):
            T.evaluate(T.ptx["shf.r.wrap.b32"](result[i], words[i], words[i + 1], bits))
        return [result[i] for i in range(4)]


class CopyProducer:
    """The producer warpgroup: copies both operands, moves them, hands stages over."""

    def __init__(self, plan: Plan, variant: Variant, thread: Thread, filled: Any) -> None:
        """filled: barriers that say that a stage is filled."""
        self.plan, self.variant, self.thread, self.filled = plan, variant, thread, filled
        self.a = RowCopies(plan, variant, plan.a, thread)
        self.b = RowCopies(plan, variant, plan.b, thread)

    def begin(self, a: tuple[Any, ...], b: tuple[Any, ...], tails: Any) -> None:
        """Emit what stays the same. For each operand: matrix, elements between rows, rows, ring of stages."""
        for copies, (matrix, stride, rows, smem), first in (
            (self.a, a, TAIL_BYTES * self.plan.config.cta_cols),
            (self.b, b, 0),
        ):
            copies.begin(matrix, stride, rows, smem, tails, first)

    def copy(self, stage: Any, row: Any, col: Any, k: Any) -> None:
        """Begin the copies of one stage, as one group. `row`, `col`: where the tile of D begins."""
        self.a.copy(stage, row, k)
        self.b.copy(stage, col, k)
        T.evaluate(T.ptx["cp.async.commit_group"]())

    def wait(self, under_way: int) -> None:
        """Until all but the newest groups of this warp have arrived, `under_way` of them."""
        if self.variant.fault != "no_copy_wait":
            T.evaluate(T.ptx["cp.async.wait_group"](under_way))
        # each lane has waited for its own copies
        if self.variant.fault != "no_copy_barrier":
            T.evaluate(T.cuda.warp_sync())

    def hand_over(self, stage: Any) -> None:
        """Move the values of a stage to their places and tell the consumers. wgmma reads through the async proxy."""
        self.variant.pause("producer_load")
        if self.variant.fault == "early_fill":
            self._tell(stage)
        self.a.move(stage)
        self.b.move(stage)
        if self.variant.fault != "no_fill_fence":
            T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
        T.evaluate(T.cuda.warp_sync())
        if self.variant.fault != "early_fill":
            self._tell(stage)

    def _tell(self, stage: Any) -> None:
        with T.If(self.thread.lane == 0), T.Then():
            self.filled.arrive(stage)
