"""Tables of answers for a family of shapes."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.deps import Db, Kept, Settings
from api.openapi import errors
from api.replies import json_bytes
from api.schemas import DispatchQuery
from api.services import dispatch
from api.strict import StrictRoute
from api.views.answers import DispatchView

router = APIRouter(prefix="/v1/dispatch", tags=["best"], route_class=StrictRoute)


@router.get("", response_model=DispatchView, responses=errors(422), summary="Best configs for a range of M")
def table(query: Annotated[DispatchQuery, Query()], db: Db, kept: Kept, settings: Settings) -> Response:
    """For fixed N and K: ranges of M, each with the result that is nearest to all of it, and the gaps between them.

    Only results tuned for exactly this N and K are looked at. Within a range the config is legal for every M.
    """
    known = kept.known(db)
    with db.read() as session:
        return json_bytes(dispatch.table(session, query, known, settings.nearest_limit_log2))
