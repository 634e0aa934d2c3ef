"""Stream-K in the Hopper template: clusters walk pieces of tiles, and parts of a tile meet in a workspace.

`StreamKTiles` is the walk (`kernels.stream_k` has its numbers, and says who computes what). `PartialSums` is what a
consumer does when its accumulators hold only a part of its tile. Its 128 threads, in this order:

    write     each thread writes its accumulators to the part's place                           st.global
    barrier   of the warpgroup: all have written                                                bar.sync
    count     thread 0 adds one to the tile's counter, and releases and acquires with it        atom.acq_rel.gpu
    vote      all learn whether thread 0 found the counter at one below the number of parts     bar.red
    add       if so, all other parts have arrived: it reads them, in the order of K             ld.relaxed.gpu
    reset     thread 0 sets the counter back to zero for the next launch                        st.global

and only then D is written, by the epilogue that whole tiles have too. Everyone else goes on to its next piece.

Why the sums are there: what a thread writes before the barrier is ordered before thread 0's release (causality order
goes through barriers), the release before the acquire of whoever counts later, and that before the reads after its
vote. Parts are read past L1.

Why no launch can hang: nobody waits for another cluster. Whoever comes last finds all others' parts written; whoever
does not come last leaves. This holds whichever clusters run at a time, in whatever order they are started, and beside
other launches, so the launch needs no guarantee that its CTAs are resident together.

Why results repeat bit for bit: the parts of a tile are cut at the same blocks in every launch, and are added in the
order of K whoever adds them. Where no tile has more than two parts, the consumer that finds the other part there
already (`peek`) keeps its own in registers and adds the two: float addition commutes. With more, it reads back its own
among the others.

Why launches do not disturb each other: the workspace belongs to one stream, or to one captured graph's part on one
stream (launcher.cc), whose launches follow one another; a part is written at most once in a launch, by the one
cluster whose place it is; counters are zero at the end of each launch, since the last to arrive at a tile resets it.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from kernels.gemm_sm90_emit import Variant, kept
from kernels.problem import FLOAT_BYTES
from kernels.stream_k import COUNTER_BYTES
from kernels.tile_scheduler import SerpentineScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.gemm_sm90_epilogue import Thread
    from kernels.gemm_sm90_plan import Plan
    from kernels.stream_k import StreamK

_LANES = 4  # accumulators in one store or load of a thread
_VECTOR_BYTES = 128 * _LANES * FLOAT_BYTES  # of a whole warpgroup
# Vectors that a thread has under way when it adds a part. A part comes from L2 at some 700 clocks a round trip: 128
# accumulators are 32 vectors, so 4 round trips. With more accumulators there are no registers for so many: one
# consumer of 192 x 128 spilled 56 B with 4.
_VECTORS_AT_ONCE = 8
_FEW_VECTORS_AT_ONCE = 2
_MANY_ACCUMULATORS = 144


@T.meta_class
class StreamKTiles(SerpentineScheduler):
    """Pieces as a role of the kernel goes through them: first those of the cluster's span, then its whole tiles.

    Past the last whole tile it goes on to tiles that do not exist, as the static scheduler does.
    """

    def __init__(self, split: StreamK, *name: str, **order: Any) -> None:
        """name, order: of SerpentineScheduler."""
        super().__init__(*name, **order)
        self._split = split
        self._next_whole = T.local_scalar("int32")
        self._unit = T.local_scalar("int32")
        self._end = T.local_scalar("int32")
        self.k_first = T.local_scalar("int32")
        self.k_count = T.local_scalar("int32")

    @T.inline
    def init(self, cluster):
        """The first piece. Every cluster has a span."""
        self._unit = self._first_unit(cluster)
        self._end = self._first_unit(cluster + 1)
        self._next_whole = self._split.shared_tiles + cluster
        self._take_piece()

    @T.inline
    def next_tile(self):
        """The next piece."""
        self._unit = self._unit + self.k_count
        if self._unit < self._end:
            self._take_piece()
        else:
            self._unit = self._end
            self.k_first = 0
            self.k_count = self._split.k_blocks
            SerpentineScheduler.init(self, self._next_whole)
            self._next_whole = self._next_whole + self._split.clusters

    @T.inline
    def _take_piece(self):
        SerpentineScheduler.init(self, self._unit // self._split.k_blocks)
        self.k_first = self._unit % self._split.k_blocks
        self.k_count = T.min(self._split.k_blocks - self.k_first, self._end - self._unit)

    def _first_unit(self, cluster: Any) -> Any:
        least, extra = self._split.share
        return cluster * least + (T.min(cluster, extra) if extra else 0)


class PartialSums:
    """What one consumer does about tiles that others work on as well."""

    def __init__(self, plan: Plan, variant: Variant, thread: Thread, tiles: StreamKTiles, cluster: Any) -> None:
        """cluster: number of the cluster, an int32."""
        self.plan, self.variant, self.thread, self.tiles, self.cluster = plan, variant, thread, tiles, cluster
        self.split = plan.workspace.split
        crowded = plan.wgmmas * plan.accumulators > _MANY_ACCUMULATORS
        self.at_once = _FEW_VECTORS_AT_ONCE if crowded else _VECTORS_AT_ONCE

    def begin(self, workspace: Any) -> None:
        """Emits what a consumer keeps between tiles."""
        self.base = kept("uint64", T.reinterpret("uint64", workspace.ptr_to([0])))
        # 1 where this consumer has the whole sum of its tile and writes D
        self.finishes = T.alloc_local((1,), "uint32")
        self.arrived = T.alloc_local((1,), "uint32")
        self.received = T.alloc_local((_LANES * self.at_once,), "float32")

    @contextmanager
    def finished(self) -> Iterator[None]:
        """For the consumers that have the sum over all of K."""
        with ExitStack() as stack:
            stack.enter_context(T.If(self.finishes[0] != T.uint32(0)))
            stack.enter_context(T.Then())
            yield

    def settle(self, acc: Any) -> None:
        """After this, `finished` holds where the accumulators are the sum over all of K."""
        self._set(self.finishes, 1)
        with T.If(self.tiles.k_count != self.split.k_blocks), T.Then():
            if self.split.at_most_two_parts:
                self._settle_two(acc)
            else:
                self._settle_many(acc)

    def _settle_two(self, acc: Any) -> None:
        self._peek()
        with T.If(self.finishes[0] == T.uint32(0)), T.Then():
            self._write(acc)
            self._count()
        with self.finished():
            self.variant.pause("exchange_sum")
            begins = self.tiles.k_first == 0
            other = T.Select(begins, self.cluster + 1, self.cluster - 1)
            self._add(acc, self._part(other, T.Select(begins, 0, 1)), first=False)
            self._reset()

    def _settle_many(self, acc: Any) -> None:
        self._write(acc)
        self._count()
        with self.finished():
            self.variant.pause("exchange_sum")
            start = kept("int32", self.tiles.linear_idx * self.split.k_blocks)
            first = kept("int32", self._owner(start))
            others = kept("int32", self._owner(start + (self.split.k_blocks - 1)) - first)
            self._add(acc, self._part(first, 1), first=True)
            with T.serial(others, unroll=False) as number:
                self._add(acc, self._part(first + 1 + number, 0), first=False)
            self._reset()

    # ------------------------------------------------------------------ the counter

    def _peek(self) -> None:
        """Whether the other part is there already: then this one need not be written."""
        self._set(self.arrived, 0)
        with T.If(self.thread.number == 0), T.Then():
            kind = "relaxed" if self.variant.fault == "no_part_fence" else "acquire"
            T.evaluate(T.ptx[f"ld.{kind}.gpu.global.u32"](self.arrived[0], self._counter()))
        self._vote()

    def _count(self) -> None:
        """This part is there; whether all others are."""
        self.variant.pause("exchange_release")
        if self.variant.fault != "no_part_barrier":
            self.thread.sync()
        self._set(self.arrived, 0)
        with T.If(self.thread.number == 0), T.Then():
            kind = "relaxed" if self.variant.fault == "no_part_fence" else "acq_rel"
            count = T.ptx[f"atom.{kind}.gpu.global.add.u32"]
            T.evaluate(count(self.arrived[0], self._counter(), T.uint32(1)))
        self._vote()

    def _vote(self) -> None:
        """All threads learn what thread 0 has found. The others have found 0, and a tile has two parts or more."""
        if self.variant.fault == "no_part_count":  # whoever begins the tile takes it as if the others were there
            found = T.And(self.thread.number == 0, self.tiles.k_first == 0)
        else:
            found = self.arrived[0] == T.cast(self._parts() - 1, "uint32")
        barrier = T.cast(self.thread.warpgroup + 1, "uint32")
        ayes = T.ptx.pred(T.Select(found, T.uint32(1), T.uint32(0)))
        T.evaluate(T.ptx["bar.red.popc.u32"](self.finishes[0], barrier, T.uint32(128), ayes))

    def _reset(self) -> None:
        if self.variant.fault == "no_count_reset":
            return
        with T.If(self.thread.number == 0), T.Then():
            T.evaluate(T.ptx["st.global.u32"](self._counter(), T.uint32(0)))

    def _parts(self) -> Any:
        """Parts of the tile at hand."""
        if self.split.at_most_two_parts:
            return 2
        start = self.tiles.linear_idx * self.split.k_blocks
        return self._owner(start + (self.split.k_blocks - 1)) - self._owner(start) + 1

    def _owner(self, unit: Any) -> Any:
        """The cluster whose span holds a unit."""
        least, extra = self.split.share
        longer = extra * (least + 1)
        if extra == 0:
            return unit // least
        return T.Select(unit < longer, unit // (least + 1), extra + (unit - longer) // least)

    # ------------------------------------------------------------------ places

    def _lane(self, place: Any) -> Any:
        """Index of this consumer's among the counters of a tile, or among the parts of a slot."""
        workspace = self.plan.workspace
        rank = self.thread.rank if workspace.ctas > 1 else 0
        return place * workspace.lanes + rank * workspace.consumers + self.thread.warpgroup

    def _counter(self) -> Any:
        """Address of the counter of the tile at hand."""
        offset = T.cast(self._lane(self.tiles.linear_idx), "uint64") * T.uint64(COUNTER_BYTES)
        return self.base + offset

    def _part(self, cluster: Any, begins_tile: Any) -> Any:
        """Address of this thread's first accumulators of a cluster's part of a tile."""
        workspace = self.plan.workspace
        place = T.cast(self._lane(cluster * 2 + begins_tile), "uint64") * T.uint64(workspace.part_bytes)
        within = T.cast(self.thread.number * (_LANES * FLOAT_BYTES), "uint64")
        return kept("uint64", self.base + T.uint64(workspace.counters_bytes) + place + within)

    # ------------------------------------------------------------------ parts

    @property
    def _vectors(self) -> list[tuple[int, int]]:
        """First register and byte offset of each vector of accumulators."""
        count = self.plan.wgmmas * self.plan.accumulators
        return [(first, first // _LANES * _VECTOR_BYTES) for first in range(0, count, _LANES)]

    def _write(self, acc: Any) -> None:
        self.variant.pause("exchange_send")
        target = self._part(self.cluster, T.Select(self.tiles.k_first == 0, 1, 0))
        for first, offset in self._vectors:
            values = [acc[first + i] for i in range(_LANES)]
            T.evaluate(T.ptx["st.global.v4.f32"](target + T.uint64(offset), *values))

    def _add(self, acc: Any, source: Any, *, first: bool) -> None:
        """Read a part; the first one in the order of K takes the place of the accumulators."""
        vectors = self._vectors
        for start in range(0, len(vectors), self.at_once):
            batch = vectors[start : start + self.at_once]
            if start:  # else ptxas asks for more at once than there are registers for, and spills the tile's place
                T.evaluate(T.cuda.warp_sync())
            for number, (_register, offset) in enumerate(batch):
                received = [self.received[number * _LANES + i] for i in range(_LANES)]
                T.evaluate(T.ptx["ld.relaxed.gpu.global.v4.f32"](*received, source + T.uint64(offset)))
            for number, (register, _offset) in enumerate(batch):
                for i in range(_LANES):
                    value = self.received[number * _LANES + i]
                    T.buffer_store(acc, value if first else acc[register + i] + value, [register + i])

    def _set(self, variable: Any, value: int) -> None:
        T.buffer_store(variable, T.uint32(value), [0])
