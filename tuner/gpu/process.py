"""One spawned child process in a process group of its own, seen from its parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from tuner.gpu.wire import Message, Order

ROOT = Path(__file__).resolve().parents[2]
# What a fault of the code that runs in a process never sends: somebody, or the kernel short of memory, ended it.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
STOP_POLL_S = 0.1
TAIL_BYTES = 16 * 1024
READ_BYTES = 64 * 1024


@contextlib.contextmanager
def killed_when(stop: threading.Event | None, process: subprocess.Popen[str]) -> Iterator[None]:
    """While the block runs, kill the process as soon as `stop` is set, and the group of its own that it must lead."""
    over = threading.Event()

    def watch(stop: threading.Event) -> None:
        while not over.is_set():
            if stop.wait(STOP_POLL_S):
                if process.returncode is not None:  # reaped: the number may belong to somebody else
                    return
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, args=(stop,), name=f"stop-{process.pid}", daemon=True) if stop else None
    if watcher is not None:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if watcher is not None:
            watcher.join()


@contextlib.contextmanager
def listened_to(
    command: Sequence[str], environ: Mapping[str, str], stop: threading.Event | None
) -> Iterator[subprocess.Popen[str]]:
    """A Python module of this project as a process that speaks line by line, and is gone when the block is left.

    command: module and its arguments
    environ: variables on top of this process's
    stop: when set, the process is killed at once
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,  # never written: end of file tells the process that its parent is gone
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        with killed_when(stop, process):
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


class ChildGone(Exception):
    """The child closed its end of the connection: it ended, or is about to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a child ended.

    text: `killed by SIGSEGV`, `exit status 3`
    from_outside: whether somebody else than the child or its parent ended it
    """

    text: str
    from_outside: bool


class ChildProcess:
    """A running child. Created with `start_new_session`, so that one signal reaches all that it has started.

    Messages and output are read by two threads: a child that stops half-way through a message, or prints without end,
    cannot block its parent.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._connection: Connection[Any, Any] = ours
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._gone = threading.Event()
        self._ending = threading.Lock()
        self._tail = bytearray()
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--channel", str(theirs.fileno())],
                stdin=subprocess.PIPE,  # never written: end of file tells the child that its parent is gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=dict(environ),
            )
        self._threads = [
            threading.Thread(target=self._read_messages, name=f"gpu-child-{self.pid}-messages", daemon=True),
            threading.Thread(target=self._read_output, name=f"gpu-child-{self.pid}-output", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id, and id of the group."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether its last message has arrived: it ended, or is about to."""
        return self._gone.is_set()

    def send(self, order: Order) -> None:
        """Raises ChildGone."""
        try:
            self._connection.send(order)
        except OSError as error:
            raise ChildGone from error

    def receive(self, timeout_s: float) -> Message:
        """The next message. Raises TimeoutError, or ChildGone after the last one."""
        try:
            message = self._inbox.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise TimeoutError from None
        if message is None:
            self._inbox.put(None)  # for whoever asks again
            raise ChildGone
        return message

    def stop(self, *, grace_s: float) -> str:
        """Let the child end by itself, kill what is left of its group, and say how it ended."""
        self._hang_up()
        self._await_exit(grace_s)
        return self.kill()

    def collect(self, *, grace_s: float = 2.0) -> Ending:
        """After ChildGone: how the child ended. Interpreters close files a moment before they exit: wait for that."""
        by_itself = self._await_exit(grace_s)
        text = self.kill()
        status = self._process.returncode
        return Ending(text=text, from_outside=by_itself and -status in FROM_OUTSIDE)

    def kill(self, *, patience_s: float = 30.0) -> str:
        """Kill the group and reap the child. Raises TimeoutError for a process that the kernel cannot end.

        Returns `killed by SIGSEGV`, `exit status 3`.
        """
        with self._ending:
            self._signal()
            try:
                status = self._process.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"process {self.pid} did not end within {patience_s:g} s of SIGKILL") from None
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._hang_up()
            for thread in self._threads:
                thread.join(timeout=2.0)
            self._connection.close()
            return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def shoot(self) -> None:
        """Kill the group, and leave the rest to the thread that talks to the child: it sees the end of its messages.

        The one call that another thread may make. It closes no file, whose number the other thread may be using.
        """
        if self._ending.acquire(blocking=False):  # else the child is being ended already
            try:
                self._signal()
            finally:
                self._ending.release()

    def last_lines(self, count: int = 8) -> str:
        """The end of what the child printed, on one line."""
        lines = self._tail.decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-count:] if line.strip())

    def _signal(self) -> None:
        if self._process.returncode is None:  # once reaped, the number may belong to somebody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _await_exit(self, grace_s: float) -> bool:
        """Whether it ended within the time."""
        # Without reaping: the id of the group stays ours until kill() has signalled it.
        deadline = time.monotonic() + grace_s
        while self._process.returncode is None and time.monotonic() < deadline:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                    return True
            except ChildProcessError:  # another thread reaped it
                return True
            time.sleep(0.01)
        return self._process.returncode is not None

    def _hang_up(self) -> None:
        # A plain close would not wake our own reader, and the child would see no end of file while it reads.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def _read_messages(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except Exception:  # end of file, or bytes that are no message: either way this child cannot be talked to
            self._gone.set()
            self._inbox.put(None)

    def _read_output(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        with stream, contextlib.suppress(OSError, ValueError):
            while chunk := os.read(stream.fileno(), READ_BYTES):
                self._tail += chunk
                del self._tail[:-TAIL_BYTES]
