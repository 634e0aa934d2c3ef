"""How the parts of K of one tile meet: float32 sums through the shared memory of a cluster.

The `split_k` CTAs of a cluster have each multiplied a part of K of the same tile. Every chunk of the tile (64 x epi_n
accumulators of one consumer) has one owner in the cluster. The others write their accumulators of it straight into
the owner's shared memory; the owner adds them to its own in the order of their ranks, rounds, and stores. So every sum
is made in one fixed order, nothing lies in global memory, and CTAs wait only for CTAs of their own cluster, which run
at the same time by definition: launches may overlap and repeat as they like.

Barriers, one pair for each consumer, in every CTA
    parts2sum   all parts of the owned chunks are here      1 arrival (owner) and their bytes
    sum2parts   every owner has read what this CTA sent     1 arrival of the same consumer of each CTA
A thread sends registers to the thread of the same number, which holds the same elements of the tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T

from kernels.gemm_sm90_emit import Variant, shared_address
from kernels.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from tvm.backend.cuda.lang.pipeline import PipelineState

    from kernels.gemm_sm90_epilogue import Thread
    from kernels.gemm_sm90_plan import Plan

_SEND = "st_async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
_LANES = 4  # accumulators in one store or load of a thread
_VECTOR_BYTES = 128 * _LANES * FLOAT_BYTES  # of a whole warpgroup


class Exchange:
    """Barriers and buffers of the exchange, and the code of one consumer."""

    def __init__(self, plan: Plan, variant: Variant, pool: Any) -> None:
        """Takes the barriers from the pool; `allocate` takes the buffers, which lie behind the pipeline's."""
        self.plan, self.variant = plan, variant
        self.parts2sum = TMABar(pool, plan.config.num_consumers)
        self.sum2parts = MBarrier(pool, plan.config.num_consumers)
        self.buffers: Any = None

    def allocate(self, pool: Any) -> None:
        """Room for the parts that the other CTAs send: a slot for each of them, for each owned chunk."""
        self.buffers = pool.alloc((self.plan.config.exchange_bytes // FLOAT_BYTES,), "float32", align=128)

    def init(self) -> None:
        """Arrivals that end a phase."""
        self.parts2sum.init(1)
        self.sum2parts.init(self.plan.config.split_k)

    def begin(self, turn: PipelineState) -> None:
        """Emits what a consumer keeps between tiles. `turn` holds the phase of both barriers."""
        self.turn = turn
        self.received = T.alloc_local((_LANES,), "float32")

    def sum(self, acc: Any, thread: Thread) -> None:
        """After this, the accumulators of owned chunks hold the sums over all of K."""
        self._send(acc, thread)
        if self.variant.fault == "early_sum_release":
            self._release(thread)
        if self.plan.owners == self.plan.config.split_k:
            self._receive(acc, thread)
        else:
            with T.If(thread.rank < self.plan.owners), T.Then():
                self._receive(acc, thread)
        if self.variant.fault != "early_sum_release":
            self._release(thread)
        self.turn.advance()

    def _registers(self, chunk: int) -> range:
        """First of each vector of accumulators of one chunk."""
        config = self.plan.config
        block, col = divmod(chunk * config.epi_n, config.blk_n)
        first = block * self.plan.accumulators + col // 2
        return range(first, first + config.epi_n // 2, _LANES)

    def _slot_bytes(self, chunk: int, slot: Any, thread: Thread) -> Any:
        """Where this thread's part of a chunk lies in the buffers of the owner."""
        owned = thread.warpgroup * self.plan.owned_chunks + chunk // self.plan.config.split_k
        offset = (owned * (self.plan.config.split_k - 1) + slot) * self.plan.part_bytes + thread.number * 16
        return T.cast(offset, "uint32")

    def _send(self, acc: Any, thread: Thread) -> None:
        """This CTA's part of every chunk of another owner. Its slot is its rank among the CTAs that send."""
        config, rank = self.plan.config, thread.rank
        self.variant.pause("exchange_send")
        if self.variant.fault != "no_sum_wait":
            # the first wait is for a phase that never was, and returns at once
            self.sum2parts.wait(thread.warpgroup, self.turn.phase ^ 1)
        for chunk in range(config.chunks):
            owner = chunk % config.split_k
            with T.If(rank != owner), T.Then():
                slot = T.Select(rank < owner, rank, rank - 1)
                target = self._remote(self.buffers.ptr_to([0]), owner) + self._slot_bytes(chunk, slot, thread)
                barrier = self._remote(self.parts2sum.ptr_to([thread.warpgroup]), owner)
                for number, register in enumerate(self._registers(chunk)):
                    values = [acc[register + i] for i in range(_LANES)]
                    T.evaluate(T.ptx[_SEND](target + T.uint32(number * _VECTOR_BYTES), *values, barrier))

    @staticmethod
    def _remote(pointer: Any, rank: Any) -> Any:
        """The address by which this CTA reaches the same place in another one."""
        mapped = T.alloc_local((1,), "uint32")
        T.evaluate(T.ptx.mapa.shared__cluster.u32(mapped[0], shared_address(pointer), T.uint32(rank)))
        return mapped[0]

    def _expected_bytes(self, thread: Thread) -> Any:
        """Bytes that the other CTAs send to one consumer of this one; the first owners may own a chunk more."""
        config = self.plan.config
        parts = config.split_k - 1 - (self.variant.fault == "parts_bytes")
        least, extra = divmod(config.chunks, config.split_k)
        if extra == 0 or least == 0:
            return max(1, least) * parts * self.plan.part_bytes
        sizes = [owned * parts * self.plan.part_bytes for owned in (least + 1, least)]
        return T.Select(thread.rank < extra, *sizes)

    def _receive(self, acc: Any, thread: Thread) -> None:
        config = self.plan.config
        with T.If(thread.number == 0), T.Then():
            self.parts2sum.arrive(thread.warpgroup, self._expected_bytes(thread))
        self.variant.pause("exchange_sum")
        if self.variant.fault != "no_parts_wait":
            bar = self.parts2sum.ptr_to([thread.warpgroup])
            T.evaluate(T.cuda.mbarrier_wait_acquire_cluster(bar, self.turn.phase))
        for chunk in range(config.chunks):
            with T.If(thread.rank == chunk % config.split_k), T.Then():
                for slot in range(config.split_k - 1):
                    start = shared_address(self.buffers.ptr_to([0])) + self._slot_bytes(chunk, slot, thread)
                    for number, register in enumerate(self._registers(chunk)):
                        self._add(acc, register, start + T.uint32(number * _VECTOR_BYTES))

    def _add(self, acc: Any, register: int, address: Any) -> None:
        received = [self.received[i] for i in range(_LANES)]
        T.evaluate(T.ptx["ld.shared.v4.f32"](*received, address))
        for i in range(_LANES):
            T.buffer_store(acc, acc[register + i] + received[i], [register + i])

    def _release(self, thread: Thread) -> None:
        """Tell every CTA of the cluster that this consumer has read. Thread 0 is busy with the next store by then."""
        self.variant.pause("exchange_release")
        thread.sync()
        with T.If(thread.number == 32), T.Then():
            for rank in range(self.plan.config.split_k):
                bar = self._remote(self.sum2parts.ptr_to([thread.warpgroup]), rank)
                T.evaluate(T.ptx["mbarrier.arrive.release.cluster.shared::cluster.b64"](bar))
