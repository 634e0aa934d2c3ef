"""Reports of wrong results elsewhere (B1-B9), each tried here; the id stands in the name and in the docstring.

What needs tensors is in tests/gpu/test_referee.py, export and import (B6) in tests/cli, questions for a K with a
remainder (B9) in tests/api/test_k_remainder.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from kernels.config import Sm90GemmConfig
from kernels.lowering import lower
from kernels.problem import GemmProblem
from kernels.structure import structural_findings
from search_space.request import MeasureProtocol, TuneRequest
from tests.tuner.support import PROBLEM, PROFILE, STARTING, fake, request, tune
from tests.tuner.test_certify import StubChild, StubPool, run
from tuner.engine.base import CertifyJob, CertifyReply, EvaluateReply, FinalJob, FinalReply
from tuner.engine.fake import FakeEngine
from tuner.engine.faults import Fault, FaultKind, FaultPlan
from tuner.recorder import MemoryRecorder
from tuner.records import Check, Evidence, Outcome, State, Verdict

if TYPE_CHECKING:
    from collections.abc import Set

SMALL = GemmProblem(m=512, n=192, k=256)
CONFIG = Sm90GemmConfig(cta_group=2, num_consumers=1, blk_n=48, epi_n=16, blk_k=32, pipe_depth=2)


@pytest.mark.parametrize("sync", ["no_stage_barrier", "no_store_wait", "epilogue_restart", "no_accumulator_wait"])
def test_b1_template_that_lost_one_sync_is_refused_before_it_is_launched(sync: str) -> None:
    """B1: a racy kernel may match 99.99 % of the elements; the missing sync is named, and the winner is out."""
    findings = structural_findings(lower(SMALL, CONFIG, 132, fault=sync), SMALL, CONFIG)
    child = StubChild()
    reply, _ = run(StubPool(findings=tuple(finding.text for finding in findings)), child)
    assert findings
    assert reply.failure is not None
    assert (reply.failure.name, reply.failure.verdict) == ("structure", Verdict.FAILED)
    assert child.jobs == []


@pytest.mark.parametrize("kind", [FaultKind.NONDETERMINISTIC, FaultKind.WRONG_RARELY])
def test_b2_config_that_differs_from_launch_to_launch_is_not_eligible(kind: FaultKind) -> None:
    """B2: the fastest config of a study is non-deterministic now: it gets that outcome and is in no tie set."""
    best = tune(request(20)).winner
    assert best is not None
    result = tune(request(20), fake(faults=FaultPlan(by_key={best.config.key: Fault(kind=kind)})))
    (trial,) = [trial for trial in result.trials if trial.config == best.config]
    assert trial.outcome is Outcome.NONDETERMINISTIC
    assert trial.measurement is None
    assert trial.number not in result.tie_set
    assert result.winner is not None
    assert result.winner.config != best.config


class FailsInFirstFinal(FakeEngine):
    """So many finalists fail in the first final; in all others they pass."""

    def __init__(self, outcome: Outcome, finalists: int, *, disturbed: bool = False, racy: bool = False) -> None:
        """`disturbed`: all later finals are; `racy`: all but these fail a check."""
        super().__init__(PROFILE)
        self._outcome, self._finalists, self._disturbed, self._racy = outcome, finalists, disturbed, racy
        self.failed: Set[str] = frozenset()
        self.again: set[str] = set()

    def _final(self, job: FinalJob) -> FinalReply:
        reply = super()._final(job)
        sources = [candidate.source_hash for candidate in job.candidates]
        if self.failed:
            self.again |= self.failed & set(sources)
            return replace(reply, measurements={}, disturbed="7 of 9 rounds") if self._disturbed else reply
        self.failed = frozenset(sources[: self._finalists])
        return replace(
            reply,
            measurements={name: times for name, times in reply.measurements.items() if name not in self.failed},
            failures={name: EvaluateReply(outcome=self._outcome, reason="this once") for name in self.failed},
        )

    def _certify(self, job: CertifyJob) -> CertifyReply:
        if self._racy and job.source_hash not in self.failed:
            return CertifyReply(checks=(Check(name="stress", verdict=Verdict.FAILED, detail="races"),))
        return super()._certify(job)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o.is_own_fault and o is not Outcome.CHECK_FAILED])
def test_b2_finalist_that_failed_once_never_wins_although_it_passes_the_next_final(outcome: Outcome) -> None:
    """B2, B7: all others fail a check of the winner, and still it has no second chance."""
    engine, recorder = FailsInFirstFinal(outcome, 1, racy=True), MemoryRecorder()
    result = tune(request(8), engine, recorder=recorder)
    (trial,) = [trial for trial in result.trials if trial.source_hash in engine.failed]
    assert (result.state, result.winner) == (State.FAILED, None)
    assert engine.again == set()
    assert (trial.outcome, trial.reason) == (outcome, "in the final: this once")
    assert Evidence.NUMERIC not in trial.evidence
    assert trial.counts_against_budget
    assert recorder.bad[trial.config.key] == trial.reason
    assert f"1 {outcome} (such as: in the final: this once)" in result.reason


@pytest.mark.parametrize("outcome", [Outcome.OUT_OF_MEMORY, Outcome.INVALID_TIMING])
def test_finalist_that_failed_by_the_moments_fault_may_pass_the_next_final(outcome: Outcome) -> None:
    """No memory and a broken clock say nothing about a kernel."""
    engine, recorder = FailsInFirstFinal(outcome, 1, racy=True), MemoryRecorder()
    result = tune(request(8), engine, recorder=recorder)
    assert result.winner is not None
    assert {result.winner.source_hash} == engine.failed
    assert result.winner.outcome is Outcome.MEASURED
    assert result.winner.config.key not in recorder.bad


def test_b7_no_finalist_found_wrong_is_chosen_when_the_next_final_is_disturbed() -> None:
    """B7: without a final the times of the search decide, but not among the disqualified."""
    engine = FailsInFirstFinal(Outcome.WRONG_RESULT, 99, disturbed=True)
    result = tune(request(24), engine)
    assert len(engine.failed) >= 5
    assert result.winner is not None
    assert result.winner.source_hash not in engine.failed
    assert "no final: 7 of 9 rounds" in result.reason
    wrong = {trial.source_hash for trial in result.trials if trial.outcome is Outcome.WRONG_RESULT}
    assert wrong == engine.failed


def test_b7_verdicts_of_a_disturbed_final_count() -> None:
    """B7: that its times are worthless makes a wrong product no better."""

    class Disturbed(FailsInFirstFinal):
        def _final(self, job: FinalJob) -> FinalReply:
            return replace(super()._final(job), measurements={}, disturbed="7 of 9 rounds")

    engine = Disturbed(Outcome.WRONG_RESULT, 2)
    result = tune(request(12), engine)
    assert result.winner is not None
    assert result.winner.source_hash not in engine.failed
    assert sum(trial.outcome is Outcome.WRONG_RESULT for trial in result.trials) == 2


def test_b2_when_all_that_were_measured_fail_in_the_final_those_stopped_early_have_their_turn() -> None:
    """B2: they were stopped because a wrong kernel is faster."""
    trials = tune(request(24)).trials
    late = Fault(kind=FaultKind.WRONG_RARELY, launch=20_000)
    wrong = {trial.config.key: late for trial in trials if trial.outcome is Outcome.MEASURED}
    assert any(trial.outcome is Outcome.STOPPED_EARLY for trial in trials)
    result = tune(request(24), fake(faults=FaultPlan(by_key=wrong)))
    assert result.state is State.DONE
    assert result.winner is not None
    assert result.winner.config.key not in wrong
    assert Evidence.CHECKED in result.evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongForOneValue(FaultPlan):
    """Every config with one value of one knob is fast and wrong."""

    knob: str
    value: Any

    def of(self, config_key: str) -> Fault | None:
        """See FaultPlan."""
        knobs = json.loads(config_key.partition(":")[2])
        return Fault(kind=FaultKind.FAST_AND_WRONG) if knobs[self.knob] == self.value else None


@pytest.mark.parametrize("knob", ["blk_n", "pipe_depth", "blk_k"])
def test_b3_knob_value_that_gives_wrong_results_is_never_selected(knob: str) -> None:
    """B3: the value that the winner has is wrong now; the winner has another one, and each wrong trial says so."""
    best = tune(request(30)).winner
    assert best is not None
    value = getattr(best.config, knob)
    result = tune(request(30), fake(faults=WrongForOneValue(knob=knob, value=value)))
    wrong = [trial for trial in result.trials if getattr(trial.config, knob) == value]
    assert wrong
    assert {trial.outcome for trial in wrong} <= {Outcome.WRONG_RESULT, Outcome.REJECTED}
    assert result.winner is not None
    assert getattr(result.winner.config, knob) != value


@pytest.mark.parametrize("kind", [FaultKind.READS_OUTPUT, FaultKind.NO_OP, FaultKind.FAST_AND_WRONG])
def test_b5_runnable_but_wrong_config_is_never_timed(kind: FaultKind) -> None:
    """B5: the accuracy check is on, and no field of a request can turn it off."""
    result = tune(request(12), fake(faults=FaultPlan(by_key={STARTING[0].key: Fault(kind=kind)})))
    assert result.trials[0].outcome is Outcome.WRONG_RESULT
    assert result.trials[0].measurement is None
    timed = [trial for trial in result.trials if trial.measurement is not None]
    assert timed
    assert all(Evidence.NUMERIC in trial.evidence for trial in timed)
    options = {field.name for kind_of in (TuneRequest, MeasureProtocol) for field in fields(kind_of)}
    assert not [name for name in options if "verify" in name or "check" in name or "accuracy" in name]


def test_b7_wrong_first_candidate_is_disqualified_and_is_nobodys_reference() -> None:
    """B7: not only logged: it has no time, and the candidates after it are judged as if it had not been there."""
    first = STARTING[0].key
    result = tune(request(12), fake(faults=FaultPlan(by_key={first: Fault(kind=FaultKind.WRONG_ELEMENT)})))
    clean = {trial.config.key: trial.outcome for trial in tune(request(12)).trials}
    assert result.trials[0].config.key == first
    assert result.trials[0].outcome is Outcome.WRONG_RESULT
    assert str(PROBLEM) in result.trials[0].reason
    others = {trial.config.key: trial.outcome for trial in result.trials[1:]}
    shared = others.keys() & clean.keys()
    assert len(shared) >= 7
    measured = {Outcome.MEASURED, Outcome.STOPPED_EARLY}
    assert {key: others[key] in measured for key in shared} == {key: clean[key] in measured for key in shared}
    assert result.winner is not None
    assert result.winner.config.key != first
