"""A GPU process that may be killed, seen from its parent."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.gpu.soak import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
CHILD = "tests.soak.gates.child"
READY_S, STALL_S = 120.0, 5.0


class GateProcess:
    """One process of tests.soak.gates.child, started ahead of its job: importing torch takes seconds."""

    def __init__(self, module: str = CHILD) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=4)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Messages of the job; the last one says how it ended. The process is gone afterwards."""
        assert self._process.stdin is not None
        limit_s = READY_S
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            while True:
                message = self._next(limit_s)
                yield message
                if message.keys() & {"done", "crashed", "hung"}:
                    return
                limit_s = STALL_S
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5.0)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was written and never read
                    stream.close()

    def _next(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return {"hung": f"no end within {limit_s:g} s: killed"}
        if line is None:
            status = self._process.wait()
            return {"crashed": f"the process ended with status {status}: {' | '.join(self._tail)}"}
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
            else:
                self._tail.append(line.strip())
        self._lines.put(None)
