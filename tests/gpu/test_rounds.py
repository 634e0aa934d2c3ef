"""Which rounds count, when there are enough, and when a candidate is given up. No GPU: bursts say what they take."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import pytest

from search_space.request import MeasureProtocol
from tuner.engine.incumbent import Incumbent
from tuner.gpu.energy import EnergyMeter
from tuner.gpu.jobs import Phase
from tuner.gpu.nvml import Card, Reading
from tuner.gpu.rounds import (
    EXTRA_ROUNDS,
    HALF_WIDTH,
    Round,
    Rounds,
    exhausted,
    hopeless,
    mean_interval,
    measure,
    precise,
)
from tuner.intervals import median_interval
from tuner.records import Ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROTOCOL = MeasureProtocol(idle_gap_ms=0.0)
INCUMBENT = Incumbent(time_us=100.0, ratio=1.1)


@dataclass(kw_only=True)
class FakeBurst:
    """Takes the times it is given."""

    name: str
    times: Iterator[float]
    launches: int = 1
    subject: int | None = None
    busy: list[tuple[str, float]] = field(default_factory=list)

    def time_us(self) -> float:
        return next(self.times)

    def sustained_us(self, *, settle_ms: float, timed_ms: float, look: Callable[[], None]) -> float:
        self.busy += [("settle", settle_ms), ("timed", timed_ms)]
        for _ in range(int(timed_ms)):
            look()
        return next(self.times)


@dataclass(kw_only=True)
class FakeCard:
    """Answers with what it is given, then with nothing unusual."""

    bits: list[int] = field(default_factory=list)
    bits_read: list[int] = field(default_factory=list)
    foreign: list[int | None] = field(default_factory=list)
    power_w: float = 300.0
    counted_mj: float = 0.0

    def throttle_bits(self) -> int:
        return self.bits.pop(0) if self.bits else 0

    def foreign_process(self) -> int | None:
        return self.foreign.pop(0) if self.foreign else None

    def energy_mj(self) -> float:
        self.counted_mj += 1.0
        return self.counted_mj

    def read(self) -> Reading:
        return Reading(
            sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            power_w=self.power_w,
            temperature_c=40,
            throttle_bits=self.bits_read.pop(0) if self.bits_read else 0,
        )


def run(
    *bursts: FakeBurst,
    card: FakeCard | None = None,
    enough: Callable[[Rounds], bool] = lambda _: False,
    protocol: MeasureProtocol = PROTOCOL,
    phases: list[Phase] | None = None,
) -> Rounds:
    """Measure with fakes."""
    return measure(
        bursts,
        protocol,
        card=cast("Card | None", card),
        order=random.Random(0),
        report=lambda phase, subject=None: (phases if phases is not None else []).append(phase),
        enough=enough,
    )


def rounds_of(**times_us: list[float]) -> Rounds:
    """Rounds with these times."""
    names = list(times_us)
    return Rounds(
        rounds=[
            Round(times_us=dict(zip(names, values, strict=True))) for values in zip(*times_us.values(), strict=False)
        ]
    )


def beside_torch(*times_us: float) -> Rounds:
    """Rounds in which torch takes 110 us."""
    return rounds_of(a=list(times_us), torch=[110.0] * len(times_us))


def test_each_round_holds_one_time_of_each_implementation() -> None:
    """Ratios are paired round by round, so a round is complete or nothing."""
    rounds = run(FakeBurst(name="a", times=iter(range(1, 99))), FakeBurst(name="b", times=repeat(2.0)))
    assert rounds.times_us("a") == tuple(range(1, 10))
    assert rounds.times_us("b") == (2.0,) * 9
    assert rounds.discarded == 0


def test_order_inside_a_round_changes_from_round_to_round() -> None:
    """What runs after a slow kernel finds a cooler or warmer card: no one may always have the same place."""
    seen: list[str] = []

    def times(name: str) -> Iterator[float]:
        while True:
            seen.append(name)
            yield 1.0

    run(*(FakeBurst(name=name, times=times(name)) for name in "abc"))
    orders = {tuple(seen[start : start + 3]) for start in range(0, len(seen), 3)}
    assert len(orders) > 2


def test_each_burst_is_reported_so_that_a_hang_has_its_own_limit() -> None:
    """The parent's limit is for a burst, however many rounds there are."""
    phases: list[Phase] = []
    run(FakeBurst(name="a", times=repeat(1.0)), FakeBurst(name="b", times=repeat(1.0)), phases=phases)
    assert phases == [Phase.MEASURE] * 18


def test_round_with_foreign_activity_is_discarded_counted_and_replaced() -> None:
    """E4: another process on the card is seen, and its round does not count."""
    rounds = run(FakeBurst(name="a", times=iter(range(1, 99))), card=FakeCard(foreign=[None, 4711, 4711]))
    assert rounds.times_us("a") == (1, 4, 5, 6, 7, 8, 9, 10, 11)
    assert rounds.discarded == 2
    assert "process 4711 used the GPU in 2" in rounds.why_discarded()
    assert "clock limits" not in rounds.why_discarded()


def test_round_under_a_changed_clock_limit_is_discarded() -> None:
    """E2: a throttled sample says nothing about the kernel."""
    rounds = run(FakeBurst(name="a", times=iter(range(1, 99))), card=FakeCard(bits=[0x4, 0, 0, 0x20]))
    assert rounds.times_us("a") == (2, 3, 5, 6, 7, 8, 9, 10, 11)
    assert rounds.discarded == 2
    assert rounds.why_discarded() == "2 of 11 rounds discarded; the clock limits changed in 2 of them"


def test_limit_that_is_always_in_force_discards_nothing() -> None:
    """A card with a low power limit is slow, but it is so all the time."""
    rounds = run(FakeBurst(name="a", times=repeat(1.0)), card=FakeCard(bits=[0x4] * 99))
    assert rounds.discarded == 0
    assert rounds.kept()[0].reading is not None
    assert cast("Reading", rounds.kept()[0].reading).throttle_bits == 0x4


def test_measuring_ends_when_nothing_counts() -> None:
    """A busy card must not hold a study for ever."""
    rounds = run(FakeBurst(name="a", times=repeat(1.0)), card=FakeCard(foreign=[1] * 99))
    assert rounds.times_us("a") == ()
    assert rounds.discarded == PROTOCOL.rounds + EXTRA_ROUNDS


def test_quiet_pair_needs_six_rounds() -> None:
    """Adaptive: a ratio that is known well enough needs no further rounds, and six are the fewest with an interval."""
    rounds = run(
        FakeBurst(name="a", times=iter([10.0, 10.01, 9.99, 10.0, 10.02, 9.98, 1.0])),
        FakeBurst(name="torch", times=repeat(10.0)),
        enough=lambda seen: precise(seen, "a", ["torch"]),
    )
    assert len(rounds.times_us("a")) == 6


def test_noisy_pair_uses_all_rounds() -> None:
    """Where rounds do not agree, the protocol's number is the limit."""
    noisy = iter([10.0, 11.0, 9.0, 10.5, 9.5, 10.0, 11.0, 9.0, 10.0])
    rounds = run(
        FakeBurst(name="a", times=noisy),
        FakeBurst(name="torch", times=repeat(10.0)),
        enough=lambda seen: precise(seen, "a", ["torch"]),
    )
    assert len(rounds.times_us("a")) == PROTOCOL.rounds


def test_next_look_at_the_interval_is_planned_from_the_width_that_was_found() -> None:
    """Six rounds 0.7 % wide ask for twelve: seven quiet rounds in between end nothing."""
    wide = [10.0, 10.07, 9.93, 10.06, 9.94, 10.0]
    quiet = [10.0] * 30
    width = Ratio.of_pairs([10.0] * 6, wide)
    assert HALF_WIDTH < (width.high - width.low) / 2 < 2 * HALF_WIDTH
    due = math.ceil(6 * ((width.high - width.low) / 2 / width.median / HALF_WIDTH) ** 2)
    assert due > 8
    for count in range(7, 20):
        times = (wide + quiet)[:count]
        assert precise(rounds_of(a=times, torch=[10.0] * count), "a", ["torch"]) is (count >= due)


@pytest.mark.parametrize("noise", [0.001, 0.003, 0.005, 0.008, 0.02])
def test_interval_of_an_adaptive_pair_holds_the_truth_in_92_to_98_percent(noise: float) -> None:
    """E12: by construction, whatever the noise of a round is; 1,500 A/A pairs each, a tenth of the rounds disturbed."""
    rng = random.Random(f"{noise}")
    held = 0
    for _ in range(1500):
        ratios = [1 + noise * rng.gauss(0, 4 if rng.random() < 0.1 else 1) for _ in range(PROTOCOL.rounds)]
        taken = next(
            (n for n in range(6, 9) if precise(rounds_of(a=[1.0] * n, aa=ratios[:n]), "a", ["aa"])), PROTOCOL.rounds
        )
        low, high = median_interval(ratios[:taken])
        held += low <= 1 <= high
    assert 0.92 <= held / 1500 <= 0.98


# ---------------------------------------------------------------------- protocol sustained


SUSTAINED = MeasureProtocol.named("sustained")


def test_sustained_load_warms_up_and_leaves_no_gap() -> None:
    """Warm-up first, shared by all; then each burst settles for a quarter of its time."""
    one, other = (FakeBurst(name=name, times=repeat(2.0)) for name in "ab")
    rounds = run(one, other, protocol=SUSTAINED)
    assert one.busy[:2] == [("settle", 500.0), ("timed", 500.0)], "half of two seconds"
    assert one.busy[2:4] == [("settle", 75.0), ("timed", 225.0)]
    assert sum(ms for _, ms in one.busy + other.busy) == 1000 * SUSTAINED.warm_up_s + 2 * 9 * SUSTAINED.burst_ms
    assert len(rounds.kept()) == SUSTAINED.rounds


def test_sustained_round_keeps_the_state_and_the_energy_of_each_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel has its own clock at the power limit, and its own energy for one product: power times time."""
    monkeypatch.setattr(EnergyMeter, "power_w", lambda meter: 500.0 if meter._moves else None)
    bursts = [FakeBurst(name="a", times=repeat(100.0)), FakeBurst(name="b", times=repeat(40.0))]
    rounds = run(*bursts, card=FakeCard(), protocol=SUSTAINED)
    assert len(rounds.readings("a")) == len(rounds.readings("b")) == 9
    assert all(set(one.readings) == {"a", "b"} for one in rounds.rounds)
    assert (rounds.energy_mj("a"), rounds.energy_mj("b")) == (50.0, 20.0)


def test_sustained_power_limit_is_no_reason_to_discard_a_round_and_heat_is() -> None:
    """The protocol wants the card at its power limit; a thermal limit is a disturbance under any protocol."""
    flickering = FakeCard(bits_read=[0x4, 0, 0, 0x4, 0x4, 0x4, 0x20, 0x4])
    rounds = run(FakeBurst(name="a", times=repeat(1.0)), card=flickering, protocol=SUSTAINED)
    assert rounds.discarded == 1
    reading = rounds.rounds[0].reading
    assert reading is not None
    assert reading.throttle_bits == 0x4, "in the record it stands all the same"


def test_card_without_nvml_can_be_loaded_too() -> None:
    """Times without states."""
    rounds = run(FakeBurst(name="a", times=repeat(1.0)), protocol=SUSTAINED)
    assert rounds.times_us("a") == (1.0,) * 9
    assert rounds.readings("a") == ()
    assert rounds.energy_mj("a") is None


def counter(*steps: tuple[float, float]) -> tuple[EnergyMeter, list[float]]:
    """A meter whose counter shows a value from each moment on; the moments are looked at in turn."""
    moments = [at for at, _ in steps]
    left = list(steps)
    meter = EnergyMeter(read_mj=lambda: left.pop(0)[1], clock=lambda: moments[len(moments) - len(left) - 1])
    return meter, moments


def test_power_is_taken_between_the_first_and_the_last_move_of_the_counter() -> None:
    """200 J between 0.1 and 0.5 s are 500 W, wherever the burst began and ended."""
    meter, moments = counter((0.0, 1e6), (0.1, 1.05e6), (0.3, 1.15e6), (0.4, 1.15e6), (0.5, 1.25e6), (0.57, 1.25e6))
    for _ in moments:
        meter.look()
    assert meter.power_w() == pytest.approx(500.0)


@pytest.mark.parametrize(
    "steps",
    [
        [(0.0, 1.0), (0.1, 1.0), (0.2, 1.0)],
        [(0.0, 1.0), (0.1, 2.0), (0.2, 2.0)],
        [(0.0, 1.0), (0.10, 2.0), (0.11, 3.0)],
        [(0.0, 9.0), (0.1, 8.0), (0.2, 7.0)],
    ],
)
def test_power_is_unknown_where_the_counter_says_too_little(steps: list[tuple[float, float]]) -> None:
    """It never moved, once, within a moment, or backwards."""
    meter, moments = counter(*steps)
    for _ in moments:
        meter.look()
    assert meter.power_w() is None


def test_card_without_a_counter_has_no_power() -> None:
    """None is no zero."""
    meter = EnergyMeter(read_mj=lambda: None)
    meter.look()
    assert meter.power_w() is None


# ---------------------------------------------------------------------- when to stop


def test_drift_that_both_share_does_not_count_as_noise() -> None:
    """The ratio is what must be known, not the time."""
    drift = [10.0, 10.5, 11.0, 10.2, 10.9, 11.3]
    assert precise(rounds_of(a=drift, torch=[2 * value for value in drift]), "a", ["torch"])


def test_ratio_is_judged_against_the_best_baseline() -> None:
    """A noisy baseline that nobody would choose does not prolong the measurement."""
    rounds = rounds_of(a=[10.0] * 6, torch=[12.0, 14.0, 19.0, 12.5, 15.0, 16.0], best=[10.0, 10.01] * 3)
    assert precise(rounds, "a", ["torch", "best"])
    assert not precise(rounds, "a", ["torch"])


def test_clearly_slower_candidate_stops_after_two_rounds_with_the_numbers() -> None:
    """Racing: what cannot win is not worth the time; its samples are kept."""
    rounds = run(
        FakeBurst(name="a", times=repeat(104.0)),
        FakeBurst(name="torch", times=repeat(110.0)),
        enough=lambda seen: bool(hopeless(seen, "a", INCUMBENT)),
    )
    assert rounds.times_us("a") == (104.0, 104.0)
    assert hopeless(rounds, "a", INCUMBENT) == ("fastest of 2 rounds 4.0% slower than the best so far (1.100x torch)")


def test_slightly_slower_candidate_needs_an_interval() -> None:
    """2.5 % may be drift in two rounds, and is not in four that agree."""
    assert not hopeless(beside_torch(102.5, 102.5), "a", INCUMBENT)
    assert hopeless(beside_torch(102.5, 102.6, 102.5, 102.6), "a", INCUMBENT) == (
        "interval of 4 rounds begins 2.5% slower than the best so far (1.100x torch)"
    )
    assert not hopeless(beside_torch(102.5, 99.0, 104.0, 105.0), "a", INCUMBENT)


def test_e9_rounds_in_which_torch_is_slower_too_stop_nobody() -> None:
    """E9: the candidate is 5 % faster than the incumbent, on a card that has become 20 % slower meanwhile."""
    throttled = rounds_of(a=[114.0] * 4, torch=[132.0] * 4)
    assert not hopeless(throttled, "a", INCUMBENT)
    assert hopeless(rounds_of(a=[126.0] * 2, torch=[132.0] * 2), "a", INCUMBENT), "5 % slower, throttled or not"
    assert hopeless(rounds_of(a=[99.0] * 2, torch=[100.0] * 2), "a", INCUMBENT), "and on a card that became faster"


def test_times_decide_only_where_there_is_no_ratio() -> None:
    """An incumbent of which no torch time is known, or rounds without torch."""
    timed = Incumbent(time_us=100.0)
    assert "(100.00 us)" in hopeless(rounds_of(a=[104.0] * 2, torch=[132.0] * 2), "a", timed)
    assert hopeless(rounds_of(a=[104.0] * 2), "a", INCUMBENT)
    assert not hopeless(rounds_of(a=[102.0] * 2), "a", INCUMBENT)


def test_close_candidate_without_incumbent_is_never_given_up() -> None:
    """There is nothing to be slower than."""
    assert not hopeless(rounds_of(a=[1e6, 1e6, 1e6]), "a", None)
    assert not hopeless(beside_torch(*[101.0] * 9), "a", INCUMBENT)


def test_very_slow_candidate_has_a_limited_share() -> None:
    """A kernel of one second is not worth nine rounds."""
    slow: Any = FakeBurst(name="a", times=repeat(1e6), launches=1)
    assert exhausted(rounds_of(a=[1e6] * 6), slow)
    assert not exhausted(rounds_of(a=[1e6] * 5), slow), "its interval still needs a sixth"
    assert not exhausted(rounds_of(a=[100.0] * 8), slow)


def test_interval_of_the_mean_is_the_textbook_one() -> None:
    """Three values 9, 10, 11: mean 10, standard deviation 1, t = 4.303, so 10 +- 2.484."""
    low, high = mean_interval([9.0, 10.0, 11.0])
    assert (low, high) == (pytest.approx(7.516, abs=1e-3), pytest.approx(12.484, abs=1e-3))
    assert mean_interval([5.0]) == (5.0, 5.0)
