"""Backup while in use, restore, and the refusals of both."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from db import queries
from db.backup import backup, restore
from db.database import Database
from db.errors import (
    DatabaseBusy,
    DatabaseError,
    MissingDatabase,
    NewerDatabase,
    NotOurDatabase,
    ReadOnlyDatabase,
)
from tests.db.rows import post_job

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(sqlite_url: str) -> str:
    """PostgreSQL has backups of its own."""
    return sqlite_url


def job_count(url: str) -> int:
    """Number of stored jobs."""
    with Database.open(url) as database, database.read() as session:
        return len(queries.jobs(session))


def test_a_backup_made_while_writing_holds_what_was_committed(database: Database, url: str, tmp_path: Path) -> None:
    """One file, whole, without the transaction that was open; it restores to the same rows."""
    copy = tmp_path / "copies" / "tuner.backup"
    copy.parent.mkdir()
    with database.write() as session:
        post_job(session, "a")
    with database.write() as session:
        post_job(session, "b")
        assert backup(database, copy) == copy.stat().st_size > 0
    assert [file.name for file in copy.parent.iterdir()] == [copy.name]
    database.close()
    assert job_count(url) == 2
    restore(copy, url)
    assert job_count(url) == 1
    with Database.open(url) as restored, restored.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"


def test_a_backup_does_not_overwrite_unless_told(database: Database, tmp_path: Path) -> None:
    """Nor ever the database itself, or a place that cannot be written."""
    copy = tmp_path / "tuner.backup"
    copy.write_bytes(b"precious")
    with pytest.raises(DatabaseError, match="exists: name another file"):
        backup(database, copy)
    assert copy.read_bytes() == b"precious"
    backup(database, copy, overwrite=True)
    assert copy.read_bytes().startswith(b"SQLite format 3")
    assert database.path is not None
    with pytest.raises(DatabaseError, match="is the database itself"):
        backup(database, database.path, overwrite=True)
    with pytest.raises(DatabaseError, match="cannot write beside"):
        backup(database, tmp_path / "absent" / "tuner.backup")


def test_a_database_in_use_is_not_replaced(database: Database, url: str, path: Path, tmp_path: Path) -> None:
    """A service that runs would go on writing to the file that is no longer there."""
    copy = tmp_path / "tuner.backup"
    backup(database, copy)
    with database.read() as session:
        queries.jobs(session)
        with pytest.raises(DatabaseBusy, match="stop the service"):
            restore(copy, url)
    with database.write() as session:
        post_job(session, "a")
    database.close()
    assert job_count(url) == 1
    assert {file.name for file in tmp_path.iterdir()} == {path.name, copy.name}


def test_a_restore_to_a_new_place_creates_it(database: Database, tmp_path: Path) -> None:
    """The folder too."""
    with database.write() as session:
        post_job(session, "a")
    copy = tmp_path / "tuner.backup"
    backup(database, copy)
    restore(copy, f"sqlite:///{tmp_path}/elsewhere/tuner.db")
    assert job_count(f"sqlite:///{tmp_path}/elsewhere/tuner.db") == 1


def test_what_is_no_sound_backup_of_ours_is_not_restored(path: Path, url: str, tmp_path: Path) -> None:
    """Each is refused by name, and the database stays as it was, byte for byte."""
    before = path.read_bytes()
    text_file, foreign, newer, damaged = (tmp_path / name for name in ("text", "foreign", "newer", "damaged"))
    text_file.write_text("hello")
    with closing(sqlite3.connect(foreign)) as connection, connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    newer.write_bytes(before)
    with closing(sqlite3.connect(newer)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    # Zeros where the last pages of the tables and indexes were.
    damaged.write_bytes(before[: len(before) // 2] + bytes(len(before) - len(before) // 2))
    for source, error in (
        (tmp_path / "absent", MissingDatabase),
        (text_file, NotOurDatabase),
        (foreign, NotOurDatabase),
        (newer, NewerDatabase),
        (damaged, DatabaseError),
        (path, DatabaseError),
    ):
        with pytest.raises(error) as caught:
            restore(source, url)
        assert caught.type is error
    assert path.read_bytes() == before


def test_a_restore_over_a_foreign_or_read_only_file_is_refused(path: Path, tmp_path: Path) -> None:
    """Nothing but a database of ours, or nothing at all, is replaced."""
    target = tmp_path / "target.db"
    target.write_text("precious")
    with pytest.raises(NotOurDatabase):
        restore(path, f"sqlite:///{target}")
    target.chmod(0o444)
    with pytest.raises(ReadOnlyDatabase):
        restore(path, f"sqlite:///{target}")
    assert target.read_text() == "precious"
    with pytest.raises(DatabaseError, match="names no SQLite file"):
        restore(path, "postgresql+psycopg://host/tuner")
