"""What racing saves, on a simulated card: bursts with the noise and the drift of a real one, and no time passing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import pytest

from search_space.request import MeasureProtocol
from tuner.gpu.rounds import Rounds, enough_for, hopeless, measure

if TYPE_CHECKING:
    from collections.abc import Callable

PROTOCOL = MeasureProtocol(idle_gap_ms=0.0)
CANDIDATES = 24
IN_FLIGHT = 8
NOISE = 0.002  # of a burst: up to 0.25 % on an H200
DRIFT = 0.015  # of all times within a study


@dataclass(kw_only=True)
class SimulatedCard:
    """Drifts slowly, as temperature does, and counts the milliseconds of its bursts."""

    rng: random.Random
    worked_ms: float = 0.0
    bursts: int = 0

    def run(self, true_us: float) -> float:
        """One burst of 4 ms and its gap."""
        self.bursts += 1
        self.worked_ms += PROTOCOL.burst_ms + 5.0
        drift = DRIFT * min(1.0, self.bursts / 500)
        return true_us * (1 + drift + NOISE * self.rng.gauss(0, 1))


@dataclass(kw_only=True)
class SimulatedBurst:
    """One implementation with its true time."""

    name: str
    true_us: float
    card: SimulatedCard
    launches: int = 1
    subject: int | None = None

    def time_us(self) -> float:
        return self.card.run(self.true_us)

    def sustained_us(self, *, settle_ms: float, timed_ms: float, look: Callable[[], None]) -> float:
        raise AssertionError("the protocol is burst")


def study(times_us: list[float], *, racing: bool, seed: int) -> tuple[int, SimulatedCard, int]:
    """Measure all candidates; returns the winner, the card, and how many were stopped early."""
    card = SimulatedCard(rng=random.Random(seed))
    baselines = [SimulatedBurst(name=name, true_us=us, card=card) for name, us in (("torch", 101.0), ("lt", 100.0))]
    medians: list[float | None] = []
    standings: dict[int, float] = {}
    for number, true_us in enumerate(times_us):
        burst = SimulatedBurst(name="candidate", true_us=true_us, card=card)
        told = [us for us in medians[: max(0, number - IN_FLIGHT + 1)] if us is not None]
        incumbent_us = min(told, default=None)
        enough: Callable[[Rounds], bool] = enough_for(burst, ["torch", "lt"], incumbent_us)
        rounds = measure(
            [burst, *baselines],
            PROTOCOL,
            card=None,
            order=random.Random(number),
            report=lambda phase, subject=None: None,
            enough=enough if racing else lambda _: False,
        )
        stopped = racing and bool(hopeless(rounds, "candidate", incumbent_us))
        medians.append(None if stopped else median(rounds.times_us("candidate")))
        if not stopped:
            standings[number] = median(rounds.times_us("candidate")) / median(rounds.times_us("torch"))
    return min(standings, key=standings.__getitem__), card, len(times_us) - len(standings)


@pytest.mark.parametrize("seed", range(8))
def test_racing_saves_half_of_the_measuring_time_and_finds_the_same_winner(seed: int) -> None:
    """Random configs of a template lie between the best and 60 % above it; the winner is the same within the noise."""
    rng = random.Random(f"space {seed}")
    times_us = [90.0 * (1 + 0.6 * rng.random() ** 1.5) for _ in range(CANDIDATES)]
    fixed, all_rounds, _ = study(times_us, racing=False, seed=seed)
    raced, card, stopped = study(times_us, racing=True, seed=seed)
    assert card.worked_ms <= 0.5 * all_rounds.worked_ms, card.worked_ms / all_rounds.worked_ms
    assert stopped >= 6
    assert times_us[raced] <= 1.005 * times_us[fixed]


def test_racing_never_stops_a_candidate_that_is_better_than_the_incumbent() -> None:
    """Not in 150 tries, though the card has slowed down by 1.5 % since the incumbent was measured."""
    for seed in range(150):
        card = SimulatedCard(rng=random.Random(seed), bursts=10_000)
        burst = SimulatedBurst(name="candidate", true_us=99.5, card=card)
        rounds = measure(
            [burst, SimulatedBurst(name="torch", true_us=100.0, card=card)],
            PROTOCOL,
            card=None,
            order=random.Random(seed),
            report=lambda phase, subject=None: None,
            enough=enough_for(burst, ["torch"], 100.0),
        )
        assert not hopeless(rounds, "candidate", 100.0)
