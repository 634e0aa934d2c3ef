"""Studies and their trials."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import Db, StudyId
from api.openapi import errors
from api.schemas import TrialsQuery
from api.services import studies
from api.strict import StrictRoute
from api.views.studies import StudyView, TrialList

router = APIRouter(prefix="/v1/studies", tags=["studies"], route_class=StrictRoute)


@router.get("/{study_id}", responses=errors(404), summary="One study")
def show(study_id: StudyId, db: Db) -> StudyView:
    """One problem on one device: state, counts by outcome, best trial so far."""
    with db.read() as session:
        return studies.show(session, study_id)


@router.get("/{study_id}/trials", responses=errors(404, 422), summary="Trials of a study")
def trials(study_id: StudyId, query: Annotated[TrialsQuery, Query()], db: Db) -> TrialList:
    """In number order; failures come with their reason."""
    with db.read() as session:
        return studies.trials(session, study_id, query)
