"""The tuning loop on invented devices: budget, repeats, resume, stopping, the final."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from search_space.checks import rejection
from search_space.request import Budget
from tests.tuner.support import PROBLEM, PROFILE, STARTING, fake, request, told, tune
from tuner.engine.base import NoDevice
from tuner.engine.fake import FakeEngine, FakeOptions, FakeTimes
from tuner.engine.faults import Fault, FaultKind, FaultPlan
from tuner.recorder import MemoryRecorder
from tuner.records import Evidence, Outcome, State, Trial, Verdict
from tuner.search.searched import SearchedSpace

if TYPE_CHECKING:
    from kernels.compile import CompiledKernel
    from tuner.progress import Progress

SAMPLERS = ("tpe", "random", "brute")


class Killed(Exception):
    """Stands for kill -9."""


class DyingRecorder(MemoryRecorder):
    """Saves a number of trials, then the process is gone: before or after the save reaches the disk."""

    def __init__(self, last: int, *, after: bool) -> None:
        super().__init__()
        self._last, self._after = last, after

    def save_trial(self, trial: Trial, kernel: CompiledKernel | None) -> None:
        """Die at the last one."""
        if len(self.trials) == self._last and not self._after:
            raise Killed
        super().save_trial(trial, kernel)
        if len(self.trials) == self._last and self._after:
            raise Killed


# ---------------------------------------------------------------------- budget and order


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_study_measures_exactly_the_trials_of_its_budget(sampler: str) -> None:
    """Counted trials reach the budget and never pass it; numbers have no gap."""
    result = tune(request(20, sampler=sampler))
    assert result.state is State.DONE
    assert sum(trial.outcome.counts_against_budget for trial in result.trials) == 20
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))


def test_study_ends_when_another_trial_is_expected_to_gain_less_than_the_noise() -> None:
    """It says how many trials that saved, and its trials are those of the study that used all of its budget."""
    asked = request(60, sampler="learned")
    whole, short = tune(asked), tune(replace(asked, stop_gain=0.001))
    counted = sum(trial.outcome.counts_against_budget for trial in short.trials)
    assert short.state is State.DONE
    assert 8 <= counted < 60
    assert f"{counted} of 60 trials: another one was expected to gain" in short.reason
    assert f": {60 - counted} were saved" in short.reason
    assert told(short) == told(whole)[: len(short.trials)]


def test_study_that_ends_early_ends_at_the_same_trial_after_a_stop() -> None:
    """Killed anywhere and resumed, and with threads that finish in any order."""
    asked = replace(request(60, sampler="learned"), stop_gain=0.001)
    whole = tune(asked)
    for last in range(3, len(whole.trials), 11):
        dying = DyingRecorder(last, after=bool(last % 2))
        with pytest.raises(Killed):
            tune(asked, recorder=dying)
        resumed = tune(asked, resume_from=dying.trials)
        assert (told(resumed), resumed.reason) == (told(whole), whole.reason)
    engine = FakeEngine(PROFILE, options=FakeOptions(times=FakeTimes(scale=0.0005, compile_workers=4, gpus=2)))
    threaded = tune(asked, engine)
    engine.close()
    assert told(threaded) == told(whole)


def test_starting_configs_go_first_in_their_order() -> None:
    """The presets and the measured good ones are tried before the sampler is asked."""
    result = tune(request(20))
    assert [trial.config for trial in result.trials[:8]] == list(STARTING[:8])


def test_winner_is_the_best_of_what_was_measured() -> None:
    """Its true cost is within the noise of the least true cost of all measured trials."""
    engine = fake()
    result = tune(request(30), engine)
    costs = [engine.cost_us(PROBLEM, t.config) for t in result.trials if t.outcome is Outcome.MEASURED]
    assert result.winner is not None
    assert engine.cost_us(PROBLEM, result.winner.config) <= min(costs) * 1.01
    assert result.winner.number == result.tie_set[0]
    assert result.evidence == (Evidence.MEASURED, Evidence.NUMERIC, Evidence.CHECKED)
    assert [check.verdict for check in result.checks] == [Verdict.CLEAN] * 4


def test_winner_that_races_when_stressed_is_replaced_by_the_next() -> None:
    """A kernel that is right at its own size and wrong in a stress build is never the winner (B1)."""
    first = tune(request(20))
    assert first.winner is not None
    racy = FaultPlan(by_key={first.winner.config.key: Fault(kind=FaultKind.RACES_WHEN_STRESSED)})
    recorder = MemoryRecorder()
    result = tune(request(20), fake(faults=racy), recorder=recorder)
    assert result.winner is not None
    assert result.winner.config != first.winner.config
    assert Evidence.CHECKED in result.evidence
    assert first.winner.number not in result.tie_set
    assert f"trial {first.winner.number} failed its stress check" in result.reason
    assert first.winner.config.key in recorder.bad
    assert result.aa_ratio is not None


def test_window_of_compiles_never_exceeds_the_trials_in_flight() -> None:
    """D bounds what is compiled ahead, and the GPU works while later trials compile."""
    high = 0

    def watch(progress: Progress) -> None:
        nonlocal high
        high = max(high, progress.in_flight)

    engine = FakeEngine(PROFILE, options=FakeOptions(times=FakeTimes(scale=0.004, compile_workers=4)))
    result = tune(request(20, in_flight=3), engine, on_progress=watch)
    engine.close()
    assert result.state is State.DONE
    assert 1 <= high <= 3


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_speed_of_the_engine_does_not_change_the_study(sampler: str) -> None:
    """Threads that finish in any order give the trials that an instant engine gives."""
    instant = tune(request(24, sampler=sampler))
    for workers in (1, 4):
        engine = FakeEngine(PROFILE, options=FakeOptions(times=FakeTimes(scale=0.001, compile_workers=workers, gpus=2)))
        threaded = tune(request(24, sampler=sampler), engine)
        engine.close()
        assert told(threaded) == told(instant)
        assert threaded.winner == instant.winner


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_study_killed_at_any_trial_and_resumed_is_the_study_that_never_stopped(sampler: str) -> None:
    """A21: no finished trial is lost or run twice, and the winner is the same."""
    asked = request(16, sampler=sampler)
    whole = tune(asked)
    for last in range(1, len(whole.trials)):
        dying = DyingRecorder(last, after=bool(last % 2))
        with pytest.raises(Killed):
            tune(asked, recorder=dying)
        second = MemoryRecorder()
        resumed = tune(asked, recorder=second, resume_from=dying.trials)
        assert told(resumed) == told(whole)
        assert resumed.winner == whole.winner
        assert {t.number for t in dying.trials}.isdisjoint(t.number for t in second.trials)


def test_resume_fills_the_gaps_that_a_crash_left_in_the_window() -> None:
    """Trials finish out of order, so a stored study may lack a number below its last one."""
    asked = request(16)
    whole = tune(asked)
    rng = random.Random(5)
    for _ in range(6):
        stop = rng.randrange(4, len(whole.trials))
        window = [n for n in range(max(0, stop - asked.in_flight), stop) if rng.random() < 0.5]
        stored = [trial for trial in whole.trials[:stop] if trial.number not in window]
        second = MemoryRecorder()
        resumed = tune(asked, recorder=second, resume_from=stored)
        assert told(resumed) == told(whole)
        assert {trial.number for trial in second.trials} >= set(window)


def test_resumed_study_with_a_larger_budget_goes_on_after_its_last_trial() -> None:
    """The first trials of the larger study are those of the smaller one."""
    small = tune(request(16))
    large = tune(request(24), resume_from=small.trials)
    assert told(large)[: len(small.trials)] == told(small)
    assert told(large) == told(tune(request(24)))


# ---------------------------------------------------------------------- what costs nothing, what is done once


def test_rejected_config_is_recorded_with_its_reason_and_costs_nothing() -> None:
    """A starting config that a check turns away is neither compiled nor counted."""
    hopeless = replace(STARTING[0], pipe_depth=16, blk_k=128)
    reason = rejection(PROBLEM, hopeless, PROFILE)
    result = tune(request(4), starting=(hopeless, *STARTING[:3]))
    assert result.trials[0].outcome is Outcome.REJECTED
    assert result.trials[0].reason == reason
    assert result.trials[0].compile_s == 0.0
    assert result.counts == {"MEASURED": 4, "REJECTED": 1} or result.counts["REJECTED"] == 1


def test_configs_with_equal_source_are_measured_once() -> None:
    """The second one points to the first, and does not count."""

    class OneSource(FakeEngine):
        """Compiles the second starting config to the source of the first."""

        def compile(self, job):  # type: ignore[no-untyped-def]
            """See Engine."""
            return super().compile(replace(job, config=STARTING[0]) if job.config == STARTING[1] else job)

    result = tune(request(4), OneSource(PROFILE), starting=STARTING[:4])
    assert result.trials[1].outcome is Outcome.REJECTED
    assert "same source as trial 0" in result.trials[1].reason
    assert sum(trial.outcome.counts_against_budget for trial in result.trials) == 4


def test_known_bad_config_is_skipped_with_the_old_reason() -> None:
    """A7: what failed before on this device and toolchain does not run again."""
    recorder = MemoryRecorder(bad={STARTING[2].key: "hung for 30 s"})
    result = tune(request(8), recorder=recorder)
    assert (result.trials[2].outcome, result.trials[2].reason) == (Outcome.KNOWN_BAD, "hung for 30 s")
    assert sum(trial.outcome.counts_against_budget for trial in result.trials) == 8


def test_space_smaller_than_the_budget_ends_the_study_and_says_so() -> None:
    """G4: every config once, then DONE with the shortfall."""
    space = SearchedSpace.of_configs(STARTING)
    result = tune(request(100), space=space, starting=STARTING)
    assert result.state is State.DONE
    assert len(result.trials) == len(STARTING)
    assert f"{len(STARTING)} of 100 trials" in result.reason


# ---------------------------------------------------------------------- stopping


class Clock:
    """Advances by a step each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        """The time now."""
        self.now_s += self._step_s
        return self.now_s


def test_wall_budget_keeps_what_is_done() -> None:
    """A19: PARTIAL with the best so far, finals included."""
    asked = replace(request(1000), budget=Budget(trials=1000, wall_s=10.0))
    result = tune(asked, clock=Clock(0.25))
    assert result.state is State.PARTIAL
    assert "10 s, the wall budget" in result.reason
    assert result.winner is not None
    assert result.aa_ratio is not None


def test_wall_budget_counts_earlier_runs_of_the_study() -> None:
    """A study that had used up its seconds before the restart runs no further trial."""
    first = tune(request(16))
    asked = replace(request(1000), budget=Budget(trials=1000, wall_s=10.0))
    recorder = MemoryRecorder()
    result = tune(asked, recorder=recorder, resume_from=first.trials[:8], wall_before_s=11.0)
    assert result.state is State.PARTIAL
    assert recorder.trials == []


def test_a24_cancel_during_a_long_compile_returns_at_once() -> None:
    """A24: nobody waits for what is in flight, and partial results are kept."""
    cancel = threading.Event()
    engine = FakeEngine(PROFILE, options=FakeOptions(times=FakeTimes(compile_s=5.0, evaluate_s=0.0, scale=1.0)))
    threading.Timer(0.2, cancel.set).start()
    started_s = time.monotonic()
    result = tune(request(8), engine, should_stop=cancel.is_set)
    assert time.monotonic() - started_s < 2.0
    assert result.state is State.CANCELLED
    assert result.winner is None
    engine.close()


def test_cancel_with_results_is_partial_and_takes_no_final() -> None:
    """The winner is chosen from the trials."""
    seen: list[Progress] = []
    result = tune(request(1000), on_progress=seen.append, should_stop=lambda: len(seen) >= 10)
    assert result.state is State.PARTIAL
    assert result.reason == "cancelled"
    assert result.winner is not None
    assert result.aa_ratio is None


def test_progress_tells_best_ratio_and_time_left() -> None:
    """Everything a progress bar shows."""
    seen: list[Progress] = []
    tune(request(20), on_progress=seen.append)
    last = seen[-1]
    assert (last.counted, last.budget) == (20, 20)
    assert last.best_us == min(p.best_us for p in seen if p.best_us is not None)
    assert last.ratio is not None
    assert all(p.left_s is not None and p.left_s >= 0 for p in seen if p.counted)


# ---------------------------------------------------------------------- modes


def test_mode_model_compiles_and_ranks_by_the_model() -> None:
    """Every counted trial is MODELED, and the answer says so."""
    result = tune(request(12, mode="model"), fake(live=False))
    assert result.state is State.DONE
    assert result.counts == {"MODELED": 12} or result.counts["MODELED"] == 12
    assert result.evidence == (Evidence.MODELED,)
    assert result.winner is not None
    assert result.best_us == min(t.modeled_us for t in result.trials if t.modeled_us is not None)
    assert result.winner.artifact_sha256
    assert result.measurement is None


def test_measuring_without_a_gpu_is_refused_with_what_to_do() -> None:
    """Nothing is compiled for a study that could not be measured."""
    with pytest.raises(NoDevice, match="ask for mode 'model'"):
        tune(request(4), fake(live=False))


# ---------------------------------------------------------------------- faults


def plan(kind: FaultKind, **fields: object) -> FaultPlan:
    """The second starting config has this fault."""
    return FaultPlan(by_key={STARTING[1].key: Fault(kind=kind, **fields)})  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", ["compile", "load", "first_launch", "verify", "measure"])
def test_a11_trial_of_a_lost_worker_is_tried_again_under_its_number(phase: str, times: int) -> None:
    """A11: a worker that goes away is no outcome."""
    engine = fake(faults=plan(FaultKind.CHILD_KILLED, phase=phase, times=times))
    assert told(tune(request(12), engine)) == told(tune(request(12)))


@pytest.mark.parametrize("phase", ["compile", "verify"])
def test_candidate_that_loses_every_worker_is_crashed(phase: str) -> None:
    """A11: tried again twice, then given up, and the study goes on."""
    result = tune(request(8), fake(faults=plan(FaultKind.CHILD_KILLED, phase=phase, times=99)))
    assert result.trials[1].outcome is Outcome.CRASHED
    assert "lost 3 workers" in result.trials[1].reason
    assert result.state is State.DONE


def test_worker_lost_in_the_final_is_replaced() -> None:
    """The final is taken again."""
    everyone = FaultPlan(rates={})
    faults = replace(everyone, by_key={c.key: Fault(kind=FaultKind.CHILD_KILLED, phase="final") for c in STARTING[:1]})
    result = tune(request(12), fake(faults=faults))
    assert result.aa_ratio is not None


def test_full_disk_ends_the_study_with_what_to_do_and_keeps_its_results() -> None:
    """The engine's trouble is no candidate's fault."""
    faults = FaultPlan(by_key={STARTING[7].key: Fault(kind=FaultKind.DISK_FULL)})
    result = tune(request(30, in_flight=4), fake(faults=faults))
    assert result.state is State.PARTIAL
    assert "no space left on device" in result.reason
    assert result.winner is not None


def test_study_without_a_working_config_fails_with_the_commonest_failures() -> None:
    """The reason counts them and shows one of each."""
    rates = {FaultKind.COMPILE_ABORTS: 0.7, FaultKind.HANGS: 0.3}
    result = tune(request(8), fake(faults=FaultPlan(rates=rates)))
    assert result.state is State.FAILED
    assert result.winner is None
    assert "configs worked" in result.reason
    assert "COMPILE_FAILED" in result.reason
    assert "TIMED_OUT" in result.reason
    assert len(result.trials) <= 60


@pytest.mark.parametrize(("sampler", "limit_ms"), [("random", 20.0), ("tpe", 60.0)])
def test_own_code_costs_a_few_milliseconds_a_trial(sampler: str, limit_ms: float) -> None:
    """200 trials, the fake engine included; TPE's own share is apart. 2 and 9 ms of an idle core."""
    started_s = time.thread_time()
    result = tune(request(200, sampler=sampler))
    cost_ms = 1e3 * (time.thread_time() - started_s) / len(result.trials)
    assert len(result.trials) >= 200
    assert cost_ms < limit_ms
