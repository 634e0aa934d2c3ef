"""Who runs a study, and is that process still alive?

Two signs, either of which says that a process is dead:

- Its lock. Each tuner process holds an exclusive lock on a file of its own for as long as it lives; the kernel lets go
  of it however the process ends. So a process is dead when its lock can be taken. That holds across containers that
  share the folder, where process numbers mean nothing, and for a number that was given to another process.
- Its lease, where tuners of several machines share a PostgreSQL. It runs out unless it is renewed, by the database's
  clock. A process that was only cut off or frozen may come back after that: then its lease is gone, and what it writes
  to a study is refused (`queries.owns_study`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from db import queries
from db.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from db.database import Database

log = logging.getLogger("gemm_tuner.owners")
RENEWALS = 3  # in the time of one lease: two may fail


class Lease:
    """Says to others that this process is alive, from a thread of its own: a tuner may be long at something else."""

    def __init__(self, database: Database, name: str, lease_s: float) -> None:
        self._database, self._name, self._lease_s = database, name, lease_s
        self._ended = threading.Event()
        self.lost = threading.Event()
        with database.write() as session:
            queries.take_lease(session, name, lease_s=lease_s)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the lease; another process may take over at once."""
        self._ended.set()
        self._thread.join()
        try:
            with self._database.write() as session:
                queries.end_lease(session, self._name)
        except DatabaseError as error:
            log.warning("the lease runs out by itself: %s", error)

    def _renew(self) -> None:
        while not self._ended.wait(self._lease_s / RENEWALS):
            try:
                with self._database.write() as session:
                    held = queries.renew_lease(session, self._name, lease_s=self._lease_s)
            except DatabaseError as error:  # it may come back before the lease has run out
                log.warning("the lease could not be renewed: %s", error)
                continue
            if not held:
                self.lost.set()
                return


class Owner:
    """This process as an owner of studies. Hold it for as long as studies are run; close it at the end."""

    def __init__(self, folder: Path, database: Database | None = None, *, lease_s: float = 15.0) -> None:
        """Takes the lock, in a folder that all tuner processes of this machine share, and a lease on PostgreSQL."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()[:80]}/{uuid.uuid4().hex}"
        self._file = os.open(self._path(self.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leased = database is not None and database.path is None
        self._lease = Lease(database, self.name, lease_s) if database is not None and leased else None

    @property
    def has_lease(self) -> bool:
        """Whether processes of other machines may share the database."""
        return self._lease is not None

    @property
    def is_replaced(self) -> bool:
        """Whether others have taken this process for dead. It must end: its studies have another owner."""
        return self._lease is not None and self._lease.lost.is_set()

    def is_dead(self, name: str, *, all_here: bool, alive: Collection[str] | None = None) -> bool:
        """Whether another owner is gone.

        all_here: every owner uses this folder (one SQLite file, one machine), so one without a lock file is gone;
            without, an owner of another machine counts as alive for as long as its lease runs
        alive: names whose lease runs; None where there are no leases
        """
        if name == self.name:
            return False
        if alive is not None and name not in alive:
            return True
        return self.lock_is_free(name) or (all_here and not self._path(name).exists())

    def lock_is_free(self, name: str) -> bool:
        """Whether a process of this machine had this name and has ended."""
        try:
            file = os.open(self._path(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(file)

    def forget(self, name: str) -> None:
        """Remove what a dead owner left, once its studies were given back."""
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the lease and of the lock."""
        if self._lease is not None:
            self._lease.close()
        self.forget(self.name)
        os.close(self._file)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.rpartition('/')[2]}.lock"
