"""What the child says of its jobs, on a torch that is none: who is at work, what was damaged, what it lets go of."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from tests.gpu import fake_torch
from tests.gpu.jobs import PROBLEM, evaluate_job, final_job
from tests.gpu.test_clock import FAST, QuietCard, bench_of, kernel_of
from tuner.gpu.child import ChangedError, GpuWorker, LoadError, load_module
from tuner.gpu.jobs import ONLY_SUBJECT, Phase, StressJob, StressModule
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.gpu.fake_torch import Card

OTHER = GemmProblem(m=512, n=512, k=1024)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """The card behind a torch that is none."""
    monkeypatch.setattr("tuner.gpu.rounds.REST", 0.0)
    yield fake_torch.install(monkeypatch)
    fake_torch.forget()


class Judge:
    """A referee whose reference may be damaged: then it finds everything wrong."""

    def __init__(self) -> None:
        self.damaged = False

    def verify(self, kernel: object, report: Any, *, repeats: int, subject: int | None = None) -> Any:
        from tuner.gpu.referee import Verdict

        report(Phase.FIRST_LAUNCH, subject)
        report(Phase.VERIFY, subject)
        if self.damaged:
            return Verdict(outcome=Outcome.WRONG_RESULT, reason="1 of 64 elements wrong", launches=1)
        return Verdict(outcome=None, max_rel_error=0.001, launches=repeats, bits="verified")

    def verify_again(self, launch: Callable[[], object], bits: object) -> Any:
        from tuner.gpu.referee import Verdict

        launch()
        return Verdict(outcome=None, launches=1)


@dataclass(kw_only=True)
class Desk:
    """A worker whose kernels take 50 us, and what it has reported."""

    worker: GpuWorker
    reports: list[tuple[Phase, int | None]] = field(default_factory=list)

    def run(self, job: Any) -> Any:
        self.reports.clear()
        return self.worker.run(job, lambda phase, subject=None: self.reports.append((phase, subject)))


def desk_of(card: Card, contexts: Any) -> Desk:
    """A worker after its start."""
    worker = GpuWorker({}, load=lambda path, sha256: kernel_of(card, 50.0))
    worker._device = bench_of(card, QuietCard()).device
    worker._contexts = contexts
    return Desk(worker=worker)


def context_of(card: Card, judge: Judge, problem: GemmProblem = PROBLEM) -> Any:
    """A real context of a problem, around buffers that are names."""
    from tuner.gpu.context import ProblemContext, judge_library

    made = bench_of(card, QuietCard()).context
    return ProblemContext(
        problem=problem,
        protocol=FAST,
        referee=judge,  # type: ignore[arg-type]
        timing=made.timing,
        baselines=made.baselines,
        control=judge_library(judge),  # type: ignore[arg-type]
    )


def only(context: Any) -> Any:
    """Contexts of one problem."""
    return SimpleNamespace(get=lambda *_: context)


# ---------------------------------------------------------------------- who is at work


def test_bursts_of_baselines_name_no_candidate_and_all_else_of_a_trial_does(card: Card) -> None:
    """A6: a hang between two reports is that of the one named by the first."""
    desk = desk_of(card, only(context_of(card, Judge())))
    assert desk.run(evaluate_job("m", protocol=FAST)).reply.outcome is Outcome.MEASURED
    of_candidate = [subject for phase, subject in desk.reports if phase is not Phase.MEASURE]
    assert set(of_candidate) == {ONLY_SUBJECT}
    bursts = [subject for phase, subject in desk.reports if phase is Phase.MEASURE]
    assert bursts[0] == ONLY_SUBJECT, "its graph is captured"
    assert sorted(map(str, bursts[1:4])) == ["0", "None", "None"], "a round: it, torch.matmul, the best algorithm"


def test_bursts_of_baselines_name_no_finalist(card: Card) -> None:
    """A6: the same in a final; the control at its end is nobody's either."""
    desk = desk_of(card, only(context_of(card, Judge())))
    desk.run(final_job("one", "two", protocol=FAST))
    bursts = [subject for phase, subject in desk.reports if phase is Phase.MEASURE]
    assert sorted(map(str, bursts[2:7])) == ["0", "0", "1", "None", "None"], "a round, the twin of the first included"
    assert desk.reports[-1] == (Phase.BASELINE, None)


# ---------------------------------------------------------------------- damaged inputs or reference


def test_final_tells_that_a_finalist_damaged_what_all_are_judged_by(card: Card) -> None:
    """B3: whether or not one of them then looks wrong: a winner that writes elsewhere is no winner."""
    judge = Judge()
    desk = desk_of(card, only(context_of(card, judge)))
    job = final_job("one", "two", protocol=FAST)
    assert not desk.run(job).doubtful

    def strays(a: Any, b: Any, d: Any) -> None:
        card.launch((a, b, d), 50.0)
        judge.damaged = True

    kernels = deque([kernel_of(card, 50.0), strays])
    desk.worker._load = lambda path, sha256: kernels.popleft()
    done = desk.run(job)
    assert set(done.reply.measurements) == {"hash of one", "hash of two"}
    assert done.doubtful


def test_final_with_a_finalist_that_is_simply_wrong_is_not_doubtful(card: Card) -> None:
    """B1: torch.matmul is judged as ever, so the verdict stands."""

    class Strict(Judge):
        def verify(self, kernel: object, report: Any, *, repeats: int, subject: int | None = None) -> Any:
            self.damaged = subject == 1
            return super().verify(kernel, report, repeats=repeats, subject=subject)

    done = desk_of(card, only(context_of(card, Strict()))).run(final_job("one", "two", protocol=FAST))
    assert done.reply.failures["hash of two"].outcome is Outcome.WRONG_RESULT
    assert not done.doubtful


def test_damage_is_seen_after_another_problem_had_its_turn(card: Card) -> None:
    """B3: the control is taken when inputs and reference are new, not when a study gets its next turn."""
    judge = Judge()
    made = {PROBLEM: context_of(card, judge), OTHER: context_of(card, Judge(), OTHER)}
    desk = desk_of(card, SimpleNamespace(get=lambda problem, *_: made[problem]))
    for problem in (PROBLEM, OTHER):
        assert not desk.run(evaluate_job("m", problem=problem, protocol=FAST)).doubtful
    judge.damaged = True
    done = desk.run(evaluate_job("m", protocol=FAST))
    assert done.reply.outcome is Outcome.WRONG_RESULT
    assert done.doubtful


# ---------------------------------------------------------------------- memory


def test_context_of_the_last_job_is_gone_when_room_is_made_for_the_next(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A23: whoever still held it would keep gigabytes from the problem that needs them."""
    import torch

    from tuner.gpu.context import Contexts

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 100), raising=False)
    alive: list[weakref.ref[Any]] = []
    left: list[int] = []

    class Frugal(Contexts):
        def _make(self, problem: GemmProblem, *_: Any) -> Any:
            left.append(sum(one() is not None for one in alive))
            context = context_of(card, Judge(), problem)
            alive.append(weakref.ref(context))
            return context

    desk = desk_of(card, Frugal(bench_of(card, QuietCard()).device))
    for problem in (PROBLEM, OTHER, PROBLEM):
        desk.run(evaluate_job("m", problem=problem, protocol=FAST))
    assert left == [0, 0, 0]


def test_inputs_of_a_stress_build_are_made_before_the_build_is_at_work(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A23: no room for them is no fault of the build."""
    monkeypatch.setattr(import_module("tuner.gpu.finals"), "make_referee", lambda *_: Judge())
    builds = tuple(
        StressModule(label=problem.shape, problem=problem, module_path=Path("m"), module_sha256="")
        for problem in (PROBLEM, OTHER)
    )
    desk = desk_of(card, only(None))
    assert desk.run(StressJob(config=Sm90GemmConfig(), builds=builds)).reply.passed
    begun = [report for report in desk.reports if report[0] in (Phase.BASELINE, Phase.LOAD)]
    assert begun == [(Phase.BASELINE, 0), (Phase.LOAD, 0), (Phase.BASELINE, 1), (Phase.LOAD, 1)]


@pytest.mark.parametrize("content", [b"", b"other bytes", None])
def test_file_with_other_bytes_is_told_from_a_module_that_does_not_load(tmp_path: Path, content: bytes | None) -> None:
    """Gone, cut short or changed: the store's fault. Bytes as they were stored that are no module: the kernel's."""
    path = tmp_path / "module.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ChangedError):
        load_module(path, hashlib.sha256(b"what was stored").hexdigest())
    path.write_bytes(b"what was stored")
    with pytest.raises(LoadError) as raised:
        load_module(path, hashlib.sha256(b"what was stored").hexdigest())
    assert not isinstance(raised.value, ChangedError)
