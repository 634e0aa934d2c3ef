"""Compile functions that misbehave. The pool's workers import this module by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
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


def do_shot() -> None:
    """As the kernel does to a process when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def do_nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def do_litter(sleeps: bool) -> str:
    """Leaves a temporary file, as a killed nvcc does."""
    handle, name = tempfile.mkstemp()
    os.close(handle)
    print(name, file=sys.stderr, flush=True)
    if sleeps:
        do_sleep()
    return name


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
