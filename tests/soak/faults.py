"""Thousands of injected faults in a random mix, on invented devices: each must get its outcome, and no healthy trial
may suffer.

    python -m tests.soak.faults --faults 2000 --out results/soak/faults.json
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from db.database import Database
from kernels.artifacts import ArtifactStore
from tests.soak.report import hand_over
from tests.soak.studies import study_of, trials_of
from tests.tuner import support
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.faults import OUTCOME_OF, FaultKind, FaultPlan, Shows
from tuner.records import Outcome, State
from tuner.store import StudyRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.progress import StudyResult
    from tuner.records import Trial

TRIALS = 60
SHARE = 0.6  # of the candidates have a fault
BUSY_TIMEOUT_S, LOCK_S = 0.02, 0.08  # another writer holds the database for longer than a transaction waits
HEALTHY = frozenset({Outcome.MEASURED, Outcome.STOPPED_EARLY})
HARMLESS = frozenset({FaultKind.CHILD_KILLED, FaultKind.DISK_FULL, FaultKind.DATABASE_LOCKED})


def run_study(seed: int, sampler: str, trials: int = TRIALS) -> tuple[Counter[str], list[str]]:
    """One study with more than half of its candidates at fault, in a database of its own; faults by kind, and what was
    wrong. A study that a full disk ends is resumed, as a person would.
    """
    plan = FaultPlan(rates={kind: SHARE / len(FaultKind) for kind in FaultKind}, seed=seed)
    request = support.request(trials, sampler=sampler, seed=seed)
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-faults-") as name:
        file = Path(name) / "tuner.db"
        options = FakeOptions(faults=plan, lock_s=LOCK_S)
        with Database.open(f"sqlite:///{file}", busy_timeout_s=BUSY_TIMEOUT_S) as database:
            engine = FakeEngine(support.PROFILE, options=options, artifacts=ArtifactStore(Path(name)), database=file)
            study_id = study_of(database, request)
            recorder = StudyRecorder(database, study_id, request, engine.device)
            result = support.tune(request, engine, recorder=recorder)
            stops = 0
            while "no space left" in result.reason and stops < trials:
                stops += 1
                before = trials_of(database, study_id)
                result = support.tune(request, engine, recorder=recorder, resume_from=before)
            engine.close()
            stored = trials_of(database, study_id)
    injected = Counter(_name(plan, trial) for trial in stored)
    problems = [f"trial {trial.number}: {text}" for trial in stored if (text := _wrong(plan, trial))]
    problems += _wrong_study(plan, result, stored, trials)
    # Two of them in flight at once stop a study once.
    full = injected[FaultKind.DISK_FULL.value]
    if stops > full or bool(stops) != bool(full):
        problems.append(f"a full disk stopped the study {stops} times, for {full} such faults")
    return injected, [f"seed {seed}: {text}" for text in problems]


def _name(plan: FaultPlan, trial: Trial) -> str:
    fault = plan.of(trial.config.key)
    return fault.kind.value if fault else "healthy"


def _wrong(plan: FaultPlan, trial: Trial) -> str:
    """What is wrong with the end of a trial, or nothing."""
    fault = plan.of(trial.config.key)
    wanted = set(HEALTHY)
    if fault is not None and fault.shows is Shows.TRIAL:
        wanted = {OUTCOME_OF[fault.kind]}
    elif fault is not None and fault.shows is Shows.CERTIFYING:
        wanted.add(Outcome.CHECK_FAILED)
    elif fault is not None and fault.shows is Shows.FINAL:
        wanted.add(OUTCOME_OF[fault.kind])
    if trial.outcome not in wanted | {Outcome.REJECTED}:
        return f"{fault} became {trial.outcome}: {trial.reason}"
    return "" if trial.outcome in HEALTHY or trial.reason else f"{trial.outcome} without a reason"


def _wrong_study(plan: FaultPlan, result: StudyResult, stored: Sequence[Trial], trials: int) -> list[str]:
    problems = []
    counted = sum(trial.counts_against_budget for trial in result.trials)
    if result.state is not State.DONE or counted != trials:
        problems.append(f"{result.state} with {counted} trials: {result.reason}")
    if [trial.number for trial in stored] != list(range(len(result.trials))):
        problems.append(f"{len(stored)} trials are stored, {len(result.trials)} were run")
    winner = plan.of(result.winner.config.key) if result.winner else None
    if result.winner is None or (winner is not None and winner.kind not in HARMLESS):
        problems.append(f"the winner is {winner}")
    return problems


def run(faults: int, trials: int = TRIALS) -> dict[str, Any]:
    """Studies of so many trials until that many faults were injected."""
    began, seed = time.monotonic(), 0
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    total: Counter[str] = Counter()
    problems: list[str] = []
    while sum(total.values()) - total["healthy"] < faults:
        injected, found = run_study(seed, "tpe" if seed % 4 == 0 else "random", trials)
        total += injected
        problems += found
        seed += 1
    return {
        "studies": seed,
        "faults": sum(total.values()) - total["healthy"],
        "healthy_trials": total["healthy"],
        "by_kind": dict(sorted(total.items())),
        "problems": problems,
        "processes_left": [
            child.name() for child in psutil.Process().children(recursive=True) if child.pid not in before
        ],
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """0 when every fault got its outcome and nothing else suffered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = {
        "schema": 1,
        "command": f"python -m tests.soak.faults --faults {arguments.faults}",
        "environment": {"python": platform.python_version(), "engine": "fake", "database": "sqlite"},
        **run(arguments.faults),
    }
    hand_over(report, arguments.out)
    return 1 if report["problems"] or report["processes_left"] else 0


if __name__ == "__main__":
    sys.exit(main())
