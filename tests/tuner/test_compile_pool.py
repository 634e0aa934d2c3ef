"""The compile pool against compilers that sleep, die, fork and refuse."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.tuner import slow_starters
from tuner.engine.base import EngineError
from tuner.engine.compile_pool import CompilePool, CompilePoolOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 30.0


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    """One worker, so that every test also shows that the next job runs; a short limit."""
    options = CompilePoolOptions(function="tests.tuner.fake_compilers:run", processes=1, limit_s=1.0)
    pool = CompilePool(options)
    yield pool
    pool.close()


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def works(pool: CompilePool) -> bool:
    """Whether the pool compiles the next job."""
    return bool(pool.submit("echo", 7).result(WAIT_S).value == 7)


def test_a_worker_serves_one_job_after_another(pool: CompilePool) -> None:
    """Workers are long-lived: importing the compiler is paid once."""
    first, second = (pool.submit("pid").result(WAIT_S).value for _ in range(2))
    assert first == second != os.getpid()


def test_a_job_never_waits_for_a_cold_worker_while_a_warm_one_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are taken up in order: one that waits for a worker's imports would hold up all in flight."""
    monkeypatch.setenv(slow_starters.FOLDER, str(tmp_path))
    pool = CompilePool(CompilePoolOptions(function="tests.tuner.slow_starters:run", processes=2))
    try:
        began = time.monotonic()
        workers = {pool.submit().result(WAIT_S).value for _ in range(3)}
        assert len(workers) == 1
        assert time.monotonic() - began < slow_starters.COLD_S
    finally:
        pool.close()
    assert time.monotonic() - began < slow_starters.COLD_S  # nor does the end wait for one


def test_a9_compile_that_sleeps_is_killed_at_its_limit_and_the_next_one_runs(pool: CompilePool) -> None:
    """A9: a compile that hangs frees its slot at its own limit."""
    reply = pool.submit("sleep").result(WAIT_S)
    assert reply.kind == "late"
    assert "longer than 1 s" in reply.reason
    assert works(pool)


def test_a3_compile_that_aborts_leaves_its_last_words_in_the_reason(pool: CompilePool) -> None:
    """A3: an abort inside the compiler takes one worker, and the reason ends with what it printed."""
    reply = pool.submit("abort").result(WAIT_S)
    assert reply.kind == "died"
    assert "SIGABRT" in reply.reason
    assert "LLVM ERROR: cannot select" in reply.reason
    assert works(pool)


def test_a10_grandchildren_of_a_compile_that_hangs_are_killed_with_it(pool: CompilePool, tmp_path: Path) -> None:
    """A10: neither children in the process group nor one in its own session outlive the limit."""
    reply = pool.submit("fork_and_sleep", str(tmp_path / "pids")).result(WAIT_S)
    assert reply.kind == "late"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert works(pool)


@pytest.mark.parametrize(("what", "kind"), [("fork_and_abort", "died"), ("fork_and_return", "value")])
def test_children_left_behind_by_a_compile_are_killed(pool: CompilePool, tmp_path: Path, what: str, kind: str) -> None:
    """A10: whether their parent crashed or returned."""
    assert pool.submit(what, str(tmp_path / "pid")).result(WAIT_S).kind == kind
    assert gone(int((tmp_path / "pid").read_text()))
    assert works(pool)


@pytest.mark.parametrize(
    ("what", "words"), [("raise_unpicklable", "RefusesToPickle: holds a lock"), ("return_unpicklable", "unpicklable")]
)
def test_what_cannot_be_pickled_fails_its_own_job_only(pool: CompilePool, what: str, words: str) -> None:
    """An exception or a value that no pickle takes becomes text; the worker lives on."""
    before = pool.submit("pid").result(WAIT_S).value
    reply = pool.submit(what).result(WAIT_S)
    assert reply.kind == "failed"
    assert words in reply.reason
    assert pool.submit("pid").result(WAIT_S).value == before


def test_a_compile_that_exits_is_reported_with_its_status(pool: CompilePool) -> None:
    """sys.exit inside a compile ends the worker, not the pool."""
    reply = pool.submit("exit").result(WAIT_S)
    assert reply.kind == "died"
    assert "exit status 3" in reply.reason
    assert works(pool)


def test_a_compile_killed_from_outside_is_lost_and_blames_nobody(pool: CompilePool) -> None:
    """A11: SIGKILL comes from an operator, or from a machine short of memory; the job may be tried again."""
    reply = pool.submit("shot").result(WAIT_S)
    assert reply.kind == "lost"
    assert "SIGKILL" in reply.reason
    assert works(pool)


def test_time_in_the_queue_is_not_charged(pool: CompilePool) -> None:
    """Three jobs of 0.4 s behind one another: the last one waits for 0.8 s and has its whole second of limit."""
    replies = [pool.submit("nap", 0.4) for _ in range(3)]
    assert [reply.result(WAIT_S).kind for reply in replies] == ["value"] * 3


def test_files_of_a_killed_compile_are_removed(pool: CompilePool) -> None:
    """A compiler that is killed cannot tidy up after itself."""
    kept = Path(pool.submit("litter", False).result(WAIT_S).value)
    assert kept.exists()
    assert kept.parent.name.startswith("gemm-tuner-compile-")
    reply = pool.submit("litter", True).result(WAIT_S)
    assert reply.kind == "late"
    left = Path(reply.reason.split()[-1])
    assert left.parent == kept.parent
    assert works(pool)  # on a fresh worker: the old one has been put away
    assert not kept.parent.exists()


def test_a_missing_compiler_is_the_machines_fault(pool: CompilePool) -> None:
    """No candidate is blamed when there is no compiler at all."""
    with pytest.raises(EngineError, match="no nvcc"):
        pool.submit("toolchain").result(WAIT_S)
    assert works(pool)


def test_dropping_takes_queued_jobs_back_and_stops_running_ones(pool: CompilePool) -> None:
    """A24: a cancelled study frees its compile slot at once, not at the limit."""
    pid = pool.submit("pid").result(WAIT_S).value
    running, queued = pool.submit("sleep"), pool.submit("echo", 1)
    while not running.running():
        time.sleep(0.01)
    started_s = time.monotonic()
    pool.drop([running, queued])
    assert queued.cancelled()
    assert running.result(WAIT_S).kind == "died"
    assert time.monotonic() - started_s < 0.9
    assert gone(pid)
    assert works(pool)


def test_dropping_a_job_that_has_just_ended_harms_no_other(pool: CompilePool) -> None:
    """A24: the next job must not get the worker that was killed for the dropped one."""
    ended = pool.submit("nap", 0.1)
    ended.add_done_callback(lambda future: pool.drop([future]))
    behind = pool.submit("echo", 2)
    assert ended.result(WAIT_S).kind == "value"
    assert behind.result(WAIT_S).kind == "value"


def test_a_function_that_cannot_be_imported_is_said_so() -> None:
    """The reason holds the interpreter's last words."""
    pool = CompilePool(CompilePoolOptions(function="tests.tuner.fake_compilers_missing:run", processes=1))
    with pytest.raises(EngineError, match=r"ended while starting[\s\S]*ModuleNotFoundError"):
        pool.submit("echo", 1).result(WAIT_S)
    pool.close()


@pytest.mark.parametrize("name", ["TemporaryFile", "TemporaryDirectory"])
def test_a_disk_that_is_full_for_a_moment_fails_one_job_and_not_the_pool(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's thread that ends by it would take no job again: each later one would wait for ever."""
    real, refusals = getattr(tempfile, name), iter(range(2))  # the worker that is warmed up, and the one for the job

    def full(*given: Any, **named: Any) -> Any:
        if next(refusals, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given, **named)

    monkeypatch.setattr(tempfile, name, full)
    pool = CompilePool(CompilePoolOptions(function="tests.tuner.fake_compilers:run", processes=1))
    try:
        with pytest.raises(EngineError, match=r"cannot be started: .*No space left on device"):
            pool.submit("echo", 1).result(WAIT_S)
        assert works(pool)
    finally:
        pool.close()


def test_workers_and_their_children_die_with_the_tuner(tmp_path: Path) -> None:
    """kill -9 of the process that owns the pool leaves no compiler behind."""
    script = (
        "import sys; from tuner.engine.compile_pool import *\n"
        "pool = CompilePool(CompilePoolOptions(function='tests.tuner.fake_compilers:run', processes=1))\n"
        "print(pool.submit('pid').result().value, flush=True)\n"
        "pool.submit('fork_and_sleep', sys.argv[1]).result()\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "pids")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        time.sleep(0.02)
    in_the_group = int((tmp_path / "pids").read_text().split()[0])
    own_session = int((tmp_path / "pids").read_text().split()[1])
    owner.kill()
    owner.communicate()
    assert gone(worker)
    assert gone(in_the_group)
    psutil.Process(own_session).kill()
