"""What a change of driver, CUDA or toolchain did to stored answers."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import Db, Kept
from api.openapi import errors
from api.schemas import RegressionsQuery
from api.services import regressions
from api.strict import StrictRoute
from api.views.regressions import RegressionList

router = APIRouter(prefix="/v1/regressions", tags=["results"], route_class=StrictRoute)


@router.get("", responses=errors(422), summary="Compare answers before and after a change")
def report(query: Annotated[RegressionsQuery, Query()], db: Db, kept: Kept) -> RegressionList:
    """Each answer beside the newest revision of another environment; and which answers nobody measured since."""
    known = kept.known(db)
    with db.read() as session:
        return regressions.report(session, query, known)
