"""Files named by the sha256 of their bytes, complete or absent: written beside their place and renamed."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path


class ArtifactError(RuntimeError):
    """An artifact is missing, changed, or cannot be written."""


class ArtifactStore:
    """One folder of modules, spread over 256 subfolders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Where an artifact with this hash lies, existing or not. Raises ArtifactError for a malformed hash."""
        if re.fullmatch(r"[0-9a-f]{64}", sha256) is None:
            raise ArtifactError(f"{sha256!r} is not a sha256 in hexadecimal")
        return self.root / sha256[:2] / f"{sha256}.so"  # tvm_ffi chooses its loader by the suffix

    def put(self, data: bytes) -> str:
        """Store bytes and return their sha256. Raises ArtifactError when the disk refuses them (full, read-only).

        What is stored outlives the process. A machine that loses power may leave the file short: whoever reads it
        finds that by its hash, and builds a candidate again; what must outlive that too is kept with `keep`.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        target = self.path(sha256)
        try:
            if _holds(target, data):
                return sha256
            target.parent.mkdir(parents=True, exist_ok=True)
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
            data = self.path(sha256).read_bytes()
        except OSError as error:
            raise ArtifactError(f"artifact {sha256[:12]} is not in {self.root}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ArtifactError(f"artifact {sha256[:12]} was changed on disk: its bytes have another hash")
        return data

    def delete(self, sha256: str) -> None:
        """Remove an artifact; one that is already gone is no error."""
        self.path(sha256).unlink(missing_ok=True)


def _holds(target: Path, data: bytes) -> bool:
    """Whether the file is there and whole: one that was cut short is written anew. Raises OSError."""
    try:
        return target.stat().st_size == len(data) and target.read_bytes() == data
    except FileNotFoundError:
        return False


def write_atomically(target: Path, data: bytes, *, flush: bool = True) -> None:
    """Write to a temporary name in the same folder, flush to disk, rename. Leaves nothing behind on failure."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".tmp-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
