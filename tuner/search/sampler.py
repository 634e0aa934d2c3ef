"""Which config is trial n? A pure function of the study's seed, of n, and of the trials up to n - D.

D is the number of trials in flight. A sampler that saw whatever had finished by the time it was asked would answer
differently whenever a compile took longer; one rebuilt after a restart would continue another random stream (0 of 20
suggestions equal with Optuna's TPE). So trial n gets a fresh sampler seeded from (seed, n), and a study that was told
exactly the trials numbered <= n - D in the order of their numbers.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from math import log
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from search_space.samplers import LEARNED, SAMPLERS
from search_space.starting import PRESETS
from tuner.search.knobs import KnobSpace
from tuner.search.samplers import MODEL_FREE, OPTUNA, Candidates, LearnedSampler, optuna_sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optuna.samplers import BaseSampler

    from kernels.config import GemmConfig
    from tuner.search.cost_model import CostModel
    from tuner.search.searched import SearchedSpace

_STUDY = "search"
MAX_ATTEMPTS = 8  # of drawing a config that was not asked before; then the seeded order decides
REPAIR_DRAWS = 100  # half a millisecond
STARTUP_TRIALS = 10  # timed trials before a sampler of Optuna's models anything; starting configs are among them
LEAST_TIMED = 8  # trials before the study's own correction of the model means anything
MAX_WITHOUT_TIME = 8  # trials in a row without a time, after which TPE has lost its way and a legal config is drawn


class SamplerError(ValueError):
    """No sampler of this name; the message lists those there are."""


def seed_of(*parts: object) -> int:
    """A 32-bit seed from anything printable: the same on every machine and in every run, which `hash()` is not."""
    text = ":".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def tried_first(kind: str, starting: Sequence[GemmConfig]) -> Sequence[GemmConfig]:
    """Those of the starting configs that are asked before the sampler is.

    Ours weighs them itself, beside everything else that it knows: where a list of 14 came first, half of 16 trials went
    to configs that it expected to be slow. Only where nothing of the kind was ever measured do the presets come first.
    """
    if kind != LEARNED:
        return starting
    presets = frozenset(PRESETS.values())
    return [config for config in starting if config in presets and config.arch.name != "sm_90a"]


class ConfigSampler:
    """Asks for configs by number and is told times by number, in any order. Not thread-safe: the loop owns it."""

    def __init__(
        self,
        kind: str,
        space: SearchedSpace,
        *,
        seed: int,
        in_flight: int,
        model: CostModel | None = None,
        also: Sequence[GemmConfig] = (),
    ) -> None:
        """`in_flight` is D of the module's rule.

        model, also: what the sampler "learned" begins with, the same for a study that goes on after a stop: a model of
            other problems' times, and configs that are known to be good
        Raises SamplerError for an unknown kind.
        """
        if kind not in SAMPLERS:
            raise SamplerError(f"unknown sampler {kind!r}: use one of {', '.join(SAMPLERS)}")
        self._kind = kind
        self._seed = seed
        self._in_flight = in_flight
        self._space = space
        self._knobs = KnobSpace(space.arch, space.choices)
        self._order: Iterator[GemmConfig] | None = None
        self._storage, self._study = quiet_study()
        self._told = 0  # trials 0 .. told - 1 are in the study
        self._timed = 0  # of them, those with a time
        self._without_time = 0  # of them, those since the last one with a time
        self._waiting: dict[int, tuple[GemmConfig, float | None]] = {}
        self._asked: dict[GemmConfig, None] = {}  # a dict keeps their order: sums must not depend on that of a set
        self._heard: set[GemmConfig] = set()
        self._model, self._also = model, also
        self._candidates: Candidates | None = None
        self.gain: float | None = None  # expected of the config asked last, as a share of the best time; ours alone

    def expects_less(self, than: float) -> bool:
        """Whether the config asked last is expected to gain less than this share of the best time.

        Depends on what the config depends on, so that a study which stops here stops here again.
        """
        return self._timed >= LEAST_TIMED and self.gain is not None and self.gain < than

    def claim(self, config: GemmConfig) -> None:
        """This config is asked without the sampler (a starting config, a stored trial): never suggest it."""
        self._asked[config] = None

    def tell(self, number: int, config: GemmConfig, time_us: float | None) -> None:
        """The outcome of trial `number`: its time in us, or None when it has none and the sampler should keep away."""
        self._waiting[number] = (config, time_us)

    def ready(self, number: int) -> bool:
        """Whether every trial that `ask(number)` must see has been told."""
        return all(seen in self._waiting for seen in range(self._told, number - self._in_flight + 1))

    def ask(self, number: int) -> GemmConfig | None:
        """The config of trial `number`, new in this study, or None when every legal config was asked.

        Numbers must be asked in rising order; raises RuntimeError when `ready(number)` does not hold.
        """
        self._feed(number)
        self.gain = None
        config = self._draw(number)
        if config is None:
            config = self._next_in_order()
        if config is not None:
            self._asked[config] = None
        return config

    def _feed(self, number: int) -> None:
        last = number - self._in_flight
        if not self.ready(number) or self._told > max(last + 1, 0):
            raise RuntimeError(f"trial {number} sees the trials up to {last}; told are those up to {self._told - 1}")
        while self._told <= last:
            config, time_us = self._waiting.pop(self._told)
            self._told += 1
            self._heard.add(config)
            self._timed += time_us is not None
            self._without_time = 0 if time_us is not None else self._without_time + 1
            if self._kind not in MODEL_FREE and (frozen := self._frozen(config, time_us)) is not None:
                self._study.add_trial(frozen)

    def _frozen(self, config: GemmConfig, time_us: float | None) -> FrozenTrial | None:
        params = self._knobs.params(config)
        if params is None:
            return None
        # PRUNED, not FAIL: TPE ignores failed trials and asks for the same region again (110 of 150 suggestions were
        # illegal on a toy space, against 31 with PRUNED).
        state = TrialState.PRUNED if time_us is None else TrialState.COMPLETE
        value = None if time_us is None else log(time_us)
        return create_trial(state=state, value=value, params=params, distributions=self._knobs.distributions)

    def _draw(self, number: int) -> GemmConfig | None:
        if self._kind == "brute" or not self._space.configs:
            return None
        for attempt in range(MAX_ATTEMPTS):
            seed = seed_of(self._seed, number, attempt)
            config = self._suggest(seed)
            if config in self._asked:
                continue
            if self._space.rejection(config) is None:
                return config
            if (repaired := self._repaired(config, seed)) is not None:
                return repaired
        return None

    def _repaired(self, config: GemmConfig, seed: int) -> GemmConfig | None:
        """A new config worth asking near a rejected one: one knob away, else the nearest of a random handful.

        Only 5 % of the combinations of Hopper's choices are legal, and for a small M fewer than one in 5,000 is worth
        asking. TPE models each knob for itself and proposed 2 to 3 rejected ones for each that was not, at 3 ms each.
        """
        rng = random.Random(seed)
        for neighbour in self._space.neighbours(config, rng):
            if neighbour not in self._asked and self._space.rejection(neighbour) is None:
                return neighbour
        places = [rng.choice(range(len(self._space.configs))) for _ in range(REPAIR_DRAWS)]
        nearest = self._space.nearest(config, places)
        return next((draw for draw in nearest if draw not in self._asked), None)

    def _suggest(self, seed: int) -> GemmConfig:
        """Random: uniform over the configs worth asking. Optuna's samplers: the same until there is something to model.

        Ours models from the first trial on: it knows the performance model, and other problems where there were any.
        """
        lost = self._without_time >= MAX_WITHOUT_TIME
        if self._kind == "random" or (self._kind in OPTUNA and (self._timed < STARTUP_TRIALS or lost)):
            return random.Random(seed).choice(self._space.configs)
        sampler = self._learned() if self._kind == LEARNED else optuna_sampler(self._kind, seed)
        if self._kind == "gp":  # writes to the trial that it is asked for, so it needs one: in a copy of the study
            return self._knobs.config({**self._knobs.only_values, **self._asked_in_a_copy(sampler)})
        # Through the sampler's public interface: `Study.ask` would leave a running trial behind for every suggestion.
        # A study object keeps the list of trials it saw first; `Study.ask` would renew it, a fresh object does too.
        study = optuna.load_study(study_name=_STUDY, storage=self._storage, sampler=sampler)
        trial = create_trial(state=TrialState.RUNNING)
        # Every trial of this study has every knob, so there is no need to let the sampler work out which they share.
        params = sampler.sample_relative(study, trial, self._knobs.open_distributions)
        if isinstance(sampler, LearnedSampler):
            self.gain = sampler.gain
            if not params:  # every candidate was asked; what is left of the space follows in its seeded order
                return random.Random(seed).choice(self._space.configs)
        return self._knobs.config({**self._knobs.only_values, **params})

    def _asked_in_a_copy(self, sampler: BaseSampler) -> dict[str, Any]:
        copy = quiet_study()[1]
        copy.sampler = sampler
        copy.add_trials(self._study.get_trials(deepcopy=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sampler is experimental, and says so each time
            params: dict[str, Any] = copy.ask(self._knobs.open_distributions).params
        return params

    def _learned(self) -> LearnedSampler:
        """Ours, with what of it stays the same all through the study."""
        if self._candidates is None:
            self._candidates = Candidates(
                self._space, self._model, random.Random(seed_of(self._seed, "pool")), self._also
            )
        flying = [c for c in self._asked if c not in self._heard and self._space.rejection(c) is None]
        return LearnedSampler(self._candidates, self._knobs, taken=self._asked, flying=flying)

    def _next_in_order(self) -> GemmConfig | None:
        if self._order is None:
            self._order = self._space.shuffled(random.Random(seed_of(self._seed, "order")))
        return next((config for config in self._order if config not in self._asked), None)


def quiet_study() -> tuple[InMemoryStorage, optuna.Study]:
    storage = InMemoryStorage()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # "A new study created in memory" is news to nobody
    try:
        return storage, optuna.create_study(study_name=_STUDY, storage=storage, direction="minimize")
    finally:
        optuna.logging.set_verbosity(verbosity)
