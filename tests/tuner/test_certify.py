"""Checks of a winner: structure, stress builds, memory; with a stub pool, child and sanitizer."""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kernels.stress import stress_builds
from tests.tuner.support import PROBLEM, STARTING
from tuner.engine.base import CertifyJob, CertifyReply, CompileJob
from tuner.engine.certify import Certification
from tuner.engine.compile_pool import PoolReply
from tuner.engine.fake import fake_kernel
from tuner.gpu.jobs import StressJob, StressReply
from tuner.gpu.memcheck import MemcheckReport, read_report
from tuner.records import Outcome, Verdict

JOB = CertifyJob(problem=PROBLEM, config=STARTING[0], sm_count=132, seed=7)


class StubPool:
    """Compiles nothing: answers at once, with planted findings or a planted failure."""

    def __init__(self, *, findings: tuple[str, ...] = (), fails_from: int = 99) -> None:
        self.findings, self.fails_from = findings, fails_from
        self.submitted: list[tuple[Any, ...]] = []

    def submit(self, *arguments: Any) -> Future[PoolReply]:
        """See CompilePool."""
        self.submitted.append(arguments)
        future: Future[PoolReply] = Future()
        if len(self.submitted) > self.fails_from:
            future.set_result(PoolReply(kind="late", reason="no end within 60 s"))
            return future
        problem, config, sm_count, delays_ns, *check = arguments
        kernel = fake_kernel(CompileJob(problem=problem, config=config, sm_count=sm_count))
        module = kernel.module + repr(delays_ns).encode()
        object.__setattr__(kernel, "module", module)
        object.__setattr__(kernel, "sha256", hashlib.sha256(module).hexdigest())
        object.__setattr__(kernel, "findings", self.findings if check else None)
        future.set_result(PoolReply(kind="value", value=kernel))
        return future

    def drop(self, futures: Any) -> None:
        """See CompilePool."""


class StubChild:
    """Runs nothing: passes, or fails in one build."""

    def __init__(self, *, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.jobs: list[StressJob] = []

    def stress(self, job: StressJob) -> StressReply:
        """See GpuChild."""
        assert all(build.module_path.is_file() for build in job.builds)
        self.jobs.append(job)
        if self.fails_in:
            reason = "200 of 9732096 elements wrong"
            return StressReply(outcome=Outcome.WRONG_RESULT, reason=reason, failed_build=self.fails_in)
        return StressReply(outcome=None, launches=job.launches * len(job.builds), gpu_s=0.5)


def run(pool: StubPool, child: StubChild, report: MemcheckReport) -> tuple[CertifyReply, list[dict[str, Any]]]:
    """Certify with stubs; also what memcheck was asked to launch."""
    launches: list[dict[str, Any]] = []

    def memcheck(asked: list[dict[str, Any]]) -> MemcheckReport:
        launches.extend(asked)
        return report

    work = Certification(pool, JOB)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        built = work.build(Path(folder))
        reply = built if isinstance(built, CertifyReply) else work.run(child, *built, memcheck=memcheck)
    return reply, launches


CLEAN = MemcheckReport(ran=True, errors=0, version="2025.3.1")


def test_winner_that_passes_every_check_is_certified() -> None:
    """All stress builds run on their own problems, and memcheck launches the two shortest kinds."""
    child = StubChild()
    reply, launches = run(StubPool(), child, CLEAN)
    assert reply.certified
    assert [check.name for check in reply.checks] == ["structure", "stress", "memcheck"]
    planned = stress_builds(PROBLEM, STARTING[0], 132)
    assert [build.problem for build in child.jobs[0].builds] == [build.problem for build in planned]
    assert "700 launches right" in reply.checks[1].detail
    assert {launch["k"] for launch in launches} == {build.problem.k for build in planned if not build.delays_ns}
    assert reply.checks[2].tool == "compute-sanitizer 2025.3.1"


def test_broken_structural_rule_stops_before_the_gpu_is_used() -> None:
    """The finding is the reason."""
    child = StubChild()
    reply, launches = run(StubPool(findings=("store without fence: line 12",)), child, CLEAN)
    assert not reply.certified
    assert reply.failure is not None
    assert (reply.failure.name, reply.failure.detail) == ("structure", "store without fence: line 12")
    assert child.jobs == launches == []


def test_race_in_a_stress_build_is_a_failure_with_its_reason() -> None:
    """Memcheck does not run after it: it cannot see races and would only cost time."""
    reply, launches = run(StubPool(), StubChild(fails_in="1 k-block"), CLEAN)
    assert reply.failure is not None
    assert "WRONG_RESULT: 200 of 9732096 elements wrong" in reply.failure.detail
    assert launches == []


@pytest.mark.parametrize(
    "report",
    [
        MemcheckReport(ran=False, detail="compute-sanitizer is not installed"),
        MemcheckReport(ran=False, detail="timeout"),
    ],
)
def test_check_that_could_not_run_is_no_pass_and_no_failure(report: MemcheckReport) -> None:
    """The winner stays a candidate, and nobody blames it."""
    reply, _ = run(StubPool(), StubChild(), report)
    assert not reply.certified
    assert reply.failure is None
    assert reply.checks[-1].verdict is Verdict.NOT_RUN
    assert reply.checks[-1].detail == report.detail


def test_stress_build_that_does_not_compile_in_time_leaves_the_winner_unchecked() -> None:
    """A compile limit says nothing about the kernel."""
    reply, _ = run(StubPool(fails_from=3), StubChild(), CLEAN)
    assert not reply.certified
    assert reply.failure is None
    assert "no end within 60 s" in reply.checks[-1].detail


def test_memcheck_report_is_clean_only_when_the_launches_were_right() -> None:
    """Zero errors of a run that died early prove nothing."""
    tail = "========= ERROR SUMMARY: 0 errors\n"
    assert read_report("launch_once: all launches right\n" + tail, version="1").clean
    died = read_report("Traceback: no module\n" + tail, version="1")
    assert (died.ran, died.clean) == (False, False)
    found = read_report(
        "========= Invalid __global__ write of size 4 bytes\n=========     at gemm_kernel\n"
        "launch_once: all launches right\n========= ERROR SUMMARY: 3 errors\n",
        version="1",
    )
    assert (found.ran, found.clean, found.errors) == (True, False, 3)
    assert found.detail.startswith("Invalid __global__ write of size 4 bytes | at gemm_kernel")
