"""Checks of a winner: structure, stress builds, soak, memory; with a stub pool, child, soak and sanitizer."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kernels.stress import stress_builds
from tests.tuner.support import PROBLEM, STARTING
from tuner.engine.base import CertifyJob, CertifyReply, CompileJob
from tuner.engine.certify import Apart, Certification
from tuner.engine.compile_pool import PoolReply
from tuner.engine.fake import fake_kernel
from tuner.gpu.jobs import StressJob, StressReply
from tuner.gpu.memcheck import SanitizerReport, read_report, sanitize
from tuner.gpu.soak import SoakJob, SoakReport
from tuner.records import Outcome, Verdict

BUILT = fake_kernel(CompileJob(problem=PROBLEM, config=STARTING[0], sm_count=132))
JOB = CertifyJob(
    problem=PROBLEM,
    config=STARTING[0],
    sm_count=132,
    module_path=Path("published.so"),
    module_sha256=BUILT.sha256,
    source_hash=BUILT.source_hash,
    seed=7,
)


class StubPool:
    """Compiles nothing: answers at once, with planted findings or a planted failure."""

    def __init__(
        self,
        *,
        findings: tuple[str, ...] = (),
        unjudged: tuple[str, ...] = (),
        fails_from: int = 99,
        edited: bool = False,
    ) -> None:
        self.findings, self.unjudged, self.fails_from, self.edited = findings, unjudged, fails_from, edited
        self.submitted: list[tuple[Any, ...]] = []

    def submit(self, *arguments: Any, urgent: bool = False) -> Future[PoolReply]:
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
        object.__setattr__(kernel, "unjudged", self.unjudged)
        if self.edited:
            object.__setattr__(kernel, "source_hash", "of a template that was edited")
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


UUID = "GPU-0"
SOAKED = SoakReport(verdict=Verdict.CLEAN, detail="10000 launches in a fresh process", gpu_s=2.0)
CLEAN = SanitizerReport(ran=True, errors=0, version="2025.3.1")


@dataclass
class Asked:
    """What the checks in processes of their own were asked for."""

    launches: list[dict[str, Any]] = field(default_factory=list)
    soaks: list[SoakJob] = field(default_factory=list)


def run(
    pool: StubPool, child: StubChild, report: SanitizerReport = CLEAN, soaked: SoakReport = SOAKED
) -> tuple[CertifyReply, Asked]:
    """Certify with stubs."""
    asked = Asked()

    def memcheck(launches: list[dict[str, Any]], uuid: str) -> SanitizerReport:
        assert uuid == UUID
        asked.launches.extend(launches)
        return report

    def soak(job: SoakJob, uuid: str) -> SoakReport:
        assert uuid == UUID
        asked.soaks.append(job)
        return soaked

    work = Certification(pool, JOB)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        built = work.build(Path(folder))
        if isinstance(built, CertifyReply):
            return built, asked
        structure, modules = built
        stress = work.stress(child, modules)
        checks = Apart(memcheck=memcheck, soak=soak)
        apart = work.apart(modules, checks, UUID) if stress.passed else None
        return work.reply(structure, stress, apart), asked


def test_winner_that_passes_every_check_is_certified() -> None:
    """All stress builds run on their own problems, the published file is soaked, memcheck launches the plain builds."""
    child = StubChild()
    reply, asked = run(StubPool(), child)
    assert reply.certified
    assert [check.name for check in reply.checks] == ["structure", "stress", "soak", "memcheck"]
    planned = stress_builds(PROBLEM, STARTING[0], 132)
    assert [build.problem for build in child.jobs[0].builds] == [build.problem for build in planned]
    assert f"{100 * len(planned)} launches right" in reply.checks[1].detail
    assert "20 builds with delays" in reply.checks[1].detail
    assert [(job.module_path, job.module_sha256) for job in asked.soaks] == [(JOB.module_path, JOB.module_sha256)]
    assert sum(asked.soaks[0].launches.values()) == 10_000
    assert {launch["k"] for launch in asked.launches} == {b.problem.k for b in planned if not b.delays_ns}
    assert reply.checks[3].tool == "compute-sanitizer 2025.3.1"
    assert reply.gpu_s == 0.5 + SOAKED.gpu_s


def test_broken_structural_rule_stops_before_the_gpu_is_used() -> None:
    """The finding is the reason."""
    child = StubChild()
    reply, asked = run(StubPool(findings=("store without fence: line 12",)), child)
    assert not reply.certified
    assert reply.failure is not None
    assert (reply.failure.name, reply.failure.detail) == ("structure", "store without fence: line 12")
    assert child.jobs == asked.launches == asked.soaks == []


def test_source_that_the_rules_cannot_judge_is_no_pass_and_no_failure() -> None:
    """A new statement of a template is not a fault: the other checks go on, and the winner stays a candidate."""
    child = StubChild()
    reply, asked = run(StubPool(unjudged=("unknown instruction: line 7: red.async has no place",)), child)
    assert not reply.certified
    assert reply.failure is None
    assert reply.checks[0].verdict is Verdict.NOT_RUN
    assert reply.checks[0].detail.startswith("cannot judge: unknown instruction: line 7: red.async")
    assert len(child.jobs) == len(asked.soaks) == 1


def test_template_that_changed_since_the_trial_is_not_judged_in_its_place() -> None:
    """A study that is resumed after an edit: the rules would read a source that nobody publishes."""
    reply, _ = run(StubPool(edited=True), StubChild())
    assert reply.checks[0].verdict is Verdict.NOT_RUN
    assert "template has changed" in reply.checks[0].detail
    assert not reply.certified


def test_race_in_a_stress_build_is_a_failure_with_its_reason() -> None:
    """Nothing runs after it: the soak and memcheck would only cost time."""
    reply, asked = run(StubPool(), StubChild(fails_in="1 k-block"))
    assert reply.failure is not None
    assert "WRONG_RESULT: 200 of 9732096 elements wrong" in reply.failure.detail
    assert asked.launches == asked.soaks == []


def test_winner_that_fails_its_soak_is_refused() -> None:
    """B2: right a hundred times, wrong in one of ten thousand."""
    detail = "launched on two streams: 1 launches gave another result"
    reply, asked = run(StubPool(), StubChild(), soaked=SoakReport(verdict=Verdict.FAILED, detail=detail))
    assert not reply.certified
    assert reply.failure is not None
    assert (reply.failure.name, reply.failure.detail) == ("soak", detail)
    assert len(asked.soaks) == 1


def test_soak_that_could_not_run_leaves_a_candidate() -> None:
    """No memory for a second process, say: no pass, and nobody blames the kernel."""
    reply, asked = run(StubPool(), StubChild(), soaked=SoakReport(verdict=Verdict.NOT_RUN, detail="no memory"))
    assert not reply.certified
    assert reply.failure is None
    assert asked.launches != []


@pytest.mark.parametrize("detail", ["compute-sanitizer is not installed", "timeout"])
def test_check_that_could_not_run_is_no_pass_and_no_failure(detail: str) -> None:
    """The winner stays a candidate, and nobody blames it."""
    reply, _ = run(StubPool(), StubChild(), SanitizerReport(ran=False, detail=detail))
    assert not reply.certified
    assert reply.failure is None
    assert reply.checks[-1].verdict is Verdict.NOT_RUN
    assert reply.checks[-1].detail == detail


def test_stress_build_that_does_not_compile_in_time_leaves_the_winner_unchecked() -> None:
    """A compile limit says nothing about the kernel."""
    reply, _ = run(StubPool(fails_from=3), StubChild())
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
    hazards = read_report(
        "launch_once: all launches right\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
        version="1",
    )
    assert (hazards.ran, hazards.errors) == (True, 2)
    assert found.detail.startswith("Invalid __global__ write of size 4 bytes | at gemm_kernel")


@pytest.fixture
def sanitizer(tmp_path: Path) -> Path:
    """A sanitizer that says its version, or sleeps."""
    path = tmp_path / "compute-sanitizer"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Version 1.2 && exit\ncat > /dev/null\nsleep 60\n')
    path.chmod(0o755)
    return path


def test_sanitizer_that_does_not_end_is_killed_at_its_limit(sanitizer: Path) -> None:
    """A kernel that hangs under the tool costs the limit and no more."""
    report = sanitize("racecheck", [], timeout_s=0.5, sanitizer=sanitizer)
    assert (report.ran, report.detail) == (False, "racecheck did not finish within 0.5 s")


def test_cancelled_sanitizer_ends_at_once(sanitizer: Path) -> None:
    """A24: nobody waits for it any more."""
    stop = threading.Event()
    stop.set()
    since = time.monotonic()
    report = sanitize("memcheck", [], sanitizer=sanitizer, stop=stop)
    assert (report.ran, report.detail) == (False, "cancelled")
    assert time.monotonic() - since < 10.0
