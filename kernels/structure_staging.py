"""Rules on the way from registers through staging buffers to TMA stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.config import Sm100GemmConfig
from kernels.problem import ELEMENT_BYTES
from kernels.resources import HEADER_BYTES
from kernels.structure_facts import Check, Facts, Report, Slot

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace


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
            spans = [self.written_by_storer(low, high) for low, high in self.group]
            self.writes = [w for w in self.writes if not any(a <= w.low < b for a, b in spans)]
            self.reading.append(self.group)
            self.group = []
            self.incomplete += 1
        elif event.kind in ("bulk_wait_read", "bulk_wait"):
            while len(self.reading) > event.n:
                self.read_unannounced += self.reading.pop(0)
            if event.kind == "bulk_wait":
                self.incomplete = min(self.incomplete, event.n)

    def written_by_storer(self, low: int, high: int) -> tuple[int, int]:
        """Bytes in which the thread that stores this box has to have staged something itself.

        Its own lane of a transposed tile (swap_ab) may lie in another box of the same buffer.
        """
        config = self.config
        if not isinstance(config, Sm100GemmConfig) or not config.swap_ab:
            return low, high
        size = ELEMENT_BYTES * config.blk_m * config.epi_n
        start = HEADER_BYTES + config.pipe_depth * config.stage_bytes
        first = start + (low - start) // size * size
        return first, first + size

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
        first, last = self.written_by_storer(low, high)
        sources = [w for w in self.writes if first <= w.low < last]
        if (first, last) == (low, high):
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
