"""Processes that compile. Each leads its own process group; a time limit or a crash takes the whole group, then a fresh
process takes its place.

Children are started with exec, never forked: a fork of a process with threads, or with a CUDA context, is broken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import psutil

from tuner.engine.base import EngineError
from tuner.engine.compile_worker import BROKEN, FAILED, READY
from tuner.engine.turns import URGENT_IN_A_ROW, Turns
from tuner.gpu.process import FROM_OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_WORKER = (sys.executable, "-m", "tuner.engine.compile_worker")
_TAIL_BYTES = 2000
_DYING_S = 2.0  # a core dump of a large process takes a while


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilePoolOptions:
    """What the pool runs, and for how long it lets it.

    function: "module:function" that a worker imports once and calls with each job's arguments; a function "warm_up" of
        the same module is called before the first job
    processes: workers
    limit_s: seconds one job may take, from the moment a worker starts on it
    start_s: seconds a worker may take to start and to import the function
    """

    function: str = "kernels.compile:compile_variant"
    processes: int = 2
    limit_s: float = 60.0
    start_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReply:
    """What became of a job.

    kind: "value", "failed" (it raised), "died" (its process did), "late" (it was killed at the limit) or "lost" (its
        process was killed from outside, which says nothing about the job)
    value: what the function returned
    reason: for people, empty after success
    """

    kind: str
    value: Any = None
    reason: str = ""


@dataclass(slots=True)
class _Job:
    arguments: tuple[Any, ...]
    future: Future[PoolReply]


class CompilePool:
    """Runs jobs on a fixed number of worker processes; urgent ones first, within their class in the order they came.

    Builds of a winner wait behind no candidate, but they are many: while a GPU runs short of candidates every other
    turn is a candidate's, so that it need not idle.

    A worker takes a job only when it is warm. On a fresh host of 16 cores importing and first using the compiler took
    about 10 s, a compile 1.4 s. Modules are taken up in order: one that fell to a cold worker held up all in flight.
    """

    def __init__(self, options: CompilePoolOptions, is_gpu_short: Callable[[], bool] = lambda: False) -> None:
        """Each job lets one more worker process start, until all have. is_gpu_short: whether a GPU runs out of work"""
        self._options = options
        self._jobs: Turns[_Job | None] = Turns(lambda: 1 if is_gpu_short() else URGENT_IN_A_ROW)
        self._wanted = threading.Semaphore(0)
        self._warming: set[_Worker] = set()
        self._running: dict[Future[Any], _Worker] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"compile-{index}", daemon=True)
            for index in range(options.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any, urgent: bool = False) -> Future[PoolReply]:
        """Queue one call of the function. The future raises EngineError when no compile can work on this machine."""
        future: Future[PoolReply] = Future()
        if self._closed:
            raise EngineError("the compile pool is closed")
        self._jobs.put(_Job(arguments, future), urgent=urgent)
        self._wanted.release()
        return future

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """Take queued jobs back and kill the workers of running ones; those futures still get a "died" reply."""
        for future in futures:
            if future.cancel():
                continue
            with self._lock:
                if (worker := self._running.get(future)) is not None:
                    worker.kill()

    def close(self) -> None:
        """Kill all workers and end the pool. Queued jobs are cancelled."""
        with self._lock:
            self._closed = True
            running = list(self._running)
            for worker in self._warming:
                worker.kill()
        for job in self._jobs.drain():
            if job is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
            self._wanted.release()
        self.drop(running)
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------ one thread for each worker

    def _serve(self) -> None:
        self._wanted.acquire()
        worker = self._warm()
        try:
            while (job := self._jobs.take()) is not None:
                if self._closed:
                    job.future.cancel()
                elif job.future.set_running_or_notify_cancel():
                    worker = self._run(worker, job) or self._warm()
        finally:
            if worker is not None:
                worker.end()

    def _warm(self) -> _Worker | None:
        """A worker that is ready for a job. None where it did not become so: the next job tries again, and says why."""
        with self._lock:
            if self._closed:
                return None
            try:
                worker = _Worker(self._options)
            except EngineError:
                return None
            self._warming.add(worker)
        try:
            if worker.wait_until_ready():
                return worker
        except EngineError:
            pass
        finally:
            with self._lock:
                self._warming.discard(worker)
        worker.end()
        return None

    def _run(self, worker: _Worker | None, job: _Job) -> _Worker | None:
        """Run one job; returns the worker for the next one, or None when a fresh one is needed."""
        try:
            worker = worker or _Worker(self._options)
            with self._lock:
                self._running[job.future] = worker
                if self._closed:
                    worker.kill()
            reply = worker.run(job.arguments)
        except EngineError as error:
            job.future.set_exception(error)
            healthy = False
        else:
            healthy = reply.kind in ("value", "failed")
            job.future.set_result(reply)
        finally:
            with self._lock:
                self._running.pop(job.future, None)
        # A job may end in the very moment in which it is dropped: its worker is killed, and must not get the next one.
        if healthy and worker is not None and not worker.is_killed:
            return worker
        if worker is not None:
            worker.end()
        return None


@contextlib.contextmanager
def _as_engine_error() -> Iterator[None]:
    """A worker needs a process, files and room for them: where one is missing no compile can work."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"a compile worker cannot be started: {error}") from error


class _Worker:
    """One child process."""

    def __init__(self, options: CompilePoolOptions) -> None:
        self._options = options
        self._ready = False
        self._ended = False
        self._killed = False
        self._kill_lock = threading.Lock()
        with contextlib.ExitStack() as undo, _as_engine_error():
            self._output = undo.enter_context(tempfile.TemporaryFile())
            # A killed compiler leaves its files behind: they go with this folder.
            self._folder = tempfile.TemporaryDirectory(prefix="gemm-tuner-compile-")
            undo.callback(self._folder.cleanup)
            self._pipe, theirs = Pipe()
            undo.enter_context(self._pipe)
            with theirs:
                # Inherited by nobody but the child, which holds the reading end.
                lifeline, self._lifeline = os.pipe()
                undo.callback(os.close, self._lifeline)
                try:
                    self._process = self._start(theirs.fileno(), lifeline)
                finally:
                    os.close(lifeline)
            undo.pop_all()  # closed in `end`

    def _start(self, pipe: int, lifeline: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            (*_WORKER, str(pipe), str(lifeline), self._options.function),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(pipe, lifeline),
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                "TMPDIR": self._folder.name,
            },
        )

    @property
    def is_killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed

    def run(self, arguments: tuple[Any, ...]) -> PoolReply:
        """Run one job to its end or to its time limit. Raises EngineError when no compile can work."""
        if not self.wait_until_ready():
            return PoolReply(kind="lost", reason=f"a compile worker was killed while starting ({self._status()})")
        self._output.seek(0)
        self._output.truncate()
        started_s = time.monotonic()
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(self._options.limit_s):
                self.kill()
                reason = f"compiling took longer than {self._options.limit_s:g} s and was killed{self._after_tail()}"
                return PoolReply(kind="late", reason=reason)
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            after_s = time.monotonic() - started_s
            lost = self._was_killed_from_outside()
            reason = f"the compiler died after {after_s:.1f} s ({self._status()}){self._after_tail()}"
            return PoolReply(kind="lost" if lost else "died", reason=reason)
        self._kill_descendants()  # what a finished compile left behind
        if kind == BROKEN:
            raise EngineError(str(value))
        if kind == FAILED:
            text, tail = value
            return PoolReply(kind="failed", reason=f"{text}\n{tail}".strip())
        return PoolReply(kind="value", value=value)

    def wait_until_ready(self) -> bool:
        """False when somebody killed it meanwhile. Raises EngineError for one that cannot start."""
        if self._ready:
            return True
        try:
            self._ready = self._pipe.poll(self._options.start_s) and self._pipe.recv()[0] == READY
            problem = f"was not ready after {self._options.start_s:g} s"
        except (EOFError, OSError):
            problem = "ended while starting"
            if self._was_killed_from_outside():
                return False
        if not self._ready:
            self.kill()
            raise EngineError(
                f"a compile worker for {self._options.function} {problem} ({self._status()}){self._after_tail()}"
            )
        return True

    def kill(self) -> None:
        """Kill the process, its process group, and descendants that left the group."""
        with self._kill_lock:
            # A process that was waited for is no longer ours to kill: its number may belong to another one by now. So
            # the group is always killed before its leader is waited for.
            if self._ended or self._process.returncode is not None:
                return
            self._killed = True
            self._kill_descendants()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _was_killed_from_outside(self) -> bool:
        """Whether an operator, or a machine short of memory, ended it. Ends what is left of it."""
        by_itself = self._let_die() and not self._killed
        self.kill()
        self._status()
        return by_itself and -(self._process.returncode or 0) in FROM_OUTSIDE

    def _let_die(self) -> bool:
        """Whether it ended by itself; the pipe closes before there is an exit status, so wait a little for it."""
        deadline_s = time.monotonic() + _DYING_S
        while time.monotonic() < deadline_s:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            time.sleep(0.01)
        return False

    def end(self) -> None:
        """Kill it and free what it held."""
        self.kill()
        with self._kill_lock:
            self._ended = True
        self._process.wait()
        self._pipe.close()
        os.close(self._lifeline)
        self._output.close()
        with contextlib.suppress(OSError):  # a process that left the group may still be writing there
            self._folder.cleanup()

    def _kill_descendants(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    def _status(self) -> str:
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "its pipe closed"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def _after_tail(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        tail = self._output.read().decode(errors="replace").strip()
        return f": {tail}" if tail else ""
