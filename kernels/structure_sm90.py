"""Rules on what only Hopper kernels do: wgmma, multicast of a shared operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.config import Sm90GemmConfig
from kernels.resources import sm90_entry_registers
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


class Copies(Check):
    """cp_async: when a warp may copy into a stage, read what it has copied, write it back, and hand the stage over."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.copies = any(event.kind == "row_copy" for event in trace.events)
        self.granted = -1
        self.begun: set[int] = set()  # stages of the group that is open
        self.flying: list[set[int]] = []
        self.arrived: set[int] = set()  # this lane's copies
        self.readable: set[int] = set()  # those of the whole warp
        self.unshared_reads = False
        self.moved: dict[int, str] = {}  # how far what was written into a stage is: "written", "fenced", "shared"

    def see(self, event: Event, slot: Slot | None) -> None:
        if not self.copies:
            return
        if event.kind == "mbarrier_wait" and slot and slot.ring == "mma2tma":
            self.granted = slot.number
        elif event.kind == "row_copy":
            self.copy(event)
        elif event.kind == "copy_commit":
            self.flying.append(self.begun)
            self.begun, self.granted = set(), -1
        elif event.kind == "copy_wait":
            while len(self.flying) > event.n:
                self.arrived |= self.flying.pop(0)
        elif event.kind == "warp_barrier":
            self.readable |= self.arrived
            self.unshared_reads = False
            self.moved.update({stage: "shared" for stage, state in self.moved.items() if state == "fenced"})
        elif event.kind == "shared_read":
            self.read(event)
        elif event.kind == "shared_write":
            self.write(event)
        elif event.kind == "proxy_fence":
            self.moved = dict.fromkeys(self.moved, "fenced")
        elif event.kind == "arrive" and slot and slot.ring == "tma2mma":
            self.hand_over(event, slot.number)

    def stage(self, address: int) -> int:
        """The stage, or the stage of the tail, that an address lies in; -1 for neither."""
        if address >= self.facts.first_tail:
            assert isinstance(self.config, Sm90GemmConfig)
            return (address - self.facts.first_tail) // self.config.tail_bytes
        found = (self.facts.region(self.trace.rank, operand, address) for operand in "AB")
        return next((region.stage for region in found if region), -1)

    def copy(self, event: Event) -> None:
        stage = self.stage(int(event.values["dst_mem"]))
        if stage < 0 or stage != self.granted:
            self.report("empty wait", event.line, f"{event.text} fills stage {stage} without a wait on mma2tma")
        self.begun.add(stage)
        self.arrived.discard(stage)
        self.readable.discard(stage)
        self.moved.pop(stage, None)

    def read(self, event: Event) -> None:
        stage = self.stage(int(event.values["addr"]))
        self.unshared_reads = True
        if stage not in self.readable:
            self.report(
                "copy wait",
                event.line,
                f"{event.text} reads stage {stage}, whose copies may not have arrived: cp.async.wait_group and a warp "
                "barrier are missing or too weak",
            )

    def write(self, event: Event) -> None:
        stage = self.stage(int(event.values["addr"]))
        if self.unshared_reads:
            self.report(
                "move barrier", event.line, f"{event.text} follows reads of the warp's values without a warp barrier"
            )
        self.moved[stage] = "written"

    def hand_over(self, event: Event, stage: int) -> None:
        state = self.moved.pop(stage, "not written")
        if state != "shared":
            self.report("fill fence", event.line, f"{event.text} hands over stage {stage}, whose values are {state}")


class WarpStaging(Check):
    """Stores of D by threads: a warp barrier between what a warp stages and its reads, either way."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        kinds = {event.kind for event in trace.events}
        self.stages = "shared_write" in kinds and "tma_store" not in kinds and "row_copy" not in kinds
        self.written = self.read = False

    def see(self, event: Event, slot: Slot | None) -> None:
        if not self.stages:
            return
        if event.kind == "warp_barrier":
            self.written = self.read = False
        elif event.kind == "shared_write":
            self.written = True
            if self.read:
                self.report("staging reuse", event.line, f"{event.text}: no warp barrier since lanes read this buffer")
        elif event.kind == "shared_read" and not event.registers:
            self.read = True
            if self.written:
                self.report(
                    "staging barrier", event.line, f"{event.text} starts without a warp barrier: lanes may be staging"
                )


def check_registers(config: Sm90GemmConfig, followed: tuple[Trace, ...], report: Report) -> None:
    """What warpgroups of a CTA ask for must be there: setmaxnreg.inc waits for registers that another gives back."""
    granted: dict[int, tuple[int, int]] = {}
    for trace in followed:
        for event in trace.events:
            if event.kind == "setmaxnreg" and trace.rank == 0:
                granted[trace.warpgroup] = (int(event.text.split()[-1]), event.line)
    launched = sm90_entry_registers(config) * config.threads
    asked = 128 * sum(registers for registers, _line in granted.values())
    if asked > launched:
        line = max(granted.values())[1]
        message = f"setmaxnreg grants {asked} registers in all, the CTA is launched with {launched}: consumers wait"
        report("register pool", line, message)


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
