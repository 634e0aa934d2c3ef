"""Many launches of a winner in a fresh process: alone, on two streams at once, by graph replay. Touches no GPU itself.

What one long-lived child cannot show: that the stored file is right in a process that has seen no other module, that
two launches may overlap, that a captured launch may be replayed, and that none of it wears off after the hundredth
launch. The process (tuner.gpu.soak_run) is watched and killed from here.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.engine.base import ModuleChanged
from tuner.gpu.process import FROM_OUTSIDE, listened_to
from tuner.records import Verdict

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

    from kernels.problem import GemmProblem

RUNNER = "tuner.gpu.soak_run"
MARK = "soak: "  # before each line that the process writes for its parent
FIRST = "for the first time"  # the launches that are compared with the reference
# Launches of each way to launch; two streams share theirs.
WAYS = {"alone": 2_000, "on two streams": 4_000, "by graph replay": 4_000}
_TAIL_LINES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakJob:
    """What to soak.

    problem: what the module computes
    module_path: file to load
    module_sha256: what the file must hash to
    seed: of the input data
    launches: wanted of each way to launch
    limit_s: seconds that the launches may take together; what does not fit is left out and said
    """

    problem: GemmProblem
    module_path: Path
    module_sha256: str
    seed: int = 0
    launches: Mapping[str, int] = field(default_factory=lambda: dict(WAYS))
    limit_s: float = 30.0

    def to_dict(self) -> dict[str, Any]:
        """For the command line of the process."""
        problem = self.problem
        return {
            "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype.value},
            "module_path": str(self.module_path),
            "module_sha256": self.module_sha256,
            "seed": self.seed,
            "launches": dict(self.launches),
            "limit_s": self.limit_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakReport:
    """What the soak showed.

    verdict: CLEAN, FAILED, or NOT_RUN when the kernel was not to blame for the end
    detail: launches of each way, or what went wrong, for people
    launches: that were compared, by way
    gpu_s: seconds of the launches
    """

    verdict: Verdict
    detail: str
    launches: Mapping[str, int] = field(default_factory=dict)
    gpu_s: float = 0.0


def soak(
    job: SoakJob,
    *,
    device: str = "0",
    start_s: float = 180.0,
    stall_s: float = 30.0,
    runner: str = RUNNER,
    stop: threading.Event | None = None,
) -> SoakReport:
    """Run the soak in a process of its own. Raises ModuleChanged.

    device: UUID or index of the card
    start_s: after which a process that has not launched the kernel yet is killed
    stall_s: after which a process that launches, and says nothing, is killed; it speaks at least once a second
    runner: module that is run as the process
    stop: when set, the process is killed at once
    """
    with listened_to([runner, json.dumps(job.to_dict())], {"CUDA_VISIBLE_DEVICES": device}, stop) as process:
        report = _Listener(job, process).report(start_s, stall_s)
    if stop is not None and stop.is_set():
        return SoakReport(verdict=Verdict.NOT_RUN, detail="cancelled")
    return report


class _Listener:
    """Hears what the process says and turns it into a report."""

    def __init__(self, job: SoakJob, process: subprocess.Popen[str]) -> None:
        self._job = job
        self._process = process
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._launches: dict[str, int] = {}
        self._gpu_s = 0.0
        self._way = ""
        threading.Thread(target=self._read, name="soak-output", daemon=True).start()

    def report(self, start_s: float, stall_s: float) -> SoakReport:
        """Listen to the end."""
        while True:
            limit_s = stall_s if self._way else start_s
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                if not self._way:
                    return self._made(Verdict.NOT_RUN, f"the process did not get to the kernel within {limit_s:g} s")
                return self._made(Verdict.FAILED, f"no end of a launch {self._way} within {limit_s:g} s: killed")
            if line is None:
                return self._ended()
            if not line.startswith(MARK):
                self._tail.append(line.strip())
                continue
            if done := self._told(json.loads(line.removeprefix(MARK))):
                return done

    def _told(self, message: dict[str, Any]) -> SoakReport | None:
        """Take in one message; the report, if it is the last one."""
        if "way" in message:
            self._way = message["way"]
            self._gpu_s = message["gpu_s"]
            if self._way != FIRST:
                self._launches[self._way] = message["launches"]
        elif message.get("changed"):
            raise ModuleChanged(message["changed"])
        elif message.get("not_run"):
            return self._made(Verdict.NOT_RUN, message["not_run"])
        elif message.get("failed"):
            where = f"launched {self._way}: " if self._way else ""
            return self._made(Verdict.FAILED, where + message["failed"])
        elif message.get("done"):
            return self._made(Verdict.CLEAN, self._summary())
        return None

    def _summary(self) -> str:
        wanted, made = sum(self._job.launches.values()), sum(self._launches.values())
        ways = ", ".join(f"{count} {way}" for way, count in self._launches.items())
        few = "" if made >= wanted else f" of {wanted}, as many as {self._job.limit_s:g} s hold,"
        return f"{made}{few} launches in a fresh process, each right and bitwise equal: {ways}"

    def _ended(self) -> SoakReport:
        """The process ended without its last message."""
        status = self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        text = f"the process ended early: {how}" + (f"; last output: {' | '.join(self._tail)}" if self._tail else "")
        blames_kernel = self._way and -status not in FROM_OUTSIDE
        return self._made(Verdict.FAILED if blames_kernel else Verdict.NOT_RUN, text)

    def _made(self, verdict: Verdict, detail: str) -> SoakReport:
        return SoakReport(verdict=verdict, detail=detail, launches=dict(self._launches), gpu_s=self._gpu_s)

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(ValueError, OSError):  # closed by the parent after a kill
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)
