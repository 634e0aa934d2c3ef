"""Who runs a study, and is that process still alive?

Each tuner process holds an exclusive lock on a file of its own for as long as it lives; the kernel lets go of it
however the process ends. So a process is dead when its lock can be taken. That holds across containers that share the
folder, where process numbers mean nothing, and for a number that was given to another process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Owner:
    """This process as an owner of studies. Hold it for as long as studies are run; close it at the end."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock, in a folder that all tuner processes of this machine share."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()[:80]}/{uuid.uuid4().hex}"
        self._file = os.open(self._path(self.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_dead(self, name: str, *, all_here: bool) -> bool:
        """Whether another owner is gone.

        all_here: every owner uses this folder (one SQLite file, one machine), so one without a lock file is gone;
        without,
            an owner of another machine counts as alive
        """
        if name == self.name:
            return False
        path = self._path(name)
        if not path.exists():
            return all_here
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
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
        """Let go of the lock."""
        self.forget(self.name)
        os.close(self._file)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.rpartition('/')[2]}.lock"
