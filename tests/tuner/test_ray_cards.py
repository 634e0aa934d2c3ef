"""The spread between cards of one name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tuner.support import ENVIRONMENT, STARTING, fake, measurement, request, tune
from tuner.cards import card_spread
from tuner.records import Outcome, Trial


def trial(number: int, card: str, vendor_us: float) -> Trial:
    """A trial that some card measured beside the vendor library."""
    environment = replace(ENVIRONMENT, gpu_uuid=card)
    measured = measurement(90.0, 91.0, 92.0, baseline_us=vendor_us, environment=environment)
    return Trial(number=number, config=STARTING[0], outcome=Outcome.MEASURED, measurement=measured)


def test_spread_is_that_of_the_vendor_library_between_the_medians_of_the_cards() -> None:
    """One odd round on a card is not its speed."""
    slow = [trial(index, "GPU-a", time_us) for index, time_us in enumerate((102.0, 102.0, 150.0))]
    fast = [trial(index + 3, "GPU-b", 100.0) for index in range(3)]
    found = card_spread([*slow, *fast])
    assert found is not None
    assert found.vendor_us == {"GPU-a": 102.0, "GPU-b": 100.0}
    assert found.spread == pytest.approx(0.02)
    assert str(found) == "measured on 2 cards, between which the vendor's kernel differs by 2.0%"


def test_one_card_or_too_few_trials_on_the_second_have_no_spread() -> None:
    """Nothing is said that was not measured."""
    alone = [trial(index, "GPU-a", 100.0) for index in range(3)]
    assert card_spread(alone) is None
    assert card_spread([*alone, trial(3, "GPU-b", 50.0)]) is None
    assert tune(request(4), fake()).reason == ""
