"""One job, followed while it runs.

The page holds a part that is asked for again when an event arrives: the events of /v1/jobs/{id}/events say when, the
server draws what there is to see.
"""

from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from api.deps import Db, JobId
from api.pages.replies import page, see
from api.pages.route import PageRoute
from api.pages.words import ratio_of
from api.services import jobs
from api.services.studies import found_study
from api.views.jobs import JobStudyView, JobView
from db import queries
from db.models import FINAL_STATES, LIVE_STATES, State
from pictures.curves import best_so_far

router = APIRouter(route_class=PageRoute)

STUDIES_A_PAGE = 50


@router.get("/jobs/{job_id}")
def show(job_id: JobId, db: Db, study: str | None = None, start: int = 0) -> Response:
    """The whole page."""
    with db.read() as session:
        job = jobs.show(session, job_id)
        return page("job.html", **_seen(session, job, study, start))


@router.get("/jobs/{job_id}/live")
def live(job_id: JobId, db: Db, study: str | None = None, start: int = 0) -> Response:
    """What changes while the job runs."""
    with db.read() as session:
        job = jobs.show(session, job_id)
        return page("job_live.html", update=True, **_seen(session, job, study, start))


@router.post("/jobs/{job_id}/cancel")
def cancel(job_id: JobId, db: Db) -> Response:
    """Stop the job and keep what is done."""
    with db.write() as session:
        jobs.cancel(session, job_id)
    return see(f"/jobs/{job_id}")


def _seen(session: Session, job: JobView, study_id: str | None, start: int) -> dict[str, Any]:
    start = max(0, start)
    shown = job.studies[start : start + STUDIES_A_PAGE]
    followed = _followed(job, study_id)
    trials = sum(job.counts.values())
    return {
        "job": job,
        "over": job.state in FINAL_STATES,
        "studies": shown,
        "results": queries.studies_with_results(session, [one.id for one in shown]),
        "ratios": {one.id: _ratio(session, one) for one in shown},
        "start": start,
        "page_size": STUDIES_A_PAGE,
        "followed": followed,
        "chosen": study_id,
        "curve": _curve(session, followed, job.mode) if followed else None,
        "trials": trials,
        "states": sorted(job.states.items()),
        "counts": sorted(job.counts.items()),
        "live_states": LIVE_STATES,
    }


def _followed(job: JobView, study_id: str | None) -> JobStudyView | None:
    """The study whose curve is drawn: the chosen one, else one that runs, else the first with a time."""
    chosen = [one for one in job.studies if one.id == study_id]
    running = [one for one in job.studies if one.state == State.RUNNING and one.best_us is not None]
    timed = [one for one in job.studies if one.best_us is not None]
    return next(iter(chosen or running or timed or job.studies), None)


def _ratio(session: Session, study: JobStudyView) -> float | None:
    best = None if study.best_trial is None else queries.trial(session, study.id, study.best_trial)
    return ratio_of(best.ratio) if best else None


def _curve(session: Session, study: JobStudyView, mode: str) -> str | None:
    """Drawn from the study's row as well, whose best is of the same moment as its trials."""
    return curve(session, study.id, mode, _ratio(session, study))


def curve(session: Session, study_id: str, mode: str, ratio: float | None) -> str | None:
    """The best time so far as a picture; None before the first time."""
    steps = [(row.number, row.time_us) for row in queries.improvements(session, study_id, mode)]
    last = queries.last_number(session, study_id)
    if not steps or last is None:
        return None
    best_us = found_study(session, study_id).best_us
    library_us = best_us * ratio if best_us and ratio else None
    return best_so_far(steps, last, library_us=library_us).fragment()
