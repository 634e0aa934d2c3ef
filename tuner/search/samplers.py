"""The samplers, each an Optuna sampler whose suggestion depends on its seed and on the finished trials alone.

They are asked through `sample_relative`, which every Optuna sampler has, so that none leaves running trials behind.
"""

from __future__ import annotations

import random
import warnings
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import TrialState

from search_space.features import KNOB_NAMES
from tuner.search.cost_model import Belief, CostModel, StudyModel, expected_improvement, prior_belief

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from kernels.config import GemmConfig
    from search_space.features import Features
    from tuner.search.cost_model import Vector
    from tuner.search.knobs import KnobSpace
    from tuner.search.searched import SearchedSpace

    Space = dict[str, BaseDistribution]

MODEL_FREE = ("random", "brute")
OPTUNA = ("tpe", "gp", "cmaes")

WHOLE = 1500  # configs of a space that is looked at whole
MODEL_PICKS = 300  # of a larger one: what the performance model likes best among all tiles, ...
POOL_DRAWS = 1200  # ... and the best of so many random configs
POOL_PICKS = 300
BEST_TRIALS = 4  # whose neighbours are looked at
STEPS_EACH = 60  # neighbours of each


def optuna_sampler(kind: str, seed: int) -> BaseSampler:
    """A sampler of Optuna's. Raises ModuleNotFoundError where its package is not installed."""
    if kind == "tpe":
        # constant_liar looks at running trials, which the same-seed rule forbids
        return TPESampler(seed=seed, n_startup_trials=0, multivariate=True, constant_liar=False)
    if kind == "gp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental
            return GPSampler(seed=seed, n_startup_trials=0)
    return CmaSampler(seed)


class OwnSampler(BaseSampler):  # type: ignore[misc]
    """What Optuna asks of a sampler beside `sample_relative`."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Space:
        """Every knob is chosen relative to the others."""
        return {}

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Never asked: all knobs are in the relative space."""
        raise NotImplementedError(f"knob {name} was not sampled with the others")


class CmaSampler(OwnSampler):
    """CMA-ES over the knobs as numbers between 0 and 1; knobs without an order get one axis each, in equal parts.

    Optuna's own keeps its state in the trials that it asked for, so it cannot follow a study that was told other
    configs. This one replays the finished trials, in generations, through the same package.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        """The next draw from the distribution that the finished generations left."""
        from cmaes import CMA

        names = sorted(search_space)
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        points = [np.array([_to_unit(search_space[name], one.params[name]) for name in names]) for one in trials]
        values = [float(one.value or 0.0) for one in trials]
        start = points[int(np.argmin(values))] if values else np.full(len(names), 0.5)
        bounds = np.array([[0.0, 1.0]] * len(names))
        strategy = CMA(mean=np.clip(start, 0.01, 0.99), sigma=0.2, bounds=bounds, seed=self._seed)
        size = strategy.population_size
        for first in range(0, len(points) - size + 1, size):
            strategy.tell(list(zip(points[first : first + size], values[first : first + size], strict=True)))
        drawn = strategy.ask()
        return {name: _from_unit(search_space[name], float(x)) for name, x in zip(names, drawn, strict=True)}


def _choices(distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    assert isinstance(distribution, IntDistribution)
    return tuple(range(distribution.low, distribution.high + 1))


def _to_unit(distribution: BaseDistribution, value: Any) -> float:
    """Middle of the value's part of the axis."""
    values = _choices(distribution)
    return (values.index(value) + 0.5) / len(values)


def _from_unit(distribution: BaseDistribution, x: float) -> Any:
    values = _choices(distribution)
    return values[min(len(values) - 1, max(0, ceil(x * len(values)) - 1))]


class Candidates:
    """Configs that the learned sampler chooses among, with their features and what is expected of them beforehand.

    A small space is looked at whole. Of a larger one a pool is made once a study: what the performance model likes
    best, configs that are known to be good, and some at random. The neighbours of the study's best trials join it. The
    last knobs (order of tiles, epilogue) hardly matter to the model and differ between neighbours: so they are tried on
    the best few.

    Configs are numbered as they come, and everything known of them is kept by number: hashing the 18 knobs of a config
    takes microseconds, and a sampler looks at thousands of them for every trial.
    """

    def __init__(
        self, space: SearchedSpace, model: CostModel | None, rng: random.Random, also: Sequence[GemmConfig] = ()
    ) -> None:
        """`also` are configs that are known to be good. Raises ValueError for a space that knows no problem."""
        if space.features is None:
            raise ValueError("a learned sampler needs a space that knows its problem")
        self._space, self._describe, self.model = space, space.features, model
        self.configs: list[GemmConfig] = []
        self._features: dict[GemmConfig, Features] = {}
        self._number: dict[GemmConfig, int] = {}
        self._knobs = np.empty((0, len(KNOB_NAMES)))
        self._mean, self._sd = np.empty(0), np.empty(0)
        self._around: dict[int, list[int]] = {}
        self._of_trial: dict[int, int] = {}
        self.pool = self.numbers(self._pool(rng, [config for config in also if space.rejection(config) is None]))

    def _pool(self, rng: random.Random, also: list[GemmConfig]) -> list[GemmConfig]:
        configs = self._space.configs
        if len(configs) <= WHOLE:
            return list(dict.fromkeys((*also, *configs)))
        drawn = dict.fromkeys(configs[rng.randrange(len(configs))] for _ in range(POOL_DRAWS))
        best = sorted(drawn, key=lambda config: (self._feature(config).model_us, config.key))[:POOL_PICKS]
        return list(dict.fromkeys((*also, *self._space.picks(MODEL_PICKS), *best)))

    def _feature(self, config: GemmConfig) -> Features:
        if config not in self._features:
            self._features[config] = self._describe(config)
        return self._features[config]

    def numbers(self, configs: Sequence[GemmConfig]) -> list[int]:
        """Numbers of configs; those that are new are described, and what is expected of them is worked out."""
        new = [config for config in dict.fromkeys(configs) if config not in self._number]
        if new:
            described = [self._feature(config) for config in new]
            belief = prior_belief(self.model, described)
            self._number |= {config: len(self.configs) + place for place, config in enumerate(new)}
            self.configs += new
            self._knobs = np.concatenate([self._knobs, [one.knobs for one in described]])
            self._mean, self._sd = np.append(self._mean, belief.mean), np.append(self._sd, belief.sd)
        return [self._number[config] for config in configs]

    def number_of_trial(self, trial: FrozenTrial, knobs: KnobSpace) -> int:
        """Number of the config of a finished trial of the study."""
        known = self._of_trial.get(trial.number)
        if known is None:
            known = self._of_trial[trial.number] = self.numbers([knobs.config(trial.params)])[0]
        return known

    def around(self, best: Sequence[int]) -> list[int]:
        """Legal configs one knob away from these."""
        for number in best:
            if number not in self._around:
                config = self.configs[number]
                steps = self._space.neighbours(config, random.Random(config.key))
                legal = (neighbour for neighbour in steps if self._space.rejection(neighbour) is None)
                self._around[number] = self.numbers(list(islice(legal, STEPS_EACH)))
        return [number for of in best for number in self._around[of]]

    def prior(self, numbers: Sequence[int]) -> Belief:
        """What is expected of configs without this study's trials."""
        return Belief(self._mean[numbers], self._sd[numbers])

    def knobs(self, numbers: Sequence[int]) -> Vector:
        """Their knobs as numbers, a row each."""
        return self._knobs[numbers]


class LearnedSampler(OwnSampler):
    """The config with the largest expected improvement, by the trees and the study's correction of them.

    Trials in flight count as if they had taken what is expected of them, so that a batch spreads out.

    gain: expected improvement of the last choice, as a share of the best time; None before the first time is known
    """

    def __init__(
        self,
        candidates: Candidates,
        knobs: KnobSpace,
        *,
        taken: Collection[GemmConfig],
        flying: Sequence[GemmConfig],
    ) -> None:
        """`taken` are the configs that were asked, `flying` those of them whose outcome is not known yet."""
        self._candidates, self._knobs = candidates, knobs
        self._taken, self._flying = taken, flying
        self.gain: float | None = None

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        """Parameters of the config; nothing when every candidate was asked."""
        config = self.choose(study)
        return {} if config is None else dict(self._knobs.params(config) or {})

    def choose(self, study: Study) -> GemmConfig | None:
        """The config, or None when every candidate was asked."""
        candidates = self._candidates
        told = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        known = {candidates.number_of_trial(one, self._knobs): float(one.value or 0.0) for one in told}
        ranked = sorted(known, key=known.__getitem__)  # of equal ones the earlier trial
        taken = set(candidates.numbers(list(self._taken)))
        nearby = candidates.around(ranked[:BEST_TRIALS])
        open_ones = [number for number in dict.fromkeys((*candidates.pool, *nearby)) if number not in taken]
        if not open_ones:
            return None
        belief = self._belief(known, open_ones)
        if not known:
            return candidates.configs[open_ones[int(np.argmin(belief.mean))]]
        gains = expected_improvement(belief, min(known.values()))
        self.gain = float(gains.max())
        return candidates.configs[open_ones[int(np.argmax(gains))]]

    def _belief(self, known: Mapping[int, float], asked: Sequence[int]) -> Belief:
        candidates = self._candidates
        if not known:
            return candidates.prior(asked)
        numbers, log_times = list(known), np.array(list(known.values()))
        model = StudyModel(candidates.knobs(numbers), log_times, candidates.prior(numbers))
        if self._flying:
            flying = candidates.numbers(self._flying)
            expected = model.believe(candidates.knobs(flying), candidates.prior(flying)).mean
            everything = [*numbers, *flying]
            model = StudyModel(
                candidates.knobs(everything),
                np.concatenate([log_times, expected]),
                candidates.prior(everything),
                shape=model.shape,
            )
        return model.believe(candidates.knobs(asked), candidates.prior(asked))
