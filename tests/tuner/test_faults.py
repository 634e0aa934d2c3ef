"""Faults in a random mix: each gets its outcome and a reason, healthy trials are left alone, the winner is healthy."""

from __future__ import annotations

import pytest

from tests.tuner.support import PROBLEM, STARTING, fake, request, tune
from tuner.engine.faults import COMPILE_FAULTS, OUTCOME_OF, Fault, FaultKind, FaultPlan
from tuner.records import Outcome, State

KINDS = (*OUTCOME_OF, FaultKind.CHILD_KILLED)
HEALTHY = (Outcome.MEASURED, Outcome.STOPPED_EARLY)


@pytest.mark.parametrize("kind", list(OUTCOME_OF))
def test_each_fault_gets_its_outcome_and_the_next_trial_runs_normally(kind: FaultKind) -> None:
    """A1, A3, A4, A6, A9, B2, B3, B5: the reason names the config, the shape and, on the GPU, the card."""
    engine = fake(faults=FaultPlan(by_key={STARTING[3].key: Fault(kind=kind)}))
    result = tune(request(10), engine)
    trial = result.trials[3]
    assert trial.outcome is OUTCOME_OF[kind]
    assert kind.value in trial.reason
    assert STARTING[3].key in trial.reason
    assert str(PROBLEM) in trial.reason
    assert kind in COMPILE_FAULTS or engine.device.uuid in trial.reason
    assert [t.outcome for t in result.trials[:8] if t.number != 3 and t.outcome not in HEALTHY] == []
    assert result.state is State.DONE
    assert result.winner is not None
    assert result.winner.number != 3


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_100_faults_in_a_random_mix_each_get_their_outcome_and_the_winner_is_healthy(sampler: str) -> None:
    """More than half of the candidates misbehave in one of 17 ways; the job ends with its whole budget measured."""
    faults = FaultPlan(rates={kind: 0.55 / len(KINDS) for kind in KINDS}, seed=11)
    result = tune(request(110, sampler=sampler), fake(faults=faults))
    injected = 0
    for trial in result.trials:
        fault = faults.of(trial.config.key)
        if fault is None or fault.kind is FaultKind.CHILD_KILLED:
            assert trial.outcome in (*HEALTHY, Outcome.REJECTED), trial.reason
        else:
            assert trial.outcome in (OUTCOME_OF[fault.kind], Outcome.REJECTED), trial.reason
            assert trial.reason
        injected += fault is not None
    assert injected >= 100
    assert result.state is State.DONE
    assert sum(trial.outcome.counts_against_budget for trial in result.trials) == 110
    assert result.winner is not None
    winners_fault = faults.of(result.winner.config.key)
    assert winners_fault is None or winners_fault.kind is FaultKind.CHILD_KILLED


def test_fault_plan_gives_a_config_the_same_fault_on_every_run() -> None:
    """Equal seeds, equal faults; rates are met within chance."""
    one, same, other = (FaultPlan(rates={FaultKind.HANGS: 0.3}, seed=seed) for seed in (1, 1, 2))
    keys = [f"config {index}" for index in range(2000)]
    assert [one.of(key) for key in keys] == [same.of(key) for key in keys]
    assert [one.of(key) for key in keys] != [other.of(key) for key in keys]
    assert 500 < sum(one.of(key) is not None for key in keys) < 700


def test_rates_above_one_are_refused() -> None:
    """The sum is a probability."""
    with pytest.raises(ValueError, match=r"add up to 1\.2"):
        FaultPlan(rates={FaultKind.HANGS: 0.6, FaultKind.SPILLS: 0.6})
