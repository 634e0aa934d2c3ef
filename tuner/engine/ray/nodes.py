"""What the tuner knows of the nodes: what they offer, what they run, how healthy they are."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.engine.ray.plan import compile_slots, gpu_slots
from tuner.engine.ray.versions import of_labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuner.engine.ray.wire import NodeReport, NodeRow

FAILURES = 3  # health checks in a row after which a node is set aside
PASSES = 3  # health checks in a row after which it is used again; doubles each time it is set aside
MOST_PASSES = 96
KNOWN_MODULES = 4096
COMPILE = "compile"


@dataclass(slots=True)
class Node:
    """One node.

    row: what Ray says of it
    report: what its worker says of itself; None until it has answered
    aside: why nothing is sent to it; empty for one that is used
    permanent: whether it stays aside for as long as it is there
    suspect: whether Ray could not reach it for a job; it is asked how it is before it gets another one
    failures, passes: health checks in a row that failed, passed
    unfit: jobs in a row that it could not do
    running: jobs sent and not answered, by lane
    modules: hashes of modules that it has been seen to have
    checked_s: when the last health check was sent
    """

    row: NodeRow
    report: NodeReport | None = None
    aside: str = ""
    permanent: bool = False
    suspect: bool = False
    failures: int = 0
    passes: int = 0
    needed_passes: int = PASSES
    unfit: int = 0
    running: dict[str, int] = field(default_factory=dict)
    modules: OrderedDict[str, None] = field(default_factory=OrderedDict)
    checked_s: float = 0.0

    @property
    def name(self) -> str:
        """For messages."""
        return self.report.name if self.report else f"{self.row.address} ({self.row.node_id[:8]})"

    @property
    def usable(self) -> bool:
        """Whether jobs may be sent to it now."""
        return self.counts and not self.suspect

    @property
    def counts(self) -> bool:
        """Whether jobs may wait for it."""
        return self.report is not None and not self.aside

    @property
    def versions(self) -> dict[str, str]:
        """As its labels tell."""
        return of_labels(self.row.labels)

    def slots(self, lane: str) -> int:
        """Jobs of a lane that run there at a time."""
        return compile_slots(self.row.resources) if lane == COMPILE else gpu_slots(self.row.resources).get(lane, 0)

    def room(self, lane: str) -> int:
        """Jobs of a lane that may be sent now: those that run, and a few ahead so that no slot waits for the network.

        One measurement ahead for each GPU, one compile ahead for each four places.
        """
        slots = self.slots(lane)
        if not slots:
            return 0
        ahead = max(1, slots // 4) if lane == COMPILE else slots
        return slots + ahead - self.running.get(lane, 0)

    def load(self, lane: str) -> float:
        """Jobs sent for each slot."""
        return self.running.get(lane, 0) / self.slots(lane)

    def begin(self, lane: str) -> None:
        """A job was sent."""
        self.running[lane] = self.running.get(lane, 0) + 1

    def end(self, lane: str) -> None:
        """A job was answered, or is not waited for any more."""
        self.running[lane] = max(0, self.running.get(lane, 0) - 1)

    def has(self, sha256: str) -> bool:
        """Whether it has been seen to have a module."""
        return sha256 in self.modules

    def note_modules(self, hashes: Iterable[str]) -> None:
        """It has these now."""
        for sha256 in hashes:
            self.modules[sha256] = None
            self.modules.move_to_end(sha256)
        while len(self.modules) > KNOWN_MODULES:
            self.modules.popitem(last=False)

    def forget_modules(self, hashes: Iterable[str]) -> None:
        """It has these no more."""
        for sha256 in hashes:
            self.modules.pop(sha256, None)

    # ------------------------------------------------------------------ health

    def passed(self) -> bool:
        """A health check passed. True when the node is used again from now on."""
        self.failures = 0
        self.suspect = False
        self.passes += 1
        if not self.aside or self.permanent or self.passes < self.needed_passes:
            return False
        self.aside, self.unfit = "", 0
        return True

    def failed(self, reason: str) -> bool:
        """A health check failed. True when the node is to be set aside now."""
        self.failures += 1
        self.passes = 0
        return self.failures >= FAILURES and self._put_aside(f"{self.failures} health checks in a row failed: {reason}")

    def refused_job(self, reason: str) -> bool:
        """It could not do a job. True when the node is to be set aside now."""
        self.unfit += 1
        return self.unfit >= FAILURES and self._put_aside(f"{self.unfit} jobs in a row could not be done: {reason}")

    def put_aside_for_good(self, reason: str) -> None:
        """Nothing that it can do makes it fit."""
        self.aside, self.permanent = reason, True

    def _put_aside(self, reason: str) -> bool:
        if self.aside:
            return False
        self.aside = reason
        self.passes = 0
        self.needed_passes = min(MOST_PASSES, self.needed_passes * 2)
        return True
