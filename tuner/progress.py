"""What a running study tells whoever watches, and what a finished one returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.records import Check, Environment, Evidence, Measurement, Outcome, Ratio, State, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A snapshot of a running study.

    phase: "search", then "final"
    trial: the trial that has just ended, if one has
    tried: trials that ended, whatever became of them
    counted: trials that count against the budget
    budget: counted trials asked for
    in_flight: trials being compiled or evaluated
    best: the fastest trial so far
    best_us: its time, predicted in mode model
    ratio: `cublaslt_best` (or the baseline there is) over the best so far
    wall_s: seconds spent so far, earlier runs of the study included
    left_s: estimate of the seconds left; None before there is anything to go by
    """

    phase: str
    trial: Trial | None
    tried: int
    counted: int
    budget: int
    in_flight: int
    best: Trial | None
    best_us: float | None
    ratio: Ratio | None
    wall_s: float
    left_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """How a study ended.

    state: DONE, PARTIAL, CANCELLED or FAILED
    reason: why it is not DONE, or what to know about the result; for people
    trials: all of them, by number
    winner: the chosen trial; None when there is none
    measurement: times that the winner was chosen by; None in mode model
    tie_set: numbers of the trials that the noise cannot tell from the best, winner first
    evidence: what stands behind the winner
    aa_ratio: the A/A pair of the final; None without a final
    noise: relative gap below which two finalists are equal
    environment: of the final, or of the device
    wall_s: seconds spent, earlier runs of the study included
    finals: times of all finalists, by trial number
    checks: of the winner beyond its own product; empty when none were made
    askable: configs worth asking about in the whole space
    """

    state: State
    reason: str
    trials: tuple[Trial, ...]
    winner: Trial | None
    measurement: Measurement | None
    tie_set: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    aa_ratio: Ratio | None = None
    noise: float = 0.0
    environment: Environment | None = None
    wall_s: float = 0.0
    finals: Mapping[int, Measurement] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    askable: int = 0

    @property
    def coverage(self) -> dict[str, int]:
        """How much of the space was looked at: configs worth asking about, asked, rejected, compiled, timed."""
        return {
            "askable": self.askable,
            "asked": len(self.trials),
            "rejected": sum(trial.outcome is Outcome.REJECTED for trial in self.trials),
            "compiled": sum(bool(trial.artifact_sha256) for trial in self.trials),
            "timed": sum(trial.measurement is not None for trial in self.trials),
        }

    @property
    def counts(self) -> dict[str, int]:
        """Trials by outcome."""
        return counts_by_outcome(self.trials)

    @property
    def best_us(self) -> float | None:
        """Median of the winner in us, predicted in mode model."""
        if self.measurement is not None:
            return self.measurement.median_us()
        return self.winner.time_us if self.winner else None


def counts_by_outcome(trials: Iterable[Trial]) -> dict[str, int]:
    """Trials by outcome, in the order in which outcomes are declared."""
    counted = Counter(trial.outcome for trial in trials)
    return {outcome.value: counted[outcome] for outcome in Outcome if counted[outcome]}


def vendor_ratio(measurement: Measurement | None) -> Ratio | None:
    """Ratio to the vendor library: `cublaslt_best` if it was measured, else `torch`, else none."""
    if measurement is None:
        return None
    for baseline in ("cublaslt_best", "torch"):
        if baseline in measurement.baselines_us:
            return measurement.ratio(baseline)
    return None
