"""Jobs: from a posted body to studies that a tuner can claim, and back to what people look at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from api.errors import RequestError
from api.services.freshness import Today
from api.services.lookup import found
from api.services.problems import checked_problem
from api.services.studies import problem_view
from api.services.targets import Targets
from api.views.jobs import JobList, JobStudyView, JobSubmitted, JobSummary, JobView
from api.views.problems import StudyState
from db import queries
from db.models import LIVE_STATES, State, utc_now
from db.queries import NewStudy
from search_space.request import Budget, Effort, MeasureProtocol, TuneRequest
from search_space.request import RequestError as InvalidRequest
from search_space.samplers import worth_a_trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Row
    from sqlalchemy.orm import Session

    from api.schemas import JobIn, JobProblem, JobsQuery
    from db.models import Job
    from db.queries import FinishedStudy

COUNTED = ("MEASURED", "MODELED", "STOPPED_EARLY")  # outcomes that use up a budget of trials
NEVER = "made in another environment"  # no study has this environment key


def wanted_studies(session: Session, body: JobIn) -> list[NewStudy]:
    """The studies that a job asks for, equal problems as one. Raises ProblemError, UnknownTarget or RequestError.

    Needs no write lock: of a job of thousands this is the larger half.
    """
    targets, protocol = Targets(queries.devices(session)), _protocol(body)
    budget = body.effort.budget_with(body.budget.trials, body.budget.wall_s)
    studies: dict[str, NewStudy] = {}
    for position, problem in enumerate(body.problems):
        wanted = _new_study(body, problem, (budget, protocol), targets, f"problems[{position}].")
        same = studies.get(wanted.study_key)
        studies[wanted.study_key] = replace(same, weight=same.weight + wanted.weight) if same else wanted
    return _weighed(list(studies.values())) if body.stops_early else list(studies.values())


def _weighed(studies: list[NewStudy]) -> list[NewStudy]:
    """Studies that end where another trial gains too little for what their problem matters in the job."""
    mean_weight = sum(study.weight for study in studies) / len(studies)
    return [_stopping(study, worth_a_trial(study.weight, mean_weight)) for study in studies]


def _stopping(study: NewStudy, stop_gain: float) -> NewStudy:
    request = replace(TuneRequest.from_dict(study.request), stop_gain=stop_gain)
    return replace(study, study_key=request.study_key, request=request.to_dict())


def submit(session: Session, body: JobIn, studies: Sequence[NewStudy], idempotency_key: str | None) -> JobSubmitted:
    """Store a job with its `wanted_studies`. Raises IdempotencyConflict."""
    job = queries.create_job(
        session,
        request=body.model_dump(mode="json"),
        mode=body.mode,
        studies=_with_environments(session, studies),
        force=body.force,
        priority=body.priority,
        idempotency_key=idempotency_key,
    )
    states = [StudyState(id=row.id, state=row.state) for row in queries.study_summaries(session, job.id)]
    return JobSubmitted(id=job.id, state=job.state, studies=states)


def _protocol(body: JobIn) -> MeasureProtocol:
    """One for all problems: it is checked when it is built. Raises RequestError."""
    try:
        return MeasureProtocol.from_dict(body.protocol.model_dump(exclude_none=True))
    except InvalidRequest as error:
        raise RequestError(f"{error.field}: {error}", hint="see /openapi.json for types and ranges") from error


def _new_study(
    body: JobIn, entry: JobProblem, terms: tuple[Budget, MeasureProtocol], targets: Targets, prefix: str
) -> NewStudy:
    budget, protocol = terms
    own = entry.arch is not None or entry.device is not None
    target = targets.chosen(entry.arch, entry.device, prefix=prefix) if own else targets.chosen(body.arch, body.device)
    problem = checked_problem(
        m=entry.m, n=entry.n, k=entry.k, dtype=entry.dtype, layout=entry.layout, target=target, prefix=prefix
    )
    try:
        request = TuneRequest(
            problem=problem,
            arch=target.arch.name,
            device=target.device,
            mode=body.mode,
            budget=budget,
            protocol=protocol,
            seed=body.seed,
            sampler=body.sampler.value,
        )
    except InvalidRequest as error:
        raise RequestError(f"{prefix}{error.field}: {error}", hint="see /openapi.json for types and ranges") from error
    return NewStudy(
        study_key=request.study_key,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype.value,
        layout=problem.layout.value,
        arch=request.arch,
        device_name=request.device,
        request=request.to_dict(),
        seed=request.seed,
        weight=entry.weight,
    )


def _with_environments(session: Session, studies: Sequence[NewStudy]) -> Sequence[NewStudy]:
    """Let a study be answered by the finished one only while nothing that matters changed on its device since."""
    devices = queries.devices(session)
    if not any(device.environment for device in devices):
        return studies  # nothing is known of today's environment, so nothing is known to have changed
    done = queries.newest_finished(session, [wanted.study_key for wanted in studies])
    today = Today(devices)
    return [_with_environment(wanted, done.get(wanted.study_key), today) for wanted in studies]


def _with_environment(wanted: NewStudy, done: FinishedStudy | None, today: Today) -> NewStudy:
    if done is None:
        return wanted
    changed = today.stale_reason(done.device_name or "", done.environment or {})
    return replace(wanted, environment_key=NEVER if changed else done.environment_key)


def listing(session: Session, query: JobsQuery) -> JobList:
    """One page, newest first."""
    rows = queries.jobs(session, state=query.state, mode=query.mode, limit=query.limit + 1, after=query.after)
    page = rows[: query.limit]
    items = [JobSummary(**_summary(job)) for job in page]
    return JobList(items=items, next=page[-1].id if len(rows) > query.limit else None)


def show(session: Session, job_id: str) -> JobView:
    """Raises NotFound."""
    return job_view(session, found_job(session, job_id))


def cancel(session: Session, job_id: str) -> JobView:
    """Ask the job to stop; one that has ended stays as it is. Raises NotFound."""
    found_job(session, job_id)
    queries.cancel_job(session, job_id)
    return show(session, job_id)


def found_job(session: Session, job_id: str) -> Job:
    """Raises NotFound."""
    return found(queries.job, session, job_id, "job", hint="GET /v1/jobs lists the jobs")


def _summary(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "state": job.state,
        "mode": job.mode,
        "force": job.force,
        "priority": job.priority,
        "cancel_requested": job.cancel_requested,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
    }


def job_view(session: Session, job: Job) -> JobView:
    """The job with its studies and what they add up to."""
    studies = queries.study_summaries(session, job.id)
    counts: Counter[str] = Counter()
    for study in studies:
        counts.update(study.counts)
    left_s = time_left_s(job.request, studies, utc_now())
    return JobView(
        **_summary(job),
        time_left_s=None if left_s is None else round(left_s, 1),
        counts=dict(counts),
        states=dict(Counter(study.state for study in studies)),
        studies=[_job_study(study) for study in studies],
    )


def time_left_s(request: Mapping[str, Any], studies: Sequence[Row[*tuple[Any, ...]]], now: datetime) -> float | None:
    """Seconds until the search of a job is over, as far as its own pace so far tells; None where it does not yet.

    A running study goes on at its pace up to its budget of trials or of time; one that waits takes as long as those
    that ran. The final and the checks of each winner come on top.
    """
    budget = _budget_of(request)
    live = [study for study in studies if study.state in LIVE_STATES]
    if not live:
        return 0.0
    paces: list[float] = []
    left_s: list[float] = []
    for study in studies:
        counted = sum(study.counts.get(outcome, 0) for outcome in COUNTED)
        if study.started_at is None or not counted:
            continue
        spent_s = ((study.finished_at or now) - study.started_at).total_seconds()
        pace_s = spent_s / counted
        paces.append(min(pace_s * budget.trials, budget.wall_s))
        if study.state == State.RUNNING:
            left_s.append(max(0.0, min(pace_s * (budget.trials - counted), budget.wall_s - spent_s)))
    waiting = len(live) - len(left_s)
    if not paces:
        return None
    at_once = max(1, len(left_s))
    return max(left_s, default=0.0) + waiting / at_once * sum(paces) / len(paces)


def _budget_of(request: Mapping[str, Any]) -> Budget:
    """Trials and seconds that a posted job gives each study."""
    given = request.get("budget") or {}
    effort = Effort.parse(request.get("effort", Effort.NORMAL))
    return effort.budget_with(given.get("trials"), given.get("wall_s"))


def _job_study(study: Row[*tuple[Any, ...]]) -> JobStudyView:
    return JobStudyView(
        id=study.id,
        state=study.state,
        reason=study.reason,
        problem=problem_view(study),
        arch=study.arch,
        device=study.device_name,
        weight=study.weight,
        counts=study.counts,
        best_trial=study.best_trial,
        best_us=study.best_us,
    )
