"""Rules on what only Blackwell kernels do: tcgen05 and tensor memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kernels.config import Sm100GemmConfig
from kernels.structure_exchange import EXCHANGE_RINGS
from kernels.structure_facts import Check, Facts, Report, Slot, leader_of

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace


class Tmem(Check):
    """Blackwell: MMA issue, accumulators in tensor memory, and their read-back."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        assert isinstance(self.config, Sm100GemmConfig)
        self.slot_columns = self.config.mma_n
        self.stages: set[int] = set()
        self.open_stages: set[int] = set()
        self.writable: set[int] = set()
        self.unfinished: set[int] = set()
        self.finished: set[int] = set()
        self.after = self.before = self.loading = False
        self.registers: set[str] = set()

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind == "mbarrier_wait" and slot and slot.ring not in EXCHANGE_RINGS:
            self.after = False
            self.uncommitted(event.line, slot.ring == "ld2mma")
            {"tma2mma": self.stages, "ld2mma": self.writable, "mma2ld": self.finished}.get(slot.ring, set()).add(
                slot.number
            )
        elif event.kind == "fence_after_sync":
            self.after = True
        elif event.kind == "fence_before_sync":
            self.before = True
        elif event.kind == "tcgen05_mma":
            self.multiply(event)
        elif event.kind == "tcgen05_commit" and slot:
            self.commit(event, slot)
        elif event.kind == "tcgen05_ld":
            self.load(event)
        elif event.kind == "tcgen05_wait_ld":
            self.loading = False
        elif event.kind == "arrive" and slot and slot.ring == "ld2mma":
            self.release(event, slot)
        elif self.loading and self.registers.intersection(event.registers):
            self.report(
                "accumulator read", event.line, f"{event.text} uses values of tcgen05.ld before tcgen05.wait::ld"
            )

    def need_after(self, event: Event) -> None:
        if not self.after:
            self.report(
                "tcgen05 fence",
                event.line,
                f"{event.text} follows an mbarrier wait without tcgen05.fence::after_thread_sync",
            )
            self.after = True

    def multiply(self, event: Event) -> None:
        self.need_after(event)
        assert isinstance(self.config, Sm100GemmConfig)
        for name, operand in zip(("a_desc", "b_desc"), "BA" if self.config.swap_ab else "AB", strict=True):
            address = (int(event.values[name]) & 0x3FFF) << 4
            region = self.facts.region(self.trace.rank, operand, address)
            if region is None:
                self.report(
                    "stage bounds", event.line, f"{event.text} reads {operand} at {address}, which no load fills"
                )
                continue
            self.open_stages.add(region.stage)
            if region.stage not in self.stages:
                self.report(
                    "full wait", event.line, f"{event.text} reads stage {region.stage} without a wait on tma2mma"
                )
        slot = (int(event.values["d_tmem"]) & 0xFFFF) // self.slot_columns
        adds, begun = bool(event.values["enable_input_d"]), slot in self.unfinished
        if adds != begun:
            does, must = ("adds to", "overwrite") if adds else ("overwrites", "add to")
            self.report("accumulator start", event.line, f"{event.text} {does} accumulator {slot}, must {must} it")
        self.unfinished.add(slot)
        if slot not in self.writable:
            self.report(
                "accumulator wait", event.line, f"{event.text} writes accumulator {slot} without a wait on ld2mma"
            )

    def commit(self, event: Event, slot: Slot) -> None:
        every = (1 << self.config.cta_group) - 1
        mask = event.values.get("mask", 1)
        if mask != every:
            self.report("commit mask", event.line, f"the commit to {slot} reaches CTAs of mask {mask}, must be {every}")
        if slot.ring == "mma2tma":
            self.open_stages.discard(slot.number)
            self.stages.discard(slot.number)
        elif slot.ring == "mma2ld":
            self.unfinished.discard(slot.number)
            self.writable.discard(slot.number)

    def uncommitted(self, line: int, tile: bool) -> None:
        for stage in sorted(self.open_stages):
            self.report("mma commit", line, f"MMAs on stage {stage} have no tcgen05.commit to mma2tma[{stage}]")
        self.open_stages = set()
        for slot in sorted(self.unfinished) if tile else ():
            self.report("mma commit", line, f"MMAs into accumulator {slot} have no tcgen05.commit to mma2ld[{slot}]")
            self.unfinished = set()

    def load(self, event: Event) -> None:
        self.need_after(event)
        self.loading, self.before = True, False
        self.registers.update(event.registers)
        slot = (int(event.values["taddr"]) & 0xFFFF) // self.slot_columns
        if slot not in self.finished:
            self.report("result wait", event.line, f"{event.text} reads accumulator {slot} without a wait on mma2ld")

    def release(self, event: Event, slot: Slot) -> None:
        if self.loading:
            self.report(
                "accumulator release", event.line, f"{event.text} releases {slot} before tcgen05.wait::ld: "
                "its last tcgen05.ld may still read tensor memory"
            )  # fmt: skip
        if not self.before:
            self.report(
                "tcgen05 fence",
                event.line,
                f"{event.text} needs tcgen05.fence::before_thread_sync after the last tcgen05.ld",
            )
        if slot.rank != leader_of(self.config, self.trace.rank):
            self.report(
                "accumulator release",
                event.line,
                f"{event.text} arrives on {slot} of CTA {slot.rank}, the leader waits",
            )
        self.finished.discard(slot.number)

    def end(self, line: int) -> None:
        self.uncommitted(line, True)


def check_tensor_memory(config: Sm100GemmConfig, followed: tuple[Trace, ...], report: Report) -> None:
    for rank in range(config.cluster_size):
        mine = [trace for trace in followed if trace.rank == rank]
        _check_owner(mine, report)
        columns: set[Any] = set()
        for kind in ("tmem_alloc", "tmem_relinquish", "tmem_dealloc"):
            threads = sum(len(t.threads) * sum(e.kind == kind for e in t.events) for t in mine)
            events = [e for t in mine for e in t.events if e.kind == kind]
            columns.update(e.values["ncols"] for e in events if "ncols" in e.values)
            if threads != 32:
                name = kind.replace("tmem_", "tcgen05.")
                message = f"{name} is executed by {threads} threads of CTA {rank}, must be one warp once"
                report("tensor memory", events[0].line if events else 0, message)
        if len(columns) != 1 or not config.tmem_columns <= max(columns, default=0) <= config.arch.tmem_columns:
            message = (
                f"{sorted(columns)} columns are allocated and deallocated, accumulators need {config.tmem_columns}"
            )
            report("tensor memory", 0, message)
        for trace in mine:
            _check_tensor_memory_order(config, trace, report)


def _check_owner(traces_of_cta: list[Trace], report: Report) -> None:
    """The warp that allocates gives the right to allocate up, and then the memory back: once each, in this order."""
    kinds = ("tmem_alloc", "tmem_relinquish", "tmem_dealloc")
    for trace in traces_of_cta:
        events = [event for event in trace.events if event.kind in kinds]
        if events and [event.kind for event in events] != list(kinds):
            done = ", ".join(event.kind.replace("tmem_", "") for event in events)
            message = f"warp {trace.threads[0] // 32} does {done}: one warp must do alloc, relinquish, dealloc"
            report("tensor memory", events[-1].line, message)


def check_issuers(config: Sm100GemmConfig, followed: tuple[Trace, ...], report: Report) -> None:
    """Each thread that executes tcgen05.mma or tcgen05.commit issues one of its own; the leader's acts for the pair."""
    for trace in followed:
        issued = next((event for event in trace.events if event.kind in ("tcgen05_mma", "tcgen05_commit")), None)
        leader = leader_of(config, trace.rank)
        if issued is not None and (len(trace.threads) != 1 or trace.rank != leader):
            threads, rank = len(trace.threads), trace.rank
            message = f"{issued.text} is issued by {threads} threads of CTA {rank}, must be one of CTA {leader}"
            report("mma issuer", issued.line, message)
        for event in trace.events:
            group = re.search(r"\bcta_group::(\d)", event.text)
            if group is not None and event.kind != "tma_load" and int(group[1]) != config.cta_group:
                report("cta group", event.line, f"{event.text} in a kernel of cta_group {config.cta_group}")


def _check_tensor_memory_order(config: Sm100GemmConfig, trace: Trace, report: Report) -> None:
    """One barrier after the allocation, one before deallocation, every use of tensor memory in between."""
    barrier = "cluster_wait" if config.cluster_size > 1 else "cta_barrier"
    passed = 0
    for event in trace.events:
        passed += event.kind == barrier
        wanted = {"tmem_alloc": 0, "shared_read": 1, "tcgen05_mma": 1, "tcgen05_ld": 1, "tcgen05_commit": 1,
                  "tmem_dealloc": 2}.get(event.kind)  # fmt: skip
        if wanted is not None and passed != wanted:
            name = barrier.replace("_wait", "").replace("_barrier", "")
            message = f"{event.text} stands after {passed} barriers of the {name}, must be after {wanted}"
            report("tensor memory", event.line, message)
