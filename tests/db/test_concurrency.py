"""Many threads and processes on one file, and one that is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from string import ascii_letters
from typing import TYPE_CHECKING

import pytest

from db import queries, schema
from db.database import Database
from tests.db import forks
from tests.db.rows import new_result, only_study, post_job, report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRITERS = 8


@pytest.fixture(scope="module")
def processes() -> Iterator[forks.Forks]:
    """A process to fork others from."""
    running = forks.Forks()
    yield running
    running.close()


def test_32_processes_that_open_at_once_make_one_schema(processes: forks.Forks, tmp_path: Path) -> None:
    """G1: none is refused with `database is locked`, and the schema is made once."""
    path = tmp_path / "tuner.db"
    assert processes.ask("open", f"sqlite:///{path}") == []
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(schema.HEAD,)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_8_processes_that_report_at_once_lose_no_trial(processes: forks.Forks, database: Database, url: str) -> None:
    """C11: every trial of every process is stored, and the study's count agrees."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
    assert processes.ask("report", url, study_id) == []
    expected = forks.REPORTERS * forks.TRIALS_EACH
    with database.read() as session:
        assert [trial.number for trial in queries.trials_of_study(session, study_id)] == list(range(expected))
        assert len(queries.measurements_of_study(session, study_id)) == expected
        study = queries.study(session, study_id)
        assert study is not None
        assert study.counts == {"MEASURED": expected}
        assert study.best_trial == expected - 1


def test_g8_fifteen_tuners_at_once_share_no_study_and_no_trial(database: Database, url: str) -> None:
    """G8: each study has one owner, which alone asks and tells; nobody is told that a trial has already finished."""
    studies, tuners = 45, 15
    with database.write() as session:
        post_job(session, *ascii_letters[:studies])

    def work(owner: str) -> list[str]:
        done = []
        with Database.open(url) as mine:
            while True:
                with mine.write() as session:
                    claimed = queries.claim_next_study(session, owner)
                if claimed is None:
                    return done
                for number in range(3):
                    with mine.write() as session:
                        report(session, claimed.id, number)
                with mine.write() as session:
                    queries.finish_study(session, claimed.id, state="DONE")
                done.append(claimed.id)

    with ThreadPoolExecutor(tuners) as pool:
        done = [study for mine in pool.map(work, (f"tuner-{number}" for number in range(tuners))) for study in mine]
    assert len(done) == len(set(done)) == studies
    with database.read() as session:
        for study in queries.studies(session, limit=studies):
            assert (study.state, study.counts) == ("DONE", {"MEASURED": 3})
            assert [trial.number for trial in queries.trials_of_study(session, study.id)] == [0, 1, 2]


def test_8_threads_that_report_at_once_lose_no_trial(database: Database) -> None:
    """C11 within one process; each number is reported by two threads and stored once."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))

    def work(index: int) -> None:
        for turn in range(10):
            with database.write() as session:
                report(session, study_id, (index // 2) * 10 + turn)

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(work, range(WRITERS)))
    with database.read() as session:
        assert len(queries.trials_of_study(session, study_id)) == 40
        study = queries.study(session, study_id)
        assert study is not None
        assert study.counts == {"MEASURED": 40}


def test_no_study_and_no_export_is_claimed_twice(database: Database) -> None:
    """8 claimers share 40 studies and 16 exports."""
    with database.write() as session:
        for number in range(40):
            post_job(session, chr(ord("a") + number % 26), force=True)
        for _ in range(16):
            queries.create_export(session, {})

    def work(index: int) -> list[str]:
        claimed = []
        for claim in (queries.claim_next_study, queries.claim_next_export):
            while True:
                with database.write() as session:
                    found = claim(session, f"tuner-{index}")
                if found is None:
                    break
                assert found.owner == f"tuner-{index}"
                claimed.append(found.id)
        return claimed

    with ThreadPoolExecutor(WRITERS) as threads:
        claimed = [study_id for ids in threads.map(work, range(WRITERS)) for study_id in ids]
    assert len(claimed) == len(set(claimed)) == 56


def test_revisions_published_at_once_are_numbered_without_gap(database: Database) -> None:
    """8 publishers, 5 results each, for one problem and device: 1 to 40, and the last is the answer."""

    def work(_: int) -> list[int | None]:
        numbers = []
        for _turn in range(5):
            with database.write() as session:
                candidate = queries.add_result(session, new_result())
            with database.write() as session:
                numbers.append(queries.publish_result(session, candidate.id).revision)
        return numbers

    with ThreadPoolExecutor(WRITERS) as threads:
        numbers = [number for some in threads.map(work, range(WRITERS)) for number in some]
    assert sorted(number or 0 for number in numbers) == list(range(1, 41))
    with database.read() as session:
        found = queries.best_exact(session, 4096, 4096, 4096, "bf16", "NT", arch="sm_90a")
        assert found is not None
        assert (found.revision, found.current) == (40, True)
        assert sum(result.current for result in queries.results_exact(session, 4096, 4096, 4096, "bf16", "NT")) == 1


def test_the_same_job_posted_at_once_under_one_key_is_stored_once(database: Database) -> None:
    """Eight clients that retry one request get one job."""

    def work(_: int) -> str:
        with database.write() as session:
            return post_job(session, "a", idempotency_key="once").id

    with ThreadPoolExecutor(WRITERS) as threads:
        assert len(set(threads.map(work, range(WRITERS)))) == 1


def test_a_writer_killed_in_a_transaction_leaves_the_state_before_it(processes: forks.Forks, path: Path) -> None:
    """`kill -9` with pages of the open transaction in the log already: sound file, whole trials, no lock left."""
    url = f"sqlite:///{path}"
    with Database.open(url) as database, database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
    writer = processes.ask("hang", url, study_id)
    log_bytes = path.with_name(f"{path.name}-wal").stat().st_size
    os.kill(writer, signal.SIGKILL)
    assert log_bytes > 200_000
    with Database.open(url, busy_timeout_s=1) as database:
        with database.write() as session:
            assert [trial.number for trial in queries.trials_of_study(session, study_id)] == [0]
            assert len(queries.measurements_of_study(session, study_id)) == 1
            report(session, study_id, 1)
        with database.read() as session:
            study = queries.study(session, study_id)
            assert study is not None
            assert study.counts == {"MEASURED": 2}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


_READ_AND_CLOSE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM devices").fetchone()[0])
connection.close()
"""


def test_opening_a_file_again_in_one_process_does_not_drop_its_locks(tmp_path: Path) -> None:
    """C11: with the locks gone, another process's last close removed the log, and the next commit was lost."""
    path = tmp_path / "locks.db"

    def devices_seen_elsewhere() -> int:
        done = subprocess.run(
            [sys.executable, "-c", _READ_AND_CLOSE, str(path)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    def add_device(database: Database, uuid: str) -> None:
        with database.write() as session:
            queries.upsert_device(
                session, uuid=uuid, name="GPU", arch="sm_90a", sm_count=132, state="READY", reason="", environment={}
            )

    with Database.open(f"sqlite:///{path}") as database:
        add_device(database, "GPU-1")
        Database.open(f"sqlite:///{path}").close()
        Database.open(f"sqlite:///{path}", read_only=True).close()
        assert devices_seen_elsewhere() == 1
        add_device(database, "GPU-2")
        assert devices_seen_elsewhere() == 2
