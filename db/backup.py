"""Backup and restore of a SQLite database. PostgreSQL has pg_dump and pg_restore."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from db import schema, sqlite_file
from db.database import BUSY_TIMEOUT_S, Database, sqlite_path
from db.driver_errors import translated
from db.errors import DatabaseBusy, DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterator


def backup(db: Database, path: Path, *, overwrite: bool = False) -> int:
    """Copy a database that may be in use to `path`; returns the bytes written. Readers and writers go on meanwhile.

    The copy appears whole or not at all. Raises DatabaseError if the file exists and `overwrite` is not given, if the
    copy does not pass SQLite's integrity check, or if the database is not SQLite.
    """
    if db.path is None:
        raise DatabaseError("only SQLite files are backed up here: use pg_dump for PostgreSQL")
    if path.exists():
        if not overwrite:
            raise DatabaseError(f"{path} exists: name another file, or allow it to be overwritten")
        if path.samefile(db.path):
            raise DatabaseError(f"{path} is the database itself: name another file")
    with _temporary_beside(path) as copy, translated(str(path), BUSY_TIMEOUT_S):
        _copy_database(db.path, copy)
        _require_sound(copy)
        _install(copy, path)
    return path.stat().st_size


def restore(path: Path, url: str) -> None:
    """Put a backup in the place of the database at `url`, which nothing may have open. Stop the service first.

    The backup is checked first (ours, of a known revision, sound), and what was there stays until the copy is complete.
    A backup of an older version is upgraded when it is opened. Raises NotOurDatabase, NewerDatabase, DatabaseBusy if
    the database is in use, DatabaseError for the rest.
    """
    target = sqlite_path(url)
    with translated(str(path), BUSY_TIMEOUT_S):
        found = sqlite_file.look_at(path)
        sqlite_file.require_present(path, found)
        schema.require_known(sqlite_file.peek_revision(path), str(path))
        _require_sound(path)
    if target.exists() and target.samefile(path):
        raise DatabaseError(f"{path} is the database itself: name a backup of it")
    sqlite_file.require_writable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_beside(target) as copy:
        with translated(str(path), BUSY_TIMEOUT_S):
            _copy_database(path, copy)
        with translated(str(target), BUSY_TIMEOUT_S), _alone_with(target):
            _install(copy, target)


def _connect(uri: str, *, timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)


def _copy_database(path: Path, copy: Path) -> None:
    with closing(_connect(sqlite_file.reading_uri(path))) as source, closing(sqlite3.connect(copy)) as target:
        # All pages in one step: one consistent state, and no restart each time a writer commits.
        source.backup(target)
        # The header says write-ahead log, as in the source. Back to one file that needs nothing beside it.
        target.execute("PRAGMA journal_mode = DELETE")


def _require_sound(path: Path) -> None:
    with closing(_connect(sqlite_file.reading_uri(path))) as connection:
        findings = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
        revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if findings != ["ok"] or revision is None:
        raise DatabaseError(f"{path} is damaged ({findings[0]}): use another backup")


@contextmanager
def _alone_with(target: Path) -> Iterator[None]:
    """Hold the database, if there is one, with its log folded in. Raises DatabaseBusy while anything has it open."""
    if sqlite_file.look_at(target).empty:
        yield
        return
    with closing(_connect(f"{target.absolute().as_uri()}?mode=rw", timeout_s=0)) as connection:
        try:
            # Leaving write-ahead-log mode needs every other connection gone. It removes the log, which would
            # otherwise lie beside the restored file and be taken for its own.
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            raise DatabaseBusy(f"{target} is in use: stop the service, then restore") from error
        yield
        # The transaction held a lock on the file that is now replaced, and changed nothing.
        connection.execute("ROLLBACK")


@contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    """A file name in the same folder, so that it can be renamed to `path`. Whatever is left there is removed."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    except OSError as error:
        raise DatabaseError(f"cannot write beside {path}: {error.strerror}: name another place") from error
    try:
        yield folder / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(copy: Path, path: Path) -> None:
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    copy.replace(path)
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
