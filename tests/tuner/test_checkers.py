"""The checkers as a check of an sm_100a winner: what passes, what blames the kernel, what leaves a candidate."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernels.checkers import CheckReport, reduced_instances
from kernels.config import Sm100GemmConfig
from kernels.devices import profile_named
from kernels.problem import Dtype, GemmProblem
from kernels.verdicts_run import MARK, NO_ENGINE, VerdictJob
from search_space.request import Budget, TuneRequest
from tests.tuner.test_certify import CLEAN, SOAKED, StubChild, StubPool
from tuner.engine.base import CHECKERS, CertifyJob, CertifyReply, CompileJob
from tuner.engine.certify import Apart, Certification
from tuner.engine.checkers import judged, run_checkers
from tuner.engine.fake import FakeEngine, FakeOptions, fake_kernel
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.records import Check, Evidence, Verdict
from tuner.store import PUBLISHED

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tuner.progress import StudyResult

CONFIG = Sm100GemmConfig(cta_group=1, num_consumers=1, blk_n=64, pipe_depth=2)
PROBLEM = GemmProblem(m=512, n=512, k=1024, dtype=Dtype.FP16)
VERSIONS = {"tirx-harness": "0.1", "rustc": "rustc 1.0"}
JOB = VerdictJob(config=CONFIG, dtype=Dtype.FP16, store=Path("verdicts"))
INSTANCES = reduced_instances(CONFIG, Dtype.FP16)
BUILT = fake_kernel(CompileJob(problem=PROBLEM, config=CONFIG, sm_count=148))
CERTIFY = CertifyJob(
    problem=PROBLEM,
    config=CONFIG,
    sm_count=148,
    module_path=Path("published.so"),
    module_sha256=BUILT.sha256,
    source_hash=BUILT.source_hash,
    seed=7,
)
PASSED = Check(name=CHECKERS, verdict=Verdict.CLEAN, detail="exact to the bit")
NO_RUST = Check(name=CHECKERS, verdict=Verdict.NOT_RUN, detail="the checkers cannot run here: no cargo found")
FOUND = Check(name=CHECKERS, verdict=Verdict.FAILED, detail="racecheck error; race: error data_race")


def report(number: int = 0, **answers: Any) -> CheckReport:
    """A report on one reduced instance, clean unless told otherwise."""
    values = {"sync": "clean", "race": "clean", "numsim": "exact", "findings": ()} | answers
    return CheckReport(
        config_key=CONFIG.key,
        problem=INSTANCES[number].problem,
        sm_count=INSTANCES[number].sm_count,
        source_hash="0" * 64,
        fault="",
        versions=VERSIONS,
        seconds={},
        **values,
    )


# ---------------------------------------------------------------------- reports to a check


def test_clean_and_exact_on_every_instance_is_a_pass() -> None:
    """The check names what was run, and with which tools."""
    check = judged(JOB, [report(0), report(1)])
    assert check.verdict is Verdict.CLEAN
    assert all(instance.problem.shape in check.detail for instance in INSTANCES)
    assert check.tool == "tirx-harness 0.1, rustc rustc 1.0"


def test_part_of_the_instances_is_no_pass() -> None:
    """A process that ended early has proven nothing."""
    for reports in ([], [report(0)], [report(1), report(0)]):
        assert judged(JOB, reports).verdict is Verdict.NOT_RUN


@pytest.mark.parametrize("answers", [{"sync": "error"}, {"race": "error"}, {"numsim": "3 of 4096 wrong"}])
def test_what_a_tool_found_blames_the_kernel(answers: dict[str, str]) -> None:
    """With the first findings."""
    check = judged(JOB, [report(0), report(1, findings=("race: error data_race: shared",), **answers)])
    assert check.verdict is Verdict.FAILED
    assert "data_race" in check.detail
    assert INSTANCES[1].problem.shape in check.detail


@pytest.mark.parametrize(
    "answers",
    [{"sync": "incomplete"}, {"race": "incomplete"}, {"race": "review"}, {"numsim": "failed: no such instruction"}],
)
def test_what_a_tool_did_not_see_whole_is_no_pass_and_no_blame(answers: dict[str, str]) -> None:
    """`incomplete` is no pass."""
    assert judged(JOB, [report(**answers)]).verdict is Verdict.NOT_RUN


# ---------------------------------------------------------------------- the process


def _runner(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A module that stands in for the process, with `job` read from its command line."""
    (folder / "stand_in.py").write_text(
        "import sys, time\nfrom kernels.verdicts_run import *\njob = VerdictJob.from_text(sys.argv[1])\n" + body
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "stand_in"


def test_reports_come_through_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between whatever else the tools print; standard input stays open until they have ended."""
    lines = "\n".join(f"{MARK}{text}" for text in (_json(report(0)), _json(report(1))))
    body = (
        "import threading\nthreading.Thread(target=lambda: (sys.stdin.read(), print('hung up', flush=True)), "
        "daemon=True).start()\nassert job.config.blk_n == 64 and job.dtype == 'fp16'\nprint('building')\n"
        f"time.sleep(0.2)\nprint({lines!r})\n"
    )
    check = run_checkers(JOB, runner=_runner(tmp_path, monkeypatch, body))
    assert check == judged(JOB, [report(0), report(1)])


def _json(one: CheckReport) -> str:
    import json

    return json.dumps(one.to_dict())


def test_a_machine_without_the_engine_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict, no blame."""
    runner = _runner(tmp_path, monkeypatch, f"print('no cargo found: install it')\nsys.exit({NO_ENGINE})\n")
    check = run_checkers(JOB, runner=runner)
    assert (check.verdict, check.detail) == (
        Verdict.NOT_RUN,
        "the checkers cannot run here: no cargo found: install it",
    )


def test_the_real_process_says_that_there_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no Rust compiler can be found, and nothing is stored."""
    monkeypatch.setenv("NUMSIM_CARGO", str(tmp_path / "missing"))
    check = run_checkers(replace(JOB, store=tmp_path / "verdicts"))
    assert check.verdict is Verdict.NOT_RUN
    assert "no cargo found" in check.detail or "not installed" in check.detail
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_breaks_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours, or a killed compiler."""
    check = run_checkers(JOB, runner=_runner(tmp_path, monkeypatch, "raise ValueError('no such thing')\n"))
    assert check.verdict is Verdict.NOT_RUN
    assert "exit status 1" in check.detail
    assert "no such thing" in check.detail


def test_a_process_without_end_is_killed_at_its_limit_or_when_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are no verdict."""
    runner = _runner(tmp_path, monkeypatch, "time.sleep(60)\n")
    assert run_checkers(JOB, limit_s=0.2, runner=runner).detail == "no verdict within 0.2 s"
    stop, since = threading.Event(), time.monotonic()
    threading.Timer(0.2, stop.set).start()
    assert run_checkers(JOB, runner=runner, stop=stop).detail == "cancelled"
    assert time.monotonic() - since < 20.0


# ---------------------------------------------------------------------- certifying


def _certify(check: Check | None, child: StubChild) -> CertifyReply:
    asked: list[CertifyJob] = []

    def checkers(job: CertifyJob) -> Check:
        asked.append(job)
        assert check is not None
        return check

    work = Certification(StubPool(), CERTIFY, checkers if check else None)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        built = work.build(Path(folder))
        assert asked == [CERTIFY] * (check is not None)
        if isinstance(built, CertifyReply):
            return built
        before, modules = built
        stress = work.stress(child, modules)
        apart = Apart(memcheck=lambda launches, uuid: CLEAN, soak=lambda job, uuid: SOAKED)
        return work.reply(before, stress, work.apart(modules, apart, "GPU-0"))


def test_sm_100a_winner_needs_the_checkers() -> None:
    """With them it is certified; nothing else stands in for them."""
    reply = _certify(PASSED, StubChild())
    assert [check.name for check in reply.checks] == ["structure", "checkers", "stress", "soak", "memcheck"]
    assert reply.certified
    assert reply.simulated


@pytest.mark.parametrize("check", [NO_RUST, None], ids=["no rust", "not wired"])
def test_winner_that_the_checkers_have_not_seen_is_a_candidate(check: Check | None) -> None:
    """Every other check goes on; the reply says what is missing."""
    child = StubChild()
    reply = _certify(check, child)
    assert (reply.certified, reply.simulated, reply.failure) == (False, False, None)
    assert reply.gap is not None
    assert "cannot run" in reply.gap.detail
    assert len(child.jobs) == 1


def test_what_the_checkers_find_keeps_the_kernel_off_the_gpu() -> None:
    """It may hang there."""
    child = StubChild()
    reply = _certify(FOUND, child)
    assert reply.failure == FOUND
    assert child.jobs == []


# ---------------------------------------------------------------------- the study

B200 = profile_named("b200")


class CheckedBy(FakeEngine):
    """A fake B200 whose checkers answer as they are told, once for each winner."""

    def __init__(self, *answers: Check | None) -> None:
        super().__init__(B200, options=FakeOptions())
        self.answers = list(answers)

    def certify(self, job: CertifyJob) -> Future[CertifyReply]:
        """See Engine."""
        future = super().certify(job)
        answer = self.answers.pop(0)
        checks = (answer if check.name == CHECKERS else check for check in future.result().checks)
        done: Future[CertifyReply] = type(future)()
        done.set_result(CertifyReply(checks=tuple(check for check in checks if check is not None)))
        return done


def _tuned(*answers: Check | None) -> StudyResult:
    asked = TuneRequest(problem=PROBLEM, arch="sm_100a", device=B200.name, budget=Budget(trials=4))
    return tune_study(asked, CheckedBy(*answers), MemoryRecorder())


def test_clean_verdicts_are_evidence_and_let_a_result_be_published() -> None:
    """`simulated` and `checked`."""
    result = _tuned(PASSED)
    assert set(result.evidence) >= PUBLISHED | {Evidence.SIMULATED}
    assert "not published" not in result.reason


@pytest.mark.parametrize("answer", [NO_RUST, None], ids=["no rust", "left out"])
def test_without_verdicts_the_winner_stays_an_unpublished_candidate(answer: Check | None) -> None:
    """Also where an engine forgot the check; the study says why."""
    result = _tuned(answer)
    assert result.winner is not None
    assert Evidence.CHECKED not in result.evidence
    assert Evidence.SIMULATED not in result.evidence
    if answer is not None:
        assert f"not published: the checkers check did not pass: {NO_RUST.detail}" in result.reason


def test_winner_that_the_checkers_refuse_makes_way_for_the_next() -> None:
    """As after any other failed check."""
    refused, result = _tuned(PASSED), _tuned(FOUND, PASSED)
    assert refused.winner is not None
    assert result.winner is not None
    assert result.winner.config != refused.winner.config
    assert "failed its checkers check: racecheck error" in result.reason
    assert set(result.evidence) >= PUBLISHED
