"""Protocol rules that one thread of a kernel has to keep, each as a small state machine over its instructions.

Used by `kernels.structure`; the rules are listed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.cuda_source import CLUSTER_WINDOW
from kernels.problem import ELEMENT_BYTES

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace, Walk
    from kernels.launch import TensorMapPlan

Report = Callable[[str, int, str], None]
# A ring's waiting side that asks for "empty" starts one phase ahead, so that its first lap passes.
STARTS_AHEAD = frozenset({"mma2tma", "ld2mma", "sum2parts"})
PART_BYTES = 16  # of one st.async: four float32
_BARRIER_OPERAND = {
    "mbarrier_wait": "barrier", "arrive": "addr", "expect_tx": "addr", "tma_load": "mbar", "tcgen05_commit": "mbar",
    "remote_write": "mbar",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """One mbarrier: ring name, slot number, and the CTA whose shared memory holds it."""

    ring: str
    number: int
    rank: int

    def __str__(self) -> str:
        return f"{self.ring}[{self.number}]"


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [low, high) of one CTA's shared memory that hold one operand of one stage."""

    rank: int
    operand: str
    stage: int
    low: int
    high: int


@dataclass(slots=True)
class Facts:
    """What the checks know of the kernel as a whole.

    walk: how far threads were followed
    maps: tensor maps by kernel parameter
    barriers: ring and slot number by shared-memory address
    regions: where stages lie, learned from the loads
    """

    config: GemmConfig
    walk: Walk
    maps: dict[str, TensorMapPlan]
    barriers: dict[int, tuple[str, int]]
    regions: list[Region] = field(default_factory=list)

    def slot(self, event: Event, rank: int) -> Slot | None:
        """The mbarrier that an instruction of CTA `rank` uses, or None where it uses none that was initialised."""
        operand = _BARRIER_OPERAND.get(event.kind)
        if operand is None:
            return None
        window, address = divmod(int(event.values[operand]), CLUSTER_WINDOW)
        found = self.barriers.get(address)
        return Slot(*found, window - 1 if window else rank) if found else None

    def box_bytes(self, event: Event) -> int:
        """Bytes of one TMA copy."""
        elements = 1
        for extent in self.maps[event.values["tmap"]].box:
            elements *= extent
        return elements * ELEMENT_BYTES

    def region(self, rank: int, operand: str, address: int) -> Region | None:
        return next(
            (r for r in self.regions if r.rank == rank and r.operand == operand and r.low <= address < r.high), None
        )


class Check:
    """Base: sees every instruction of one thread in order, then its end."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        self.facts, self.trace, self.report = facts, trace, report
        self.config = facts.config

    def see(self, event: Event, slot: Slot | None) -> None:
        raise NotImplementedError

    def end(self, line: int) -> None:
        """`line` is that of the thread's last instruction."""


class Lifetime(Check):
    """Barriers are used only between the barrier that publishes their initialisation and the one before exit."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.cluster = self.config.cluster_size > 1
        self.unfenced = self.ready = self.left = self.told = False
        self.found = "no barrier"

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind == "mbarrier_init":
            self.unfenced = True
        elif event.kind == "init_fence":
            self.unfenced = False
        elif event.kind in ("cluster_arrive", "cta_barrier"):
            if self.unfenced:
                self.report("init fence", event.line, f"{event.text} follows mbarrier.init without fence.mbarrier_init")
                self.unfenced = False
            self.found = event.text
        if event.kind == "cluster_wait" or (event.kind == "cta_barrier" and not self.cluster):
            self.left, self.ready = self.ready, True
        elif event.kind in _BARRIER_OPERAND:
            self.left = False
            if not self.ready and not self.told:
                self.told = True
                need = "a cluster barrier" if self.cluster else "a CTA barrier"
                self.report(
                    "init barrier",
                    event.line,
                    f"{event.text} needs {need} between mbarrier.init and this first use, found {self.found}",
                )

    def end(self, line: int) -> None:
        if self.cluster and not self.left:
            self.report(
                "exit barrier",
                line,
                f"the thread exits without a cluster barrier after its last use, found {self.found}",
            )


class Phases(Check):
    """The n-th wait on a slot waits for the parity of its n-th use."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.waits: Counter[Slot] = Counter()

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind in _BARRIER_OPERAND and slot is None:
            operand = event.values[_BARRIER_OPERAND[event.kind]]
            self.report(
                "barrier init", event.line, f"{event.text} uses address {operand}, where no mbarrier was initialised"
            )
        if event.kind != "mbarrier_wait" or slot is None:
            return
        if slot.rank != self.trace.rank:
            self.report("barrier phase", event.line, f"waits on {slot} of another CTA")
        ahead = slot.ring in STARTS_AHEAD or (slot.ring == "turn" and slot.number == 0)
        expected = (self.uses(slot) + ahead) % 2
        self.waits[slot] += 1
        if event.values["phase"] != expected:
            self.report(
                "barrier phase",
                event.line,
                f"wait {self.waits[slot]} on {slot} is for parity {event.values['phase']}, must be {expected}",
            )

    def uses(self, slot: Slot) -> int:
        """Uses of the slot before this wait."""
        turns = self.facts.walk.turns
        if turns == 1 or slot.ring != "tma2mma":
            return self.waits[slot]
        # Consumers that take turns see every `turns`-th tile: their n-th stage is a later one of the ring.
        k_blocks, depth = self.facts.walk.trips(self.facts.walk.k_blocks), self.config.pipe_depth
        tile, block = divmod(sum(n for place, n in self.waits.items() if place.ring == slot.ring), k_blocks)
        number = (tile * turns + self.trace.warpgroup) * k_blocks + block
        return number // depth if number % depth == slot.number else -1


class Producer(Check):
    """A stage is filled once for each wait on mma2tma, and the producer outlives the commits that arrive at it."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.granted = -1
        self.filled: list[tuple[int, int]] = []
        self.waits: Counter[int] = Counter()
        self.fills: Counter[int] = Counter()

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind == "mbarrier_wait" and slot and slot.ring == "mma2tma":
            self.granted, self.filled = slot.number, []
            self.waits[slot.number] += 1
        elif event.kind == "tma_load" and slot:
            if slot.ring != "tma2mma":
                self.report("transaction bytes", event.line, f"a load lands on {slot}, must land on tma2mma")
                return
            low = int(event.values["dst_mem"])
            high = low + self.facts.box_bytes(event)
            again = any(low < end and start < high for start, end in self.filled)
            if slot.number != self.granted or again:
                self.report(
                    "empty wait", event.line, f"{event.text} fills stage {slot.number} without a wait on mma2tma"
                )
            if not self.filled:
                self.fills[slot.number] += 1
            self.filled.append((low, high))

    def end(self, line: int) -> None:
        if not isinstance(self.config, Sm100GemmConfig) or not self.waits:
            return
        # tcgen05.commit arrives on its own; on Hopper the consumers arrive before the exit barrier.
        for stage, fills in self.fills.items():
            if self.waits[stage] <= fills:
                self.report(
                    "stage drain", line, f"the producer leaves before the last release of stage {stage} has arrived"
                )


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


@dataclass(slots=True)
class _Write:
    low: int
    line: int
    fenced: bool = False
    shared: bool = False


class Staging(Check):
    """Epilogue: registers -> staging buffer -> TMA store, and when a buffer may be written again.

    Follows the thread that issues the stores: only it can wait for them, and a named barrier tells the others.
    """

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.writes: list[_Write] = []
        self.group: list[tuple[int, int]] = []
        self.reading: list[list[tuple[int, int]]] = []
        self.read_unannounced: list[tuple[int, int]] = []
        self.incomplete = 0

    def see(self, event: Event, slot: Slot | None) -> None:
        if self.group and event.kind not in ("tma_store", "bulk_commit"):
            self.report(
                "store commit", event.line, f"{event.text} follows a TMA store without cp.async.bulk.commit_group"
            )
            self.reading.append(self.group)
            self.group = []
        if event.kind == "shared_write":
            self.write(event)
        elif event.kind == "proxy_fence":
            for write in self.writes:
                write.fenced = True
        elif event.kind == "named_barrier":
            self.read_unannounced = []
            for write in self.writes:
                write.shared = write.fenced
        elif event.kind == "tma_store":
            self.store(event)
        elif event.kind == "bulk_commit":
            self.reading.append(self.group)
            self.group = []
            self.incomplete += 1
        elif event.kind in ("bulk_wait_read", "bulk_wait"):
            while len(self.reading) > event.n:
                self.read_unannounced += self.reading.pop(0)
            if event.kind == "bulk_wait":
                self.incomplete = min(self.incomplete, event.n)

    def write(self, event: Event) -> None:
        low = int(event.values["p"] if "p" in event.values else event.values["addr"])
        if any(a <= low < b for group in self.reading for a, b in group):
            self.report(
                "staging reuse",
                event.line,
                f"{event.text} writes a buffer that {len(self.reading)} store group(s) in flight may still read: "
                f"cp.async.bulk.wait_group.read {self.config.epi_stages - 1} is missing or does not cover this buffer",
            )
        elif any(a <= low < b for a, b in self.read_unannounced):
            self.report(
                "staging reuse", event.line, f"{event.text}: no named barrier since the wait for this buffer's store"
            )
        self.writes.append(_Write(low, event.line))

    def store(self, event: Event) -> None:
        low = int(event.values["src_mem"])
        high = low + self.facts.box_bytes(event)
        sources = [w for w in self.writes if low <= w.low < high]
        self.writes = [w for w in self.writes if not low <= w.low < high]
        if self.facts.maps[event.values["tmap"]].operand != "D":
            self.report("staging barrier", event.line, f"{event.text} writes an operand that is not D")
        if not sources:
            self.report("staging barrier", event.line, f"{event.text} stores a buffer that was not written for it")
        elif not all(w.fenced for w in sources):
            self.report(
                "proxy fence",
                event.line,
                f"{event.text} reads values staged in line {sources[0].line} without fence.proxy.async",
            )
        elif not all(w.shared for w in sources):
            self.report(
                "staging barrier",
                event.line,
                f"{event.text} starts without a named barrier after the fence: other warps may still be staging",
            )
        self.group.append((low, high))

    def end(self, line: int) -> None:
        if self.incomplete or self.group:
            self.report(
                "exit store wait", line, f"{self.incomplete} store group(s) may be in flight at exit: "
                "cp.async.bulk.wait_group 0 is missing"
            )  # fmt: skip


class Exchange(Check):
    """Split-K: when a consumer may send its part, add up those of the others, and let the next ones come."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.may_send = self.may_read = self.unannounced = self.summed = False
        self.owns = any(event.kind == "shared_read" for event in trace.events)

    def see(self, event: Event, slot: Slot | None) -> None:
        if event.kind == "mbarrier_wait" and slot and slot.ring == "sum2parts":
            self.may_send = True
        elif event.kind == "mbarrier_wait" and slot and slot.ring == "parts2sum":
            self.may_read = True
            if ".acquire.cluster" not in event.text:
                self.report("sum wait", event.line, f"{event.text} does not acquire in the cluster")
        elif event.kind == "remote_write":
            if not self.may_send:
                self.report("parts wait", event.line, f"{event.text} sends a part without a wait on sum2parts")
        elif event.kind == "shared_read":
            self.unannounced = self.summed = True
            if not self.may_read:
                self.report("sum wait", event.line, f"{event.text} reads a part without a wait on parts2sum")
        elif event.kind == "named_barrier":
            self.unannounced = False
        elif event.kind == "arrive" and slot and slot.ring == "sum2parts":
            self.release(event, slot)

    def release(self, event: Event, slot: Slot) -> None:
        if self.unannounced:
            self.report("sum release", event.line, f"{event.text} follows reads of parts without a named barrier")
        elif self.owns and not self.summed:
            self.report("sum release", event.line, f"{event.text} lets new parts come before these were read")
        if slot.rank == self.config.cluster_size - 1:  # the last of a round
            self.may_send = self.may_read = self.summed = False


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
        if event.kind == "mbarrier_wait" and slot:
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
        for name, operand in (("a_desc", "A"), ("b_desc", "B")):
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
        if slot.rank != 0:
            self.report(
                "accumulator release",
                event.line,
                f"{event.text} arrives on {slot} of CTA {slot.rank}, the leader waits",
            )
        self.finished.discard(slot.number)

    def end(self, line: int) -> None:
        self.uncommitted(line, True)
