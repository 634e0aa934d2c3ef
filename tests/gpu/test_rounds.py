"""Which rounds count, when there are enough, and when a candidate is given up. No GPU: bursts say what they take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import pytest

from search_space.request import MeasureProtocol
from tuner.gpu.jobs import Phase
from tuner.gpu.nvml import Card, Reading
from tuner.gpu.rounds import (
    EXTRA_ROUNDS,
    ProtocolError,
    Round,
    Rounds,
    exhausted,
    hopeless,
    mean_interval,
    measure,
    precise,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROTOCOL = MeasureProtocol(idle_gap_ms=0.0)


@dataclass(kw_only=True)
class FakeBurst:
    """Takes the times it is given."""

    name: str
    times: Iterator[float]
    launches: int = 1
    subject: int | None = None

    def time_us(self) -> float:
        return next(self.times)


@dataclass(kw_only=True)
class FakeCard:
    """Answers with what it is given, then with nothing unusual."""

    bits: list[int] = field(default_factory=list)
    foreign: list[int | None] = field(default_factory=list)

    def throttle_bits(self) -> int:
        return self.bits.pop(0) if self.bits else 0

    def foreign_process(self) -> int | None:
        return self.foreign.pop(0) if self.foreign else None

    def read(self) -> Reading:
        return Reading(sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=300, temperature_c=40, throttle_bits=0)


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


def test_round_under_a_changed_clock_limit_is_discarded() -> None:
    """E2: a throttled sample says nothing about the kernel."""
    rounds = run(FakeBurst(name="a", times=iter(range(1, 99))), card=FakeCard(bits=[0x4, 0, 0, 0x20]))
    assert rounds.times_us("a") == (2, 3, 5, 6, 7, 8, 9, 10, 11)
    assert rounds.discarded == 2


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


def test_unknown_protocol_is_refused() -> None:
    """A result under another protocol would be relabelled silently."""
    protocol = MeasureProtocol()
    object.__setattr__(protocol, "kind", "sustained")
    with pytest.raises(ProtocolError, match="sustained"):
        run(FakeBurst(name="a", times=repeat(1.0)), protocol=protocol)


def test_quiet_pair_needs_three_rounds() -> None:
    """Adaptive: a ratio that is known well enough needs no further rounds."""
    rounds = run(
        FakeBurst(name="a", times=iter([10.0, 10.01, 9.99, 1.0])),
        FakeBurst(name="torch", times=repeat(10.0)),
        enough=lambda seen: precise(seen, "a", ["torch"]),
    )
    assert len(rounds.times_us("a")) == 3


def test_noisy_pair_uses_all_rounds() -> None:
    """Without three rounds that agree, the protocol's number is the limit."""
    noisy = iter([10.0, 11.0, 9.0, 10.5, 9.5, 10.0, 11.0, 9.0, 10.0])
    rounds = run(
        FakeBurst(name="a", times=noisy),
        FakeBurst(name="torch", times=repeat(10.0)),
        enough=lambda seen: precise(seen, "a", ["torch"]),
    )
    assert len(rounds.times_us("a")) == PROTOCOL.rounds


def test_drift_that_both_share_does_not_count_as_noise() -> None:
    """The ratio is what must be known, not the time."""
    drift = [10.0, 10.5, 11.0]
    assert precise(rounds_of(a=drift, torch=[2 * value for value in drift]), "a", ["torch"])


def test_ratio_is_judged_against_the_best_baseline() -> None:
    """A noisy baseline that nobody would choose does not prolong the measurement."""
    rounds = rounds_of(a=[10.0, 10.0, 10.0], torch=[12.0, 14.0, 19.0], best=[10.0, 10.01, 10.0])
    assert precise(rounds, "a", ["torch", "best"])
    assert not precise(rounds, "a", ["torch"])


def test_clearly_slower_candidate_stops_after_two_rounds_with_the_numbers() -> None:
    """Racing: what cannot win is not worth the time; its samples are kept."""
    rounds = run(
        FakeBurst(name="a", times=repeat(104.0)),
        enough=lambda seen: bool(hopeless(seen, "a", 100.0)),
    )
    assert rounds.times_us("a") == (104.0, 104.0)
    assert "104.00 us" in hopeless(rounds, "a", 100.0)
    assert "100.00 us" in hopeless(rounds, "a", 100.0)


def test_slightly_slower_candidate_needs_an_interval() -> None:
    """2.5 % may be drift in two rounds, and is not in four that agree."""
    assert not hopeless(rounds_of(a=[102.5, 102.5]), "a", 100.0)
    assert hopeless(rounds_of(a=[102.5, 102.6, 102.5, 102.6]), "a", 100.0)
    assert not hopeless(rounds_of(a=[102.5, 99.0, 104.0, 105.0]), "a", 100.0)


def test_close_candidate_without_incumbent_is_never_given_up() -> None:
    """There is nothing to be slower than."""
    assert not hopeless(rounds_of(a=[1e6, 1e6, 1e6]), "a", None)
    assert not hopeless(rounds_of(a=[101.0] * 9), "a", 100.0)


def test_very_slow_candidate_has_a_limited_share() -> None:
    """A kernel of one second is not worth nine rounds."""
    slow: Any = FakeBurst(name="a", times=repeat(1e6), launches=1)
    assert exhausted(rounds_of(a=[1e6, 1e6, 1e6]), slow)
    assert not exhausted(rounds_of(a=[100.0] * 8), slow)


def test_interval_of_the_mean_is_the_textbook_one() -> None:
    """Three values 9, 10, 11: mean 10, standard deviation 1, t = 4.303, so 10 +- 2.484."""
    low, high = mean_interval([9.0, 10.0, 11.0])
    assert (low, high) == (pytest.approx(7.516, abs=1e-3), pytest.approx(12.484, abs=1e-3))
    assert mean_interval([5.0]) == (5.0, 5.0)
