"""compute-sanitizer's process from the parent's side, with a script in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tuner.gpu.memcheck import memcheck

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHES = [{"path": "module.so", "m": 8, "n": 8, "k": 8, "dtype": "bf16"}]
SCRIPT = """#!/bin/sh
[ "$1" = --version ] && { echo "Version 1.2.3 (build 1)"; exit 0; }
exec %s -c '%s'
"""
# As tuner.gpu.launch_once begins: one line, then the watch on the parent.
BEGIN = "import os, sys, time; from tuner.gpu.wire import follow_parent; line = sys.stdin.readline(); follow_parent(); "


@pytest.fixture
def sanitizer(tmp_path: Path) -> Path:
    """A sanitizer that runs the Python code in the file `code` beside it."""
    return tmp_path / "compute-sanitizer"


def write(sanitizer: Path, code: str) -> None:
    """Let it run this."""
    sanitizer.write_text(SCRIPT % (sys.executable, BEGIN + code))
    sanitizer.chmod(0o755)


def test_launches_arrive_and_the_report_is_read(sanitizer: Path) -> None:
    """One line of JSON on standard input, which stays open."""
    write(
        sanitizer,
        'print("launch_once: all launches right" if "module.so" in line else line); print("ERROR SUMMARY: 0 errors")',
    )
    report = memcheck(LAUNCHES, sanitizer=sanitizer, timeout_s=30.0)
    assert (report.ran, report.clean, report.version) == (True, True, "1.2.3")


def test_run_that_never_ends_is_killed_at_its_limit(sanitizer: Path) -> None:
    """A6: a kernel may hang only under the sanitizer."""
    write(sanitizer, "time.sleep(60)")
    began = time.monotonic()
    report = memcheck(LAUNCHES, sanitizer=sanitizer, timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert not report.ran
    assert "within 1 s" in report.detail


def test_run_that_nobody_waits_for_is_killed_at_once(sanitizer: Path) -> None:
    """A24: a cancelled study frees the GPU."""
    write(sanitizer, "time.sleep(60)")
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    began = time.monotonic()
    assert not memcheck(LAUNCHES, sanitizer=sanitizer, stop=stop).ran
    assert time.monotonic() - began < 10


def test_run_ends_when_its_parent_is_killed(sanitizer: Path, tmp_path: Path) -> None:
    """A14: `kill -9` of the tuner leaves nothing behind, though the kernel hangs."""
    write(sanitizer, f'open("{tmp_path}/pid", "w").write(str(os.getpid())); time.sleep(60)')
    code = "from pathlib import Path; from tuner.gpu.memcheck import memcheck; "
    code += f"memcheck({LAUNCHES}, sanitizer=Path('{sanitizer}'))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as parent:
        file = tmp_path / "pid"
        deadline = time.monotonic() + 20
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        pid = int(file.read_text())
        parent.kill()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.02)
