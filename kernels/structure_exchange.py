"""Rules on parts of K that meet in the shared memory of a cluster, the same on both architectures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kernels.cuda_trace import CLUSTER_WINDOW
from kernels.structure_facts import Check, Facts, Report, Slot

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace

EXCHANGE_RINGS = frozenset({"parts2sum", "sum2parts"})  # they hand over no tensor memory


def is_part_read(event: Event) -> bool:
    """Whether an instruction reads a part of a sum, into floats. Other reads: the TMEM address, copied operands."""
    return event.kind == "shared_read" and bool(event.registers)


class Exchange(Check):
    """Split-K: when a consumer may send its part, add up those of the others, and let the next ones come."""

    def __init__(self, facts: Facts, trace: Trace, report: Report) -> None:
        super().__init__(facts, trace, report)
        self.may_send = self.may_read = self.unannounced = self.summed = False
        self.owns = any(is_part_read(event) for event in trace.events)

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
        elif is_part_read(event):
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


def check_parts(followed: tuple[Trace, ...], report: Report) -> None:
    """What is sent to each CTA, and what it reads: the same addresses, equally often, by threads of one number."""
    sent: Counter[tuple[int, int, int]] = Counter()
    read: Counter[tuple[int, int, int]] = Counter()
    lines = {}
    for trace in followed:
        for event in trace.events:
            if event.kind != "remote_write" and not is_part_read(event):
                continue
            window, address = divmod(int(event.values["addr"]), CLUSTER_WINDOW)
            owner = window - 1 if window else trace.rank
            place = (owner, trace.threads[0], address)
            (sent if event.kind == "remote_write" else read)[place] += 1
            lines[place] = event.line
    for place in sorted(sent.keys() | read.keys()):
        if sent[place] != read[place]:
            owner, _thread, address = place
            message = f"address {address} of CTA {owner} is written {sent[place]} and read {read[place]} times"
            report("parts place", lines[place], message)
