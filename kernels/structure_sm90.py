"""Rules on what only Hopper kernels do: wgmma, multicast of a shared operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.config import Sm90GemmConfig
from kernels.structure_counts import loads
from kernels.structure_facts import Check, Facts, Report, Slot

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace


class Wgmma(Check):
    """Hopper mainloop: which stage a wgmma reads, which groups are in flight, who reads accumulators when."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.readable: set[int] = set()
        self.open: set[int] = set()
        self.flying: list[set[int]] = []
        self.accumulators: set[str] = set()
        self.fenced = False
        slots = (facts.slot(event, trace.rank) for event in trace.events if event.kind == "arrive")
        self.releases = any(slot is not None and slot.ring == "mma2tma" for slot in slots)

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind == "mbarrier_wait" and slot and slot.ring == "tma2mma":
            self.uncommitted(event)
            if self.releases and slot.number in self.readable:
                self.report(
                    "stage release",
                    event.line,
                    f"waits for the next fill of stage {slot.number} before releasing it: the producer waits for the "
                    "release, so neither goes on",
                )
            self.readable.add(slot.number)
        elif event.kind == "wgmma_fence":
            self.fenced = True
        elif event.kind == "wgmma":
            self.multiply(event)
        elif event.kind == "wgmma_commit":
            self.flying.append(self.open)
            self.open, self.fenced = set(), False
        elif event.kind == "wgmma_wait":
            self.uncommitted(event)
            while len(self.flying) > event.n:
                self.flying.pop(0)
        elif event.kind == "arrive" and slot and slot.ring == "mma2tma":
            self.release(event, slot)
        elif self.accumulators.intersection(event.registers) and (self.open or self.flying):
            groups = len(self.flying) + bool(self.open)
            self.report(
                "accumulator read",
                event.line,
                f"{event.text} reads accumulators while {groups} wgmma group(s) may be in flight: "
                "wgmma.wait_group 0 is missing",
            )

    def multiply(self, event: Event) -> None:
        self.accumulators.update(event.registers)
        if not self.fenced:
            self.report("wgmma fence", event.line, f"{event.text} opens a batch without wgmma.fence")
            self.fenced = True
        operands = "BA" if isinstance(self.config, Sm90GemmConfig) and self.config.swap_ab else "AB"
        for name, operand in zip(("a_desc", "b_desc"), operands, strict=True):
            address = (int(event.values[name]) & 0x3FFF) << 4
            region = self.facts.region(self.trace.rank, operand, address)
            if region is None:
                self.report("stage bounds", event.line, f"wgmma reads {operand} at {address}, which no load fills")
                continue
            self.open.add(region.stage)
            if region.stage not in self.readable:
                self.report(
                    "full wait", event.line, f"{event.text} reads stage {region.stage} without a wait on tma2mma"
                )

    def release(self, event: Event, slot: Slot) -> None:
        self.readable.discard(slot.number)
        if slot.number in self.open or any(slot.number in group for group in self.flying):
            self.report(
                "stage release",
                event.line,
                f"{event.text} releases stage {slot.number} while a wgmma group that reads it may be in flight: "
                "wgmma.wait_group is missing or too weak",
            )

    def uncommitted(self, event: Event) -> None:
        if self.open:
            self.report("wgmma commit", event.line, f"{event.text} follows wgmma without wgmma.commit_group")
            self.open = set()

    def end(self, line: int) -> None:
        if self.open:
            self.report("wgmma commit", line, "the last wgmma batch is not closed by wgmma.commit_group")


class Turns(Check):
    """Pingpong: between two turns of a consumer, the other has waited for every stage of its tile.

    A wait on a stage only tells odd from even uses, so a consumer that starts early takes an older use for its own.
    """

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.mine = facts.walk.turns == 1

    def see(self, event: Event, slot: Slot | None) -> None:
        if self.facts.walk.turns == 1 or slot is None:
            return
        if event.kind == "mbarrier_wait" and slot.ring == "turn":
            self.mine = True
            if slot.number != self.trace.warpgroup:
                self.report("turn", event.line, f"consumer {self.trace.warpgroup} waits for {slot}")
        elif event.kind == "mbarrier_wait" and slot.ring == "tma2mma" and not self.mine:
            self.report("turn", event.line, f"{event.text} waits for {slot} before the consumer's turn")
        elif event.kind == "arrive" and slot.ring == "turn":
            self.mine = False


def check_multicast(facts: Facts, followed: tuple[Trace, ...], report: Report) -> None:
    config = facts.config
    assert isinstance(config, Sm90GemmConfig)
    every = (1 << config.cta_group) - 1
    for _trace, event, _slot in loads(facts, followed):
        operand = facts.maps[event.values["tmap"]].operand
        shared = config.cta_group > 1 and operand == config.share
        mask = event.values.get("cta_mask")
        if mask != (every if shared else None):
            need = f"a multicast to mask {every}" if shared else "no multicast"
            report("multicast mask", event.line, f"{event.text} loads {operand} with mask {mask}, needs {need}")
