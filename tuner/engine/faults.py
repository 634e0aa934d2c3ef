"""Faults as data: which candidate misbehaves, and how. Only the fake engine reads them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping


class FaultKind(StrEnum):
    """Ways in which a candidate, its compiler or its worker can misbehave."""

    COMPILE_SLEEPS = "compile sleeps"
    COMPILE_ABORTS = "compile aborts"
    COMPILE_FORKS = "compile forks children that sleep"
    SPILLS = "spills"
    HANGS = "kernel never returns"
    FAULTS = "illegal address at launch n"
    WRONG_ELEMENT = "wrong in one element"
    WRONG_RARELY = "wrong rarely"
    NONDETERMINISTIC = "differs from launch to launch"
    READS_OUTPUT = "reads its output"
    OUT_OF_BOUNDS = "writes out of bounds"
    NO_OP = "does nothing, quickly"
    FAST_AND_WRONG = "fast and wrong"
    LEAKS = "leaks memory"
    OUT_OF_MEMORY = "out of memory"
    INVALID_TIMING = "time below the physical limit"
    RACES_WHEN_STRESSED = "right at its own size, races in a stress build"
    CHILD_KILLED = "child killed from outside"
    DISK_FULL = "disk full while storing the artifact"


# CHILD_KILLED, DISK_FULL and RACES_WHEN_STRESSED are missing: the first is tried again, the second ends the study, the
# third shows only when a winner is checked.
OUTCOME_OF: dict[FaultKind, Outcome] = {
    FaultKind.COMPILE_SLEEPS: Outcome.TIMED_OUT,
    FaultKind.COMPILE_ABORTS: Outcome.COMPILE_FAILED,
    FaultKind.COMPILE_FORKS: Outcome.TIMED_OUT,
    FaultKind.SPILLS: Outcome.SPILLED,
    FaultKind.HANGS: Outcome.TIMED_OUT,
    FaultKind.FAULTS: Outcome.CRASHED,
    FaultKind.WRONG_ELEMENT: Outcome.WRONG_RESULT,
    FaultKind.WRONG_RARELY: Outcome.NONDETERMINISTIC,
    FaultKind.NONDETERMINISTIC: Outcome.NONDETERMINISTIC,
    FaultKind.READS_OUTPUT: Outcome.WRONG_RESULT,
    FaultKind.OUT_OF_BOUNDS: Outcome.CHECK_FAILED,
    FaultKind.NO_OP: Outcome.WRONG_RESULT,
    FaultKind.FAST_AND_WRONG: Outcome.WRONG_RESULT,
    FaultKind.LEAKS: Outcome.OUT_OF_MEMORY,
    FaultKind.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
    FaultKind.INVALID_TIMING: Outcome.INVALID_TIMING,
}
COMPILE_FAULTS = frozenset(
    {
        FaultKind.COMPILE_SLEEPS,
        FaultKind.COMPILE_ABORTS,
        FaultKind.COMPILE_FORKS,
        FaultKind.SPILLS,
        FaultKind.DISK_FULL,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    kind: what happens
    phase: of CHILD_KILLED, when: "compile", "load", "first_launch", "verify", "measure" or "final"
    times: of CHILD_KILLED, how often it happens before the job goes through
    launch: of a fault in one launch, which one
    """

    kind: FaultKind
    phase: str = "verify"
    times: int = 1
    launch: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """Who gets which fault: the same for the same config on every run.

    by_key: fault of a config, by its key
    rates: probability of each fault for the configs that `by_key` does not name; their sum is at most 1
    seed: of the draw
    """

    by_key: Mapping[str, Fault] = field(default_factory=dict)
    rates: Mapping[FaultKind, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if sum(self.rates.values()) > 1 + 1e-9:
            raise ValueError(f"fault rates add up to {sum(self.rates.values()):g}, more than 1")

    def of(self, config_key: str) -> Fault | None:
        """The fault of this config, or None for a healthy one."""
        if config_key in self.by_key:
            return self.by_key[config_key]
        draw = uniform("fault", self.seed, config_key)
        for kind, rate in self.rates.items():
            if draw < rate:
                return Fault(kind=kind, phase=_phase_of(self.seed, config_key))
            draw -= rate
        return None


KILL_PHASES = ("compile", "load", "first_launch", "verify", "measure")


def _phase_of(seed: int, config_key: str) -> str:
    return KILL_PHASES[int(uniform("phase", seed, config_key) * len(KILL_PHASES))]


def uniform(*parts: object) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
