"""The same job run three times on a real GPU: does each winner lie in the tie sets of the other two?

    python -m tests.soak.equal_jobs OUT_DIR

Each run is a whole study with the product's own loop and engine; what it learns stays in memory. The samplers of
`--samplers` take turns. As in a service, each run knows the winner of the one before, and its sampler hears the times
of the first run, so that all ask the same configs: only the clock can make a difference. The checks beyond the product
(stress builds, memcheck) are left out: they say nothing about time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.artifacts import ArtifactStore
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from tests.soak.on_gpu import Json, say
from tests.soak.report import write_json
from tuner.engine.base import CertifyReply
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.local import LocalEngine, LocalMachine, LocalOptions
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from tuner.engine.base import CertifyJob
    from tuner.progress import StudyResult
    from tuner.records import Trial

SHAPE, TRIALS, RUNS = "128x4096x7168", 30, 3


def uncertified(_: CertifyJob) -> Future[CertifyReply]:
    """No checks."""
    done: Future[CertifyReply] = Future()
    done.set_result(CertifyReply(checks=()))
    return done


def main() -> int:
    """0 when each winner lies in the tie sets of the other runs of its sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--shape", default=SHAPE, metavar="MxNxK")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--samplers", nargs="+", default=("random", "tpe"))
    parser.add_argument("--limit-s", type=float, default=120.0, help="start no run after this time")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.limit_s
    pool = CompilePoolOptions(processes=min(16, os.cpu_count() or 1))
    machine = LocalMachine(LocalOptions(compile=pool), ArtifactStore(options.out_dir / "modules"))
    try:
        if not machine.gpus:
            raise SystemExit("no supported GPU is visible: run this where there is one")
        engine = machine.engine(machine.gpus[0].profile, live=True)
        engine.certify = uncertified  # type: ignore[method-assign, assignment]
        rows = []
        for sampler in options.samplers:
            rows.append(three(sampler, options.shape, options.trials, engine, deadline_s))
            say(json.dumps({name: value for name, value in rows[-1].items() if name != "runs"}))
            environment = engine.device.environment
            report = {
                "schema": 1,
                "command": f"python -m tests.soak.equal_jobs OUT_DIR --shape {options.shape} --trials {options.trials}",
                "environment": environment.to_dict() if environment else None,
                "rows": rows,
            }
            write_json(options.out_dir / "equal_jobs.json", report)
    finally:
        machine.close()
    return 0 if all(row["met"] for row in rows) else 1


def three(sampler: str, shape: str, trials: int, engine: LocalEngine, deadline_s: float) -> Json:
    """The runs of one sampler."""
    request = TuneRequest(
        problem=GemmProblem.parse(shape, dtype="bf16"),
        arch=engine.device.profile.arch.name,
        budget=Budget(trials=trials, wall_s=300.0),
        sampler=sampler,
    )
    runs: list[Json] = []
    previous: GemmConfig | None = None
    first: tuple[Trial, ...] = ()
    for number in range(RUNS):
        if time.monotonic() > deadline_s:
            break
        began = time.monotonic()
        result = tune_study(request, engine, MemoryRecorder(), previous_winner=previous, told_before=first)
        first = first or result.trials
        runs.append(_run(result, time.monotonic() - began))
        say(f"{sampler} run {number}: {json.dumps({k: v for k, v in runs[-1].items() if k != 'tie_set'})}")
        previous = result.winner.config if result.winner else None
    mutual = [[one["winner"] in other["tie_set"] for other in runs] for one in runs]
    return {
        "sampler": sampler,
        "shape": shape,
        "trials": trials,
        "winners": len({run["winner"] for run in runs}),
        "winner_in_tie_set_of": mutual,
        "met": len(runs) == RUNS and all(all(row) for row in mutual),
        "runs": runs,
    }


def _run(result: StudyResult, wall_s: float) -> Json:
    keys = {trial.number: trial.config.key for trial in result.trials}
    return {
        "state": result.state.value,
        "reason": result.reason,
        "winner": result.winner.config.key if result.winner else None,
        "median_us": result.best_us,
        "ratio": {name: ratio.to_dict() for name, ratio in result.measurement.ratios().items()}
        if result.measurement
        else {},
        "aa_ratio": result.aa_ratio.to_dict() if result.aa_ratio else None,
        "finalists": len(result.finals),
        "trials": len(result.trials),
        "wall_s": round(wall_s, 1),
        "tie_set": [keys[number] for number in result.tie_set],
    }


if __name__ == "__main__":
    sys.exit(main())
