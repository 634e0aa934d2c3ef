"""Databases that must not be touched: each is refused by name and stays byte for byte as it was."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from db import sqlite_file
from db.database import Database
from db.errors import DatabaseError, NewerDatabase, NotLocalDatabase, NotOurDatabase, ReadOnlyDatabase

COMMIT_AND_DIE = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("UPDATE alembic_version SET version_num = '9999'")
connection.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its bytes."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def assert_refused(path: Path, error: type[DatabaseError], message: str, **options: Any) -> None:
    """The file is refused with that error, and neither it nor its folder changes."""
    before, times = contents(path.parent), path.stat().st_mtime_ns
    with pytest.raises(error, match=message):
        Database.open(f"sqlite:///{path}", **options)
    assert contents(path.parent) == before
    assert path.stat().st_mtime_ns == times


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A SQLite database of another program."""
    path = tmp_path / "bookmarks.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    return path


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("data", [b"hello", b"x" * 5000, b"SQLite format 3\x00", b"\x00" * 4096])
def test_a_file_that_is_not_sqlite_is_refused_untouched(tmp_path: Path, data: bytes, read_only: bool) -> None:
    """Text, noise, a header cut short, zeros."""
    path = tmp_path / "notes.txt"
    path.write_bytes(data)
    assert_refused(path, NotOurDatabase, "is not a SQLite database; it was left as it was", read_only=read_only)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_of_another_program_is_refused_untouched(foreign: Path, read_only: bool) -> None:
    """Its application id is not ours, whatever its tables are called."""
    assert_refused(foreign, NotOurDatabase, "another program", read_only=read_only)


def test_a_database_of_another_program_with_a_log_is_refused_untouched(foreign: Path) -> None:
    """Opening it with SQLite would fold the log into the file, so it must not come to that."""
    with closing(sqlite3.connect(foreign, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("INSERT INTO bookmarks VALUES ('a')")
        assert_refused(foreign, NotOurDatabase, "another program")


MOUNTS = r"""
22 1 252:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /srv rw - nfs4 server:/all rw
31 30 0:27 / /srv/local rw - xfs /dev/sdb rw
32 22 0:28 / /mnt/my\040share rw - cifs //server/share rw
33 22 0:29 / /mnt/hidden rw - nfs server:/old rw
34 22 0:30 / /mnt/hidden rw - ext4 /dev/sdc rw
35 22 0:31 / /mnt/keys rw - fuse.sshfs host: rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/tuner.db", "ext4"),
        ("/srv/me/tuner.db", "nfs4"),
        ("/srv/local/tuner.db", "xfs"),
        ("/srvs/tuner.db", "ext4"),
        ("/mnt/my share/not/yet/there.db", "cifs"),
        ("/mnt/hidden/tuner.db", "ext4"),
        ("/mnt/keys/tuner.db", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    """Also of a path that does not exist yet; a mount over another one hides it."""
    assert sqlite_file.file_system_of(Path(path), MOUNTS) == kind


def test_a_network_file_system_is_refused_with_a_hint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's locks and shared memory do not reach other machines; nothing is opened or created."""
    before = path.read_bytes()
    where = path.parent.resolve()
    mounts = path.parent / "mounts"
    mounts.write_text(f"22 1 252:0 / / rw - ext4 /dev/root rw\n30 22 0:26 / {where} rw - nfs4 server:/all rw\n")
    monkeypatch.setattr(sqlite_file, "_MOUNTS", mounts)
    for file in (path, path.with_name("new.db")):
        for options in ({}, {"read_only": True}):
            with pytest.raises(NotLocalDatabase, match=r"network file system \(nfs4\).*GEMM_TUNER_DATABASE_URL"):
                Database.open(f"sqlite:///{file}", **options)
    assert path.read_bytes() == before
    assert not path.with_name("new.db").exists()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    """A URL may name a folder by mistake."""
    with pytest.raises(NotOurDatabase, match="is a folder"):
        Database.open(f"sqlite:///{tmp_path}")


def make_newer(path: Path) -> None:
    """Write the schema revision of a version to come."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_database_is_refused_untouched(path: Path, read_only: bool) -> None:
    """The message names both revisions and the two ways out."""
    make_newer(path)
    assert_refused(
        path, NewerDatabase, r"revision '9999', this version knows up to .*newer version.*backup", read_only=read_only
    )


def test_a_newer_database_whose_writer_was_killed_is_refused_untouched(path: Path) -> None:
    """The newer revision stands only in the log that a killed process left; file and log stay as they are."""
    killed = subprocess.run([sys.executable, "-c", COMMIT_AND_DIE, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    names = {path.name, f"{path.name}-wal"}
    before = {name: data for name, data in contents(path.parent).items() if name in names}
    assert len(before) == 2
    with pytest.raises(NewerDatabase, match="9999"):
        Database.open(f"sqlite:///{path}")
    assert {name: data for name, data in contents(path.parent).items() if name in names} == before


def test_a_read_only_file_is_refused_for_writing_untouched(path: Path) -> None:
    """The mode bits are respected even by root, for whom writing would succeed."""
    path.chmod(0o444)
    assert_refused(path, ReadOnlyDatabase, "is read-only: make it writable")


def test_a_read_only_folder_is_refused_for_writing_untouched(path: Path) -> None:
    """SQLite needs to create its log there."""
    path.parent.chmod(0o555)
    try:
        assert_refused(path, ReadOnlyDatabase, r"folder .* is read-only")
        with pytest.raises(ReadOnlyDatabase, match=r"folder .* is read-only"):
            Database.open(f"sqlite:///{path.parent}/new/tuner.db")
    finally:
        path.parent.chmod(0o755)


def test_a_damaged_database_is_reported_as_such(path: Path) -> None:
    """A file cut short in the middle names the remedy, not a driver's code."""
    path.write_bytes(path.read_bytes()[:6000])
    with pytest.raises(DatabaseError, match=r"damaged|no readable schema"):
        Database.open(f"sqlite:///{path}")
