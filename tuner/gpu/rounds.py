"""Rounds: one burst of each implementation, in random order; which of them count, and when there are enough.

Needs no torch: anything with a name and a time will do for a burst.

Absolute times drift by 2 % between sessions; ratios of one round stay within 0.5 %. So a candidate and its baselines
take turns, and each round that something disturbed is left out as a whole.

Protocol `burst` lets the card rest before each burst, so that it stays at its highest clock. Protocol `sustained` never
lets it rest: after a warm-up the bursts follow one another without a gap, and each begins untimed, because the clocks
that the power limit leaves to one kernel are not those that it leaves to the next.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Protocol

from search_space.request import MIN_ROUNDS
from tuner.engine.incumbent import BASELINE
from tuner.gpu.energy import EnergyMeter
from tuner.gpu.jobs import Phase
from tuner.gpu.nvml import POWER_CAP
from tuner.records import Ratio

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from search_space.request import MeasureProtocol
    from tuner.engine.incumbent import Incumbent
    from tuner.gpu.nvml import Card, Reading
    from tuner.gpu.wire import Report

MIN_ROUNDS_TO_STOP = 2
HALF_WIDTH = 0.005  # of the ratio to the best baseline
# Than the incumbent, in each round. One round is quiet to 0.5 %, and a ratio taken again in another process held to 1 %
# or its interval in 58 of 61 cases (results/h200/reproduce.json).
CLEARLY_SLOWER = 1.03
SLOWER = 1.02  # lower end of the interval, from the third round on
MIN_ROUNDS_FOR_INTERVAL = 3  # of Student's t, which only racing uses
EXTRA_ROUNDS = 6  # that may be tried in place of discarded ones
MAX_CANDIDATE_S = 2.0  # of one candidate's bursts, for kernels so slow that a round takes long
# Idle time after a long burst, as a multiple of it: more than half of the time at work trips the power limit.
REST = 1.25
SETTLE_SHARE = 0.25  # of a sustained burst: an H200 takes 0.1 s to find the clock of another kernel

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
STUDENT_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
STUDENT_T_BEYOND = 2.2


class Timed(Protocol):
    """A burst of launches of one implementation."""

    @property
    def name(self) -> str:
        """Of the implementation."""

    @property
    def launches(self) -> int:
        """In the burst."""

    @property
    def subject(self) -> int | None:
        """Index of the candidate, None for a baseline."""

    def time_us(self) -> float:
        """Run the burst. Returns the time of one launch."""

    def sustained_us(self, *, settle_ms: float, timed_ms: float, look: Callable[[], None]) -> float:
        """Run it again and again, at first untimed, and leave the card with work for a moment.

        Calls `look` every few milliseconds of the timed part. Returns the time of one launch.
        """


@dataclass(frozen=True, kw_only=True)
class Round:
    """One burst of each implementation.

    times_us: by name
    throttle_bits: limits in force after any of the bursts, as far as the protocol keeps them away
    foreign_pid: another process that used the card, or None
    reading: state of the card after the last burst, with all limits that any burst met; None without NVML
    readings: state of the card at the end of each burst, by name; only of a sustained round
    energy_mj: of one launch, by name, where the card's counter told it; only of a sustained round
    """

    times_us: dict[str, float]
    throttle_bits: int = 0
    foreign_pid: int | None = None
    reading: Reading | None = None
    readings: dict[str, Reading] = field(default_factory=dict)
    energy_mj: dict[str, float] = field(default_factory=dict)

    def reading_of(self, name: str) -> Reading | None:
        """The state that belongs to one implementation: its own, or that of the round."""
        return self.readings.get(name, self.reading)


@dataclass(kw_only=True)
class Rounds:
    """All rounds of one measurement. One counts when its limits are the usual ones and nobody else used the card."""

    rounds: list[Round] = field(default_factory=list)

    def kept(self) -> list[Round]:
        """Rounds that count, in order. The usual state of the limits is the most frequent one, on a tie the freest."""
        own = [one for one in self.rounds if one.foreign_pid is None]
        if not own:
            return []
        counts = Counter(one.throttle_bits for one in own)
        usual = min(counts, key=lambda bits: (-counts[bits], bits.bit_count()))
        return [one for one in own if one.throttle_bits == usual]

    def times_us(self, name: str) -> tuple[float, ...]:
        """Samples of one implementation from the rounds that count."""
        return tuple(one.times_us[name] for one in self.kept())

    def readings(self, name: str) -> tuple[Reading, ...]:
        """State of the card in the rounds that count; none without NVML."""
        found = (one.reading_of(name) for one in self.kept())
        return tuple(reading for reading in found if reading is not None)

    def energy_mj(self, name: str) -> float | None:
        """Energy of one launch in mJ: median of the rounds that count and tell it, None where none does."""
        known = [one.energy_mj[name] for one in self.kept() if name in one.energy_mj]
        return median(known) if known else None

    @property
    def discarded(self) -> int:
        """Rounds that do not count."""
        return len(self.rounds) - len(self.kept())

    def why_discarded(self) -> str:
        """For people."""
        foreign = [one.foreign_pid for one in self.rounds if one.foreign_pid is not None]
        text = f"{self.discarded} of {len(self.rounds)} rounds discarded"
        if foreign:
            text += f"; process {foreign[-1]} used the GPU in {len(foreign)} of them"
        if limited := self.discarded - len(foreign):
            text += f"; the clock limits changed in {limited} of them"
        return text


# ---------------------------------------------------------------------- measuring


def measure(
    bursts: Sequence[Timed],
    protocol: MeasureProtocol,
    *,
    card: Card | None,
    order: random.Random,
    report: Report,
    enough: Callable[[Rounds], bool],
    most: int | None = None,
) -> Rounds:
    """Rounds until `enough` says so, or `most` of them count (default: the protocol's), or too many were discarded."""
    result, most = Rounds(), most or protocol.rounds
    if protocol.is_sustained:
        _warm_up(bursts, protocol, report)
    one_round = _sustained_round if protocol.is_sustained else _burst_round
    for _ in range(most + EXTRA_ROUNDS):
        result.rounds.append(one_round(order.sample(bursts, len(bursts)), protocol, card, report))
        kept = len(result.kept())
        if kept >= most or (kept and enough(result)):
            break
    return result


def _burst_round(bursts: Sequence[Timed], protocol: MeasureProtocol, card: Card | None, report: Report) -> Round:
    times: dict[str, float] = {}
    bits, rest_s = 0, 0.0
    for burst in bursts:
        report(Phase.MEASURE, burst.subject)
        # A long burst needs a longer rest, or the mean power climbs to the limit.
        time.sleep(max(protocol.idle_gap_ms / 1000.0, rest_s))
        times[burst.name] = burst.time_us()
        rest_s = REST * 1e-6 * times[burst.name] * burst.launches
        if card is not None:
            bits |= card.throttle_bits()
    if card is None:
        return Round(times_us=times)
    reading = replace(card.read(), throttle_bits=bits)
    return Round(times_us=times, throttle_bits=bits, foreign_pid=card.foreign_process(), reading=reading)


def _warm_up(bursts: Sequence[Timed], protocol: MeasureProtocol, report: Report) -> None:
    """Load without a gap until the power limit has settled; all implementations take turns."""
    share_ms = protocol.warm_up_s * 1000.0 / len(bursts)
    for burst in bursts:
        report(Phase.MEASURE, burst.subject)
        burst.sustained_us(settle_ms=share_ms / 2, timed_ms=share_ms / 2, look=lambda: None)


def _sustained_round(bursts: Sequence[Timed], protocol: MeasureProtocol, card: Card | None, report: Report) -> Round:
    times: dict[str, float] = {}
    readings: dict[str, Reading] = {}
    energy: dict[str, float] = {}
    settle_ms = SETTLE_SHARE * protocol.burst_ms
    for burst in bursts:
        report(Phase.MEASURE, burst.subject)
        meter = EnergyMeter(read_mj=card.energy_mj if card else lambda: None)
        times[burst.name] = burst.sustained_us(
            settle_ms=settle_ms, timed_ms=protocol.burst_ms - settle_ms, look=meter.look
        )
        if card is not None:
            readings[burst.name] = card.read()
        if (power_w := meter.power_w()) is not None:
            energy[burst.name] = power_w * times[burst.name] / 1000.0
    if card is None:
        return Round(times_us=times)
    bits = 0
    for reading in readings.values():
        bits |= reading.throttle_bits
    return Round(
        times_us=times,
        throttle_bits=bits & ~POWER_CAP,  # at the power limit is where this protocol wants the card
        foreign_pid=card.foreign_process(),
        reading=replace(readings[bursts[-1].name], throttle_bits=bits),
        readings=readings,
        energy_mj=energy,
    )


# ---------------------------------------------------------------------- when to stop


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; without width for one value.

    Used only to decide when to stop: unlike the order-statistic interval that is stored with a result, it says
    something about three values.
    """
    middle = fmean(values)
    if len(values) < 2:
        return middle, middle
    half = STUDENT_T.get(len(values) - 1, STUDENT_T_BEYOND) * stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def precise(rounds: Rounds, name: str, baselines: Sequence[str]) -> bool:
    """Whether the 95 % interval of the ratio to the best baseline, as it is stored, is within half a percent.

    Looking at an interval after every round and stopping when it happens to be narrow makes it hold the truth too
    seldom. So each look decides, from the width it finds, when the next one is due.
    """
    ours = rounds.times_us(name)
    if len(ours) < MIN_ROUNDS or not baselines or min(ours) <= 0:
        return False
    best = min((rounds.times_us(baseline) for baseline in baselines), key=median)
    look = MIN_ROUNDS
    while look <= len(ours):
        ratio = Ratio.of_pairs(best[:look], ours[:look])
        too_wide = (ratio.high - ratio.low) / 2 / ratio.median / HALF_WIDTH
        if too_wide <= 1:
            return True
        look = max(look + 1, math.ceil(look * too_wide**2))
    return False


def hopeless(rounds: Rounds, name: str, incumbent: Incumbent | None) -> str:
    """Why the candidate cannot reach the incumbent, or nothing. Says the same on a hot card as on a cool one."""
    kept = rounds.kept()
    if incumbent is None or len(kept) < MIN_ROUNDS_TO_STOP:
        return ""
    baseline_us = [one.times_us[BASELINE] for one in kept if BASELINE in one.times_us]
    slowdowns = incumbent.slowdowns(rounds.times_us(name), baseline_us)
    best = f"than the best so far ({incumbent.text()})"
    if (least := min(slowdowns)) > CLEARLY_SLOWER:
        return f"fastest of {len(kept)} rounds {least - 1:.1%} slower {best}"
    low, _ = mean_interval(slowdowns)
    if len(kept) >= MIN_ROUNDS_FOR_INTERVAL and low > SLOWER:
        return f"interval of {len(kept)} rounds begins {low - 1:.1%} slower {best}"
    return ""


def enough_for(burst: Timed, baselines: Sequence[str], incumbent: Incumbent | None) -> Callable[[Rounds], bool]:
    """When a candidate has had enough rounds: its ratio is known, it cannot win, or it takes too long."""

    def enough(rounds: Rounds) -> bool:
        return (
            precise(rounds, burst.name, baselines)
            or bool(hopeless(rounds, burst.name, incumbent))
            or exhausted(rounds, burst)
        )

    return enough


def exhausted(rounds: Rounds, burst: Timed) -> bool:
    """Whether a slow candidate has had its share of GPU time."""
    ours = rounds.times_us(burst.name)
    return len(ours) >= MIN_ROUNDS and sum(ours) * burst.launches * 1e-6 >= MAX_CANDIDATE_S
