"""Tuning jobs: submit, list, look at, follow, cancel."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.deps import Db, IdempotencyKey, JobId, LastEventId, Settings
from api.openapi import Responses, errors
from api.replies import json_reply
from api.schemas import JobIn, JobsQuery
from api.services import events, jobs
from api.strict import StrictRoute
from api.views.jobs import JobList, JobSubmitted, JobView

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)


@router.post("", status_code=202, response_model=JobSubmitted, responses=errors(409, body=True), summary="Submit a job")
def submit(body: JobIn, db: Db, idempotency_key: IdempotencyKey = None) -> Response:
    """Tune one or many problems. Equal problems share a study; a finished study is attached as it stands."""
    with db.read() as session:
        studies = jobs.wanted_studies(session, body)
    with db.write() as session:
        job = jobs.submit(session, body, studies, idempotency_key)
    return json_reply(job, status_code=202, headers={"Location": f"/v1/jobs/{job.id}"})


@router.get("", responses=errors(422), summary="List jobs")
def listing(query: Annotated[JobsQuery, Query()], db: Db) -> JobList:
    """Newest first."""
    with db.read() as session:
        return jobs.listing(session, query)


@router.get("/{job_id}", response_model=JobView, responses=errors(404), summary="State of a job")
def show(job_id: JobId, db: Db) -> Response:
    """State, trials by outcome, and the best time of each study so far."""
    with db.read() as session:
        return json_reply(jobs.show(session, job_id))


@router.delete("/{job_id}", responses=errors(404), summary="Cancel a job")
def cancel(job_id: JobId, db: Db) -> JobView:
    """What is measured is kept. A job that has ended stays as it is."""
    with db.write() as session:
        return jobs.cancel(session, job_id)


EVENT_STREAM: Responses = {
    200: {
        "description": "Server-sent events: `trial` for each finished trial, `job` when the state or a count changes, "
        "`end` with the final job. Ids are opaque; send the last one as Last-Event-ID to resume.",
        "content": {
            "text/event-stream": {
                "schema": {
                    "description": "One event.",
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "event": {"type": "string", "enum": ["trial", "job", "end"]},
                        "data": {"type": "string", "description": "A JSON object."},
                    },
                    "required": ["id", "event", "data"],
                },
                "example": 'id: 1777887000000000-0-7\nevent: trial\ndata: {"study_id": "5f0c", "number": 7}\n\n',
            }
        },
    },
    204: {"description": "The stream was read to its end before; nothing will follow."},
}


@router.get(
    "/{job_id}/events",
    responses=EVENT_STREAM | errors(404, 422, json=False),
    response_class=StreamingResponse,
    summary="Follow a job",
)
def follow(job_id: JobId, db: Db, settings: Settings, request: Request, last_event_id: LastEventId = None) -> Response:
    """Events from the start of the job, or after `Last-Event-ID`, until the job ends."""
    follower = events.follower(db, job_id, last_event_id)
    return events.response(follower, settings, request.app.state)
