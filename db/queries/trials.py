"""Trials and their raw samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, tuple_

from db.models import Measurement, Study, Trial, utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy.orm import Session

    from db.models import Result

# The outcome whose time may become the study's best, by mode. STOPPED_EARLY has samples and was clearly slow.
_BEST_OUTCOME = {"measure": "MEASURED", "model": "MODELED"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NewMeasurement:
    """Raw samples to store.

    samples_us: one time a round, microseconds
    baselines_us: the vendor library's times by baseline, round by round with `samples_us`, microseconds
    protocol: `MeasureProtocol.to_dict()`
    environment: `Environment.to_dict()`
    discarded: rounds thrown away because something disturbed them
    states: the card at the end of each round, as plain dicts; empty where nobody read it
    energy_mj: energy of one product by implementation, millijoules; empty where nobody read it
    """

    samples_us: Sequence[float]
    baselines_us: dict[str, Sequence[float]] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    discarded: int = 0
    states: Sequence[dict[str, Any]] = ()
    energy_mj: dict[str, float] = field(default_factory=dict)


def save_trial(
    session: Session,
    study_id: str,
    number: int,
    *,
    config: dict[str, Any],
    config_key: str,
    outcome: str,
    reason: str = "",
    evidence: Sequence[str] = (),
    source_hash: str | None = None,
    toolchain: str = "",
    modeled_us: float | None = None,
    median_us: float | None = None,
    ratio: dict[str, Any] | None = None,
    artifact_sha256: str | None = None,
    compile_s: float | None = None,
    gpu_s: float | None = None,
    max_rel_error: float | None = None,
    finished_at: datetime | None = None,
    measurement: NewMeasurement | None = None,
) -> Trial:
    """Store a finished trial with its samples, and update the study's counts and best. Called by the tuner alone.

    A number that is stored already is returned as it stands: the first report wins, so a report that is repeated after
    a crash, or comes late from a worker given up for lost, changes nothing. Raises KeyError for an unknown study.
    """
    study = session.get(Study, study_id, with_for_update=True)
    if study is None:
        raise KeyError(study_id)
    stored = session.get(Trial, (study_id, number))
    if stored is not None:
        return stored
    new = Trial(
        study_id=study_id,
        number=number,
        config=config,
        config_key=config_key,
        source_hash=source_hash,
        toolchain=toolchain,
        outcome=str(outcome),
        reason=reason,
        evidence=[str(word) for word in evidence],
        modeled_us=modeled_us,
        median_us=median_us,
        ratio=ratio,
        artifact_sha256=artifact_sha256,
        compile_s=compile_s,
        gpu_s=gpu_s,
        max_rel_error=max_rel_error,
        finished_at=finished_at or utc_now(),
    )
    session.add(new)
    study.counts = {**study.counts, new.outcome: study.counts.get(new.outcome, 0) + 1}
    _update_best(study, new)
    session.flush()
    if measurement is not None:
        save_measurement(session, study_id, number, measurement, phase="trial")
    return new


def _update_best(study: Study, new: Trial) -> None:
    if new.outcome != _BEST_OUTCOME[study.mode]:
        return
    time_us = new.median_us if study.mode == "measure" else new.modeled_us
    if time_us is not None and (study.best_us is None or time_us < study.best_us):
        study.best_trial = new.number
        study.best_us = time_us


def save_measurement(
    session: Session, study_id: str, number: int, measurement: NewMeasurement, *, phase: str
) -> Measurement:
    """Store the samples of one trial. Called by `save_trial`, and by the tuner for each finalist.

    phase: `trial` or `final`. A final that is measured again is stored beside the first; the newest counts.
    """
    new = Measurement(
        study_id=study_id,
        trial_number=number,
        phase=phase,
        samples_us=list(measurement.samples_us),
        baselines_us={name: list(samples) for name, samples in measurement.baselines_us.items()},
        protocol=measurement.protocol,
        environment=measurement.environment,
        discarded=measurement.discarded,
        states=list(measurement.states) or None,
        energy_mj=dict(measurement.energy_mj) or None,
    )
    session.add(new)
    session.flush()
    return new


def trial(session: Session, study_id: str, number: int) -> Trial | None:
    """One trial by its study and number, or None. Called by the export and by the result page."""
    return session.get(Trial, (study_id, number))


def trials_of_study(
    session: Session,
    study_id: str,
    *,
    outcome: str | None = None,
    limit: int | None = None,
    after: int | None = None,
) -> Sequence[Trial]:
    """Trials of a study by number. Called by GET /v1/studies/{id}/trials, and by the tuner to go on with a study.

    after: number of the last trial of the page before
    """
    query = select(Trial).where(Trial.study_id == study_id).order_by(Trial.number)
    if outcome is not None:
        query = query.where(Trial.outcome == outcome)
    if after is not None:
        query = query.where(Trial.number > after)
    if limit is not None:
        query = query.limit(limit)
    return session.scalars(query).all()


def measurements_of_study(
    session: Session, study_id: str, *, number: int | None = None, phase: str | None = None
) -> Sequence[Measurement]:
    """Raw samples of a study, or of one trial, in stored order. Called by the result page and `reproduce`."""
    query = (
        select(Measurement)
        .where(Measurement.study_id == study_id)
        .order_by(Measurement.trial_number, Measurement.created_at, Measurement.id)
    )
    if number is not None:
        query = query.where(Measurement.trial_number == number)
    if phase is not None:
        query = query.where(Measurement.phase == phase)
    return session.scalars(query).all()


def measurements_of_results(session: Session, results: Sequence[Result]) -> dict[str, Measurement]:
    """The samples that each result was chosen by, by result id; of the final, or of the search where there was none.

    Called by GET /v1/results and GET /v1/results/{id}. Results without samples (modeled, imported) are left out.
    """
    wanted = {
        (one.study_id, one.trial_number): one.id for one in results if one.study_id and one.trial_number is not None
    }
    if not wanted:
        return {}
    query = (
        select(Measurement)
        .where(tuple_(Measurement.study_id, Measurement.trial_number).in_(list(wanted)))
        # the last row of a trial wins: finals come after the search, a repeated final after the first
        .order_by(Measurement.phase == "final", Measurement.created_at, Measurement.id)
    )
    return {wanted[row.study_id, row.trial_number]: row for row in session.scalars(query)}


def fail_trial(
    session: Session,
    study_id: str,
    number: int,
    *,
    outcome: str,
    reason: str,
    evidence: Sequence[str] | None = None,
) -> Trial | None:
    """Turn a measured trial into a failed one: the final or a later check found its kernel to be bad.

    Called by the tuner; returns the trial. Its samples stay, and it is no longer counted as measured or as the study's
    best. A trial that is not there changes nothing.

    evidence: what is still true of it; None where all of it is
    """
    study = session.get(Study, study_id, with_for_update=True)
    trial = session.get(Trial, (study_id, number))
    if study is None or trial is None:
        return None
    counts = {**study.counts, trial.outcome: study.counts.get(trial.outcome, 1) - 1}
    study.counts = {word: count for word, count in counts.items() if count} | {outcome: counts.get(outcome, 0) + 1}
    trial.outcome, trial.reason = outcome, reason
    if evidence is not None:
        trial.evidence = [str(word) for word in evidence]
    session.flush()
    if study.best_trial == number:
        study.best_trial = study.best_us = None
        for other in trials_of_study(session, study_id, outcome=_BEST_OUTCOME[study.mode]):
            _update_best(study, other)
        session.flush()
    return trial


def replace_artifact(session: Session, study_id: str, number: int, sha256: str) -> None:
    """Name another build of a trial's kernel. Called by the tuner when the module of a finalist was built again."""
    trial = session.get(Trial, (study_id, number))
    if trial is not None:
        trial.artifact_sha256 = sha256
