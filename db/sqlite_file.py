"""What a SQLite file is, judged from its first bytes and never by opening it for writing.

A refused file has to stay byte for byte as it was, and SQLite itself may roll back a journal or fold a write-ahead log
into the file when it opens it. So the first look reads the header as plain bytes.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from db.errors import DatabaseError, MissingDatabase, NotLocalDatabase, NotOurDatabase, ReadOnlyDatabase

APPLICATION_ID = 0x47544E52  # "GTNR", in the header of every database of ours (PRAGMA application_id)

type FileKey = tuple[int, int]

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_WRITE_VERSION_OFFSET = 18
_WAL_VERSION = 2
_APPLICATION_ID_OFFSET = 68


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What lies at a path.

    exists: there is a file
    empty: there is none, or it has no bytes yet
    wal: the file is in write-ahead-log mode
    """

    exists: bool
    empty: bool
    wal: bool


# Files that this process has open through SQLite, by device and inode. POSIX locks belong to the process: closing any
# descriptor of such a file drops the locks that SQLite holds on it, and another process then removes the log under a
# live connection ("How To Corrupt An SQLite Database File", 2.2). Rows committed after that were lost without an error.
_live: Counter[FileKey] = Counter()
# Held from the first look at a file until it counts as live, so that no other thread looks in between.
opening = threading.RLock()


def note_open(path: Path) -> FileKey:
    """This process has the file open from now on. Call with `opening` held; give the key to `note_closed`."""
    key = _key(path)
    _live[key] += 1
    return key


def note_closed(key: FileKey) -> None:
    """One of the openings of a file is over, its connections closed."""
    with opening:
        _live[key] -= 1
        if _live[key] <= 0:
            del _live[key]


def _key(path: Path) -> FileKey:
    found = path.stat()
    return found.st_dev, found.st_ino


def look_at(path: Path) -> Found:
    """Read the header of the file. Raises NotOurDatabase, or DatabaseError where it cannot be read; changes nothing.

    A file that this process has open was looked at when it was opened, and is not touched again.
    """
    with opening:
        if path.exists() and _key(path) in _live:
            return Found(exists=True, empty=False, wal=True)
        return _look_at(path)


def _look_at(path: Path) -> Found:
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return Found(exists=False, empty=True, wal=False)
    except IsADirectoryError:
        raise NotOurDatabase(f"{path} is a folder: name a file for the database") from None
    except OSError as error:
        raise DatabaseError(f"cannot read {path}: {error.strerror}: check the path and its permissions") from error
    if not header:
        return Found(exists=True, empty=True, wal=False)
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise NotOurDatabase(f"{path} is not a SQLite database; it was left as it was: name another file")
    found_id = int.from_bytes(header[_APPLICATION_ID_OFFSET : _APPLICATION_ID_OFFSET + 4], "big")
    if found_id != APPLICATION_ID:
        raise NotOurDatabase(
            f"{path} is a SQLite database of another program (application id {found_id:#x}, ours is "
            f"{APPLICATION_ID:#x}); it was left as it was: name another file"
        )
    return Found(exists=True, empty=False, wal=header[_WRITE_VERSION_OFFSET] == _WAL_VERSION)


def require_writable(path: Path) -> None:
    """Raises ReadOnlyDatabase unless the file, or the nearest existing folder above it, may be written.

    The mode bits count even for root, who could write anyway: whoever cleared them meant it.
    """
    if path.exists():
        _require_writable(path, f"{path} is read-only: make it writable (chmod u+w), or open it for reading only")
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    _require_writable(
        folder, f"the folder {folder} is read-only, and SQLite keeps its log beside {path.name}: make it writable"
    )


def _require_writable(path: Path, message: str) -> None:
    bits = stat.S_IMODE(path.stat().st_mode)
    if not os.access(path, os.W_OK) or not bits & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise ReadOnlyDatabase(message)


NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "orangefs",
        "gfs2",
        "ocfs2",
    )
) | frozenset(("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.ceph", "fuse.juicefs", "fuse.gcsfuse"))
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


def require_local(path: Path, mounts: str | None = None) -> None:
    """Raises NotLocalDatabase on a network file system, where SQLite's locks and shared memory do not reach.

    mounts: what the kernel says is mounted where; default: what it says now, and on other systems than Linux nothing
    """
    if mounts is None:
        mounts = _MOUNTS.read_text(errors="replace") if _MOUNTS.exists() else ""
    kind = file_system_of(path.resolve(), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise NotLocalDatabase(
            f"{path} lies on a network file system ({kind}), where SQLite loses data: put GEMM_TUNER_HOME on a local "
            "disk, or name a PostgreSQL database with GEMM_TUNER_DATABASE_URL"
        )


def file_system_of(path: Path, mounts: str) -> str:
    """Type of the file system that holds a path, existing or not; empty where the mounts do not say."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) < 5 or not types:
            continue
        point = Path(_OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4]))
        # Of mounts on one point the last one hides those before it.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), types[0]
    return kind


def reading_uri(path: Path) -> str:
    """URI that opens the file for reading and leaves nothing beside it where that is possible.

    Without a log beside it, the file is the whole database. SQLite would still create the log's files, which a
    read-only folder does not allow, so such a file is opened as immutable.
    """
    folder_writable = os.access(path.parent, os.W_OK) and stat.S_IMODE(path.parent.stat().st_mode) & stat.S_IWUSR
    immutable = "" if folder_writable or _wal_path(path).exists() else "&immutable=1"
    return f"{path.absolute().as_uri()}?mode=ro{immutable}"


def peek_revision(path: Path) -> str | None:
    """Schema revision, read without writing to the file or beside it; None where it cannot be told this way.

    A guess good enough to refuse a newer database untouched. Whoever goes on to write reads it again under a lock.
    """
    # With no log there is no writer, so the file may be read as it lies, without the locks that leave files beside it.
    immutable = "" if _wal_path(path).exists() else "&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{immutable}", uri=True)) as connection:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError:
        return None
    return None if row is None else str(row[0])


def require_present(path: Path, found: Found) -> None:
    """Raises MissingDatabase where there is no file, or an empty one."""
    if found.empty:
        what = "is empty" if found.exists else "does not exist"
        raise MissingDatabase(f"{path} {what}: name an existing database, or let it be created")


def _wal_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")
