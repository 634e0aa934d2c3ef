"""`kill -9` of the tuner at random moments: real processes, a real SQLite file, invented devices.

    python -m tests.soak.kills --kills 200 --out results/soak/kills.json [--max-seconds N]

In each round two studies, one with TPE and one with random search, are tuned by processes that are killed at random
moments, one after another, until both are done. No finished trial may be lost, changed or run twice, and trials,
winner and published result must be those of a run that nobody disturbed. The times of the invented devices depend on
config and seed alone, as recorded ones would. Cut short (exit status 3), the same command goes on with the next round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db import queries
from db.database import Database
from kernels.artifacts import ArtifactError, ArtifactStore, write_atomically
from kernels.config import config_from_dict
from search_space.request import Budget, TuneRequest
from tests.soak.report import hand_over
from tests.soak.studies import study_of
from tests.tuner.problems import KILL_PROBLEMS
from tests.tuner.support import PROFILE, fake
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.models import Study, Trial
    from tuner.progress import StudyResult

CUT_SHORT = 3
WAIT_S = 60.0
LIFE = (
    0.6  # of the time that both studies take undisturbed: a tuner is killed at a random moment within this part of it
)
FAKE_SCALE = 0.005  # seconds of the fake engine for each second of a real one
TRIALS = 24


class Nursery:
    """Starts tuner processes quickly (see tests.tuner.tuner_nursery) and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tuner.tuner_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "GEMM_TUNER_FAKE_SCALE": str(FAKE_SCALE),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )

    def start(self, settings: Settings) -> int:
        """Start a tuner; returns its process number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = ["--engine", "fake", "--database-url", settings.database_url]
        arguments += ["--artifacts-dir", str(settings.artifacts_dir), "--exports-dir", str(settings.exports_dir)]
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def await_ready(self) -> None:
        """Wait until starting a tuner is quick."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.end(self.start(_settings(folder)), signal.SIGKILL)

    def end(self, pid: int, number: signal.Signals) -> None:
        """Send a signal and wait until the process is gone."""
        os.kill(pid, number)
        deadline_s = time.monotonic() + WAIT_S
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline_s, "the process did not end"
            time.sleep(0.005)

    def close(self) -> None:
        """End the process that starts the others."""
        self._process.communicate()


def _settings(folder: Path) -> Settings:
    return Settings(
        database_url=f"sqlite:///{folder / 'tuner.db'}",
        artifacts_dir=folder / "artifacts",
        exports_dir=folder / "exports",
        engine="fake",
    )


def requests(seed: int) -> tuple[TuneRequest, ...]:
    """The two studies of a round."""
    arch, budget = PROFILE.arch.name, Budget(trials=TRIALS)
    return tuple(
        TuneRequest(problem=problem, arch=arch, budget=budget, sampler=sampler, seed=seed)
        for problem, sampler in zip(KILL_PROBLEMS, ("tpe", "random"), strict=True)
    )


def undisturbed(request: TuneRequest, study: Study) -> StudyResult:
    """The study as it goes when nobody kills its tuner: in one process and in memory.

    It begins with the configs that the study noted before its first trial: among them are winners of the other one.
    """
    assert study.search is not None
    starting = [config_from_dict(request.arch, knobs) for knobs in study.search["starting"]]
    return tune_study(request, fake(), MemoryRecorder(), starting=starting)


# ---------------------------------------------------------------------- one round


class Round:
    """Two studies in a database of their own."""

    def __init__(self, folder: Path, seed: int, nursery: Nursery, *, longest_life_s: float = 0.0) -> None:
        self.settings = _settings(folder)
        self._rng = random.Random(seed)
        self._longest_life_s = longest_life_s
        self._nursery = nursery
        self._requests = requests(seed)
        self._seen: dict[tuple[str, int], str] = {}
        self.moments: Counter[str] = Counter()
        self.problems: list[str] = []
        self.tuned_s = 0.0  # that the last tuner of the round took, which nobody killed

    @property
    def kills(self) -> int:
        """Tuners killed while they had something to do."""
        return sum(self.moments.values())

    def run(self, most: int) -> None:
        """Kill tuners until the studies are done, at most so many; then let them end."""
        with Database.open(self.settings.database_url) as database:
            ids = [study_of(database, one) for one in self._requests]
            while self.kills < most and not self._done(database, ids):
                self._kill_one(database, ids)
            tuner = self._nursery.start(self.settings)
            began_s = time.monotonic()
            while not self._done(database, ids) and time.monotonic() < began_s + WAIT_S:
                time.sleep(0.02)
            self.tuned_s = time.monotonic() - began_s
            self._nursery.end(tuner, signal.SIGTERM)
            self._look(database, ids)
            for study_id, request in zip(ids, self._requests, strict=True):
                self._compare(database, study_id, request)

    def _kill_one(self, database: Database, ids: Sequence[str]) -> None:
        tuner = self._nursery.start(self.settings)
        time.sleep(self._rng.uniform(0.0, self._longest_life_s))
        done_before = self._done(database, ids)
        self._nursery.end(tuner, signal.SIGKILL)
        if not done_before:
            self.moments[self._moment(database, ids)] += 1
        self._look(database, ids)

    def _done(self, database: Database, ids: Sequence[str]) -> bool:
        return all(self._study(database, study_id).state == "DONE" for study_id in ids)

    @staticmethod
    def _study(database: Database, study_id: str) -> Study:
        with database.read() as session:
            study = queries.study(session, study_id)
        assert study is not None
        return study

    def _moment(self, database: Database, ids: Sequence[str]) -> str:
        """Where the process was killed, as far as the database tells."""
        with database.read() as session:
            for study_id in ids:
                study = queries.study(session, study_id)
                assert study is not None
                if study.state == "RUNNING":
                    if queries.measurements_of_study(session, study_id, phase="final"):
                        return "between the final and the end of the study"
                    rows = queries.trials_of_study(session, study_id)
                    counted = sum(row.outcome in ("MEASURED", "STOPPED_EARLY") for row in rows)
                    if counted >= TRIALS:
                        return "between the last trial and the end of the final"
                    return "among the trials" if rows else "before the first trial"
        return "while no study was running"

    def _look(self, database: Database, ids: Sequence[str]) -> None:
        """Everything that was saved before must still be there, unchanged: run again, it would have another time."""
        now = {
            (study_id, row.number): json.dumps(
                [row.config_key, row.outcome, row.median_us, row.finished_at.isoformat()]
            )
            for study_id in ids
            for row in self._trials(database, study_id)
        }
        for key, saved in self._seen.items():
            if now.get(key) != saved:
                self.problems.append(f"trial {key[1]} was {saved}, is {now.get(key, 'lost')}")
        self._seen = now

    @staticmethod
    def _trials(database: Database, study_id: str) -> Sequence[Trial]:
        with database.read() as session:
            return queries.trials_of_study(session, study_id)

    def _compare(self, database: Database, study_id: str, request: TuneRequest) -> None:
        """Trials, winner and published result against the undisturbed run."""
        study, problem = self._study(database, study_id), request.problem
        if study.search is None:
            self.problems.append(f"{request.sampler}: never begun")
            return
        name, whole = request.sampler, undisturbed(request, study)
        rows = self._trials(database, study_id)
        found = [(row.number, row.config_key, row.outcome) for row in rows]
        wanted = [(trial.number, trial.config.key, trial.outcome.value) for trial in whole.trials]
        if found != wanted:
            self.problems.append(f"{name}: {len(found)} trials differ from the {len(wanted)} of an undisturbed run")
        if whole.winner is None or (study.state, study.best_trial) != ("DONE", whole.winner.number):
            self.problems.append(f"{name}: {study.state}, winner {study.best_trial}, not {whole.winner}")
            return
        with database.read() as session:
            results = queries.results_exact(
                session, problem.m, problem.n, problem.k, problem.dtype.value, problem.layout.value
            )
            samples = queries.measurements_of_study(session, study_id, phase="trial")
        published = [(result.revision, result.config) for result in results]
        if published != [(1, whole.winner.config.to_dict())]:
            self.problems.append(f"{name}: published are {published}")
        measured = [row.number for row in rows if row.outcome in ("MEASURED", "STOPPED_EARLY")]
        if sorted(row.trial_number for row in samples) != measured:
            self.problems.append(f"{name}: not one set of samples for each measured trial")
        self._check_artifacts(rows, {str(result.artifact_sha256) for result in results})

    def _check_artifacts(self, rows: Sequence[Trial], published: set[str]) -> None:
        """What a revision names is there, and what is there is whole: modules that lost may have been removed."""
        store = ArtifactStore(self.settings.artifacts_dir)
        kept = {row.artifact_sha256 for row in rows if row.artifact_sha256 and store.path(row.artifact_sha256).exists()}
        for sha256 in sorted(kept | published):
            try:
                store.read(sha256)
            except ArtifactError as error:
                self.problems.append(f"module of the study: {error}")


# ---------------------------------------------------------------------- many rounds


def run_round(seed: int, most: int, nursery: Nursery, longest_life_s: float = 0.0) -> dict[str, Any]:
    """One round with at most so many kills."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-kills-") as folder:
        one = Round(Path(folder), seed, nursery, longest_life_s=longest_life_s)
        one.run(most)
    return {
        "seed": seed,
        "kills": one.kills,
        "moments": dict(sorted(one.moments.items())),
        "problems": one.problems,
        "tuned_s": round(one.tuned_s, 2),
        "wall_s": round(time.monotonic() - began, 1),
    }


def longest_life_s(nursery: Nursery) -> float:
    """How long a tuner may live on this machine, from a round in which none is killed."""
    nursery.await_ready()
    return LIFE * float(run_round(0, 0, nursery)["tuned_s"])


def report_of(rounds: Sequence[dict[str, Any]], kills: int) -> dict[str, Any]:
    """All rounds together."""
    moments: Counter[str] = Counter()
    for one in rounds:
        moments.update(one["moments"])
    return {
        "schema": 1,
        "command": f"python -m tests.soak.kills --kills {kills}",
        "environment": {"python": platform.python_version(), "engine": "fake", "database": "sqlite"},
        "kills": sum(one["kills"] for one in rounds),
        "moments": dict(sorted(moments.items())),
        "rounds": len(rounds),
        "studies": {"tpe": len(rounds), "random": len(rounds)},
        "problems": [f"round {one['seed']}: {text}" for one in rounds for text in one["problems"]],
        "wall_s": round(sum(one["wall_s"] for one in rounds), 1),
    }


def main() -> int:
    """0 when all went as it must, 1 when not, 3 when the time was up: run it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-seconds", type=float, default=3600.0)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    state: Path = arguments.out.with_suffix(".state.json")
    rounds: list[dict[str, Any]] = json.loads(state.read_text()) if state.exists() else []
    deadline_s = time.monotonic() + arguments.max_seconds
    nursery = Nursery()
    life_s = longest_life_s(nursery)
    try:
        while (left := arguments.kills - sum(one["kills"] for one in rounds)) > 0:
            if time.monotonic() > deadline_s:
                print("time is up: run the same command again")
                return CUT_SHORT
            rounds.append(run_round(len(rounds), left, nursery, life_s))
            write_atomically(state, json.dumps(rounds).encode())
            print(json.dumps(rounds[-1]), flush=True)
    finally:
        nursery.close()
    report = report_of(rounds, arguments.kills)
    hand_over(report, arguments.out)
    state.unlink()
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
