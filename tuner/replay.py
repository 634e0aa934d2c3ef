"""Replaying a search against a landscape: any sampler, any starting configs, many seeds, no GPU.

The very sampler of the product is asked, under its same-seed rule: trial n sees the trials up to n - D. A config of the
landscape answers with its recorded time, off by as much as its rounds allow; one that failed there fails here. How good
a config is, is judged by the recorded time. What a study would have taken is reckoned
beside it: compiles on so many processes, one candidate after another on the GPU, those that cannot reach the best so
far stopped early.

How good a run is, is measured as the auto-tuning community does (Willemsen et al., "A methodology for comparing
optimization algorithms for auto-tuning", FGCS 2024): against what a random search without repetition is expected to
have found by then, which is known exactly.
"""

from __future__ import annotations

import heapq
import random
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import comb
from statistics import median
from typing import TYPE_CHECKING

from search_space.features import features
from search_space.samplers import LEARNED, SAMPLERS
from search_space.starting import SOURCES, Tuned, starting_configs
from tuner.records import Outcome
from tuner.search.sampler import ConfigSampler
from tuner.search.searched import SearchedSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kernels.config import GemmConfig
    from tuner.landscape import Landscape
    from tuner.search.cost_model import CostModel

CUTOFF = 0.95  # of the way from the median to the optimum: where a random search's expected best ends the comparison
CLEARLY_SLOWER = 1.03  # than the best so far: such a candidate is stopped early
NUMBERS_PER_TRIAL = 20  # configs asked for each that counts, before a sampler is given up


class ReplayError(ValueError):
    """A strategy that does not exist, or a landscape that cannot be replayed."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A sampler and what it starts with.

    sampler: as in a request
    sources: starting configs, as in `search_space.starting.SOURCES`; none for a sampler on its own
    """

    sampler: str
    sources: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """SAMPLER, or SAMPLER+SOURCE+SOURCE; "starts" stands for all sources. Raises ReplayError."""
        sampler, *sources = text.split("+")
        if sampler not in SAMPLERS:
            raise ReplayError(f"unknown sampler {sampler!r}: use one of {', '.join(SAMPLERS)}")
        if sources == ["starts"]:
            return cls(sampler, SOURCES)
        if unknown := [source for source in sources if source not in SOURCES]:
            raise ReplayError(f"unknown source {unknown[0]!r}: use some of {', '.join(SOURCES)}, or starts")
        return cls(sampler, tuple(source for source in SOURCES if source in sources))

    @property
    def name(self) -> str:
        """What `parse` reads."""
        if self.sources == SOURCES:
            return f"{self.sampler}+starts"
        return "+".join((self.sampler, *self.sources))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """How studies are simulated.

    trials: candidates that count
    in_flight: D of the same-seed rule
    compile_processes: compiles at a time
    stop_gain: end when the sampler expects to gain less than this share of the best time
    """

    trials: int = 48
    in_flight: int = 8
    compile_processes: int = 16
    stop_gain: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One simulated study.

    best_us: best time so far, after each candidate that counted
    wall_s: simulated seconds until it was known, likewise
    asked: configs that were asked, also those that failed
    """

    best_us: tuple[float, ...]
    wall_s: tuple[float, ...]
    asked: int


class Arena:
    """A landscape made ready for many replays."""

    def __init__(
        self,
        landscape: Landscape,
        *,
        tuned: Iterable[Tuned] = (),
        learn: Callable[[], CostModel | None] = lambda: None,
    ) -> None:
        """`tuned` are winners of other problems, `learn` learns from others: neither may know this one.

        Raises ReplayError for a landscape with fewer than two times.
        """
        self.landscape, self._learn = landscape, learn
        self.times_us = {landscape.configs[index]: time_us for index, time_us in landscape.times_us.items()}
        if len(self.times_us) < 2:
            raise ReplayError(f"{landscape.name} holds fewer than two configs with a time")
        # A config that was never reached is none of the space. One that failed is: a search pays for asking it.
        self._rows = {landscape.configs[index]: row for index, row in landscape.rows.items()}
        self.configs = tuple(self._rows)
        self._tuned = tuple(tuned)
        self._described = {config: features(landscape.problem, config, landscape.profile) for config in self.configs}
        self.space = SearchedSpace.of_configs(self.configs, self._described.__getitem__)
        self._starts: dict[tuple[str, ...], tuple[GemmConfig, ...]] = {}

    @cached_property
    def model(self) -> CostModel | None:
        """What was learned; takes seconds, so only samplers that use it ask for it."""
        return self._learn()

    @cached_property
    def best_us(self) -> float:
        """The optimum."""
        return min(self.times_us.values())

    @cached_property
    def gpu_s(self) -> tuple[float, float]:
        """Usual GPU seconds of a candidate that is timed in full, and of one that is stopped early."""
        full = [row.gpu_s for row in self._rows.values() if row.outcome is Outcome.MEASURED]
        stopped = [row.gpu_s for row in self._rows.values() if row.outcome is Outcome.STOPPED_EARLY]
        full_s = median(full) if full else 0.2
        return full_s, median(stopped) if stopped else full_s

    def starts(self, sources: tuple[str, ...]) -> tuple[GemmConfig, ...]:
        """Starting configs, each as the nearest config of the landscape; nothing measured on its shape is used."""
        if sources not in self._starts:
            landscape = self.landscape
            wanted = starting_configs(
                landscape.problem, landscape.profile, sources=sources, tuned=self._tuned, blind=True
            )
            self._starts[sources] = self.nearest(wanted)
        return self._starts[sources]

    def without_model(self) -> Arena:
        """The same landscape where nothing was learned before."""
        other = copy(self)
        other.__dict__["model"] = None
        return other

    def nearest(self, wanted: Sequence[GemmConfig]) -> tuple[GemmConfig, ...]:
        """Each config where the landscape holds it, else the one of the landscape that is nearest; each once."""
        found: dict[GemmConfig, None] = {}
        for config in wanted:
            nearest = min(self.configs, key=lambda one: (self.space.distance(config, one), one.key))
            found[config if config in self._rows else nearest] = None
        return tuple(found)

    def measured_us(self, config: GemmConfig, rng: random.Random) -> float | None:
        """What a study would read: the recorded time, off by as much as the median of its rounds may be off."""
        time_us = self.times_us.get(config)
        samples = self._rows[config].samples_us
        if time_us is None or not samples:  # one with the same source as another has no samples of its own
            return time_us
        return time_us * median(rng.choices(samples, k=len(samples))) / median(samples)

    def compile_s(self, config: GemmConfig) -> float:
        """Seconds that its compile took."""
        return self._rows[config].compile_s


def simulate(arena: Arena, strategy: Strategy, seed: int, options: ReplayOptions) -> Course:
    """One study of a strategy on a landscape."""
    model = arena.model if strategy.sampler == LEARNED else None
    sampler = ConfigSampler(strategy.sampler, arena.space, seed=seed, in_flight=options.in_flight, model=model)
    starting = arena.starts(strategy.sources) if strategy.sources else ()
    for start in starting:
        sampler.claim(start)
    clock = _Clock(arena, options)
    best_us: list[float] = []
    wall_s: list[float] = []
    number = 0
    config: GemmConfig | None
    while len(best_us) < options.trials and number < NUMBERS_PER_TRIAL * options.trials:
        config = starting[number] if number < len(starting) else sampler.ask(number)
        if config is None:  # every config was asked
            break
        if sampler.expects_less(options.stop_gain):
            break
        time_us = arena.times_us.get(config)
        done_s = clock.run(number, config, time_us, best_us[-1] if best_us else None)
        sampler.tell(number, config, arena.measured_us(config, random.Random(f"{seed}:{number}")))
        if time_us is not None:
            best_us.append(min(time_us, best_us[-1]) if best_us else time_us)
            wall_s.append(done_s)
        number += 1
    return Course(best_us=tuple(best_us), wall_s=tuple(wall_s), asked=number)


class _Clock:
    """Simulated seconds: a trial is asked when the one D before it is done; processes compile, one GPU evaluates."""

    def __init__(self, arena: Arena, options: ReplayOptions) -> None:
        self._arena, self._in_flight = arena, options.in_flight
        self._free_s = [0.0] * options.compile_processes
        self._gpu_free_s = 0.0
        self._done_s: list[float] = []

    def run(self, number: int, config: GemmConfig, time_us: float | None, best_us: float | None) -> float:
        """When the trial is done."""
        before = number - self._in_flight
        asked_s = max(self._done_s[: before + 1], default=0.0) if before >= 0 else 0.0
        start_s = max(asked_s, heapq.heappop(self._free_s))
        built_s = start_s + self._arena.compile_s(config)
        heapq.heappush(self._free_s, built_s)
        full_s, stopped_s = self._arena.gpu_s
        if time_us is None:
            done_s = built_s  # most failures end with the compile
        else:
            is_slow = best_us is not None and time_us > CLEARLY_SLOWER * best_us
            done_s = max(built_s, self._gpu_free_s) + (stopped_s if is_slow else full_s)
            self._gpu_free_s = done_s
        self._done_s.append(done_s)
        return done_s


# ---------------------------------------------------------------------- random search, exactly


def expected_minimum(values: Iterable[float], draws: int) -> float:
    """Expected minimum of `draws` of these values, drawn without repetition, each set equally likely.

    The i-th smallest of N is the least drawn in C(N - i, n - 1) of the C(N, n) sets (negative hypergeometric).
    Raises ValueError for fewer than one draw, or more than there are values.
    """
    ordered = sorted(values)
    count = len(ordered)
    if not 1 <= draws <= count:
        raise ValueError(f"{draws} draws from {count} values")
    share = draws / count  # C(N - 1, n - 1) / C(N, n); each next one by the ratio of two binomials
    total = 0.0
    for index, value in enumerate(ordered):
        total += share * value
        left = count - 1 - index
        if left < draws:
            break
        share *= (left - draws + 1) / left
    return total


def chance_of(good: int, total: int, draws: int) -> float:
    """Chance that `draws` of `total` configs hold one of the `good` ones."""
    return 1.0 - comb(total - good, draws) / comb(total, draws)


def cutoff(times_us: Sequence[float]) -> int:
    """Draws after which a random search is expected to have come 95 % of the way from the median to the optimum."""
    best_us, middle_us = min(times_us), median(times_us)
    goal_us = middle_us - CUTOFF * (middle_us - best_us)
    low, high = 1, len(times_us)
    while low < high:  # the expected minimum falls with every draw
        middle = (low + high) // 2
        if expected_minimum(times_us, middle) <= goal_us:
            high = middle
        else:
            low = middle + 1
    return low


def score(course: Course, times_us: Sequence[float], *, draws: int) -> float:
    """How much of what a random search is expected to miss the study has found, on average over the first draws.

    1: the optimum at once; 0: as good as a random search; below: worse. Draws after which a random search is expected
    to hold the optimum itself do not count.
    """
    best_us = min(times_us)
    shares = []
    for number in range(1, draws + 1):
        missed_us = expected_minimum(times_us, number) - best_us
        if missed_us > 1e-9 * best_us and course.best_us:
            reached_us = course.best_us[min(number, len(course.best_us)) - 1]
            shares.append(1.0 - (reached_us - best_us) / missed_us)
    return sum(shares) / len(shares) if shares else 1.0
