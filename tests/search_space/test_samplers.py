"""What samplers need, and when a study of a job ends."""

from __future__ import annotations

import pytest

from search_space import samplers
from search_space.samplers import WORTH_A_TRIAL, missing_modules, unusable_reason, worth_a_trial


def test_sampler_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And which ones can be used as the machine is; the default needs nothing more."""
    monkeypatch.setitem(samplers.NEEDED_MODULES, "gp", ("no_such_module", "json"))
    assert missing_modules("gp") == ("no_such_module",)
    reason = unusable_reason("gp") or ""
    assert "'gp' needs no_such_module" in reason
    assert "gemm-tuner[search]" in reason
    assert "learned, tpe" in reason
    assert unusable_reason(samplers.DEFAULT_SAMPLER) is None


@pytest.mark.parametrize(("weight", "factor"), [(1.0, 1.0), (2.0, 0.5), (0.5, 2.0), (1e-9, 4.0), (1e9, 0.25)])
def test_weight_times_least_gain_is_the_same_for_all_problems_of_a_job(weight: float, factor: float) -> None:
    """Within a factor of four: no problem is left without a search, none searched for ever."""
    assert worth_a_trial(weight, 1.0) == pytest.approx(WORTH_A_TRIAL * factor)
