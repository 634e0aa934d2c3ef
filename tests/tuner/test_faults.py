"""Each injected fault gets its outcome and a reason, healthy trials are left alone, the winner is healthy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from db.database import Database
from db.errors import DatabaseBusy
from tests.soak import faults as soak
from tests.soak.studies import study_of, trials_of
from tests.tuner.support import PROBLEM, PROFILE, STARTING, fake, request, told, tune
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.faults import (
    CHECK_OF,
    COMPILE_FAULTS,
    IN_ONE_LAUNCH,
    OUTCOME_OF,
    TRIAL_LAUNCHES,
    Fault,
    FaultKind,
    FaultPlan,
    OtherWriter,
    Shows,
)
from tuner.records import Evidence, Outcome, State
from tuner.store import StudyRecorder, write

if TYPE_CHECKING:
    from tuner.records import Trial

HEALTHY = (Outcome.MEASURED, Outcome.STOPPED_EARLY)


def of_fourth(kind: FaultKind, **fields: object) -> FaultPlan:
    """The fourth starting config has this fault."""
    return FaultPlan(by_key={STARTING[3].key: Fault(kind=kind, **fields)})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(OUTCOME_OF))
def test_each_fault_gets_its_outcome_and_the_next_trial_runs_normally(kind: FaultKind) -> None:
    """A1, A3, A4, A6, A9, B2, B3, B5: the reason names the config, the shape and, on the GPU, the card."""
    engine = fake(faults=of_fourth(kind))
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


def best_of(trials: int) -> str:
    """Key of the config that wins when nothing is at fault."""
    winner = tune(request(trials)).winner
    assert winner is not None
    return winner.config.key


@pytest.mark.parametrize("kind", sorted(CHECK_OF))
def test_winner_with_a_fault_that_only_a_check_finds_is_replaced(kind: FaultKind) -> None:
    """B1: right in every comparison at its own size."""
    best = best_of(12)
    result = tune(request(12), fake(faults=FaultPlan(by_key={best: Fault(kind=kind)})))
    assert result.winner is not None
    assert result.winner.config.key != best
    assert f"failed its {CHECK_OF[kind]} check" in result.reason


def test_when_every_finalist_fails_a_check_the_next_fastest_has_its_turn() -> None:
    """B1: a family of racy configs may be the fastest; behind them are healthy ones."""
    ranked = sorted(
        (t for t in tune(request(24)).trials if t.outcome is Outcome.MEASURED), key=lambda t: t.time_us or 0.0
    )
    racy = {trial.config.key: Fault(kind=FaultKind.RACES_WHEN_STRESSED) for trial in ranked[:-1]}
    result = tune(request(24), fake(faults=FaultPlan(by_key=racy)))
    assert result.state is State.DONE
    assert result.winner is not None
    assert result.winner.config.key not in racy
    assert Evidence.CHECKED in result.evidence
    assert result.reason.count("failed its stress check") >= 8


def test_when_all_that_were_measured_fail_a_check_one_that_was_stopped_early_wins() -> None:
    """B1: it was stopped because a racy kernel is faster; it is the best that is right."""
    trials = tune(request(24)).trials
    racy = {t.config.key: Fault(kind=FaultKind.RACES_WHEN_STRESSED) for t in trials if t.outcome is Outcome.MEASURED}
    assert any(trial.outcome is Outcome.STOPPED_EARLY for trial in trials)
    result = tune(request(24), fake(faults=FaultPlan(by_key=racy)))
    assert result.state is State.DONE
    assert result.winner is not None
    assert result.winner.outcome is Outcome.STOPPED_EARLY
    assert result.winner.config.key not in racy
    assert Evidence.CHECKED in result.evidence


class Killed(Exception):
    """Stands for kill -9."""


class DyingRecorder(StudyRecorder):
    """The process is gone once it has saved that a finalist failed, or its winner a check."""

    def save_failed_final(self, trial: Trial) -> None:
        """See Recorder."""
        super().save_failed_final(trial)
        raise Killed

    def save_failed_check(self, trial: Trial, reason: str) -> None:
        """See Recorder."""
        super().save_failed_check(trial, reason)
        raise Killed


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Fault(kind=FaultKind.RACES_WHEN_STRESSED), Outcome.CHECK_FAILED),
        (Fault(kind=FaultKind.WRONG_RARELY, launch=TRIAL_LAUNCHES + 1), Outcome.NONDETERMINISTIC),
    ],
)
def test_study_killed_after_its_best_failed_ends_as_if_it_had_not_been(
    tmp_path: Path, fault: Fault, outcome: Outcome
) -> None:
    """A21: what failed was measured, so no trial is run in its place, and it does not win when it comes back."""
    asked = request(12)
    racy = FaultPlan(by_key={best_of(12): fault})
    whole = tune(asked, fake(faults=racy))
    with Database.open(f"sqlite:///{tmp_path / 'tuner.db'}") as database:
        engine = fake(faults=racy)
        study_id = study_of(database, asked)
        with pytest.raises(Killed):
            tune(asked, engine, recorder=DyingRecorder(database, study_id, asked, engine.device))
        stored = trials_of(database, study_id)
        recorder = StudyRecorder(database, study_id, asked, engine.device)
        resumed = tune(asked, engine, recorder=recorder, resume_from=stored)
    assert outcome in {trial.outcome for trial in stored}
    assert [trial.config for trial in resumed.trials] == [trial.config for trial in whole.trials]
    assert resumed.winner is not None
    assert whole.winner is not None
    assert resumed.winner.number == whole.winner.number
    assert resumed.state is State.DONE


@pytest.mark.parametrize("times", [1, 2])
def test_worker_lost_during_the_checks_is_replaced(times: int) -> None:
    """A11: a lost worker is no verdict, and the winner still gets its checks."""
    killed = FaultPlan(by_key={best_of(12): Fault(kind=FaultKind.CHILD_KILLED, phase="certify", times=times)})
    result = tune(request(12), fake(faults=killed))
    assert Evidence.CHECKED in result.evidence


@pytest.mark.parametrize("kind", sorted(IN_ONE_LAUNCH))
def test_fault_in_a_late_launch_shows_in_the_final_and_does_not_win(kind: FaultKind) -> None:
    """B2: a trial takes fewer launches than a final."""
    best = best_of(12)
    late = Fault(kind=kind, launch=TRIAL_LAUNCHES + 1)
    result = tune(request(12), fake(faults=FaultPlan(by_key={best: late})))
    assert result.winner is not None
    assert result.winner.config.key != best
    assert f"failed in the final as {OUTCOME_OF[kind]}" in result.reason
    assert result.aa_ratio is not None


def test_100_faults_in_a_random_mix_each_get_their_outcome_and_the_winner_is_healthy() -> None:
    """More than half of the candidates misbehave in one of all ways; each job ends with its whole budget measured."""
    report = soak.run(100, trials=30)
    assert report["problems"] == []
    assert report["faults"] >= 100
    assert report["processes_left"] == []


def test_study_that_a_full_disk_ends_goes_on_where_it_stopped() -> None:
    """Nobody is to blame, nothing is lost, and the study is the one that never stopped."""
    engine = fake(faults=of_fourth(FaultKind.DISK_FULL))
    stopped = tune(request(12), engine)
    assert "no space left on device" in stopped.reason
    assert 3 not in {trial.number for trial in stopped.trials}
    resumed = tune(request(12), engine, resume_from=stopped.trials)
    assert told(resumed) == told(tune(request(12)))


def test_trial_is_saved_although_another_writer_holds_the_database(tmp_path: Path) -> None:
    """The other writer holds it for longer than a transaction waits; the study does not notice."""
    file = tmp_path / "tuner.db"
    options = FakeOptions(faults=of_fourth(FaultKind.DATABASE_LOCKED, times=3), lock_s=0.2)
    with Database.open(f"sqlite:///{file}", busy_timeout_s=0.02) as database:
        engine = FakeEngine(PROFILE, options=options, database=file)
        study_id = study_of(database, request(8))
        recorder = StudyRecorder(database, study_id, request(8), engine.device)
        result = tune(request(8), engine, recorder=recorder)
        engine.close()
        assert [trial.number for trial in trials_of(database, study_id)] == [trial.number for trial in result.trials]
    assert told(result) == told(tune(request(8)))


def test_other_writer_really_locks_the_database(tmp_path: Path) -> None:
    """Without patience, the save would be lost."""
    file = tmp_path / "tuner.db"
    with Database.open(f"sqlite:///{file}", busy_timeout_s=0.02) as database:
        other = OtherWriter(file)
        other.hold(0.3)
        with pytest.raises(DatabaseBusy):
            write(database, lambda session: None, patience_s=0.0)
        write(database, lambda session: None, patience_s=30.0)
        other.close()


def test_fault_plan_gives_a_config_the_same_fault_on_every_run() -> None:
    """Equal seeds, equal faults; rates are met within chance; late launches and every phase are among them."""
    one, same, other = (FaultPlan(rates={FaultKind.FAULTS: 0.3}, seed=seed) for seed in (1, 1, 2))
    keys = [f"config {index}" for index in range(2000)]
    assert [one.of(key) for key in keys] == [same.of(key) for key in keys]
    assert [one.of(key) for key in keys] != [other.of(key) for key in keys]
    assert 500 < sum(one.of(key) is not None for key in keys) < 700
    drawn = [fault for key in keys if (fault := one.of(key)) is not None]
    assert {fault.shows for fault in drawn} == {Shows.TRIAL, Shows.FINAL}
    assert {fault.phase for fault in drawn} >= {"compile", "baseline", "measure", "final", "certify"}


def test_every_fault_says_where_it_shows() -> None:
    """A kind without an outcome, a check or a word in its favour would be a hole in the soak."""
    shows = {kind: Fault(kind=kind).shows for kind in FaultKind}
    assert {kind for kind, where in shows.items() if where is Shows.TRIAL} == set(OUTCOME_OF)
    assert {kind for kind, where in shows.items() if where is Shows.CERTIFYING} == set(CHECK_OF)
    assert {kind for kind, where in shows.items() if where is Shows.NOWHERE} == soak.HARMLESS


def test_rates_above_one_are_refused() -> None:
    """The sum is a probability."""
    with pytest.raises(ValueError, match=r"add up to 1\.2"):
        FaultPlan(rates={FaultKind.HANGS: 0.6, FaultKind.SPILLS: 0.6})


def test_recorded_2000_faults_hold_every_kind_and_left_nothing_amiss() -> None:
    """What the documentation says of results/soak/faults.json."""
    report = json.loads((Path(__file__).parents[2] / "results/soak/faults.json").read_text())
    assert report["faults"] >= 2000
    assert (report["problems"], report["processes_left"]) == ([], [])
    assert set(report["by_kind"]) == {"healthy", *(kind.value for kind in FaultKind)}
