"""Opening, reading, writing, and what each refusal says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import URL, select, text
from sqlalchemy.exc import IntegrityError, StatementError

from db import queries, schema
from db.database import Database
from db.errors import DatabaseBusy, DatabaseError, MissingDatabase, OutdatedDatabase, ReadOnlyDatabase
from db.models import Job, JobStudy
from db.sqlite_file import APPLICATION_ID
from tests.db.rows import post_job

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_file_gets_the_schema_the_log_and_our_mark(tmp_path: Path) -> None:
    """Opening creates the folder, the tables, write-ahead logging and the application id."""
    with Database.open(f"sqlite:///{tmp_path}/new/folder/tuner.db") as database, database.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA application_id")) == APPLICATION_ID
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == 10_000
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == schema.HEAD
    assert [file.name for file in (tmp_path / "new/folder").iterdir()] == ["tuner.db"]


def test_an_empty_file_is_taken_as_a_new_database(tmp_path: Path) -> None:
    """A file without bytes belongs to nobody."""
    (tmp_path / "tuner.db").touch()
    with Database.open(f"sqlite:///{tmp_path}/tuner.db") as database, database.read() as session:
        assert queries.jobs(session) == []


def test_a_path_with_odd_characters_is_opened_as_it_stands(tmp_path: Path) -> None:
    """Percent signs, spaces and question marks of a path mean nothing to SQLite's URIs or to Alembic's settings."""
    folder = tmp_path / "100% a?b #c"
    folder.mkdir()
    url = URL.create("sqlite", database=str(folder / "tuner.db")).render_as_string()
    Database.open(url).close()
    assert [file.name for file in folder.iterdir()] == ["tuner.db"]


def test_a_write_is_seen_after_the_block_and_its_rows_stay_usable(database: Database) -> None:
    """write() commits at its end, and what was loaded outlives the session."""
    with database.write() as session:
        posted = post_job(session, "a")
    with database.read() as session:
        stored = queries.job(session, posted.id)
    assert stored is not None
    assert stored.state == posted.state == "QUEUED"
    assert stored.request == {"keys": ["a"]}


def test_a_write_that_raises_leaves_nothing(database: Database) -> None:
    """An error in the block undoes all of it and comes out unchanged."""

    def fail() -> None:
        with database.write() as session:
            post_job(session, "a")
            raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        fail()
    with database.read() as session:
        assert queries.jobs(session) == []


def test_a_read_keeps_nothing_that_was_done_in_it(database: Database) -> None:
    """read() never commits."""
    with database.read() as session:
        post_job(session, "a")
    with database.read() as session:
        assert queries.jobs(session) == []


def test_a_reader_sees_one_state_while_a_writer_commits(database: Database) -> None:
    """A reader is neither blocked by a writer nor shown half of what it did."""
    with database.read() as reader:
        assert queries.jobs(reader) == []
        with database.write() as writer:
            post_job(writer, "a")
        assert queries.jobs(reader) == []
    with database.read() as reader:
        assert len(queries.jobs(reader)) == 1


def test_a_second_writer_is_told_that_the_database_is_busy(sqlite_url: str) -> None:
    """Past the busy timeout the error says who to wait for and how long it waited."""
    with (
        Database.open(sqlite_url) as first,
        Database.open(sqlite_url, busy_timeout_s=0.05) as second,
        first.write(),
        pytest.raises(DatabaseBusy, match=r"locked by another writer for 0\.05 s: try again"),
        second.write(),
    ):
        pytest.fail("two writers at once")
    with Database.open(sqlite_url) as later, later.write() as session:
        post_job(session, "a")


def test_a_writer_that_waits_for_another_ones_decision_is_told(url: str) -> None:
    """What is decided from many rows is decided by one writer at a time, on every database."""
    with Database.open(url) as first, Database.open(url, busy_timeout_s=0.05) as second:
        with first.write() as session:
            post_job(session, "a")
            with pytest.raises(DatabaseBusy, match="locked by another writer"), second.write() as other:
                post_job(other, "b")
        with second.write() as session:
            post_job(session, "b")
            assert len(queries.jobs(session)) == 2


def test_opening_a_database_that_another_program_holds_says_busy(path: Path) -> None:
    """A file without its write-ahead log is set right at opening, which needs the file for a moment."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseBusy, match="locked by another writer"):
            Database.open(f"sqlite:///{path}", busy_timeout_s=0.05)
        other.execute("ROLLBACK")
    with Database.open(f"sqlite:///{path}") as database, database.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"


def test_a_constraint_violation_comes_out_as_it_is(database: Database) -> None:
    """Foreign keys and CHECK constraints hold, and their errors are not mistaken for trouble with the file."""
    with pytest.raises(IntegrityError, match=r"(?i)foreign key"), database.write() as session:
        session.add(JobStudy(job_id="none", position=0, study_id="none"))
    with pytest.raises(IntegrityError, match="ck_jobs_state"), database.write() as session:
        session.add(Job(request={}, mode="measure", state="ASLEEP"))


def test_times_come_back_aware_and_in_utc(database: Database) -> None:
    """SQLite keeps no time zone; a naive time is refused rather than guessed."""
    berlin = timezone(timedelta(hours=2))
    with database.write() as session:
        session.add(Job(request={}, mode="measure", created_at=datetime(2026, 7, 1, 14, 0, tzinfo=berlin)))
    with database.read() as session:
        assert session.scalar(select(Job.created_at)) == datetime(2026, 7, 1, 12, 0, tzinfo=UTC)
    with pytest.raises(StatementError, match="naive datetime"), database.write() as session:
        session.add(Job(request={}, mode="measure", created_at=datetime(2026, 7, 1, 14, 0)))


def test_a_number_that_json_cannot_hold_is_refused(database: Database) -> None:
    """NaN would be stored by SQLite's driver and refused by PostgreSQL: it fails on both."""
    with pytest.raises((StatementError, ValueError), match="not JSON compliant"), database.write() as session:
        session.add(Job(request={"ratio": float("nan")}, mode="measure"))


def test_a_reader_of_its_own_can_read_and_not_write(url: str) -> None:
    """A read-only database answers questions beside a writer, sees its commits, and refuses to write."""
    with Database.open(url) as writer, Database.open(url, read_only=True) as reader:
        with writer.write() as session:
            post_job(session, "a")
        with reader.read() as session:
            assert len(queries.jobs(session)) == 1
        with pytest.raises(ReadOnlyDatabase, match="opened for reading only"), reader.write():
            pytest.fail("written")
        with pytest.raises(ReadOnlyDatabase, match="read-only"), reader.read() as session:
            post_job(session, "b")


def test_a_read_only_file_in_a_read_only_folder_can_be_read(path: Path) -> None:
    """Nothing can be created beside it, and nothing needs to be."""
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        with Database.open(f"sqlite:///{path}", read_only=True) as database, database.read() as session:
            assert queries.jobs(session) == []
        assert [file.name for file in path.parent.iterdir()] == [path.name]
    finally:
        path.parent.chmod(0o755)


def test_a_missing_database_is_created_only_when_allowed(tmp_path: Path) -> None:
    """create=False and read_only=True leave no file behind."""
    url = f"sqlite:///{tmp_path}/absent.db"
    with pytest.raises(MissingDatabase, match="does not exist"):
        Database.open(url, create=False)
    with pytest.raises(MissingDatabase, match="does not exist"):
        Database.open(url, read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tuner.db", "not a database URL"),
        ("mysql://host/tuner", "unsupported database 'mysql'"),
        ("sqlite://", "names no SQLite file"),
        ("sqlite:///:memory:", "names no SQLite file"),
    ],
)
def test_a_url_that_names_no_usable_database_is_refused(url: str, message: str) -> None:
    """The message says what to write instead."""
    with pytest.raises(DatabaseError, match=message) as caught:
        Database.open(url)
    assert "sqlite" in str(caught.value)


def test_an_older_database_is_upgraded_only_when_allowed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """migrate=False names both revisions and the command."""
    monkeypatch.setattr(schema, "KNOWN_REVISIONS", ("0000", *schema.KNOWN_REVISIONS))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    before = path.read_bytes()
    for options in ({"migrate": False}, {"read_only": True}):
        with pytest.raises(OutdatedDatabase, match=rf"'0000'.*'{schema.HEAD}'.*db upgrade"):
            Database.open(f"sqlite:///{path}", **options)
    assert path.read_bytes() == before
