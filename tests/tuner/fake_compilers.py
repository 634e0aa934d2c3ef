"""Compile functions that misbehave. The pool's workers import this module by name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SLEEP = "import time; time.sleep(600)"


class RefusesToPickle(Exception):
    """Holds a lock, which no pickle takes."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def run(what: str, *arguments: Any) -> Any:
    """Do what the job says."""
    return globals()[f"do_{what}"](*arguments)


def do_echo(value: Any) -> Any:
    return value


def do_pid() -> int:
    return os.getpid()


def do_sleep() -> None:
    time.sleep(600)


def do_abort() -> None:
    print("LLVM ERROR: cannot select", file=sys.stderr, flush=True)
    os.abort()


def do_fork_and_sleep(pid_file: str) -> None:
    """Starts a child and one in a session of its own, as a compiler driver may, and waits for them for ever."""
    children = [subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=own) for own in (False, True)]
    Path(pid_file).write_text(" ".join(str(child.pid) for child in children))
    for child in children:
        child.wait()


def do_fork_and_abort(pid_file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    Path(pid_file).write_text(str(child.pid))
    os.abort()


def do_fork_and_return(pid_file: str) -> int:
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    Path(pid_file).write_text(str(child.pid))
    child.returncode = 0  # nobody will wait for it
    return child.pid


def do_raise_unpicklable() -> None:
    raise RefusesToPickle


def do_return_unpicklable() -> Any:
    return threading.Lock()


def do_exit() -> None:
    sys.exit(3)


def do_toolchain() -> None:
    from kernels.errors import ToolchainError

    raise ToolchainError("no nvcc: install the tuner extra")


def compile_kernel(problem: Any, config: Any, sm_count: int) -> Any:
    """A compile function with the signature of the real one; the pipeline depth says what goes wrong."""
    from tuner.engine.base import CompileJob
    from tuner.engine.fake import fake_kernel

    if config.pipe_depth == 9:
        do_abort()
    if config.pipe_depth == 10:
        do_sleep()
    if config.pipe_depth == 11:
        from kernels.errors import CompileError

        raise CompileError("nvcc for sm_90a failed: bad", log_tail="line 7: error")
    job = CompileJob(problem=problem, config=config, sm_count=sm_count)
    return fake_kernel(job, spill_bytes=64 if config.pipe_depth == 12 else 0)
