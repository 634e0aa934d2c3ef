"""For load balancers and monitoring."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from api.deps import Db, Metrics
from api.metrics import CONTENT_TYPE
from api.openapi import Responses, errors
from api.services import health
from api.strict import StrictRoute
from api.views.devices import Health

router = APIRouter(tags=["service"], route_class=StrictRoute)

EXPOSITION: Responses = {
    200: {
        "description": "Prometheus text format.",
        "content": {"text/plain": {"schema": {"type": "string"}, "example": 'gemm_tuner_studies{state="QUEUED"} 3\n'}},
    }
}


@router.get("/healthz", responses=errors(), summary="Is the service up")
def healthz(db: Db, request: Request) -> Health:
    """200 when the service answers and reaches its database, else 503."""
    with db.read() as session:
        return health.check(session, request.app.version)


@router.get("/metrics", responses=EXPOSITION | errors(json=False), response_class=PlainTextResponse, summary="Metrics")
def metrics(db: Db, counters: Metrics) -> PlainTextResponse:
    """Requests by route and status, their duration, studies and jobs by state, length of the queue."""
    with db.read() as session:
        return PlainTextResponse(health.exposition(session, counters), media_type=CONTENT_TYPE)
