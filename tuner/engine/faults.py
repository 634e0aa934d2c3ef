"""Faults that the fake engine injects into chosen configs, and how a study must come out of each."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class FaultKind(StrEnum):
    """Ways in which a candidate, its compiler, its worker or its machine can misbehave."""

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
    FAR_OUT_OF_BOUNDS = "writes far out of bounds, where no guard band sees it"
    NO_OP = "does nothing, quickly"
    FAST_AND_WRONG = "fast and wrong"
    LEAKS = "leaks memory"
    OUT_OF_MEMORY = "out of memory"
    INVALID_TIMING = "time below the physical limit"
    RACES_WHEN_STRESSED = "right at its own size, races in a stress build"
    CHILD_KILLED = "child killed from outside"
    DISK_FULL = "disk full while storing the artifact"
    DATABASE_LOCKED = "database locked by another writer"


class Shows(StrEnum):
    """Where a fault comes to light."""

    TRIAL = "in its trial"
    FINAL = "in the final"
    CERTIFYING = "in a check of the winner"
    NOWHERE = "in no outcome: it is not the candidate's"


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
    FaultKind.OUT_OF_BOUNDS: Outcome.WRONG_RESULT,
    FaultKind.NO_OP: Outcome.WRONG_RESULT,
    FaultKind.FAST_AND_WRONG: Outcome.WRONG_RESULT,
    FaultKind.LEAKS: Outcome.OUT_OF_MEMORY,
    FaultKind.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
    FaultKind.INVALID_TIMING: Outcome.INVALID_TIMING,
}
# The check of a winner that finds what its own product does not show.
CHECK_OF = {FaultKind.RACES_WHEN_STRESSED: "stress", FaultKind.FAR_OUT_OF_BOUNDS: "memcheck"}
COMPILE_FAULTS = frozenset(
    {
        FaultKind.COMPILE_SLEEPS,
        FaultKind.COMPILE_ABORTS,
        FaultKind.COMPILE_FORKS,
        FaultKind.SPILLS,
        FaultKind.DISK_FULL,
    }
)
IN_ONE_LAUNCH = frozenset({FaultKind.FAULTS, FaultKind.WRONG_RARELY})
# Verifying and timing a trial takes fewer launches; a final verifies with more, and takes more rounds.
TRIAL_LAUNCHES = 5_000
LAUNCHES = (1, 3, 17, 400, 20_000)
KILL_PHASES = (
    "compile",
    "start",
    "health",
    "baseline",
    "load",
    "first_launch",
    "verify",
    "measure",
    "final",
    "certify",
)
GPU_PHASES = frozenset(KILL_PHASES) - {"compile", "final", "certify"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    kind: what happens
    phase: of CHILD_KILLED, when: one of KILL_PHASES
    times: of CHILD_KILLED, DISK_FULL and DATABASE_LOCKED, how often it happens before the job goes through
    launch: of a fault in one launch, which one; one beyond TRIAL_LAUNCHES shows in the final
    """

    kind: FaultKind
    phase: str = "verify"
    times: int = 1
    launch: int = 3

    @property
    def shows(self) -> Shows:
        """Where it comes to light, if its config gets there."""
        if self.kind in CHECK_OF:
            return Shows.CERTIFYING
        if self.kind in IN_ONE_LAUNCH and self.launch > TRIAL_LAUNCHES:
            return Shows.FINAL
        return Shows.TRIAL if self.kind in OUTCOME_OF else Shows.NOWHERE


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
                return Fault(
                    kind=kind,
                    phase=_choice(KILL_PHASES, "phase", self.seed, config_key),
                    launch=_choice(LAUNCHES, "launch", self.seed, config_key),
                )
            draw -= rate
        return None


def _choice[Value](values: tuple[Value, ...], *parts: object) -> Value:
    return values[int(uniform(*parts) * len(values))]


def uniform(*parts: object) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class OtherWriter:
    """Another writer of a SQLite database, which takes its time between BEGIN IMMEDIATE and COMMIT."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._threads: list[threading.Thread] = []

    def hold(self, hold_s: float) -> None:
        """Hold the write lock for so long. Returns once it is held, or when somebody else holds it for longer."""
        held = threading.Event()
        thread = threading.Thread(target=self._write, args=(hold_s, held), name="other-writer", daemon=True)
        self._threads.append(thread)
        thread.start()
        held.wait()

    def close(self) -> None:
        """Wait until every lock is given back."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _write(self, hold_s: float, held: threading.Event) -> None:
        connection = sqlite3.connect(self._database, timeout=hold_s, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            held.set()
            threading.Event().wait(hold_s)
            connection.execute("COMMIT")
        except sqlite3.OperationalError:  # locked by the tuner itself, for longer than a transaction of ours takes
            pass
        finally:
            held.set()
            connection.close()
