"""Where a child is, how long it may stay there, and how a job ends that gets no reply."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.gpu.jobs import Phase, PhaseLimits

if TYPE_CHECKING:
    from tuner.gpu.wire import PhaseStarted
    from tuner.records import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """How a job ended without a reply.

    outcome: TIMED_OUT, CRASHED or OUT_OF_MEMORY
    reason: for people, without config, shape and GPU
    phase: where it happened
    subject: index of the candidate or build that was at work; None where none was
    gpu_s: seconds since the candidate's first phase began
    """

    outcome: Outcome
    reason: str
    phase: Phase
    subject: int | None
    gpu_s: float

    @property
    def is_candidates(self) -> bool:
        """Whether the candidate or build named by `subject` did it. Else nothing is said of any of them."""
        return self.phase.is_candidates and self.subject is not None


class Watch:
    """Where a child is, and since when."""

    def __init__(self, *, limits: PhaseLimits, phase: Phase = Phase.BASELINE) -> None:
        self._limits = limits
        self._candidate_since: float | None = None
        self.subject: int | None = None
        self.phase = phase
        self._deadline = time.monotonic() + limits.of(phase)

    def begin(self, started: PhaseStarted) -> None:
        """A phase begins now."""
        now = time.monotonic()
        self.phase, self.subject = started.phase, started.subject
        self._deadline = now + self._limits.of(started.phase)
        if started.phase.is_candidates and self._candidate_since is None:
            self._candidate_since = now

    def remaining_s(self) -> float:
        """Seconds left to the phase."""
        return self._deadline - time.monotonic()

    def fault(self, outcome: Outcome, reason: str) -> Fault:
        """A fault of what is at work now."""
        since = self._candidate_since
        gpu_s = 0.0 if since is None else time.monotonic() - since
        return Fault(outcome=outcome, reason=reason, phase=self.phase, subject=self.subject, gpu_s=gpu_s)
