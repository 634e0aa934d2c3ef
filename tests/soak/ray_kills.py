"""A real Ray cluster of 3 nodes and 2 tuners on one PostgreSQL, with a node and a tuner killed again and again.

    python -m tests.soak.ray_kills --studies 60 --trials 50 --out results/soak/ray_kills.json [--max-seconds N]

Devices are invented, all else is real. The tuners have folders of their own, as on two machines. No finished trial may
be lost, changed or counted twice, and trials and winners must be those of the local engine for the same seeds. What a
study began with, starting configs and what `learned` had learned from the others by then, is noted with it, and the
local engine begins with the same. Exit status 3: the time was up before all were done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db import queries
from db.database import Database
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from tests.postgres import running as postgres_running
from tests.ray_cluster import LocalCluster
from tests.soak.report import hand_over, host
from tests.soak.studies import study_of
from tests.tuner.support import PROFILE
from tuner.engine.fake import FakeEngine
from tuner.learning import begin_search
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.progress import StudyResult

CUT_SHORT = 3
NODES = 3
TUNERS = 2
STUDIES_AT_A_TIME = 4  # of one tuner
# Small spaces, which are quickly listed.
SHAPES = [(m, n * 512, k * 1024) for m in (16, 32, 64) for n in (2, 3, 4, 5, 6) for k in (1, 2, 3, 4)]


def requests_of(studies: int, trials: int, samplers: Sequence[str]) -> list[TuneRequest]:
    """So many studies, each on a problem of its own, with the samplers taking turns."""
    return [
        TuneRequest(
            problem=GemmProblem(m=m, n=n, k=k),
            arch=PROFILE.arch.name,
            budget=Budget(trials=trials, wall_s=86_400.0),
            sampler=samplers[index % len(samplers)],
            seed=index,
        )
        for index, (m, n, k) in enumerate(SHAPES[:studies])
    ]


@dataclass(slots=True)
class Fleet:
    """The tuner processes."""

    url: str
    address: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start one, with a folder of its own."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *("nice", sys.executable, "-m", "tuner.service", "--engine", "ray", "--ray-address", self.address),
                    *("--database-url", self.url, "--artifacts-dir", str(home / "artifacts")),
                    *("--exports-dir", str(home / "exports")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "GEMM_TUNER_STUDIES": str(STUDIES_AT_A_TIME),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )

    def kill(self, name: str) -> None:
        """As a power cut of its machine."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def dead(self) -> list[str]:
        """Those that have ended by themselves."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def close(self) -> None:
        """End all."""
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)


class Watcher:
    """Looks at the database: a trial that was there once must stay as it was."""

    def __init__(self, url: str, ids: Sequence[str]) -> None:
        self._database = Database.open(url)
        self._ids = ids
        self._seen: dict[tuple[str, int], str] = {}
        self.problems: list[str] = []
        self.moves: dict[str, set[str]] = {}

    def look(self) -> int:
        """Studies that are done."""
        done = 0
        with self._database.read() as session:
            for study_id in self._ids:
                study = queries.study(session, study_id)
                assert study is not None
                done += study.finished_at is not None
                if study.owner:
                    self.moves.setdefault(study_id, set()).add(study.owner)
                now = {
                    row.number: json.dumps([row.config_key, row.outcome, row.median_us, row.finished_at.isoformat()])
                    for row in queries.trials_of_study(session, study_id)
                }
                self._compare(study_id, now)
        return done

    def _compare(self, study_id: str, now: dict[int, str]) -> None:
        for (other, number), saved in self._seen.items():
            if other == study_id and now.get(number) != saved:
                self.problems.append(f"trial {number} of {study_id} was {saved}, is {now.get(number, 'lost')}")
        self._seen.update({(study_id, number): text for number, text in now.items()})

    def check(self, study_id: str, request: TuneRequest, expected: StudyResult) -> None:
        """Trials, samples and winner against the local engine."""
        name = f"{request.problem} with {request.sampler}"
        with self._database.read() as session:
            study = queries.study(session, study_id)
            assert study is not None
            rows = queries.trials_of_study(session, study_id)
            samples = [row.trial_number for row in queries.measurements_of_study(session, study_id, phase="trial")]
        found = [(row.number, row.config_key, row.outcome) for row in rows]
        wanted = [(trial.number, trial.config.key, trial.outcome.value) for trial in expected.trials]
        if found != wanted:
            different = [pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]][:1]
            self.problems.append(f"{name}: {len(found)} trials, {len(wanted)} with the local engine; {different}")
        assert expected.winner is not None
        if (study.state, study.best_trial) != ("DONE", expected.winner.number):
            self.problems.append(f"{name}: {study.state} ({study.reason}), winner {study.best_trial}")
        measured = [row.number for row in rows if row.outcome in ("MEASURED", "STOPPED_EARLY")]
        if sorted(samples) != measured:
            self.problems.append(f"{name}: not one set of samples for each measured trial")

    def trials(self) -> int:
        """Rows of all studies."""
        with self._database.read() as session:
            return sum(len(queries.trials_of_study(session, study_id)) for study_id in self._ids)

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class Killer:
    """Kills a node and a tuner every so many seconds, and starts them again at once."""

    def __init__(self, cluster: LocalCluster, fleet: Fleet, *, node_every_s: float, tuner_every_s: float) -> None:
        self._cluster, self._fleet = cluster, fleet
        self._every_s = {"node": node_every_s, "tuner": tuner_every_s}
        began_s = time.monotonic()
        self._next_s = {what: began_s + every_s for what, every_s in self._every_s.items()}
        self._rng = random.Random(0)
        self.kills = {"node": 0, "tuner": 0}

    def now_and_then(self) -> None:
        """What is due."""
        for what, due_s in self._next_s.items():
            if time.monotonic() < due_s:
                continue
            self._next_s[what] = time.monotonic() + self._every_s[what]
            if what == "node":
                name = self._rng.choice(self._cluster.names)
                self._cluster.kill(name)
                self._cluster.start_node(name)
            else:
                name = self._rng.choice(sorted(self._fleet.processes))
                self._fleet.kill(name)
                self._fleet.start(name)
            self.kills[what] += 1


def expected_of(database: Database, study_id: str, request: TuneRequest) -> StudyResult:
    """What the local engine's invented devices make of the same request, begun with what was noted with the study."""
    engine = FakeEngine(PROFILE)
    with database.read() as session:
        study = queries.study(session, study_id)
    assert study is not None
    assert study.search is not None
    start = begin_search(database, study, request, engine.device, None)
    return tune_study(request, engine, MemoryRecorder(), starting=start.starting, model=start.model)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole soak; the report."""
    requests = requests_of(options.studies, options.trials, options.samplers.split(","))
    with postgres_running() as server:
        url = server.create("soak")
        with Database.open(url) as database:
            ids = [study_of(database, request) for request in requests]
        cluster = LocalCluster(folder, scale=options.scale)
        fleet = Fleet(url, cluster.address, folder)
        watcher = Watcher(url, ids)
        try:
            cluster.start_head()
            for index in range(NODES):
                cluster.start_node(f"n{index}")
            cluster.wait_for(NODES + 1)
            for index in range(TUNERS):
                fleet.start(f"tuner{index}")
            began_s = time.monotonic()
            killer, done = _until_done(options, cluster, fleet, watcher, len(ids))
            wall_s = time.monotonic() - began_s
        finally:
            fleet.close()
            cluster.close()
        if done == len(ids):
            with Database.open(url) as database:
                for study_id, request in zip(ids, requests, strict=True):
                    watcher.check(study_id, request, expected_of(database, study_id, request))
        report = _report(options, watcher, killer, done, wall_s)
        watcher.close()
        return report


def _until_done(
    options: argparse.Namespace, cluster: LocalCluster, fleet: Fleet, watcher: Watcher, studies: int
) -> tuple[Killer, int]:
    killer = Killer(cluster, fleet, node_every_s=options.node_every_s, tuner_every_s=options.tuner_every_s)
    deadline_s = time.monotonic() + options.max_seconds
    said_s = 0.0
    done = 0
    while done < studies and time.monotonic() < deadline_s:
        killer.now_and_then()
        for name in fleet.dead():
            watcher.problems.append(f"{name} ended by itself")
            fleet.start(name)
        done = watcher.look()
        if time.monotonic() - said_s > 15.0:
            said_s = time.monotonic()
            print(
                json.dumps({"done": done, "of": studies, "kills": killer.kills, "trials": watcher.trials()}), flush=True
            )
        time.sleep(1.0)
    return killer, done


def _report(options: argparse.Namespace, watcher: Watcher, killer: Killer, done: int, wall_s: float) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": f"python -m tests.soak.ray_kills --studies {options.studies} --trials {options.trials}"
        f" --samplers {options.samplers} --node-every-s {options.node_every_s:g}"
        f" --tuner-every-s {options.tuner_every_s:g} --scale {options.scale:g}",
        "environment": {**host(), "engine": "ray, invented devices", "database": "postgresql"},
        "nodes": NODES,
        "tuners": TUNERS,
        "studies": options.studies,
        "done": done,
        "trials": watcher.trials(),
        "kills": killer.kills,
        "studies_that_moved": sum(len(owners) > 1 for owners in watcher.moves.values()),
        "problems": watcher.problems,
        "wall_s": round(wall_s, 1),
    }


def main() -> int:
    """0 when all went as it must, 1 when not, 3 when the time was up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=60)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--samplers", default="tpe,learned")
    parser.add_argument("--node-every-s", type=float, default=20.0)
    parser.add_argument("--tuner-every-s", type=float, default=60.0)
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--max-seconds", type=float, default=1500.0)
    parser.add_argument("--keep", type=Path, help="folder for logs; default: a temporary one, removed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended in any case
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        report = run(options, options.keep)
    else:
        with tempfile.TemporaryDirectory(prefix="gemm-rk-", dir="/tmp") as folder:  # socket paths must be short
            report = run(options, Path(folder))
    hand_over(report, options.out)
    if report["problems"]:
        return 1
    return 0 if report["done"] == options.studies else CUT_SHORT


if __name__ == "__main__":
    sys.exit(main())
