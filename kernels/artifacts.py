"""Files named by the sha256 of their bytes, complete or absent: written beside their place and renamed.

Names of single files are strings here. A `Path` interns each part of its name, and Python 3.12 keeps interned strings
for good: two names a module were 0.3 MiB for every 1,000 trials of a tuner.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path


class ArtifactError(RuntimeError):
    """An artifact is missing, changed, or cannot be written."""


class ArtifactStore:
    """One folder of modules, spread over 256 subfolders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Where an artifact with this hash lies, existing or not. Raises ArtifactError for a malformed hash."""
        return Path(self._name(sha256))

    def _name(self, sha256: str) -> str:
        if re.fullmatch(r"[0-9a-f]{64}", sha256) is None:
            raise ArtifactError(f"{sha256!r} is not a sha256 in hexadecimal")
        return f"{self.root}/{sha256[:2]}/{sha256}.so"  # tvm_ffi chooses its loader by the suffix

    def put(self, data: bytes) -> str:
        """Store bytes and return their sha256. Raises ArtifactError when the disk refuses them (full, read-only).

        What is stored outlives the process. A machine that loses power may leave the file short: whoever reads it
        finds that by its hash, and builds a candidate again; what must outlive that too is kept with `keep`.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        target = self._name(sha256)
        try:
            if _holds(target, data):
                return sha256
            os.makedirs(os.path.dirname(target), exist_ok=True)
            write_atomically(target, data, flush=False)
        except OSError as error:
            raise ArtifactError(f"cannot store artifact {sha256[:12]} under {self.root}: {error.strerror}") from error
        return sha256

    def keep(self, sha256: str) -> None:
        """Flush an artifact to disk: what is published must be there after a loss of power. Raises ArtifactError."""
        path = self.path(sha256)
        try:
            for one in (path, path.parent):
                descriptor = os.open(one, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise ArtifactError(f"cannot keep artifact {sha256[:12]} in {self.root}: {error.strerror}") from error

    def holds(self, sha256: str) -> bool:
        """Whether the artifact is there with all its bytes."""
        try:
            self.read(sha256)
        except ArtifactError:
            return False
        return True

    def read(self, sha256: str) -> bytes:
        """The stored bytes. Raises ArtifactError when they are missing or no longer have this hash."""
        try:
            data = _read(self._name(sha256))
        except OSError as error:
            raise ArtifactError(f"artifact {sha256[:12]} is not in {self.root}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ArtifactError(f"artifact {sha256[:12]} was changed on disk: its bytes have another hash")
        return data

    def delete(self, sha256: str) -> None:
        """Remove an artifact; one that is already gone is no error."""
        with suppress(FileNotFoundError):
            os.unlink(self._name(sha256))


def _read(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read()


def _holds(target: str, data: bytes) -> bool:
    """Whether the file is there and whole: one that was cut short is written anew. Raises OSError."""
    try:
        return os.stat(target).st_size == len(data) and _read(target) == data
    except FileNotFoundError:
        return False


def write_atomically(target: str | Path, data: bytes, *, flush: bool = True) -> None:
    """Write to a temporary name in the same folder, flush to disk, rename. Leaves nothing behind on failure."""
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target) or ".", prefix=".tmp-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
