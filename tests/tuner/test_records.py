"""Outcomes, statistics and JSON round trips of the tuner's records."""

from __future__ import annotations

import json
from statistics import median

import pytest

from kernels.config import Sm100GemmConfig
from kernels.problem import GemmProblem
from tests.tuner.support import ENVIRONMENT, measurement
from tuner.records import CardState, Environment, Evidence, Measurement, Outcome, Ratio, Trial


def test_budget_counts_exactly_the_outcomes_that_bring_a_time() -> None:
    """MEASURED, MODELED and STOPPED_EARLY use up a trial; failures and rejections do not."""
    counted = {outcome for outcome in Outcome if outcome.counts_against_budget}
    assert counted == {Outcome.MEASURED, Outcome.MODELED, Outcome.STOPPED_EARLY}
    assert len(Outcome) == 14


def test_ratio_is_taken_round_by_round_before_the_median() -> None:
    """A drift that hits both by the same factor leaves no trace in the ratio."""
    drift = [1.0, 1.1, 1.3, 0.9, 2.0, 1.0, 1.2]
    ratio = Ratio.of_pairs([200.0 * d for d in drift], [100.0 * d for d in drift])
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_above_one_means_faster_than_the_baseline() -> None:
    """The baseline's time stands above."""
    assert measurement(50.0, 50.0, 50.0, baseline_us=100.0).ratio("cublaslt_best").median == 2.0


def test_statistics_of_a_measurement_are_derived_from_its_samples() -> None:
    """Median, spread and rate."""
    made = measurement(10.0, 12.0, 11.0)
    assert made.median_us() == 11.0
    assert made.spread() == median([1.0, 1.0, 0.0]) / 11.0
    assert made.tflops(GemmProblem(m=1000, n=1000, k=1000)) == pytest.approx(2e9 / 11e-6 / 1e12)


def test_a_missing_baseline_is_named_with_those_there_are() -> None:
    """The error says what was measured."""
    with pytest.raises(KeyError, match=r"no baseline 'triton': measured were cublaslt_best"):
        measurement(1.0).ratio("triton")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_not_finite_and_positive_is_no_measurement(bad: float) -> None:
    """Such a sample is an INVALID_TIMING, not a number to divide by."""
    with pytest.raises(ValueError, match="finite and positive"):
        measurement(1.0, bad)


def test_baselines_that_do_not_pair_up_are_refused() -> None:
    """Rounds are paired, so their numbers agree."""
    with pytest.raises(ValueError, match="torch has 1 rounds, ours has 2"):
        measurement(1.0, 2.0, baselines_us={"torch": (1.0,)})


def test_states_of_the_card_pair_up_with_the_samples() -> None:
    """One for each round."""
    with pytest.raises(ValueError, match="states has 1 rounds, ours has 2"):
        measurement(1.0, 2.0, states=(CardState(sm_clock_mhz=1980.0),))


def test_measurement_of_an_earlier_version_is_read() -> None:
    """Without states and energy, and with a protocol that knows no warm-up."""
    made = measurement(1.0, 2.0)
    stored = json.loads(json.dumps(made.to_dict()))
    del stored["states"], stored["energy_mj"], stored["protocol"]["warm_up_s"]
    assert Measurement.from_dict(stored) == made


def test_trial_survives_json() -> None:
    """Everything comes back equal, samples and environment included."""
    trial = Trial(
        number=3,
        config=Sm100GemmConfig(pipe_depth=5),
        outcome=Outcome.MEASURED,
        measurement=measurement(1.5, 2.5, 3.5),
        modeled_us=1.25,
        evidence=(Evidence.MEASURED, Evidence.NUMERIC),
        source_hash="ab",
        artifact_sha256="cd",
        compile_s=1.0,
        gpu_s=0.5,
        max_rel_error=0.001,
    )
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial
    failed = Trial(number=4, config=Sm100GemmConfig(), outcome=Outcome.CRASHED, reason="why")
    assert Trial.from_dict(json.loads(json.dumps(failed.to_dict()))) == failed


def test_measurement_and_environment_survive_json() -> None:
    """Also the pairs and the tuples in them."""
    environment = Environment(
        gpu_name="g", arch="sm_90a", sm_count=1, throttle_reasons=("power",), packages=(("a", "1"), ("b", "2"))
    )
    states = (
        CardState(sm_clock_mhz=1980.0, power_w=512.5, throttle_reasons=("sw_power_cap",)),
        CardState(sm_clock_mhz=0.0),
    )
    made = measurement(1.0, 2.0, environment=environment, discarded=3, states=states, energy_mj={"ours": 71.5})
    assert Measurement.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_environment_of_another_version_is_read_as_far_as_it_is_known() -> None:
    """A field of a newer version is dropped, one that is missing gets its default."""
    stored = {"gpu_name": "g", "arch": "sm_90a", "sm_count": 1, "moon_phase": "full"}
    assert Environment.from_dict(stored) == Environment(gpu_name="g", arch="sm_90a", sm_count=1)


def test_environment_key_ignores_what_does_not_decide_equal_or_stale() -> None:
    """Minor driver version, clocks and card do not change the key; source and toolchain do."""
    warm = Environment.from_dict({**ENVIRONMENT.to_dict(), "temperature_c": 70.0, "driver": "580.9", "gpu_uuid": "x"})
    assert warm.key("s") == ENVIRONMENT.key("s")
    assert ENVIRONMENT.key("other") != ENVIRONMENT.key("s")
    assert Environment.from_dict({**ENVIRONMENT.to_dict(), "driver": "590.1"}).key("s") != ENVIRONMENT.key("s")
