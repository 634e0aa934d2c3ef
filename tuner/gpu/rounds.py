"""Rounds: one burst of each implementation, in random order; which of them count, and when there are enough.

Needs no torch: anything with a name and a time will do for a burst.

Absolute times drift by 2 % between sessions; ratios of one round stay within 0.5 %. So a candidate and its baselines
take turns, and each round that something disturbed is left out as a whole.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Protocol

from tuner.gpu.jobs import Phase

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from search_space.request import MeasureProtocol
    from tuner.gpu.nvml import Card, Reading
    from tuner.gpu.wire import Report

MIN_ROUNDS = 3
MIN_ROUNDS_TO_STOP = 2
HALF_WIDTH = 0.005  # of the ratio to the best baseline
CLEARLY_SLOWER = 1.03  # in each round; one round is quiet to 0.5 %, and a card drifts by 1 to 2 % within a study
SLOWER = 1.02  # lower end of the interval, from the third round on
EXTRA_ROUNDS = 6  # that may be tried in place of discarded ones
MAX_CANDIDATE_S = 2.0  # of one candidate's bursts, for kernels so slow that a round takes long
REST = (
    1.25  # idle time after a long burst, as a multiple of it: more than half of the time at work trips the power limit
)

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
STUDENT_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
STUDENT_T_BEYOND = 2.2


class ProtocolError(ValueError):
    """The clock does not know this protocol."""


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


@dataclass(frozen=True, kw_only=True)
class Round:
    """One burst of each implementation.

    times_us: by name
    throttle_bits: limits in force after any of the bursts
    foreign_pid: another process that used the card, or None
    reading: state of the card after the last burst, None without NVML
    """

    times_us: dict[str, float]
    throttle_bits: int = 0
    foreign_pid: int | None = None
    reading: Reading | None = None


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

    @property
    def discarded(self) -> int:
        """Rounds that do not count."""
        return len(self.rounds) - len(self.kept())

    def why_discarded(self) -> str:
        """For people."""
        foreign = [one.foreign_pid for one in self.rounds if one.foreign_pid is not None]
        text = f"{self.discarded} of {len(self.rounds)} rounds discarded"
        return f"{text}; process {foreign[-1]} used the GPU in {len(foreign)} of them" if foreign else text


# ---------------------------------------------------------------------- measuring


def measure(
    bursts: Sequence[Timed],
    protocol: MeasureProtocol,
    *,
    card: Card | None,
    order: random.Random,
    report: Report,
    enough: Callable[[Rounds], bool],
) -> Rounds:
    """Rounds until `enough` says so, or the protocol's number of them counts, or too many had to be discarded.

    Raises ProtocolError for a protocol other than `burst`.
    """
    if protocol.kind != "burst":
        raise ProtocolError(f"protocol {protocol.kind!r} is not served: use 'burst'")
    result = Rounds()
    for _ in range(protocol.rounds + EXTRA_ROUNDS):
        result.rounds.append(_one_round(bursts, protocol, card, order, report))
        kept = len(result.kept())
        if kept >= protocol.rounds or (kept and enough(result)):
            break
    return result


def _one_round(
    bursts: Sequence[Timed], protocol: MeasureProtocol, card: Card | None, order: random.Random, report: Report
) -> Round:
    times: dict[str, float] = {}
    bits, rest_s = 0, 0.0
    for burst in order.sample(bursts, len(bursts)):
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
    """Whether the ratio to the best baseline is known to within half a percent."""
    ours = rounds.times_us(name)
    if len(ours) < MIN_ROUNDS or not baselines or min(ours) <= 0:
        return False
    best = min((rounds.times_us(baseline) for baseline in baselines), key=median)
    ratios = [theirs / mine for theirs, mine in zip(best, ours, strict=True)]
    low, high = mean_interval(ratios)
    return (high - low) / 2 <= HALF_WIDTH * fmean(ratios)


def hopeless(rounds: Rounds, name: str, incumbent_us: float | None) -> str:
    """Why the candidate cannot reach the incumbent, or nothing."""
    ours = rounds.times_us(name)
    if incumbent_us is None or len(ours) < MIN_ROUNDS_TO_STOP:
        return ""
    if min(ours) > CLEARLY_SLOWER * incumbent_us:
        return f"fastest of {len(ours)} rounds {min(ours):.2f} us, the best so far is {incumbent_us:.2f} us"
    low, _ = mean_interval(ours)
    if len(ours) >= MIN_ROUNDS and low > SLOWER * incumbent_us:
        return f"interval of {len(ours)} rounds begins at {low:.2f} us, the best so far is {incumbent_us:.2f} us"
    return ""


def exhausted(rounds: Rounds, burst: Timed) -> bool:
    """Whether a slow candidate has had its share of GPU time."""
    ours = rounds.times_us(burst.name)
    return len(ours) >= MIN_ROUNDS and sum(ours) * burst.launches * 1e-6 >= MAX_CANDIDATE_S
