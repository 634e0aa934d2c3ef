"""A study as an Optuna storage, for optuna-dashboard and other tools of Optuna's: written once, never read back.

Our trial table stays the only record. What Optuna has no word for (outcome, reason, evidence) goes to user attributes.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from search_space.space import choices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = dict[str, Any]

# A candidate that was slow or not worth a try says nothing about a fault.
_PRUNED = frozenset({"STOPPED_EARLY", "REJECTED", "KNOWN_BAD"})
_ATTRIBUTES = ("outcome", "reason", "evidence", "ratio", "compile_s", "gpu_s", "max_rel_error", "artifact_sha256")


class DashboardError(ValueError):
    """The storage cannot take the study; the message says why."""


def export_study(study: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], storage_url: str) -> str:
    """Write a study and its trials, as the service's routes give them; gives the name of the study in the storage.

    storage_url: as Optuna takes it, such as sqlite:///optuna.db
    Raises DashboardError where the study is there already or the storage cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem = study["problem"]
    shape = f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']}"
    name = f"{shape} on {study['device'] or study['arch']} ({study['id'][:8]})"
    frozen = [_frozen(trial, study["arch"]) for trial in trials]
    try:
        made = optuna.create_study(storage=storage_url, study_name=name, direction="minimize")
    except optuna.exceptions.DuplicatedStudyError as error:
        raise DashboardError(f"{storage_url} has the study {name!r} already: name another storage") from error
    except Exception as error:  # whatever the storage's driver raises for a URL or file that it cannot use
        raise DashboardError(f"{storage_url} cannot be used as an Optuna storage: {error}") from error
    for attribute in ("problem", "arch", "device", "mode", "state", "environment", "request"):
        made.set_user_attr(attribute, study[attribute])
    made.add_trials(frozen)
    return name


def _frozen(trial: Mapping[str, Any], arch: str) -> FrozenTrial:
    time_us = trial["median_us"] if trial["median_us"] is not None else trial["modeled_us"]
    state = _state(trial["outcome"], time_us)
    finished_at = datetime.fromisoformat(trial["finished_at"]).replace(tzinfo=None)
    config = trial["config"]
    return FrozenTrial(
        number=trial["number"],
        trial_id=trial["number"],
        state=state,
        value=time_us if state is TrialState.COMPLETE else None,
        values=None,
        datetime_start=finished_at,
        datetime_complete=finished_at,
        params=config,
        distributions={knob: _distribution(arch, knob, value) for knob, value in config.items()},
        user_attrs={name: trial[name] for name in _ATTRIBUTES},
        system_attrs={},
        # Optuna keeps the time of a pruned trial as its last intermediate value.
        intermediate_values={0: time_us} if state is TrialState.PRUNED and time_us is not None else {},
    )


def _state(outcome: str, time_us: float | None) -> TrialState:
    if outcome in ("MEASURED", "MODELED") and time_us is not None:
        return TrialState.COMPLETE
    return TrialState.PRUNED if outcome in _PRUNED else TrialState.FAIL


def _distribution(arch: str, knob: str, value: Any) -> CategoricalDistribution:
    """The choices of the knob; one of a version with others stands with what it took."""
    listed = choices(arch).get(knob, ())
    return CategoricalDistribution(listed if value in listed else (*listed, value))
