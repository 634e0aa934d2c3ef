"""What racing saves, on a simulated card: bursts with the noise and the drift of a real one, and no time passing."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest

from search_space.request import MIN_ROUNDS, MeasureProtocol
from tuner.engine.incumbent import Incumbent, best_of
from tuner.gpu.rounds import Round, Rounds, enough_for, hopeless, measure
from tuner.records import Ratio

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = Path(__file__).parents[2] / "results/h200/racing.json"
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
    throttled: float = 1.0

    def run(self, true_us: float) -> float:
        """One burst of 4 ms and its gap."""
        self.bursts += 1
        self.worked_ms += PROTOCOL.burst_ms + 5.0
        drift = DRIFT * min(1.0, self.bursts / 500)
        return true_us * self.throttled * (1 + drift + NOISE * self.rng.gauss(0, 1))


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


def incumbent_of(rounds: Rounds) -> Incumbent:
    """What later candidates race against."""
    ours_us = rounds.times_us("candidate")
    ratio = Ratio.of_pairs(rounds.times_us("torch"), ours_us).median
    return Incumbent(time_us=median(ours_us), ratio=ratio)


def study(times_us: list[float], *, racing: bool, seed: int) -> tuple[int, SimulatedCard, int]:
    """Measure all candidates; returns the winner, the card, and how many were stopped early."""
    card = SimulatedCard(rng=random.Random(seed))
    baselines = [SimulatedBurst(name=name, true_us=us, card=card) for name, us in (("torch", 101.0), ("lt", 100.0))]
    told: list[Incumbent | None] = []
    standings: dict[int, float] = {}
    for number, true_us in enumerate(times_us):
        burst = SimulatedBurst(name="candidate", true_us=true_us, card=card)
        incumbent = best_of(told[: max(0, number - IN_FLIGHT + 1)])
        enough: Callable[[Rounds], bool] = enough_for(burst, ["torch", "lt"], incumbent)
        rounds = measure(
            [burst, *baselines],
            PROTOCOL,
            card=None,
            order=random.Random(number),
            report=lambda phase, subject=None: None,
            enough=enough if racing else lambda _: False,
        )
        stopped = racing and bool(hopeless(rounds, "candidate", incumbent))
        told.append(None if stopped else incumbent_of(rounds))
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
    incumbent = Incumbent(time_us=100.0, ratio=1.0)
    for seed in range(150):
        card = SimulatedCard(rng=random.Random(seed), bursts=10_000)
        burst = SimulatedBurst(name="candidate", true_us=99.5, card=card)
        rounds = measure(
            [burst, SimulatedBurst(name="torch", true_us=100.0, card=card)],
            PROTOCOL,
            card=None,
            order=random.Random(seed),
            report=lambda phase, subject=None: None,
            enough=enough_for(burst, ["torch"], incumbent),
        )
        assert not hopeless(rounds, "candidate", incumbent)


@pytest.mark.parametrize("throttled", [0.8, 1.0, 1.2, 2.9])
def test_e9_racing_stops_the_same_candidates_on_a_throttled_card_as_on_a_cool_one(throttled: float) -> None:
    """E9: the incumbent ran on a cool card, these rounds do not; all of them are slower, torch.matmul too.

    A candidate 5 % faster than the incumbent is measured to the end, and one 5 % slower is stopped, also where a faster
    clock makes it look good.
    """
    incumbent = Incumbent(time_us=100.0, ratio=1.10)
    for seed in range(20):
        card = SimulatedCard(rng=random.Random(seed), throttled=throttled)
        for true_us, stops in ((95.0, False), (100.0, False), (105.0, True)):
            burst = SimulatedBurst(name="candidate", true_us=true_us, card=card)
            rounds = measure(
                [burst, SimulatedBurst(name="torch", true_us=110.0, card=card)],
                PROTOCOL,
                card=None,
                order=random.Random(seed),
                report=lambda phase, subject=None: None,
                enough=enough_for(burst, ["torch"], incumbent),
            )
            assert bool(hopeless(rounds, "candidate", incumbent)) is stops
            assert len(rounds.kept()) == 2 if stops else len(rounds.kept()) >= MIN_ROUNDS


def test_racing_by_ratios_stops_the_candidates_that_it_stopped_on_a_card() -> None:
    """The margins are the same: replayed with the ratios of results/h200/racing.json, the same 41 of 72 stop."""
    stopped = 0
    for row in json.loads(RECORDED.read_text())["rows"]:
        told: list[Incumbent | None] = []
        for number, candidate in enumerate(row["candidates"]):
            ratio = candidate["raced"]["ratio"]
            incumbent = best_of(told[: max(0, number - IN_FLIGHT + 1)])
            pair = Rounds(rounds=[Round(times_us={"candidate": 1.0, "torch": ratio})] * 2)
            stops = bool(hopeless(pair, "candidate", incumbent))
            assert stops is bool(candidate["stopped"]), (row["shape"], candidate["name"])
            told.append(None if stops else Incumbent(time_us=1.0, ratio=ratio))
            stopped += stops
    assert stopped == 41
