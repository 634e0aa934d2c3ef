"""Rules on tiles by cluster launch control: who asks, who reads, and when an answer's place is free again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.cuda_trace import CLUSTER_WINDOW
from kernels.structure_facts import ANSWER_BYTES, Check, Facts, Report, Slot, leader_of

if TYPE_CHECKING:
    from kernels.config import Sm100GemmConfig
    from kernels.cuda_trace import Event, Trace

ANSWER_RINGS = frozenset({"next2roles", "roles2next"})


def is_multicast(event: Event) -> bool:
    """Whether a request has its answer written in every CTA of the cluster."""
    return "multicast::cluster::all" in event.text


class Answers(Check):
    """One thread: it asks when its last answer is read, reads what it has waited for, and says so after a fence."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.arrived: Slot | None = None
        self.free: Slot | None = None
        self.read = self.fenced = self.asked = False

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind == "mbarrier_wait" and slot and slot.ring == "next2roles":
            self.arrived, self.read, self.fenced = slot, False, False
        elif event.kind == "mbarrier_wait" and slot and slot.ring == "roles2next":
            self.free = slot
        elif event.kind == "try_cancel":
            self.ask(event, slot)
        elif event.kind == "answer_read":
            self.take(event)
        elif event.kind == "proxy_fence":
            self.fenced = True
        elif event.kind == "arrive" and slot and slot.ring == "roles2next":
            self.release(event, slot)

    def ask(self, event: Event, slot: Slot | None) -> None:
        if slot is None or self.free != Slot("roles2next", slot.number, slot.rank):
            self.report("answer place", event.line, f"{event.text} asks for {slot} without a wait on roles2next")
        if self.asked:
            self.report("one question", event.line, f"{event.text} asks again before the last answer was read")
        self.asked, self.free = True, None

    def take(self, event: Event) -> None:
        number = self.facts.answers.get(int(event.values["addr"]) % CLUSTER_WINDOW)
        if self.arrived is None or number != self.arrived.number:
            self.report("answer wait", event.line, f"{event.text} reads answer {number} without a wait on next2roles")
        self.read, self.asked, self.fenced = True, False, False

    def release(self, event: Event, slot: Slot) -> None:
        if not self.read or self.arrived is None or slot.number != self.arrived.number:
            self.report("answer release", event.line, f"{event.text} releases {slot}, which this thread has not read")
        elif not self.fenced:
            self.report("answer release", event.line, f"{event.text} needs a proxy fence after the read of the answer")
        if slot.rank != leader_of(self.config, self.trace.rank):
            self.report("answer release", event.line, f"{event.text} arrives in CTA {slot.rank}, the leader waits")
        self.arrived, self.read = None, False

    def end(self, line: int) -> None:
        if self.asked:
            self.report("one question", line, "the thread that asks leaves before it has read the last answer")


def learn_answers(facts: Facts, followed: tuple[Trace, ...]) -> None:
    """Where answers lie, from the requests: slot by address."""
    for trace in followed:
        for event in trace.events:
            slot = facts.slot(event, trace.rank) if event.kind == "try_cancel" else None
            if slot is not None:
                facts.answers[int(event.values["addr"])] = slot.number


def check_requests(config: Sm100GemmConfig, followed: tuple[Trace, ...], report: Report) -> None:
    """One thread of the leader asks, for all CTAs of the cluster."""
    asking = [(t, next(e for e in t.events if e.kind == "try_cancel")) for t in followed if _asks(t)]
    threads = sum(len(trace.threads) for trace, _ in asking)
    wanted = 1 if config.scheduler == "clc" else 0
    for trace, event in asking:
        if threads != wanted or trace.rank != leader_of(config, trace.rank):
            message = f"{event.text} is issued by {threads} threads, must be one of the leader CTA"
            report("request", event.line, message)
        if is_multicast(event) != (config.cta_group > 1):
            scope = "every CTA of the cluster" if config.cta_group > 1 else "this CTA only"
            report("request", event.line, f"{event.text}: the answer must reach {scope}")
    if wanted and not asking:
        report("request", 0, "no thread asks for the next tile")


def _asks(trace: Trace) -> bool:
    return any(event.kind == "try_cancel" for event in trace.events)


def answer_bytes(event: Event, slot: Slot, cluster_size: int) -> dict[Slot, int]:
    """Bytes that the answer to a request brings, by barrier."""
    ranks = range(cluster_size) if is_multicast(event) else (slot.rank,)
    return {Slot(slot.ring, slot.number, rank): ANSWER_BYTES for rank in ranks}
