"""Jobs, and the state they derive from their studies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, exists, insert, or_, select

from db.errors import IdempotencyConflict
from db.models import FINAL_STATES, LIVE_STATES, Job, JobStudy, State, Study, new_id, utc_now
from db.queries.studies import KEYS_A_STATEMENT, end_cancelled, hold_jobs
from db.queries.withdrawals import has_withdrawn_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import Row
    from sqlalchemy.orm import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class NewStudy:
    """One problem of a new job.

    study_key: hash of the request; a study with the same key may be shared
    m, n, k, dtype, layout: the problem
    arch: architecture to tune for
    device_name: exact device, or None for any device of the architecture
    request: what the tuner reads back, `TuneRequest.to_dict()`
    seed: the study's seed
    weight: importance of the problem in the job
    environment_key: a finished study is shared only with this key; None accepts any
    """

    study_key: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    arch: str
    device_name: str | None
    request: dict[str, Any]
    seed: int = 0
    weight: float = 1.0
    environment_key: str | None = None


def create_job(
    session: Session,
    *,
    request: dict[str, Any],
    mode: str,
    studies: Sequence[NewStudy],
    force: bool = False,
    priority: int = 0,
    idempotency_key: str | None = None,
) -> Job:
    """Store a job with its studies. Called by POST /v1/jobs; returns the job, in the state its studies give it.

    Unless `force`, a problem is answered by a study that is DONE and whose winner stands, or waits with another job for
    one that is live. A known idempotency key returns the job that it made. Raises IdempotencyConflict where that job
    had another request.
    """
    hold_jobs(session)
    if idempotency_key is not None:
        earlier = job_by_idempotency_key(session, idempotency_key)
        if earlier is not None:
            return _same_request(earlier, request, idempotency_key)
    new = Job(request=request, mode=mode, force=force, priority=priority, idempotency_key=idempotency_key)
    session.add(new)
    session.flush()
    # A problem listed twice is tuned once, forced or not; the first place decides which environment it accepts.
    wanted: dict[str, NewStudy] = {}
    for one in studies:
        wanted.setdefault(one.study_key, one)
    ids = {} if force else _shareable(session, wanted)
    ids |= _add_studies(session, [one for key, one in wanted.items() if key not in ids], mode)
    links = [
        {"job_id": new.id, "position": position, "study_id": ids[one.study_key], "weight": one.weight}
        for position, one in enumerate(studies)
    ]
    if links:
        session.execute(insert(JobStudy), links)
    return refresh_job_state(session, new.id)


def _same_request(earlier: Job, request: dict[str, Any], key: str) -> Job:
    if earlier.request != request:
        raise IdempotencyConflict(
            f"idempotency key {key!r} belongs to job {earlier.id}, whose request differs: use a new key"
        )
    return earlier


def _shareable(session: Session, wanted: Mapping[str, NewStudy]) -> dict[str, str]:
    """Ids of the studies that answer, or will answer, these problems, by study key: a DONE one goes before a live one.

    Columns, and many keys a statement: two statements a problem held SQLite's write lock for seconds (4,096 problems).
    """
    found: dict[str, str] = {}
    for some in batched(wanted, KEYS_A_STATEMENT):
        keys = {"keys": some}
        for key, study_id, environment_key in session.execute(_DONE_OF_KEYS, keys):
            if key not in found and wanted[key].environment_key in (None, environment_key):
                found[key] = study_id
        for key, study_id in session.execute(_LIVE_OF_KEYS, keys):
            found.setdefault(key, study_id)
    return found


_OF_KEYS = Study.study_key.in_(bindparam("keys", expanding=True))
_DONE_OF_KEYS = (
    select(Study.study_key, Study.id, Study.environment_key)
    .where(_OF_KEYS, Study.state == State.DONE, ~has_withdrawn_result())
    .order_by(Study.finished_at.desc(), Study.id)
)
_LIVE_OF_KEYS = (
    select(Study.study_key, Study.id)
    .where(_OF_KEYS, Study.state.in_(LIVE_STATES), Study.cancel_requested.is_(False))
    .order_by(Study.created_at, Study.id)
)


def _add_studies(session: Session, wanted: Sequence[NewStudy], mode: str) -> dict[str, str]:
    """Store new studies; gives their ids by study key."""
    ids = [new_id() for _ in wanted]
    rows = [
        {
            "id": study_id,
            "study_key": one.study_key,
            "m": one.m,
            "n": one.n,
            "k": one.k,
            "dtype": one.dtype,
            "layout": one.layout,
            "arch": one.arch,
            "device_name": one.device_name,
            "mode": mode,
            "request": one.request,
            "seed": one.seed,
        }
        for one, study_id in zip(wanted, ids, strict=True)
    ]
    if rows:
        session.execute(insert(Study), rows)
    return {one.study_key: study_id for one, study_id in zip(wanted, ids, strict=True)}


def job(session: Session, job_id: str) -> Job | None:
    """One job by its id, or None. Called by GET and DELETE /v1/jobs/{id}."""
    return session.get(Job, job_id)


def job_by_idempotency_key(session: Session, key: str) -> Job | None:
    """The job that was posted with this key, or None. Called by POST /v1/jobs."""
    return session.scalar(select(Job).where(Job.idempotency_key == key))


def jobs(
    session: Session, *, state: str | None = None, mode: str | None = None, limit: int = 50, after: str | None = None
) -> Sequence[Job]:
    """A page of jobs, newest first. Called by GET /v1/jobs and `gemm-tuner jobs`.

    after: id of the last job of the page before; an unknown id gives an empty page
    """
    query = select(Job).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
    if state is not None:
        query = query.where(Job.state == state)
    if mode is not None:
        query = query.where(Job.mode == mode)
    if after is not None:
        last = session.get(Job, after)
        if last is None:
            return []
        query = query.where(
            or_(Job.created_at < last.created_at, and_(Job.created_at == last.created_at, Job.id < last.id))
        )
    return session.scalars(query).all()


def studies_of_job(session: Session, job_id: str) -> Sequence[Study]:
    """Studies of a job, in the order of its problems. Called by GET /v1/jobs/{id}. A shared problem appears twice."""
    return [study for _, study in job_studies(session, job_id)]


def job_studies(session: Session, job_id: str) -> Sequence[tuple[JobStudy, Study]]:
    """Like `studies_of_job`, each with its place and weight in the job."""
    query = (
        select(JobStudy, Study)
        .join(Study, JobStudy.study_id == Study.id)
        .where(JobStudy.job_id == job_id)
        .order_by(JobStudy.position)
    )
    return [(link, study) for link, study in session.execute(query)]


def study_summaries(session: Session, job_id: str) -> Sequence[Row[*tuple[Any, ...]]]:
    """What an overview of a job shows of its studies, in the order of its problems. Called by GET /v1/jobs/{id}.

    Rows with weight, id, state, reason, the problem's columns, arch, device_name, counts, best_trial, best_us,
    started_at and finished_at. Whole studies, with the request of each, take five times as long to load.
    """
    return session.execute(_SUMMARIES, {"job_id": job_id}).all()


_SUMMARIES = (
    select(
        JobStudy.weight,
        *(Study.id, Study.state, Study.reason),
        *(Study.m, Study.n, Study.k, Study.dtype, Study.layout),
        *(Study.arch, Study.device_name, Study.counts, Study.best_trial, Study.best_us),
        *(Study.started_at, Study.finished_at),
    )
    .join(Study, JobStudy.study_id == Study.id)
    .where(JobStudy.job_id == bindparam("job_id"))
    .order_by(JobStudy.position)
)


def jobs_of_study(session: Session, study_id: str) -> Sequence[Job]:
    """Jobs that hold a study, oldest first. Called when a study changes state."""
    held = select(JobStudy.job_id).where(JobStudy.study_id == study_id)
    return session.scalars(select(Job).where(Job.id.in_(held)).order_by(Job.created_at, Job.id)).all()


def cancel_job(session: Session, job_id: str) -> Job | None:
    """Ask a job to stop, keeping what is done. Called by DELETE /v1/jobs/{id}; returns the job, or None if unknown.

    A study that another live job waits for goes on. The rest: a queued one ends here, a running one is told by
    `cancel_requested`, and the tuner ends it with `finish_study`. A job that is over stays as it is.
    """
    hold_jobs(session)
    session.flush()
    found = session.get(Job, job_id, populate_existing=True)
    if found is None or found.state in FINAL_STATES:
        return found
    found.cancel_requested = True
    session.flush()
    for study in _live_studies_only_of(session, job_id):
        study.cancel_requested = True
        if study.state == State.QUEUED:
            end_cancelled(study)
    return refresh_job_state(session, job_id)


def _live_studies_only_of(session: Session, job_id: str) -> Sequence[Study]:
    ours = select(JobStudy.study_id).where(JobStudy.job_id == job_id)
    others = (
        exists()
        .where(JobStudy.study_id == Study.id, JobStudy.job_id == Job.id, Job.id != job_id)
        .where(Job.state.in_(LIVE_STATES), Job.cancel_requested.is_(False))
    )
    query = select(Study).where(Study.id.in_(ours), Study.state.in_(LIVE_STATES), ~others)
    return session.scalars(query).all()


def refresh_job_state(session: Session, job_id: str) -> Job:
    """Derive the job's state and counts from its studies. Called whenever one of them changes; returns the job.

    Raises KeyError for an unknown job.
    """
    hold_jobs(session)
    session.flush()
    found = session.get(Job, job_id, populate_existing=True)
    if found is None:
        raise KeyError(job_id)
    # Columns, not models: a job may hold thousands of studies.
    query = (
        select(Study.state, Study.cancel_requested, Study.counts)
        .where(Study.id.in_(select(JobStudy.study_id).where(JobStudy.job_id == job_id)))
        .order_by(Study.id)
    )
    by_state: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    within: set[str] = set()
    for study_state, study_cancelled, counts in session.execute(query):
        by_state[study_state] += 1
        outcomes.update(counts)
        # A live study that goes on for other jobs is over for a cancelled one.
        left = found.cancel_requested and study_state in LIVE_STATES and not study_cancelled
        within.add(State.CANCELLED if left else study_state)
    found.counts = {"studies": dict(by_state), "outcomes": dict(outcomes)}
    state = _state_of(within)
    found.state = state
    if state not in FINAL_STATES:
        found.finished_at = None
    elif found.finished_at is None:
        found.finished_at = utc_now()
    session.flush()
    return found


def _state_of(states: Iterable[str]) -> State:
    present = {State(state) for state in states}
    if present <= {State.QUEUED}:
        return State.QUEUED
    if present & set(LIVE_STATES):
        return State.RUNNING
    if len(present) == 1:
        return present.pop()
    # Over, and mixed. With a result of some study the job has results; with none, a failure weighs more than a cancel.
    return State.PARTIAL if present & {State.DONE, State.PARTIAL} else State.FAILED
