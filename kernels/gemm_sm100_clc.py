"""Tiles by cluster launch control (CLC): a cluster that is done takes over the tile of a cluster not yet launched.

The grid has a cluster for each tile. Those that find room start with the tile of their own number; a scheduler thread
in each CTA, warp 2 of the last warpgroup, asks the hardware to cancel the launch of a waiting cluster and hands its
number to the roles of the CTA. So tiles go to whoever is free, and SMs that another kernel still holds join later.

    ring         slots   protects                      arrivals                                 waits
    next2roles   2       the answer: the next tile     1 expect_tx of the CTA's scheduler,      every role of the CTA,
                                                       plus the answer's 16 bytes               and its scheduler
    roles2next   2       the answer, read by all       every thread that has read it, of        the leader's scheduler
                                                       every CTA of the cluster

The leader's scheduler asks for all CTAs of the cluster: the answer is multicast. After the answer that nothing is left,
nobody may ask again (undefined, PTX ISA), so it asks only once it has read the answer before.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import MBarrier, PipelineState, TMABar
from tvm.backend.cuda.lang.clc import query_cancel_first_ctaid_x
from tvm.script import tirx as T

from kernels.gemm_names import ANSWER_SLOTS
from kernels.pause import pause
from kernels.tile_scheduler import SerpentineScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.gemm_sm100_plan import Plan

_ANSWER_BYTES = 16
_WORDS = 4  # 32-bit words of an answer
_NOTHING_LEFT = 0xFFFFFFFF
_TRY_CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"


class Answers:
    """Barriers and buffer of the answers, and what is done to them. Emits TIR while it is traced."""

    def __init__(self, plan: Plan, pool: Any, *, fault: str, delays_ns: Mapping[str, int]) -> None:
        self.plan, self.fault, self.delays_ns = plan, fault, delays_ns
        self.next2roles = TMABar(pool, ANSWER_SLOTS)
        self.roles2next = MBarrier(pool, ANSWER_SLOTS)
        self.buffer = pool.alloc((ANSWER_SLOTS * _WORDS,), "uint32", align=_ANSWER_BYTES)

    def init(self) -> None:
        """Arrivals that end a phase."""
        self.next2roles.init(1)
        self.roles2next.init(self.plan.config.answer_readers - (self.fault == "answer_count"))

    def place(self, slot: Any) -> Any:
        """Address of an answer."""
        return self.buffer.ptr_to([slot * _WORDS])

    def ask(self, turn: PipelineState, member: Any) -> None:
        """Announce an answer in this CTA; the leader's scheduler asks for it when the one before it has been read."""
        pause(self.delays_ns, "scheduler_ask")
        if self.fault != "no_answer_slot_wait":
            with T.If(member == 0), T.Then():
                self.roles2next.wait(turn.stage, turn.phase ^ 1)
        self.next2roles.arrive(turn.stage, _ANSWER_BYTES // (2 if self.fault == "answer_bytes" else 1))
        every = self.plan.config.cta_group > 1 and self.fault != "answer_to_leader_only"
        instruction = T.ptx[f"{_TRY_CANCEL}{'.multicast::cluster::all' if every else ''}.b128"]
        with T.If(member == 0), T.Then():
            T.evaluate(instruction(self.place(turn.stage), self.next2roles.ptr_to([turn.stage])))

    def wait(self, turn: PipelineState) -> None:
        """Until the answer is here."""
        if self.fault != "no_answer_wait":
            self.next2roles.wait(turn.stage, turn.phase)

    def release(self, turn: PipelineState) -> None:
        """Tell the leader's scheduler that this thread has read the answer."""
        if self.fault != "no_answer_release":
            pair = self.plan.config.cta_group > 1
            (self.roles2next.remote_view(0) if pair else self.roles2next).arrive(turn.stage)


@T.meta_class
class StolenTiles(SerpentineScheduler):
    """Tiles as a role of the kernel goes through them, one answer after the other."""

    def __init__(self, answers: Answers, *name: str, **order: Any) -> None:
        """name, order: of SerpentineScheduler."""
        super().__init__(*name, **order)
        self._answers = answers
        self._cluster_size = answers.plan.config.cluster_size
        self._first_cta = T.local_scalar("uint32")
        self._turn = PipelineState(ANSWER_SLOTS)

    @T.inline
    def init(self, tile):
        """The first tile is the one that the cluster was launched for."""
        self._turn.init(0)
        SerpentineScheduler.init(self, tile)

    @T.inline
    def next_tile(self):
        """Read the next answer. Every thread of a role does, and says so."""
        self._answers.wait(self._turn)
        query_cancel_first_ctaid_x(self._first_cta, self._answers.place(self._turn.stage))
        self._answers.release(self._turn)
        self._turn.advance()
        SerpentineScheduler.init(self, self._answered())

    @T.inline
    def schedule(self, member):
        """The scheduler thread of one CTA."""
        while self.valid():
            self._answers.ask(self._turn, member)
            self.next_tile()

    def _answered(self) -> Any:
        """The tile of the cluster whose launch was cancelled; past the last one where none was: the roles end."""
        launched = T.cast(self._first_cta // T.uint32(self._cluster_size), "int32")
        return T.Select(self._first_cta == T.uint32(_NOTHING_LEFT), self._TOTAL_TILES, launched)
