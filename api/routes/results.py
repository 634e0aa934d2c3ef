"""Stored results: published revisions and candidates."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import Db, ResultId
from api.openapi import errors
from api.schemas import ResultsQuery, RevisionsQuery
from api.services import results
from api.strict import StrictRoute
from api.views.results import ResultList, ResultView, RevisionList

router = APIRouter(prefix="/v1/results", tags=["results"], route_class=StrictRoute)


@router.get("", responses=errors(422), summary="List results")
def listing(query: Annotated[ResultsQuery, Query()], db: Db) -> ResultList:
    """Newest first."""
    with db.read() as session:
        return results.listing(session, query)


@router.get("/{result_id}", responses=errors(404), summary="One result")
def show(result_id: ResultId, db: Db) -> ResultView:
    """Config, times, baselines, evidence and environment."""
    with db.read() as session:
        return results.show(session, result_id)


@router.get("/{result_id}/revisions", responses=errors(404, 422), summary="Published revisions of a problem")
def revisions(result_id: ResultId, query: Annotated[RevisionsQuery, Query()], db: Db) -> RevisionList:
    """Of the problem and device of this result, newest first. `current` is the one that answers."""
    with db.read() as session:
        return results.revisions(session, result_id, query)
