"""Which config is best for a shape."""

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from api.deps import Db, Kept, Settings
from api.openapi import Responses, errors, query_parameters
from api.replies import json_bytes
from api.schemas import BestBulkIn, BestQuery
from api.services import best
from api.strict import StrictRoute, parsed_query
from api.views.answers import BestBulk, BestView, NoResultBody, WithdrawnBody

router = APIRouter(prefix="/v1/best", tags=["best"], route_class=StrictRoute)

NO_RESULT: Responses = {
    404: {"model": NoResultBody, "description": "Nothing answers; `submit` is the job that would tune the shape."},
    410: {"model": WithdrawnBody, "description": "The revision that was asked for was found to be bad."},
}


@router.get(
    "",
    response_model=BestView,
    responses=errors(422) | NO_RESULT,
    openapi_extra=query_parameters(BestQuery),
    summary="Best config for one shape",
)
async def one(request: Request) -> Response:
    """The result tuned for exactly this shape, else the nearest that is legal for it, else a default when allowed."""
    # Asked most often by far, so without the framework's dependencies: resolving them takes longer than the answer. And
    # an exact answer of SQLite comes in less time than the way to another thread takes.
    state = request.app.state
    database, kept, limit_log2 = state.database, state.kept, state.settings.nearest_limit_log2
    question = request.scope["query_string"], limit_log2
    known = kept.known_at_hand(database)
    body = known and kept.find(known, question)
    if body is None:
        query = parsed_query(request, BestQuery)
        body = known and best.quick_answer(database, query, known)
        if body is None:
            known, body = await run_in_threadpool(best.looked_up, database, query, kept, limit_log2)
        kept.keep(known, question, body)
    return json_bytes(body)


@router.post("", response_model=BestBulk, responses=errors(body=True), summary="Best configs for many shapes")
def many(body: BestBulkIn, db: Db, kept: Kept, settings: Settings) -> Response:
    """Answers in the order of the shapes; a shape without one says why instead of failing the whole question."""
    known = kept.known(db)
    with db.read() as session:
        return json_bytes(best.answer_many(session, body, known, settings.nearest_limit_log2))
