"""Thousands of injected faults in a random mix, on invented devices: each must get its outcome, and no healthy trial
may suffer.

    python -m tests.soak.faults --faults 2000 --out results/soak/faults.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from kernels.artifacts import write_atomically
from tests.tuner.support import fake, request, tune
from tuner.engine.faults import OUTCOME_OF, FaultKind, FaultPlan
from tuner.records import Outcome, State

KINDS = (*OUTCOME_OF, FaultKind.CHILD_KILLED, FaultKind.RACES_WHEN_STRESSED)
SHOWS_LATER = (FaultKind.CHILD_KILLED, FaultKind.RACES_WHEN_STRESSED)  # the trial itself ends normally
HEALTHY = (Outcome.MEASURED, Outcome.STOPPED_EARLY)
TRIALS = 60


def run_study(seed: int, sampler: str) -> tuple[Counter[str], list[str]]:
    """One study with more than half of its candidates at fault; faults by kind, and what was wrong."""
    plan = FaultPlan(rates={kind: 0.6 / len(KINDS) for kind in KINDS}, seed=seed)
    result = tune(request(TRIALS, sampler=sampler, seed=seed), fake(faults=plan))
    injected: Counter[str] = Counter()
    problems = []
    for trial in result.trials:
        fault = plan.of(trial.config.key)
        injected[fault.kind.value if fault else "healthy"] += 1
        normal = fault is None or fault.kind in SHOWS_LATER
        wanted = HEALTHY if normal else (OUTCOME_OF[fault.kind],) if fault else ()
        if trial.outcome not in (*wanted, Outcome.REJECTED):
            problems.append(f"seed {seed}, trial {trial.number}: {fault} became {trial.outcome}: {trial.reason}")
        if trial.outcome not in HEALTHY and not trial.reason:
            problems.append(f"seed {seed}, trial {trial.number}: no reason")
    counted = sum(trial.outcome.counts_against_budget for trial in result.trials)
    if result.state is not State.DONE or counted != TRIALS:
        problems.append(f"seed {seed}: {result.state} with {counted} trials: {result.reason}")
    winner = plan.of(result.winner.config.key) if result.winner else None
    if result.winner is None or (winner is not None and winner.kind is not FaultKind.CHILD_KILLED):
        problems.append(f"seed {seed}: the winner is {winner}")
    return injected, problems


def run(faults: int) -> dict[str, Any]:
    """Studies until that many faults were injected."""
    began, seed = time.monotonic(), 0
    total: Counter[str] = Counter()
    problems: list[str] = []
    while sum(total.values()) - total["healthy"] < faults:
        injected, found = run_study(seed, "tpe" if seed % 4 == 0 else "random")
        total += injected
        problems += found
        seed += 1
    return {
        "studies": seed,
        "faults": sum(total.values()) - total["healthy"],
        "healthy_trials": total["healthy"],
        "by_kind": dict(sorted(total.items())),
        "problems": problems,
        "processes_left": [child.name() for child in psutil.Process().children(recursive=True)],
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
        "environment": {"python": platform.python_version(), "engine": "fake"},
        **run(arguments.faults),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.out, (text + "\n").encode())
    return 1 if report["problems"] or report["processes_left"] else 0


if __name__ == "__main__":
    sys.exit(main())
