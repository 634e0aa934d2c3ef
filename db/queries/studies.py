"""Studies: claiming, recovering and ending them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, func, or_, select, update

from db.database import hold
from db.models import FINAL_STATES, LIVE_STATES, Export, Job, JobStudy, State, Study, utc_now
from db.queries.withdrawals import has_withdrawn_result

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import Select
    from sqlalchemy.orm import Session

KEYS_A_STATEMENT = 500  # SQLite takes 32,766 parameters in one statement, older builds 999


def study(session: Session, study_id: str) -> Study | None:
    """One study by its id, or None. Called by GET /v1/studies/{id}."""
    return session.get(Study, study_id)


def wanted_studies(session: Session, study_ids: Collection[str]) -> set[str]:
    """Those of these studies that are there and that nobody has asked to stop. Called by the tuner several times a
    second, so it reads no more than that.
    """
    return set(session.scalars(select(Study.id).where(Study.id.in_(study_ids), Study.cancel_requested.is_(False))))


def studies(
    session: Session, *, state: str | None = None, limit: int = 50, after: str | None = None
) -> Sequence[Study]:
    """A page of studies, newest first. Called by overviews.

    after: id of the last study of the page before; an unknown id gives an empty page
    """
    query = select(Study).order_by(Study.created_at.desc(), Study.id.desc()).limit(limit)
    if state is not None:
        query = query.where(Study.state == state)
    if after is not None:
        last = session.get(Study, after)
        if last is None:
            return []
        query = query.where(
            or_(Study.created_at < last.created_at, and_(Study.created_at == last.created_at, Study.id < last.id))
        )
    return session.scalars(query).all()


def coverage_of_studies(session: Session, study_ids: Collection[str]) -> dict[str, dict[str, Any] | None]:
    """How much of its space each study looked at, by id; null until it ends. Called by GET /v1/results."""
    query = select(Study.id, Study.coverage).where(Study.id.in_(study_ids))
    return {row.id: row.coverage for row in session.execute(query)} if study_ids else {}


def claim_next_study(
    session: Session,
    owner: str,
    *,
    modes: Collection[str] | None = None,
    archs: Collection[str] | None = None,
    device_names: Collection[str] | None = None,
) -> Study | None:
    """Take the next queued study for this tuner process. Called by the tuner; None where nothing waits.

    The order is the priority of the job that wants it most, then that job's age, then the place in the job. No two
    claimers get the same study. The filters leave out what this tuner cannot run; None accepts all, and a study that
    names no device fits any of `device_names`.
    """
    hold_jobs(session)
    waiting = (
        select(Study)
        .join(JobStudy, JobStudy.study_id == Study.id)
        .join(Job, JobStudy.job_id == Job.id)
        .where(Study.state == State.QUEUED, Study.cancel_requested.is_(False))
        .where(Job.state.in_(LIVE_STATES), Job.cancel_requested.is_(False))
        .order_by(Job.priority.desc(), Job.created_at, Job.id, JobStudy.position)
        .limit(1)
    )
    if modes is not None:
        waiting = waiting.where(Study.mode.in_(modes))
    if archs is not None:
        waiting = waiting.where(Study.arch.in_(archs))
    if device_names is not None:
        waiting = waiting.where(or_(Study.device_name.is_(None), Study.device_name.in_(device_names)))
    found = session.scalar(waiting)
    if found is None:
        return None
    found.state = State.RUNNING
    found.owner = owner
    found.started_at = found.started_at or utc_now()
    _refresh_jobs_of(session, found)
    return found


def record_environment(
    session: Session, study_id: str, *, device_name: str, environment: dict[str, Any], environment_key: str
) -> Study:
    """Note where a claimed study runs. Called by the tuner before the first trial. Raises KeyError if unknown."""
    found = _locked(session, study_id)
    found.device_name = device_name
    found.environment = environment
    found.environment_key = environment_key
    session.flush()
    return found


def running_studies(session: Session, owner: str | None = None) -> Sequence[Study]:
    """RUNNING studies, of one owner or of all, oldest first. Called by the tuner at start, to find dead owners."""
    query = select(Study).where(Study.state == State.RUNNING).order_by(Study.started_at, Study.id)
    if owner is not None:
        query = query.where(Study.owner == owner)
    return session.scalars(query).all()


def requeue_running(session: Session, owner: str) -> Sequence[str]:
    """Give back what a dead tuner process held; returns the ids of its studies. Called by the tuner at start.

    Finished trials stay, and whoever claims the study goes on after them. A study that was asked to stop ends instead.
    Exports that the process was writing are queued again.
    """
    hold_jobs(session)
    held = running_studies(session, owner)
    for found in held:
        found.owner = None
        if found.cancel_requested:
            end_cancelled(found)
        else:
            found.state = State.QUEUED
        _refresh_jobs_of(session, found)
    session.execute(
        update(Export)
        .where(Export.state == State.RUNNING, Export.owner == owner)
        .values(state=State.QUEUED, owner=None)
    )
    return [found.id for found in held]


def finish_study(
    session: Session,
    study_id: str,
    *,
    state: str,
    reason: str = "",
    best_trial: int | None = None,
    best_us: float | None = None,
    coverage: dict[str, int] | None = None,
) -> Study:
    """End a study and refresh the jobs that hold it. Called by the tuner. Raises KeyError if unknown.

    state: DONE, PARTIAL, CANCELLED or FAILED; anything else raises ValueError
    best_trial, best_us: the winner of the final; where None, the best trial so far stays
    coverage: how much of the space was looked at
    A study that is over already stays as it is, so a call that is repeated after a crash is harmless.
    """
    if state not in FINAL_STATES:
        raise ValueError(f"{state!r} does not end a study: use one of {', '.join(FINAL_STATES)}")
    hold_jobs(session)
    found = _locked(session, study_id)
    if found.state in FINAL_STATES:
        return found
    found.state = state
    found.reason = reason
    found.owner = None
    found.finished_at = utc_now()
    if best_trial is not None:
        found.best_trial = best_trial
        found.best_us = best_us
    found.coverage = coverage
    _refresh_jobs_of(session, found)
    return found


def finished_study(session: Session, study_key: str, environment_key: str | None = None) -> Study | None:
    """The newest DONE study of this request whose winner stands, or None.

    Called by POST /v1/jobs and by the tuner before it starts one.

    environment_key: only a study made in this environment counts; None accepts any
    """
    query = (
        select(Study)
        .where(Study.study_key == study_key, Study.state == State.DONE, ~has_withdrawn_result())
        .order_by(Study.finished_at.desc(), Study.id)
        .limit(1)
    )
    if environment_key is not None:
        query = query.where(Study.environment_key == environment_key)
    return session.scalar(query)


def first_finished_study(session: Session, study_key: str, device_name: str) -> Study | None:
    """The oldest DONE study of a request on a device, or None. Called by the tuner before it runs the request again.

    The oldest, so that a study which is killed and goes on finds the same one, whatever ended meanwhile.
    """
    query = select(Study).where(
        Study.study_key == study_key, Study.state == State.DONE, Study.device_name == device_name
    )
    return session.scalar(query.order_by(Study.finished_at, Study.id).limit(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedStudy:
    """Where a DONE study was made.

    device_name: the device that it ran on
    environment: `Environment.to_dict()`
    environment_key: what `NewStudy.environment_key` must be for the study to be shared
    """

    device_name: str | None
    environment: dict[str, Any] | None
    environment_key: str | None


def newest_finished(session: Session, study_keys: Collection[str]) -> dict[str, FinishedStudy]:
    """Where the newest DONE study of each request was made; a request without one is left out. Called by POST /v1/jobs.

    The studies are those that `finished_study` finds without an environment key.
    """
    found: dict[str, FinishedStudy] = {}
    for some in batched(study_keys, KEYS_A_STATEMENT):
        for key, device_name, environment, environment_key in session.execute(_NEWEST_FINISHED, {"keys": some}):
            found[key] = FinishedStudy(
                device_name=device_name, environment=environment, environment_key=environment_key
            )
    return found


def _newest_finished() -> Select[*tuple[Any, ...]]:
    place = func.row_number().over(partition_by=Study.study_key, order_by=(Study.finished_at.desc(), Study.id))
    ranked = (
        select(Study.id, place.label("place"))
        .where(Study.study_key.in_(bindparam("keys", expanding=True)), Study.state == State.DONE)
        .where(~has_withdrawn_result())
        .subquery()
    )
    columns = select(Study.study_key, Study.device_name, Study.environment, Study.environment_key)
    return columns.join(ranked, Study.id == ranked.c.id).where(ranked.c.place == 1)


_NEWEST_FINISHED = _newest_finished()


def hold_jobs(session: Session) -> None:
    """Make all changes of state follow one another: a job's state derives from many studies, a study's from many jobs.

    Called before the first look by whatever claims, ends, cancels or shares. Reporting trials does not need it.
    """
    hold(session, "jobs")


def end_cancelled(found: Study) -> None:
    """Set a study that nobody runs to PARTIAL where it has a best trial, else to CANCELLED."""
    found.state = State.PARTIAL if found.best_trial is not None else State.CANCELLED
    found.reason = "cancelled"
    found.finished_at = utc_now()


def _locked(session: Session, study_id: str) -> Study:
    found = session.get(Study, study_id, with_for_update=True)
    if found is None:
        raise KeyError(study_id)
    return found


def _refresh_jobs_of(session: Session, found: Study) -> None:
    # jobs.py builds on this module.
    from db.queries.jobs import jobs_of_study, refresh_job_state

    session.flush()
    for holder in jobs_of_study(session, found.id):
        refresh_job_state(session, holder.id)
