"""Keeps a few child processes running: restarts those that may be restarted, stops all of them together.

Each child leads its own process group, so that what it started (compilers, GPU children) goes with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PR_SET_PDEATHSIG = 1
READY_S = 30.0
READY_POLL_S = 0.05
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """One child process.

    name: for messages
    command: program and arguments
    restart: whether it is started again when it ends by itself; otherwise its end stops everything
    ready: file that it makes once it has begun its work; those after it start no earlier
    final_status: exit status with which it says that starting it again would not help
    """

    name: str
    command: Sequence[str]
    restart: bool
    ready: Path | None = None
    final_status: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Pause before a child is started again: doubles with each quick death, starts over after a healthy run.

    first_s: pause after the first death
    longest_s: upper limit
    healthy_s: a child that ran this long was healthy
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_s: float = 60.0

    def pause_s(self, quick_deaths: int) -> float:
        """Seconds to wait after this many quick deaths in a row, the first being 1."""
        return min(self.longest_s, self.first_s * 2.0 ** (quick_deaths - 1))


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)
    quick_deaths: int = 0


class Supervisor:
    """Runs children until told to stop. Use from the main thread: a child asks to die with the thread that made it."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        backoff: Backoff | None = None,
        grace_s: float = 10.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._specs = specs
        self._backoff = backoff or Backoff()
        self._grace_s = grace_s
        self._report = report
        self._children: dict[str, _Child] = {}
        # SimpleQueue.put is re-entrant: a signal handler may call it while the main thread is inside get.
        self._events: SimpleQueue[tuple[str, str, int]] = SimpleQueue()

    def stop(self) -> None:
        """Ask `run` to end all children and return 0. Safe in a signal handler and from any thread."""
        self._events.put(("stop", "", 0))

    def run(self) -> int:
        """Start all children and look after them. Returns 0 after `stop`, 1 when one that is not restarted ended."""
        try:
            for spec in self._specs:
                if spec.ready is not None:
                    spec.ready.unlink(missing_ok=True)
                self._start(spec)
                self._wait_until_ready(spec)
            while True:
                event, name, status = self._events.get()
                if event == "stop":
                    return 0
                if not self._ended(self._children[name], status):
                    return 1
        finally:
            self._stop_all()

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each child that was started, by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def _start(self, spec: ChildSpec, quick_deaths: int = 0) -> None:
        # Its own session, so that Ctrl-C reaches only the supervisor, which then stops all children in order.
        process = subprocess.Popen(spec.command, start_new_session=True, preexec_fn=die_with_parent)  # noqa: PLW1509
        child = _Child(spec, process, quick_deaths=quick_deaths)
        self._children[spec.name] = child
        threading.Thread(target=self._watch, args=(child,), name=f"watch-{spec.name}", daemon=True).start()

    def _wait_until_ready(self, spec: ChildSpec) -> None:
        """Wait for a child's sign of life; one that dies or takes too long is left to the main loop."""
        deadline, process = time.monotonic() + READY_S, self._children[spec.name].process
        while spec.ready is not None and not spec.ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                return
            if self._stopped_within(READY_POLL_S):
                self.stop()  # seen here, acted on in run
                return

    def _watch(self, child: _Child) -> None:
        self._events.put(("ended", child.spec.name, child.process.wait()))

    def _ended(self, child: _Child, status: int) -> bool:
        """Start a child again after a pause. False when that is not allowed."""
        name = child.spec.name
        _kill_group(child.process.pid, signal.SIGKILL)  # what it left behind, if anything
        if not child.spec.restart or status == child.spec.final_status:
            self._report(f"{name} ended ({_status(status)}): stopping")
            return False
        healthy = time.monotonic() - child.started_s >= self._backoff.healthy_s
        quick_deaths = 1 if healthy else child.quick_deaths + 1
        pause_s = self._backoff.pause_s(quick_deaths)
        self._report(f"{name} ended ({_status(status)}): starting it again in {pause_s:g} s")
        if self._stopped_within(pause_s):
            self.stop()  # seen here, acted on in run
            return True
        self._start(child.spec, quick_deaths)
        return True

    def _stopped_within(self, pause_s: float) -> bool:
        """Wait, but notice a stop at once. Other events are put back in their order."""
        deadline, kept, stopped = time.monotonic() + pause_s, [], False
        while not stopped and (left_s := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left_s)
            except Empty:
                break
            stopped = event[0] == "stop"
            if not stopped:
                kept.append(event)
        for event in kept:
            self._events.put(event)
        return stopped

    def _stop_all(self) -> None:
        """End every child: ask first, then insist. The API, started last, is asked first, so that no work comes in."""
        children = list(reversed(self._children.values()))
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + self._grace_s
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._report(f"{child.spec.name} did not stop within {self._grace_s:g} s: killed")
            _kill_group(child.process.pid, signal.SIGKILL)
            child.process.wait()


def _kill_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody of the group is left
        os.killpg(pid, number)


def die_with_parent() -> None:
    """A supervisor that is killed outright must not leave a service on the port.

    Runs in the child between fork and exec, where other threads' locks may be held for ever: one call into the C
    library, bound beforehand, and nothing else.
    """
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
