"""Reports of wrong results elsewhere (B1-B9), each tried here; the id stands in the name and in the docstring.

What needs tensors is in tests/gpu/test_referee.py, export and import (B6) in tests/cli, questions for a K with a
remainder (B9) in tests/api/test_k_remainder.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import pytest

from kernels.config import Sm90GemmConfig
from kernels.lowering import lower
from kernels.problem import GemmProblem
from kernels.structure import structural_findings
from search_space.request import MeasureProtocol, TuneRequest
from tests.tuner.support import PROBLEM, STARTING, fake, request, tune
from tests.tuner.test_certify import StubChild, StubPool, run
from tuner.engine.faults import Fault, FaultKind, FaultPlan
from tuner.records import Evidence, Outcome, Verdict

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
