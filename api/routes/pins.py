"""Revisions that shall stay the answer."""

from fastapi import APIRouter

from api.deps import Db
from api.openapi import errors
from api.schemas import PinIn
from api.services import results
from api.strict import StrictRoute
from api.views.results import PinList, ResultView

router = APIRouter(prefix="/v1/pins", tags=["results"], route_class=StrictRoute)


@router.put("", responses=errors(404, 409, 410, body=True), summary="Pin a revision, or let it go")
def put(body: PinIn, db: Db) -> ResultView:
    """A pinned revision answers for its problem and device, however many are published after it, and also when stale.

    It takes the place of an earlier pin. The same request twice does no more than once.
    """
    with db.write() as session:
        return results.pin(session, body)


@router.get("", responses=errors(), summary="List pins")
def listing(db: Db) -> PinList:
    """By device and problem."""
    with db.read() as session:
        return results.pins(session)
