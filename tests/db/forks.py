"""Processes that use one database at once: `python -m tests.db.forks`, driven over its standard input.

They are forked from one process that has imported everything and has nothing open. Starting an interpreter each would
take seconds and spread their first moments over all of them, and the point is that they meet.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from db import queries
from db.database import Database
from tests.db.rows import only_study, post_job, report

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
OPENERS = 32
REPORTERS = 8
TRIALS_EACH = 10


class Forks:
    """The parent's side: one request a line, one answer a line."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.db.forks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, url: str, study_id: str = "") -> Any:
        """`open` and `report` answer with the errors of the children, `hang` with the id of a process to kill."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, url, study_id]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate(timeout=30)


def together(count: int, work: Callable[[int], None]) -> list[str]:
    """Run `work(index)` in `count` forked children that start at the same moment; returns the errors of all."""
    gate_read, gate_write = os.pipe()
    errors_read, errors_write = os.pipe()
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            os.close(gate_write)
            os.read(gate_read, 1)  # returns at end of file, when the parent opens the gate
            try:
                work(index)
            except Exception as error:  # the boundary of the child: the parent is told
                os.write(errors_write, f"{type(error).__name__}: {error}\n".encode())
            os._exit(0)
        children.append(child)
    for end in (gate_read, gate_write, errors_write):
        os.close(end)
    with os.fdopen(errors_read) as errors:
        failures = errors.read().splitlines()
    for child in children:
        status = os.waitpid(child, 0)[1]
        if status != 0:
            failures.append(f"child ended with status {status}")
    return failures


def _open(url: str) -> list[str]:
    def work(_: int) -> None:
        with Database.open(url) as database, database.read() as session:
            queries.devices(session)

    return together(OPENERS, work)


def _report(url: str, study_id: str) -> list[str]:
    def work(index: int) -> None:
        with Database.open(url) as database:
            for turn in range(TRIALS_EACH):
                with database.write() as session:
                    report(session, study_id, index * TRIALS_EACH + turn)

    return together(REPORTERS, work)


def _hang(url: str, study_id: str) -> int:
    """Fork a child that commits trial 0 and then waits in a transaction whose pages have reached the log."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        with Database.open(url) as database:
            with database.write() as session:
                report(session, study_id, 0)
            with database.write() as session:
                session.execute(text("PRAGMA cache_size = 10"))
                for number in range(1, 50):
                    report(session, study_id, number, reason="x" * 16384)
                os.write(ready_write, b"x")
                signal.pause()
    os.read(ready_read, 1)
    return child


def _warm_up() -> None:
    """Load what is loaded on first use, so that the children spend their time on the database."""
    with tempfile.TemporaryDirectory() as folder, Database.open(f"sqlite:///{folder}/warm.db") as database:
        with database.write() as session:
            report(session, only_study(session, post_job(session, "a")), 0)
        with database.read() as session:
            queries.devices(session)


def main() -> None:
    """Answer requests until the input ends."""
    _warm_up()
    for line in sys.stdin:
        what, url, study_id = json.loads(line)
        match what:
            case "open":
                answer: Any = _open(url)
            case "report":
                answer = _report(url, study_id)
            case "hang":
                answer = _hang(url, study_id)
            case _:
                raise ValueError(what)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
