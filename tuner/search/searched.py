"""The set of configs that a study searches: the choices of each knob, and the configs worth asking among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from search_space.askable import AskableConfigs, askable_configs
from search_space.checks import rejection
from search_space.features import features
from search_space.space import choices
from search_space.starting import model_picks

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from search_space.features import Features

# Listing a space takes a second of a core and 2 MB, and several studies of one problem come one after another.
SPACES_KEPT = 16
listed_configs = lru_cache(maxsize=SPACES_KEPT)(askable_configs)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedSpace:
    """What may be asked.

    arch: name of the architecture
    choices: values of each knob
    configs: every config worth asking, in a fixed order; need not be a list
    rejection: why a combination of choices is not among them, or None
    features: a config as numbers, for samplers that learn; None for a space that knows no problem
    picks: so many configs that the performance model expects to be fastest; none for a space that knows no problem
    """

    arch: str
    choices: Mapping[str, tuple[Any, ...]]
    configs: Sequence[GemmConfig]
    rejection: Callable[[GemmConfig], str | None]
    features: Callable[[GemmConfig], Features] | None = None
    picks: Callable[[int], Sequence[GemmConfig]] = lambda count: ()

    @classmethod
    def of(cls, problem: GemmProblem, profile: DeviceProfile) -> SearchedSpace:
        """Everything worth asking for a problem on a device."""
        return cls(
            arch=profile.arch.name,
            choices=choices(profile.arch),
            configs=listed_configs(problem, profile),
            rejection=lambda config: rejection(problem, config, profile),
            features=lambda config: features(problem, config, profile),
            picks=lambda count: model_picks(problem, profile, count),
        )

    @classmethod
    def of_configs(
        cls, configs: Sequence[GemmConfig], describe: Callable[[GemmConfig], Features] | None = None
    ) -> SearchedSpace:
        """Exactly these configs, of one architecture. Raises ValueError for none."""
        if not configs:
            raise ValueError("a space needs at least one config")
        knobs = {name: tuple(dict.fromkeys(getattr(c, name) for c in configs)) for name in type(configs[0]).knobs()}
        members = frozenset(configs)
        return cls(
            arch=configs[0].arch.name,
            choices=knobs,
            configs=tuple(configs),
            rejection=lambda config: None if config in members else "not one of the configs of this space",
            features=describe,
        )

    def shuffled(self, rng: random.Random) -> Iterator[GemmConfig]:
        """Every config once, in random order. Takes memory only for what was drawn: a space may hold millions."""
        moved: dict[int, int] = {}  # Fisher-Yates on an array that is the identity where nothing is noted
        for left in range(len(self.configs), 0, -1):
            at = rng.randrange(left)
            yield self.configs[moved.get(at, at)]
            moved[at] = moved.pop(left - 1, left - 1)

    def neighbours(self, config: GemmConfig, rng: random.Random) -> Iterator[GemmConfig]:
        """Combinations that differ in one knob, the smallest steps first, knobs with equal steps in random order."""
        steps: list[tuple[int, float, str, Any]] = []
        for name, values in self.choices.items():
            current = getattr(config, name)
            if current not in values:
                continue
            here = values.index(current)
            ordered = all(type(value) is int for value in values)
            steps += [
                (abs(there - here) if ordered else 1, rng.random(), name, value)
                for there, value in enumerate(values)
                if there != here
            ]
        for _, _, name, value in sorted(steps, key=lambda step: step[:2]):
            yield config.with_choices({name: value})

    def nearest(self, config: GemmConfig, places: Sequence[int]) -> Iterator[GemmConfig]:
        """The configs at these places, by their distance to a config; of equally near ones the first place first."""
        names = tuple(self.choices)
        far = [self._distances(config, name) for name in names]
        configs = self.configs
        if isinstance(configs, AskableConfigs):
            values = (configs.values(place, names) for place in places)
        else:
            values = ([getattr(configs[place], name) for name in names] for place in places)
        sums = []
        for row in values:
            total = 0.0  # not `sum`: it rounds otherwise in Python 3.12 than before, and ties decide what is asked
            for table, value in zip(far, row, strict=True):
                total += table.get(value, 1.0)
            sums.append(total)
        for at in sorted(range(len(places)), key=sums.__getitem__):
            yield configs[places[at]]

    def _distances(self, config: GemmConfig, name: str) -> dict[Any, float]:
        """How far the choices of a knob lie from its value in a config; what is not in it lies at 1."""
        here, values = getattr(config, name), self.choices[name]
        found = {here: 0.0}
        if type(here) is int and here in values:
            found |= {value: abs(at - values.index(here)) / len(values) for at, value in enumerate(values)}
        return found

    def distance(self, one: GemmConfig, other: GemmConfig) -> float:
        """How far two configs lie apart: a knob counts up to 1, by its steps where it is a number."""
        total = 0.0
        for name, values in self.choices.items():
            left, right = getattr(one, name), getattr(other, name)
            if left == right:
                continue
            ordered = type(left) is int and left in values and right in values
            total += abs(values.index(left) - values.index(right)) / len(values) if ordered else 1.0
        return total
