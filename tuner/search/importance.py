"""How much each knob matters, by Optuna's own evaluators."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import FanovaImportanceEvaluator, PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import TrialState, create_trial

from tuner.search.sampler import quiet_study

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SEED = 0  # of the forest, so that the same trials give the same picture


def importances(trials: Sequence[tuple[Mapping[str, Any], float]]) -> tuple[str, dict[str, float]]:
    """Name of the evaluator, and the share of each knob that had more than one value; none for fewer than two trials.

    trials: configs with the logarithm of their time
    fANOVA (Hutter et al., ICML 2014) where scikit-learn is installed, else PED-ANOVA (Watanabe et al., IJCAI 2023),
    which asks what tells the better trials from all and needs numpy only.
    """
    values = {name: list(dict.fromkeys(config.get(name) for config, _ in trials)) for name in dict(trials[0][0])}
    varied = {name: CategoricalDistribution(_sorted(found)) for name, found in values.items() if len(found) > 1}
    method, evaluator = _evaluator()
    if len(trials) < 2 or not varied:
        return method, {}
    study = quiet_study()[1]
    study.add_trials(
        create_trial(
            state=TrialState.COMPLETE,
            value=value,
            params={name: config.get(name) for name in varied},
            distributions=dict(varied),
        )
        for config, value in trials
    )
    return method, dict(get_param_importances(study, evaluator=evaluator))


def _evaluator() -> tuple[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return "fANOVA", FanovaImportanceEvaluator(seed=SEED)
        except ImportError:  # it grows its forest with scikit-learn
            return "PED-ANOVA", PedAnovaImportanceEvaluator()


def _sorted(values: list[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (isinstance(value, str), value if value is not None else -1))
