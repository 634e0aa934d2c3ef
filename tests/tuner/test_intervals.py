"""95 % intervals of a median: where they lie, and how often they hold the truth."""

from __future__ import annotations

import random
from math import log

import pytest

from tuner.intervals import median_interval


@pytest.mark.parametrize(("count", "low"), [(1, 0.0), (5, 0.0), (6, 0.093), (8, 0.843), (9, 0.984), (20, 4.916)])
def test_interval_of_the_median_lies_between_two_order_statistics(count: int, low: float) -> None:
    """Hettmansperger and Sheather: of eight rounds, 84 % of the way from the smallest to the second smallest."""
    assert median_interval(range(count)) == (pytest.approx(low, abs=1e-3), pytest.approx(count - 1 - low, abs=1e-3))


def test_interval_of_a_thousand_rounds_agrees_with_the_normal_approximation() -> None:
    """n / 2 +- 1.054 sqrt(n): 2.108 standard deviations hold 96.5 %."""
    low, high = median_interval(range(1001))
    assert (low, high) == (pytest.approx(500 - 33.35, abs=0.6), pytest.approx(500 + 33.35, abs=0.6))


def test_interval_of_equal_values_is_that_value() -> None:
    """Interpolating between equal numbers must not leave them."""
    for value in (0.1, 1.0, 175.6):
        assert median_interval([value] * 9) == (value, value)


@pytest.mark.parametrize("count", [6, 7, 8, 9, 15])
@pytest.mark.parametrize("draw", ["exponential", "normal", "disturbed"])
def test_interval_of_independent_values_holds_the_median_a_little_more_often_than_95_percent(
    count: int, draw: str
) -> None:
    """3,000 intervals of a few values each: 95.3 to 97.7 % hold the true median, whatever the distribution."""
    rng = random.Random(f"{count}{draw}")
    true_median = log(2) if draw == "exponential" else 0.0
    values = {
        "exponential": lambda: rng.expovariate(1.0),
        "normal": lambda: rng.gauss(0, 1),
        "disturbed": lambda: rng.gauss(0, 10 if rng.random() < 0.1 else 1),
    }[draw]
    held = 0
    for _ in range(3000):
        low, high = median_interval(values() for _ in range(count))
        held += low <= true_median <= high
    assert 0.953 <= held / 3000 <= 0.977
