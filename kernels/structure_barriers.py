"""Rules on mbarriers that hold for every thread: lifetime, phases, and who may fill a stage."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kernels.config import Sm100GemmConfig
from kernels.structure_facts import BARRIER_OPERAND, STARTS_AHEAD, Check, Facts, Report, Slot

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace


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
        elif event.kind in BARRIER_OPERAND:
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
        if event.kind in BARRIER_OPERAND and slot is None:
            operand = event.values[BARRIER_OPERAND[event.kind]]
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
        k_blocks, depth = self.facts.walk.trips(self.facts.walk.k_blocks, fetches=True), self.config.pipe_depth
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
