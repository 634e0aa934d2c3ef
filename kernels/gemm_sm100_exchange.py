"""How the parts of K of one tile meet on Blackwell: float32 sums through the shared memory of a cluster.

The `split_k` CTAs of a cluster have each multiplied a part of K of the same tile into their own tensor memory. Every
chunk of the tile (blk_m lanes x epi_n columns of one consumer) has one owner in the cluster. The others read it back
and write it straight into the owner's shared memory; the owner adds the parts to its own in the order of their ranks,
rounds, and stores. So every sum is made in one fixed order, nothing lies in global memory, and CTAs wait only for CTAs
of their own cluster, which run at the same time by definition: launches may overlap and repeat as they like.

Barriers, one pair for each consumer, in every CTA
    parts2sum   all parts of the owned chunks are here      1 arrival (owner) and their bytes
    sum2parts   every owner has read what this CTA sent     1 arrival of the same consumer of each owner
An owner arrives on sum2parts when it has read the parts of all CTAs, so no CTA is told of a round that it has not sent
for: a CTA that owns nothing stays silent.
A thread sends registers to the thread of the same number, which holds the same elements of the tile.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import MBarrier, TMABar
from tvm.script import tirx as T

from kernels.gemm_sm100_plan import WARPGROUP_THREADS, Plan
from kernels.pause import pause
from kernels.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tvm.backend.cuda.lang import PipelineState

_SEND = "st_async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
_LANES = 4  # values in one store or load of a thread
_VECTOR_BYTES = WARPGROUP_THREADS * _LANES * FLOAT_BYTES  # of a whole warpgroup
_RELEASING_THREAD = 32  # thread 0 is busy with the next store


class Exchange:
    """Barriers and buffers of the exchange, and the code of one writeback warpgroup. Emits TIR while it is traced."""

    def __init__(self, plan: Plan, pool: Any, *, fault: str, delays_ns: Mapping[str, int]) -> None:
        """Takes the barriers from the pool; `allocate` takes the buffers, which lie behind the staging buffers."""
        self.plan, self.fault, self.delays_ns = plan, fault, delays_ns
        self.parts2sum = TMABar(pool, plan.config.num_consumers)
        self.sum2parts = MBarrier(pool, plan.config.num_consumers)
        self.buffers: Any = None

    def allocate(self, pool: Any) -> None:
        """Room for the parts that the other CTAs send: a slot for each of them, for each owned chunk."""
        self.buffers = pool.alloc((self.plan.config.exchange_bytes // FLOAT_BYTES,), "float32", align=128)

    def init(self) -> None:
        """Arrivals that end a phase."""
        self.parts2sum.init(1)
        self.sum2parts.init(self.plan.owners)

    def owner_of(self, chunk: Any) -> Any:
        """The CTA that sums and stores a chunk."""
        return chunk % self.plan.config.split_k

    def wait_to_send(self, consumer: Any, turn: PipelineState) -> None:
        """Until every owner has read the last tile's parts; the first wait is for a phase that never was."""
        pause(self.delays_ns, "exchange_send")
        if self.fault != "no_sum_wait":
            self.sum2parts.wait(consumer, turn.phase ^ 1)

    def send(self, values: Any, chunk: Any, consumer: Any, part: Any, thread: Any) -> None:
        """This CTA's part of a chunk that another one owns. Its slot is its rank among the CTAs that send."""
        owner = self.owner_of(chunk)
        slot = T.Select(part < owner, part, part - 1)
        target = self._remote(self.buffers.ptr_to([0]), owner) + self._slot_bytes(chunk, slot, consumer, thread)
        barrier = self._remote(self.parts2sum.ptr_to([consumer]), owner)
        for number, first in enumerate(range(0, self.plan.chunk_registers, _LANES)):
            sent = [values[first + lane] for lane in range(_LANES)]
            T.evaluate(T.ptx[_SEND](target + T.uint32(number * _VECTOR_BYTES), *sent, barrier))

    def wait_to_sum(self, consumer: Any, part: Any, thread: Any, turn: PipelineState) -> None:
        """Until all parts of the owned chunks are here. Only for CTAs that own a chunk."""
        with T.If(thread == 0), T.Then():
            self.parts2sum.arrive(consumer, self._expected_bytes(part))
        pause(self.delays_ns, "exchange_sum")
        if self.fault != "no_parts_wait":
            T.evaluate(T.cuda.mbarrier_wait_acquire_cluster(self.parts2sum.ptr_to([consumer]), turn.phase))

    def add(self, values: Any, received: Any, chunk: Any, consumer: Any, thread: Any) -> None:
        """The other CTAs' parts of an owned chunk, in the order of their ranks."""
        for slot in range(self.plan.config.split_k - 1):
            start = self._shared(self.buffers.ptr_to([0])) + self._slot_bytes(chunk, slot, consumer, thread)
            for number, first in enumerate(range(0, self.plan.chunk_registers, _LANES)):
                arrived = [received[lane] for lane in range(_LANES)]
                T.evaluate(T.ptx["ld.shared.v4.f32"](*arrived, start + T.uint32(number * _VECTOR_BYTES)))
                for lane in range(_LANES):
                    T.buffer_store(values, values[first + lane] + received[lane], [first + lane])

    def release(self, consumer: Any, thread: Any) -> None:
        """Tell every CTA of the cluster that this consumer has read. A barrier of the warpgroup has to stand before."""
        pause(self.delays_ns, "exchange_release")
        with T.If(thread == _RELEASING_THREAD), T.Then():
            for rank in range(self.plan.config.split_k):
                barrier = self._remote(self.sum2parts.ptr_to([consumer]), rank)
                T.evaluate(T.ptx["mbarrier.arrive.release.cluster.shared::cluster.b64"](barrier))

    def _slot_bytes(self, chunk: Any, slot: Any, consumer: Any, thread: Any) -> Any:
        """Where this thread's part of a chunk lies in the buffers of the owner."""
        owned = consumer * self.plan.owned_chunks + chunk // self.plan.config.split_k
        offset = (owned * (self.plan.config.split_k - 1) + slot) * self.plan.part_bytes
        return T.cast(offset + thread * (_LANES * FLOAT_BYTES), "uint32")

    def _expected_bytes(self, part: Any) -> Any:
        """Bytes that the other CTAs send to one consumer of this one; the first owners may own a chunk more."""
        parts = self.plan.config.split_k - 1 - (self.fault == "parts_bytes")
        least, extra = divmod(self.plan.config.chunks, self.plan.config.split_k)
        if extra == 0 or least == 0:
            return max(1, least) * parts * self.plan.part_bytes
        more, fewer = ((least + one) * parts * self.plan.part_bytes for one in (1, 0))
        return T.Select(part < extra, more, fewer)

    @staticmethod
    def _shared(pointer: Any) -> Any:
        return T.cuda.cvta_generic_to_shared(pointer)

    def _remote(self, pointer: Any, rank: Any) -> Any:
        """The address by which this CTA reaches the same place in another one."""
        mapped = T.alloc_local((1,), "uint32")
        T.evaluate(T.ptx.mapa.shared__cluster.u32(mapped[0], self._shared(pointer), T.cast(rank, "uint32")))
        return mapped[0]
