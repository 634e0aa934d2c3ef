"""From trials to a winner: who is timed again, what is a tie, and who wins one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from search_space.request import MeasureProtocol
from tests.tuner.support import ENVIRONMENT, LATE, PROBLEM, PROFILE, STARTING, fake, measurement, request, told, tune
from tuner.choosing import MOST_FINALISTS, choose_measured, finalists, next_batch, why_none_worked
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.recorder import MemoryRecorder
from tuner.records import Evidence, Measurement, Outcome, Ratio, State, Trial
from tuner.search.searched import SearchedSpace

ROUNDS = 9


def timed(number: int, time_us: float, *, drift: float = 1.0, **changes: object) -> Trial:
    """A verified trial of a starting config; a drift slows it and its baselines down together."""
    made = measurement(*(drift * time_us,) * ROUNDS, baselines_us={"torch": (drift * 100.0,) * ROUNDS})
    trial = Trial(
        number=number,
        config=STARTING[number],
        outcome=Outcome.MEASURED,
        measurement=made,
        evidence=(Evidence.MEASURED, Evidence.NUMERIC),
    )
    return replace(trial, **changes)  # type: ignore[arg-type]


def samples(rng: random.Random, time_us: float, noise: float) -> Measurement:
    """Nine rounds of a final."""
    return Measurement(
        samples_us=tuple(time_us * (1 + noise * rng.gauss(0, 1)) for _ in range(ROUNDS)),
        protocol=MeasureProtocol(),
        environment=ENVIRONMENT,
        baselines_us={},
    )


# ---------------------------------------------------------------------- finalists


def test_drift_within_a_study_does_not_decide_who_is_a_finalist() -> None:
    """The second trial ran on a card that was 3 % slower by then, as its baseline shows: it is the faster one."""
    trials = [timed(0, 50.5), timed(1, 50.0, drift=1.03), timed(2, 52.0)]
    assert [trial.number for trial in finalists(trials)] == [1, 0, 2]


def test_only_verified_measured_trials_are_finalists() -> None:
    """A time without a verified product is nothing to publish."""
    trials = [
        timed(0, 50.0, outcome=Outcome.STOPPED_EARLY),
        timed(1, 51.0, evidence=(Evidence.MEASURED,)),
        timed(2, 52.0),
        timed(3, 49.0, outcome=Outcome.CHECK_FAILED),
    ]
    assert [trial.number for trial in finalists(trials)] == [2]


def test_all_that_come_close_are_timed_again_and_no_more_than_a_dozen() -> None:
    """E1: what the next run may choose should stand in this run's tie set."""
    ranked = finalists([timed(number, 50.0 + 0.03 * number) for number in range(len(STARTING))])
    batch, rest = next_batch(ranked, fewest=5)
    assert [trial.number for trial in batch] == list(range(MOST_FINALISTS))
    assert [*batch, *rest] == ranked
    apart = finalists([timed(number, 50.0 + 5 * number) for number in range(len(STARTING))])
    assert [trial.number for trial in next_batch(apart, fewest=5)[0]] == [0, 1, 2, 3, 4]


def test_previous_winner_is_timed_again_wherever_it_stands() -> None:
    """The revision before is compared in the same rounds, not by a number of another day."""
    apart = finalists([timed(number, 50.0 + 5 * number) for number in range(len(STARTING))])
    batch, rest = next_batch(apart, fewest=3, previous_key=STARTING[9].key)
    assert [trial.number for trial in batch] == [0, 1, 2, 9]
    assert 9 not in [trial.number for trial in rest]


# ---------------------------------------------------------------------- no winner


def test_reason_of_a_study_without_a_winner_counts_what_failed_in_the_final() -> None:
    """All were tried and measured; then all differed from launch to launch."""
    result = tune(request(8), fake(faults=LATE))
    assert result.state is State.FAILED
    assert f"none of {len(result.trials)} configs worked: 8 NONDETERMINISTIC" in result.reason
    assert "no config was tried" not in result.reason


def test_reason_without_a_winner_says_whether_anything_was_tried() -> None:
    """A final that nobody could take is another thing than a study without a trial."""
    assert why_none_worked([]) == "no config was tried"
    assert why_none_worked([timed(0, 50.0), timed(1, 51.0)]).startswith("2 configs were measured, and none")


# ---------------------------------------------------------------------- ties


def choose(times_us: dict[int, float], *, noise: float, seed: int = 0, previous: int | None = None) -> tuple[int, ...]:
    """The tie set of a final with these true times."""
    rng = random.Random(seed)
    trials = [timed(number, time_us) for number, time_us in times_us.items()]
    twin = samples(rng, 100.0, noise)
    chosen = choose_measured(
        trials,
        {number: samples(rng, time_us, noise) for number, time_us in times_us.items()},
        aa_ratio=Ratio.of_pairs(twin.samples_us, samples(rng, 100.0, noise).samples_us),
        paired=True,
        previous_key=None if previous is None else STARTING[previous].key,
    )
    assert chosen is not None
    assert chosen.winner.number == chosen.tie_set[0]
    return chosen.tie_set


def test_e1_winner_of_each_of_three_equal_finals_lies_in_the_tie_sets_of_the_others() -> None:
    """E1: configs that the noise cannot tell apart are a declared tie, whichever is fastest today; 30 such triples."""
    true_us = dict.fromkeys(range(6), 100.0) | {6: 103.0, 7: 106.0}
    for triple in range(30):
        ties = [choose(true_us, noise=0.001, seed=3 * triple + run) for run in range(3)]
        for one in ties:
            assert all(one[0] in other for other in ties), ties
            assert {6, 7}.isdisjoint(one)


class NoisyEngine(FakeEngine):
    """Draws other noise for each run of the same job."""

    def __init__(self, salt: int, *, noise: float = 0.001) -> None:
        super().__init__(PROFILE, options=FakeOptions(noise=noise, ruggedness=0.2))
        self._salt = salt

    def _measure(self, problem, config, protocol, phase):  # type: ignore[no-untyped-def]
        return super()._measure(problem, config, protocol, f"{self._salt}:{phase}")


def test_e1_same_job_run_three_times_declares_each_others_winners_as_ties() -> None:
    """E1: the same configs, measured on three days: the winner of each lies in the tie sets of the other two."""
    space = SearchedSpace.of_configs(STARTING)
    results = [tune(request(len(STARTING)), NoisyEngine(salt), space=space, starting=STARTING) for salt in range(3)]
    ties = [{trial.config.key for trial in one.trials if trial.number in one.tie_set} for one in results]
    winners = [one.winner.config.key for one in results if one.winner]
    assert len({tuple(m.samples_us for m in one.finals.values()) for one in results}) == 3, "the noise did differ"
    assert all(winner in tied for winner in winners for tied in ties)


def test_e1_equal_study_of_before_makes_the_sampler_ask_the_same_configs_again() -> None:
    """E1: TPE follows the times, which differ from day to day; told those of the first day, only the clock decides."""
    first = tune(request(40), NoisyEngine(1, noise=0.05))
    alone = tune(request(40), NoisyEngine(2, noise=0.05))
    assert told(alone) != told(first), "the noise alone leads elsewhere"
    again = tune(request(40), NoisyEngine(2, noise=0.05), told_before=first.trials)
    assert [trial.config for trial in again.trials] == [trial.config for trial in first.trials]
    measured = {trial.number: trial.measurement for trial in again.trials if trial.outcome is Outcome.MEASURED}
    assert all(measured[trial.number] != trial.measurement for trial in first.trials if trial.number in measured)


def test_e1_equal_studies_with_a_clock_as_good_as_ours_tie_each_others_winners() -> None:
    """E1: noise of 0.1 %, as an H200's bursts have; TPE asks the same configs again, and the winners are ties."""
    first = tune(request(40), NoisyEngine(1))
    again = tune(request(40), NoisyEngine(2), told_before=first.trials)
    assert first.winner is not None
    assert again.winner is not None
    assert {m.samples_us for m in first.finals.values()}.isdisjoint(m.samples_us for m in again.finals.values())
    assert first.winner.number in again.tie_set
    assert again.winner.number in first.tie_set


def test_equal_study_of_before_whose_winner_failed_a_check_is_repeated_all_the_same() -> None:
    """The sampler had heard its time before it failed."""
    first = tune(request(24), NoisyEngine(1))
    assert first.winner is not None
    failed = [
        replace(trial, outcome=Outcome.CHECK_FAILED) if trial.number == first.winner.number else trial
        for trial in first.trials
    ]
    again = tune(request(24), NoisyEngine(2), told_before=failed)
    assert [trial.config for trial in again.trials] == [trial.config for trial in first.trials]


def test_e3_order_inside_a_tie_is_fixed_and_not_that_of_the_clock() -> None:
    """E3: two winners in a tie differ in their rounding, so the choice must not flip: first by config key."""
    first = min(range(4), key=lambda number: STARTING[number].key)
    for seed in range(20):
        ties = choose(dict.fromkeys(range(4), 100.0), noise=0.002, seed=seed)
        if first in ties:
            assert ties[0] == first
        assert list(ties) == sorted(ties, key=lambda number: STARTING[number].key)


def test_e3_previous_winner_stays_on_a_tie_and_falls_to_a_faster_one() -> None:
    """E3: users of revision 1 see no other numerics for nothing."""
    last = max(range(4), key=lambda number: STARTING[number].key)
    for seed in range(10):
        ties = choose(dict.fromkeys(range(4), 100.0), noise=0.002, seed=seed, previous=last)
        if last in ties:
            assert ties[0] == last
    faster = {number: 95.0 if number != last else 100.0 for number in range(4)}
    assert last not in choose(faster, noise=0.002, previous=last)


# ---------------------------------------------------------------------- the previous revision in a study


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_previous_revision_is_measured_in_the_final_and_leaves_the_search_as_it_is(sampler: str) -> None:
    """Its config is no starting config, so nothing but the previous revision can have brought it in."""
    alone = tune(request(20, sampler=sampler))
    tried = [trial.config for trial in alone.trials]
    stranger = next(config for config in SearchedSpace.of(PROBLEM, PROFILE).configs if config not in tried)
    recorder = MemoryRecorder()
    result = tune(request(20, sampler=sampler), fake(), recorder=recorder, previous_winner=stranger)
    assert told(result)[:-1] == told(alone)
    last = result.trials[-1]
    assert (last.config, last.outcome, last.number) == (stranger, Outcome.MEASURED, len(alone.trials))
    assert last.number in result.finals
    assert last.number in [number for number, _ in recorder.finals]
    resumed = tune(request(20, sampler=sampler), resume_from=result.trials, previous_winner=stranger)
    assert told(resumed) == told(result), "killed before its final, it goes on with the final"
    assert resumed.winner == result.winner


def test_previous_revision_that_the_search_met_is_not_tried_twice() -> None:
    """It takes part in the final under its own number, however slow it was."""
    slowest = max(tune(request(8)).trials, key=lambda trial: trial.time_us or 0.0)
    result = tune(request(8), previous_winner=slowest.config)
    assert len(result.trials) == 8
    if result.trials[slowest.number].outcome is Outcome.MEASURED:
        assert slowest.number in result.finals


def test_previous_revision_with_the_source_of_a_trial_is_represented_by_it() -> None:
    """Two spellings of one kernel: the one that was measured stands for both, and stays on a tie."""

    class OneSource(FakeEngine):
        """Compiles the previous winner to the source of the first trial."""

        def compile(self, job):  # type: ignore[no-untyped-def]
            """See Engine."""
            return super().compile(replace(job, config=STARTING[0]) if job.config == STARTING[11] else job)

    result = tune(request(6), OneSource(PROFILE), starting=STARTING[:6], previous_winner=STARTING[11])
    assert result.trials[-1].outcome is Outcome.REJECTED
    assert "same source as trial 0" in result.trials[-1].reason
    assert 0 in result.finals


def test_previous_revision_that_no_longer_works_is_named_with_the_reason() -> None:
    """A config that the rules of today reject costs nothing and hides nothing."""
    broken = replace(STARTING[0], pipe_depth=16, blk_k=128, blk_n=256)
    result = tune(request(12), fake(), previous_winner=broken)
    assert result.trials[-1].outcome is Outcome.REJECTED
    assert "shared memory" in result.trials[-1].reason
    assert result.winner is not None


def test_model_mode_ignores_the_previous_revision() -> None:
    """It is about measured times."""
    stranger = next(config for config in SearchedSpace.of(PROBLEM, PROFILE).configs if config not in STARTING)
    result = tune(request(8, mode="model"), fake(live=False), previous_winner=stranger)
    assert stranger not in [trial.config for trial in result.trials]


@pytest.mark.parametrize("seed", range(3))
def test_disturbed_final_leaves_a_candidate_and_says_so(seed: int) -> None:
    """E4: another process held the card through the whole final: the search's times choose, nothing is certified."""

    class Disturbed(FakeEngine):
        """Its card is somebody else's when the final comes."""

        def _final(self, job):  # type: ignore[no-untyped-def]
            reply = super()._final(job)
            return replace(reply, measurements={}, aa_ratio=None, disturbed="15 of 15 rounds discarded; process 4711")

    result = tune(request(12, seed=seed), Disturbed(PROFILE))
    assert result.winner is not None
    assert Evidence.CHECKED not in result.evidence
    assert "no final: 15 of 15 rounds discarded; process 4711" in result.reason
