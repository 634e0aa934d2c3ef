"""The modules that a node keeps: each once, by content hash, within a number of MiB."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kernels.artifacts import ArtifactError, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kernels.artifacts import ArtifactStore

IN_USE_S = 3600.0  # a module used this recently may belong to a job that runs
SWEEP_EVERY_S = 30.0


class ModuleCache:
    """An artifact store whose least recently used modules go when it is full. The tuner's store is the record."""

    def __init__(self, artifacts: ArtifactStore, limit_mib: int, *, in_use_s: float = IN_USE_S) -> None:
        self._artifacts = artifacts
        self._limit_bytes = limit_mib * 2**20
        self._in_use_s = in_use_s
        self._next_sweep_s = 0.0
        self._lock = threading.Lock()

    def take(self, modules: Mapping[str, bytes]) -> None:
        """Store what came with a call. Raises ArtifactError when the disk refuses it or bytes have another hash."""
        for sha256, data in modules.items():
            if self._artifacts.put(data) != sha256:
                raise ArtifactError(f"module {sha256[:12]} arrived with other bytes")
        if modules:
            self._sweep_now_and_then()

    def path(self, sha256: str) -> Path:
        """Where a module lies, and note that it is used."""
        path = self._artifacts.path(sha256)
        with suppress(FileNotFoundError):
            os.utime(path)
        return path

    def missing(self, hashes: Iterable[str]) -> tuple[str, ...]:
        """Those that are not here, or not whole."""
        return tuple(sha256 for sha256 in dict.fromkeys(hashes) if not self._artifacts.holds(sha256))

    def try_disk(self) -> str:
        """Why the disk takes no module, or nothing."""
        probe = self._artifacts.root / ".health"
        try:
            self._artifacts.root.mkdir(parents=True, exist_ok=True)
            write_atomically(probe, b"\0" * 2**16)
            probe.unlink(missing_ok=True)
        except OSError as error:
            return f"cannot write under {self._artifacts.root}: {error.strerror}"
        return ""

    def sweep(self) -> int:
        """Remove the least recently used modules beyond the limit; returns how many."""
        files = []
        for path in self._artifacts.root.glob("??/*.so"):
            with suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self._limit_bytes
        removed = 0
        for used_at, size, path in sorted(files):
            if excess <= 0 or used_at > time.time() - self._in_use_s:
                break
            path.unlink(missing_ok=True)
            excess -= size
            removed += 1
        return removed

    def _sweep_now_and_then(self) -> None:
        with self._lock:
            if time.monotonic() < self._next_sweep_s:
                return
            self._next_sweep_s = time.monotonic() + SWEEP_EVERY_S
        self.sweep()
