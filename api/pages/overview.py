"""First page: devices, running jobs, recent results; and the list of all jobs."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from api.deps import Db
from api.pages.replies import page
from api.pages.route import PageRoute
from api.schemas import JobsQuery, ResultsQuery, StateName
from api.services import devices, jobs, results
from api.views.jobs import JobSummary
from db.models import LIVE_STATES

router = APIRouter(route_class=PageRoute)

SHOWN_JOBS = 10
SHOWN_RESULTS = 12


@router.get("/")
def overview(db: Db) -> Response:
    """What goes on."""
    with db.read() as session:
        recent = jobs.listing(session, JobsQuery(limit=SHOWN_JOBS)).items
        return page(
            "overview.html",
            devices=devices.listing(session),
            live=_live(session),
            ended=[job for job in recent if job.state not in LIVE_STATES],
            results=results.listing(session, ResultsQuery(limit=SHOWN_RESULTS)).items,
        )


def _live(session: Session) -> list[JobSummary]:
    """What runs, then what waits."""
    states = (StateName.RUNNING, StateName.QUEUED)
    found = [jobs.listing(session, JobsQuery(state=state, limit=SHOWN_JOBS)).items for state in states]
    return [job for some in found for job in some][:SHOWN_JOBS]


@router.get("/jobs")
def listing(query: Annotated[JobsQuery, Query()], db: Db) -> Response:
    """All jobs, newest first."""
    with db.read() as session:
        return page("jobs.html", listed=jobs.listing(session, query), query=query, states=list(StateName))


@router.get("/results")
def result_list(query: Annotated[ResultsQuery, Query()], db: Db) -> Response:
    """All results, newest first."""
    with db.read() as session:
        listed = results.listing(session, query)
        return page("results.html", listed=listed, query=query, devices=devices.listing(session))
