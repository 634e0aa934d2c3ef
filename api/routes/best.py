"""Which config is best for a shape."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.deps import Db, Settings
from api.openapi import Responses, errors
from api.replies import json_reply
from api.schemas import BestBulkIn, BestQuery
from api.services import best
from api.views import BestBulk, BestView, NoResultBody

router = APIRouter(prefix="/v1/best", tags=["best"])

NO_RESULT: Responses = {
    404: {"model": NoResultBody, "description": "Nothing answers; `submit` is the job that would tune the shape."}
}


@router.get("", response_model=BestView, responses=errors(422) | NO_RESULT, summary="Best config for one shape")
def one(query: Annotated[BestQuery, Query()], db: Db, settings: Settings) -> Response:
    """The result tuned for exactly this shape, else the nearest that is legal for it, else a default when allowed."""
    with db.read() as session:
        return json_reply(best.answer(session, query, settings))


@router.post("", response_model=BestBulk, responses=errors(body=True), summary="Best configs for many shapes")
def many(body: BestBulkIn, db: Db, settings: Settings) -> Response:
    """Answers in the order of the shapes; a shape without one says why instead of failing the whole question."""
    with db.read() as session:
        return json_reply(best.answer_many(session, body, settings))
