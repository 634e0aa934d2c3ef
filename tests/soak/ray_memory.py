"""Whether a tuner's memory stays level over 200,000 trials in 4,000 studies on a real Ray cluster.

    python -m tests.soak.ray_memory --studies 4000 --trials 50 --out results/soak/ray_memory.json

One `tuner.service` process with its bridge, a head and 2 nodes, SQLite; devices are invented and finish at once. Random
search, because the sampler's own time is not what is looked at. Exit status 1 where the tuner or its bridge holds more
in the last quarter of the trials than in the second by more than the limit, or where a trial or a study is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import psutil
from sqlalchemy import func, select

from db import models, queries
from db.database import Database
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from tests.ray_cluster import LocalCluster
from tests.soak.ray_cost import SHAPES_USED, rss_mib
from tests.soak.ray_kills import SHAPES, Fleet
from tests.soak.report import hand_over, host
from tests.soak.studies import new_study
from tests.tuner.support import PROFILE

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKS = 40
MOST_GROWTH = 0.03  # of the mean of the second quarter: what an allocator does by itself
STUDIES_OF_JOB = 100


def submit(database: Database, studies: int, trials: int) -> None:
    """Queue so many studies, each with a seed of its own."""
    for first in range(0, studies, STUDIES_OF_JOB):
        new = [_study(number, trials) for number in range(first, min(studies, first + STUDIES_OF_JOB))]
        with database.write() as session:
            queries.create_job(session, request={}, mode="measure", studies=new)


def _study(number: int, trials: int) -> queries.NewStudy:
    m, n, k = SHAPES[number % SHAPES_USED]
    budget = Budget(trials=trials, wall_s=86_400.0)
    problem = GemmProblem(m=m, n=n, k=k)
    return new_study(TuneRequest(problem=problem, arch=PROFILE.arch.name, budget=budget, sampler="random", seed=number))


def memory_mib(process: psutil.Process) -> dict[str, float]:
    """Resident memory of a tuner and of its bridge."""
    bridges = [child for child in process.children(recursive=True) if "bridge" in " ".join(child.cmdline())]
    return {"tuner": rss_mib([process]), "bridge": rss_mib(bridges)}


def counts(database: Database) -> tuple[int, int]:
    """Finished studies, and trials."""
    with database.read() as session:
        done = session.scalar(select(func.count()).where(models.Study.finished_at.is_not(None)))
        return done or 0, session.scalar(select(func.count()).select_from(models.Trial)) or 0


def missing(database: Database, trials: int) -> int:
    """Studies with fewer trials than were asked, or with a number left out. Those that cost nothing are stored too."""
    stored = select(func.count().label("count"), func.max(models.Trial.number).label("last"))
    each = stored.group_by(models.Trial.study_id).subquery()
    with database.read() as session:
        whole = (each.c.count >= trials) & (each.c.count == each.c.last + 1)
        found = session.scalar(select(func.count()).select_from(each).where(whole)) or 0
        return (session.scalar(select(func.count()).select_from(models.Study)) or 0) - found


def watched(database: Database, fleet: Fleet, studies: int, max_seconds: float) -> Iterator[dict[str, Any]]:
    """Memory after each of LOOKS parts of the studies."""
    process = psutil.Process(fleet.processes["tuner"].pid)
    deadline_s, looked = time.monotonic() + max_seconds, 0
    while time.monotonic() < deadline_s and not fleet.dead():
        done, trials = counts(database)
        if done * LOOKS >= looked * studies:
            looked += 1
            row = {"studies": done, "trials": trials, **memory_mib(process)}
            print(json.dumps(row), flush=True)
            yield row
        if done == studies:
            return
        time.sleep(2.0)


def growth(rows: list[dict[str, Any]], name: str) -> float:
    """Memory in the last quarter of the trials over that in the second quarter, less one."""
    most = rows[-1]["trials"]
    second = [row[name] for row in rows if 0.25 * most <= row["trials"] <= 0.5 * most]
    last = [row[name] for row in rows if row["trials"] >= 0.75 * most]
    return float(round(mean(last) / mean(second) - 1, 4))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole soak; the report."""
    url = f"sqlite:///{folder / 'tuner.db'}"
    cluster = LocalCluster(folder, scale=0.0)
    fleet = Fleet(url, cluster.address, folder)
    with Database.open(url) as database:
        submit(database, options.studies, options.trials)
        try:
            cluster.start_head()
            for index in range(2):
                cluster.start_node(f"n{index}", devices=("NVIDIA H200",) * 4, compiles=8)
            with cluster.mending():  # as `gemm-tuner node` does: on a busy machine Ray may give up on a start
                cluster.wait_for(3)
            began_s = time.monotonic()
            fleet.start("tuner")
            rows = list(watched(database, fleet, options.studies, options.max_seconds))
            wall_s = time.monotonic() - began_s
        finally:
            fleet.close()
            cluster.close()
        done, trials = counts(database)
        lacking = missing(database, options.trials)
    grown = {name: growth(rows, name) for name in ("tuner", "bridge")}
    complete = done == options.studies and not lacking
    return {
        "schema": 1,
        "command": f"python -m tests.soak.ray_memory --studies {options.studies} --trials {options.trials}",
        "environment": {**host(), "engine": "ray, invented devices", "database": "sqlite"},
        "studies": done,
        "trials": trials,
        "studies_with_missing_trials": lacking,
        "wall_s": round(wall_s, 1),
        "trials_a_minute": round(trials / wall_s * 60),
        "growth_last_over_second_quarter": grown,
        "limit": MOST_GROWTH,
        "kept": complete and all(value <= MOST_GROWTH for value in grown.values()),
        "memory_mib": rows,
    }


def main() -> int:
    """0 where memory stayed level and nothing is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=4000)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--max-seconds", type=float, default=7200.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended in any case
    folder = Path(tempfile.mkdtemp(prefix="gemm-rm-", dir="/tmp"))  # paths of sockets must be short
    try:
        report = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hand_over(report, options.out)
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
