"""Clients that use a service of invented devices as people and programs do, all at once; used by `tests.soak.load`.

Each client goes round: submit (sometimes the same request twice under one key, sometimes to be cancelled), poll to the
end, ask for the best (one shape, many, a table), list, order a bundle and download it. Afterwards the database is
compared with what the clients were told.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from db import queries
from db.database import Database
from db.models import FINAL_STATES, Job
from kernels.devices import profile_named
from tests.cli.conftest import free_port
from tuner.bundle import load_bundle
from tuner.client import Client, ClientError
from tuner.engine.fake import fake_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Session

START_S = 120.0
DRAIN_S = 300.0
PAUSE_S = (0.05, 0.5)  # between two steps of a client
SHAPES = tuple((m, n, k) for m in (16, 64, 100, 256, 1024, 4096) for n, k in ((4096, 4096), (1536, 2048), (512, 512)))
DEVICES = ("h200", "h100", "b200")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much load, and for how long.

    clients: at work at the same time
    seconds: until the last round begins
    seed: of what they do
    """

    clients: int
    seconds: float
    seed: int = 0


@dataclass(slots=True)
class Told:
    """What the clients were told. Shared by all of them.

    jobs: id of each job by the key that it was posted with
    steps: calls by what they did
    statuses: answers that were errors, by status and name
    problems: what no client should see
    """

    jobs: dict[str, str] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, step: str) -> None:
        """Count a step."""
        with self.lock:
            self.steps[step] += 1

    def problem(self, text: str) -> None:
        """Something that must not be."""
        with self.lock:
            self.problems.append(text[:400])


class LoadClient(threading.Thread):
    """One client."""

    def __init__(self, number: int, url: str, limits: Limits, told: Told, folder: Path) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._number, self._limits, self._told, self._folder = number, limits, told, folder
        self._client = Client(url, timeout_s=60.0)
        self._rng = random.Random(f"{limits.seed} {number}")
        self._round = 0

    def run(self) -> None:
        """Rounds until the time is over."""
        end = time.monotonic() + self._limits.seconds
        while time.monotonic() < end:
            try:
                self._one_round()
            except ClientError as error:
                with self._told.lock:
                    self._told.statuses[f"{error.status} {error.error}"] += 1
                if error.status == 0 or error.status >= 500:
                    self._told.problem(f"client {self._number}: {error.status} {error.error}: {error}")
            except Exception as error:  # a client that falls silent would look like one that is content
                self._told.problem(f"client {self._number}: {type(error).__name__}: {error}")
            self._round += 1
        self._client.close()

    def _one_round(self) -> None:
        device = self._rng.choice(DEVICES)
        shapes = self._rng.sample(SHAPES, self._rng.randint(1, 3))
        job_id = self._submit(device, shapes)
        cancel = self._rng.random() < 0.2
        if cancel:
            self._pause()
            self._client.cancel(job_id)
            self._told.note("cancel")
        job = self._poll(job_id)
        # Jobs name a real device; the one that serves it is invented and says so.
        invented = fake_device(profile_named(device)).name
        self._ask(invented, shapes)
        if job["state"] == "DONE" and self._rng.random() < 0.5:
            self._export(invented, shapes[0])

    def _submit(self, device: str, shapes: list[tuple[int, int, int]]) -> str:
        key = f"{self._number}-{self._round}"
        body = {
            "problems": [{"m": m, "n": n, "k": k} for m, n, k in shapes],
            "device": device,
            "mode": self._rng.choice(("measure", "model")),
            "budget": {"trials": self._rng.randint(2, 8), "wall_s": 60},
            "seed": self._rng.randint(0, 3),
            "force": self._rng.random() < 0.1,
        }
        ids = {self._client.submit_job(body, idempotency_key=key)["id"] for _ in range(self._rng.randint(1, 2))}
        self._told.note("submit")
        if len(ids) != 1:
            self._told.problem(f"key {key} made the jobs {ids}")
        with self._told.lock:
            self._told.jobs[key] = next(iter(ids))
        return next(iter(ids))

    def _poll(self, job_id: str) -> Any:
        while (job := self._client.job(job_id))["state"] not in FINAL_STATES:
            self._told.note("poll")
            self._pause()
        return job

    def _ask(self, device: str, shapes: list[tuple[int, int, int]]) -> None:
        m, n, k = shapes[0]
        try:
            self._client.best(m=m, n=n, k=k, device=device, evidence="modeled")
        except ClientError as error:
            if error.status != 404:
                raise
        self._client.best_many([{"m": m, "n": n, "k": k} for m, n, k in SHAPES], device=device, evidence="modeled")
        self._client.dispatch(n=n, k=k, device=device, evidence="modeled")
        self._client.results(limit=20)
        self._client.jobs(limit=20)
        self._told.note("ask")
        self._pause()

    def _export(self, device: str, shape: tuple[int, int, int]) -> None:
        m, n, k = shape
        best = self._client.best(m=m, n=n, k=k, device=device, evidence="modeled")
        if best["result_id"] is None:
            return
        order = self._client.create_export([best["result_id"]], allow_unverified=True)
        done = self._client.wait_export(order["id"], timeout_s=120)
        path = self._client.download_bundle(done["id"], self._folder / f"{self._number}.zip")
        load_bundle(path)
        self._told.note("export")

    def _pause(self) -> None:
        time.sleep(self._rng.uniform(*PAUSE_S))


@contextmanager
def serving(home: Path, log: Path) -> Iterator[tuple[str, int]]:
    """`gemm-tuner serve` with invented devices that cost no time; gives its address and process id."""
    port = free_port()
    environment = os.environ | {
        "GEMM_TUNER_HOME": str(home),
        "GEMM_TUNER_FAKE_SCALE": "0",
        "GEMM_TUNER_STUDIES": "4",
        "GEMM_TUNER_COMPILE_PROCESSES": "2",
    }
    command = [sys.executable, "-m", "tuner.cli.main", "serve", "--port", str(port), "--engine", "fake"]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    with Client(url, timeout_s=5.0) as client:
        while True:
            try:
                client.health()
            except ClientError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the service did not start: {log.read_text()[-800:]}") from None
                time.sleep(0.2)
            else:
                return


def run_clients(limits: Limits) -> dict[str, Any]:
    """Everything in one object; `kept` is whether nothing was lost, doubled or refused that should not be."""
    told = Told()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home, log = folder / "home", folder / "log"
        with serving(home, log) as (url, pid):
            clients = [LoadClient(number, url, limits, told, folder) for number in range(limits.clients)]
            began = time.monotonic()
            for client in clients:
                client.start()
            for client in clients:
                client.join(limits.seconds + DRAIN_S)
            wall_s = time.monotonic() - began
            stuck = [client.name for client in clients if client.is_alive()]
            peak_mib = _memory_mib(pid)
        text = log.read_text(errors="replace")
        stored = _compare(home, told)
    locked = text.count("database is locked")
    server_errors = sum(count for status, count in told.statuses.items() if status.startswith("5"))
    server_errors += text.count('"status": 50')
    problems = [*told.problems, *stored["problems"], *(f"{name} did not end" for name in stuck)]
    return {
        "clients": limits.clients,
        "seconds": limits.seconds,
        "seed": limits.seed,
        "wall_s": round(wall_s, 1),
        "steps": dict(sorted(told.steps.items())),
        "jobs": stored["jobs"],
        "trials": stored["trials"],
        "error_answers": dict(sorted(told.statuses.items())),
        "errors_5xx": server_errors,
        "database_is_locked": locked,
        "tracebacks": text.count("Traceback"),
        "memory_mib": peak_mib,
        "problems": problems[:20],
        "kept": not problems and not server_errors and not locked and "Traceback" not in text,
    }


def _memory_mib(pid: int) -> dict[str, int]:
    """Resident memory of the API and the tuner at the end."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        command = " ".join(child.cmdline())
        for name in ("api", "tuner.service"):
            if f"-m {name} " in command:
                found[name] = round(child.memory_info().rss / 2**20)
    return found


def _compare(home: Path, told: Told) -> dict[str, Any]:
    """Nothing lost, nothing doubled, nothing left half done."""
    problems: list[str] = []
    with Database.open(f"sqlite:///{home / 'gemm-tuner.db'}") as database, database.read() as session:
        by_key = {job.idempotency_key: job for job in _all_jobs(session)}
        if lost := sorted(set(told.jobs) - set(by_key)):
            problems.append(f"jobs lost: {lost[:5]}")
        if unknown := [key for key in by_key if key not in told.jobs]:
            problems.append(f"jobs that no client was told of: {unknown[:5]}")
        problems += [
            f"key {key}: job {by_key[key].id} is {by_key[key].state}, told {told.jobs[key]}"
            for key in told.jobs
            if _differs(key, by_key, told)
        ]
        trials = 0
        for study in _all_studies(session):
            numbers = [trial.number for trial in queries.trials_of_study(session, study.id)]
            trials += len(numbers)
            if numbers != list(range(len(numbers))):
                problems.append(f"study {study.id} has the trials {numbers[:20]}")
            if sum(study.counts.values()) != len(numbers):
                problems.append(f"study {study.id} counts {study.counts}, has {len(numbers)} trials")
            if study.state not in FINAL_STATES:
                problems.append(f"study {study.id} is {study.state}")
    return {"jobs": len(by_key), "trials": trials, "problems": problems}


def _differs(key: str, by_key: dict[str | None, Job], told: Told) -> bool:
    return key in by_key and (by_key[key].id != told.jobs[key] or by_key[key].state not in FINAL_STATES)


def _all_jobs(session: Session) -> Iterator[Job]:
    after: str | None = None
    while page := queries.jobs(session, limit=500, after=after):
        yield from page
        after = page[-1].id


def _all_studies(session: Session) -> Iterator[Any]:
    after: str | None = None
    while page := queries.studies(session, limit=500, after=after):
        yield from page
        after = page[-1].id
