"""What a trial costs besides the GPU: our own code with instant candidates, and compiling with two processes.

python -m tests.soak.trial_cost --trials 200 --compiles 16 --out results/host/trial_cost.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.samplers import TPESampler

from db import queries
from db.database import Database
from kernels.artifacts import ArtifactStore
from kernels.devices import profile_named
from kernels.problem import GemmProblem
from kernels.toolchain import find_toolchain
from search_space.request import Budget, TuneRequest
from search_space.space import random_legal
from tests.soak.report import hand_over
from tests.soak.studies import new_study
from tuner.engine.base import CompileJob
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.loop import tune_study
from tuner.store import StudyRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBLEM = GemmProblem.parse("4096x4096x4096")
PROFILE = profile_named("h200")


@contextlib.contextmanager
def time_in_optuna() -> Iterator[list[float]]:
    """Seconds of each suggestion of Optuna's TPE."""
    spent_s: list[float] = []
    suggest = TPESampler.sample_relative

    def timed(*arguments: Any, **named: Any) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            suggested: dict[str, Any] = suggest(*arguments, **named)
            return suggested
        finally:
            spent_s.append(time.perf_counter() - began)

    TPESampler.sample_relative = timed
    try:
        yield spent_s
    finally:
        TPESampler.sample_relative = suggest


def ms_a_trial(trials: int, sampler: str) -> dict[str, float]:
    """Wall time of one trial whose compile and measurement take no time: Optuna's, and ours.

    Ours is the loop, the sampler around Optuna, the list of legal configs and the database. The quickest of three
    studies, after a short one that imports what is imported once a process.
    """
    wall_s_of_study(12, sampler)
    runs = []
    for _ in range(3):
        with time_in_optuna() as spent_s:
            wall_s, count = wall_s_of_study(trials, sampler)
        runs.append(((wall_s - sum(spent_s)) / count, sum(spent_s) / count))
    own_s, optuna_s = min(runs)
    return {"own": round(1000 * own_s, 2), "optuna": round(1000 * optuna_s, 2)}


def wall_s_of_study(trials: int, sampler: str) -> tuple[float, int]:
    """Seconds of a study with instant compiles and measurements, and its trials."""
    request = TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=trials), sampler=sampler)
    engine = FakeEngine(PROFILE, options=FakeOptions())
    with tempfile.TemporaryDirectory() as folder, Database.open(f"sqlite:///{folder}/cost.db") as database:
        with database.write() as session:
            job = queries.create_job(session, request={}, mode="measure", studies=[new_study(request)])
            study_id = queries.studies_of_job(session, job.id)[0].id
        recorder = StudyRecorder(database, study_id, request, engine.device)
        began = time.perf_counter()
        result = tune_study(request, engine, recorder)
        wall_s = time.perf_counter() - began
    return wall_s, len(result.trials)


def compile_s_a_candidate(count: int, processes: int) -> dict[str, float]:
    """Wall seconds a candidate of a stream of random legal configs, through the product's own pool."""
    rng = random.Random(0)
    configs = [random_legal(PROBLEM, PROFILE, rng) for _ in range(count + processes)]
    with tempfile.TemporaryDirectory() as folder:
        options = LocalOptions(compile=CompilePoolOptions(processes=processes), gpus=False)
        machine = LocalMachine(options, ArtifactStore(Path(folder)))
        try:
            engine = machine.engine(PROFILE, live=False)
            jobs = [CompileJob(problem=PROBLEM, config=config, sm_count=PROFILE.sm_count) for config in configs]
            for future in [engine.compile(job) for job in jobs[:processes]]:  # starts the processes, imports tvm
                future.result()
            began = time.perf_counter()
            replies = [future.result() for future in [engine.compile(job) for job in jobs[processes:]]]
            wall_s = time.perf_counter() - began
        finally:
            machine.close()
    each = [reply.kernel.compile_s for reply in replies if reply.kernel is not None]
    return {"wall_s_a_candidate": round(wall_s / count, 3), "mean_compile_s": round(sum(each) / len(each), 3)}


def main() -> int:
    """Print, and write with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--compiles", type=int, default=16)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "schema": 1,
        "command": f"python -m tests.soak.trial_cost --trials {arguments.trials} --compiles {arguments.compiles}",
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "toolchain": find_toolchain().name,
        "ms_a_trial": {name: ms_a_trial(arguments.trials, name) for name in ("tpe", "random")},
        "compile": {"processes": arguments.processes, **compile_s_a_candidate(arguments.compiles, arguments.processes)},
    }
    hand_over(report, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
