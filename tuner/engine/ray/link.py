"""The tuner's side of its bridge process: starts it, starts it again with growing pauses, passes messages."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from tuner.engine.ray.wire import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from tuner.engine.ray.wire import FromBridge, ToBridge

log = logging.getLogger("gemm_tuner.ray")
BRIDGE = (sys.executable, "-m", "tuner.engine.ray.bridge")


class Listener(Protocol):
    """Who hears what the bridge says. Called from the link's thread."""

    def heard(self, message: FromBridge) -> None:
        """A message."""

    def cut(self, reason: str) -> None:
        """The bridge is gone, and with it every request that was not answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkOptions:
    """How the bridge is started.

    address: host:port of Ray's head
    command: program of the bridge
    first_pause_s, longest_pause_s: before it is started again; doubles with each failure
    healthy_s: a bridge that lived this long starts the pauses over
    """

    address: str
    command: Sequence[str] = BRIDGE
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    healthy_s: float = 60.0


class Link:
    """A bridge at a time, for as long as the tuner lives."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._listener: Listener | None = None
        self._outbox: SimpleQueue[ToBridge | None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ray-link", daemon=True)
        self.restarts = -1  # the first start is none

    def open(self, listener: Listener) -> None:
        """Start, and tell the listener from now on."""
        self._listener = listener
        self._thread.start()

    def send(self, message: ToBridge) -> bool:
        """Queue a message; never waits. False when there is no bridge to hear it."""
        with self._lock:
            if self._outbox is None:
                return False
            self._outbox.put(message)
            return True

    def close(self) -> None:
        """End the bridge."""
        self._closed.set()
        with self._lock:
            process = self._process
        if process is not None:
            _kill(process)
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        failures = 0
        while not self._closed.is_set():
            started_s = time.monotonic()
            reason = self._one_bridge()
            if self._closed.is_set():
                return
            failures = 1 if time.monotonic() - started_s > self._options.healthy_s else failures + 1
            pause_s = min(self._options.longest_pause_s, self._options.first_pause_s * 2.0 ** (failures - 1))
            log.warning("%s; connecting again in %g s", reason, pause_s)
            assert self._listener is not None
            self._listener.cut(reason)
            self._closed.wait(pause_s)

    def _one_bridge(self) -> str:
        """Start one and listen until it ends; returns why it did."""
        assert self._listener is not None
        mine, theirs = Pipe()
        lifeline, held = os.pipe()  # the child ends when the writing end closes, however this process ends
        try:
            process = subprocess.Popen(
                [*self._options.command, str(theirs.fileno()), str(lifeline), self._options.address],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self.restarts += 1
        outbox: SimpleQueue[ToBridge | None] = SimpleQueue()
        sender = threading.Thread(target=_pass_on, args=(outbox, mine), name="ray-send", daemon=True)
        sender.start()
        with self._lock:
            self._process, self._outbox = process, outbox
            if self._closed.is_set():
                _kill(process)
        try:
            reason = self._listen(mine)
        finally:
            with self._lock:
                self._outbox = None
            _kill(process)
            status = process.wait()
            outbox.put(None)
            sender.join()
            mine.close()
            os.close(held)
        return reason or f"the bridge to Ray ended with status {status}"

    def _listen(self, pipe: Connection) -> str:
        """Returns why the bridge cannot work, or nothing where it just ended."""
        assert self._listener is not None
        while True:
            try:
                message: FromBridge = pipe.recv()
            except (EOFError, OSError):
                return ""
            if isinstance(message, Refused):
                return message.reason
            self._listener.heard(message)


def _pass_on(outbox: SimpleQueue[ToBridge | None], pipe: Connection) -> None:
    """Write from a thread of its own: a full pipe must not hold up who reads the answers."""
    while (message := outbox.get()) is not None:
        try:
            pipe.send(message)
        except OSError:
            return


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With everything that it has started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
