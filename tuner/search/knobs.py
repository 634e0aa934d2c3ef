"""Knobs as Optuna parameters and back.

Ordered choices become an index, so that a sampler knows that 64 lies between 32 and 128 whatever the spacing; the
others become categories. Every knob of the architecture is a parameter, also one with a single choice: a study keeps
its meaning when a choice is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from kernels.config import GemmConfig, config_from_dict

Choices = Mapping[str, tuple[Any, ...]]


class KnobSpace:
    """The choices of one architecture as distributions.

    distributions: of every knob
    open_distributions: of the knobs that have a choice
    only_values: parameters of the knobs that have none
    """

    def __init__(self, arch: str, choices: Choices) -> None:
        """`choices` as of `search_space.space.choices`."""
        self.arch = arch
        self._choices = {name: _ordered(values) for name, values in sorted(choices.items())}
        self.distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1) if _is_ordered(values) else CategoricalDistribution(values)
            for name, values in self._choices.items()
        }

        self.only_values = {name: 0 if _is_ordered(v) else v[0] for name, v in self._choices.items() if len(v) == 1}
        self.open_distributions = {
            name: distribution for name, distribution in self.distributions.items() if name not in self.only_values
        }

    def config(self, params: Mapping[str, Any]) -> GemmConfig:
        """The config that these parameters mean; knobs outside the space keep their default."""
        knobs = {
            name: values[params[name]] if _is_ordered(values) else params[name]
            for name, values in self._choices.items()
        }
        return config_from_dict(self.arch, knobs)

    def params(self, config: GemmConfig) -> dict[str, Any] | None:
        """Parameters that mean this config; None when it lies outside the space, as a preset may."""
        params: dict[str, Any] = {}
        for name, values in self._choices.items():
            value = getattr(config, name)
            if value not in values:
                return None
            params[name] = values.index(value) if _is_ordered(values) else value
        return params if self.config(params) == config else None


def _is_ordered(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _ordered(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(values)) if _is_ordered(values) else tuple(values)
