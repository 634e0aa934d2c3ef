"""What a study races against, on invented devices whose clock changes in the middle of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.tuner.support import ENVIRONMENT, PROFILE, PROTOCOL, request, tune
from tuner.engine.fake import STOP_EARLY_AT, FakeEngine
from tuner.engine.incumbent import Incumbent, best_of
from tuner.records import Measurement, Outcome

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tuner.engine.base import EvaluateJob, EvaluateReply


class Throttling(FakeEngine):
    """Everything takes twice as long from the 20th evaluation on, the vendor library too."""

    def __init__(self, *arguments: Any, slowdown: float = 2.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.jobs: list[EvaluateJob] = []
        self._slowdown = slowdown

    def evaluate(self, job: EvaluateJob) -> Future[EvaluateReply]:
        """See Engine."""
        self.jobs.append(job)
        return super().evaluate(job)

    def _measure(self, *arguments: Any) -> Measurement:
        made = super()._measure(*arguments)
        factor = self._slowdown if len(self.jobs) >= 20 else 1.0

        def slowed(samples_us: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * us for us in samples_us)

        baselines_us = {name: slowed(samples_us) for name, samples_us in made.baselines_us.items()}
        return replace(made, samples_us=slowed(made.samples_us), baselines_us=baselines_us)


@pytest.mark.parametrize("slowdown", [0.5, 1.0, 2.0])
def test_e9_card_that_throttles_within_a_study_stops_nobody_who_would_win_on_a_cool_one(slowdown: float) -> None:
    """E9: each trial is judged by its ratio to torch and that of the best told, whatever the clock was for either."""
    engine = Throttling(PROFILE, slowdown=slowdown)
    ratios = {
        trial.source_hash: (trial.measurement.ratio("torch").median, trial.outcome)
        for trial in tune(request(60), engine).trials
        if trial.measurement is not None
    }
    late = [job for job in engine.jobs[20:] if job.incumbent is not None and job.source_hash in ratios]
    assert len(late) > 20
    for job in late:
        ratio, outcome = ratios[job.source_hash]
        assert job.incumbent is not None
        assert job.incumbent.ratio is not None
        hopeless = job.incumbent.ratio / ratio > STOP_EARLY_AT
        assert outcome is (Outcome.STOPPED_EARLY if hopeless else Outcome.MEASURED)
    assert {outcome for _, outcome in ratios.values()} == {Outcome.MEASURED, Outcome.STOPPED_EARLY}


def test_best_is_the_one_with_the_best_ratio_and_the_fastest_where_ratios_are_missing() -> None:
    """A slower time on a slower card may be the better kernel."""
    cool, hot = Incumbent(time_us=100.0, ratio=1.10), Incumbent(time_us=114.0, ratio=1.158)
    assert best_of([None, cool, hot]) == hot
    assert best_of([cool, hot, Incumbent(time_us=99.0)]) == Incumbent(time_us=99.0)
    assert best_of([None]) is None
    assert best_of([]) is None


def test_incumbent_has_the_paired_ratio_of_its_rounds() -> None:
    """The median of the ratios, not the ratio of the medians; none where torch was not timed."""
    made = Measurement(
        samples_us=(10.0, 20.0, 30.0),
        baselines_us={"torch": (11.0, 26.0, 36.0)},
        protocol=PROTOCOL,
        environment=ENVIRONMENT,
    )
    assert Incumbent.of(made) == Incumbent(time_us=20.0, ratio=pytest.approx(1.2))
    assert Incumbent.of(replace(made, baselines_us={})) == Incumbent(time_us=20.0)


def test_final_and_a_job_without_incumbent_race_against_nobody() -> None:
    """Finalists are timed in full."""
    engine = Throttling(PROFILE)
    tune(request(20), engine)
    job = engine.jobs[-1]
    assert job.raced_against is not None
    assert job.raced_against == job.incumbent
    assert replace(job, phase="final").raced_against is None
    assert engine.jobs[0].raced_against is None
