"""Rows for studies, for tests and soaks that run the loop with the real store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from db import queries
from tuner.store import stored_trials

if TYPE_CHECKING:
    from db.database import Database
    from search_space.request import TuneRequest
    from tuner.records import Trial


def new_study(request: TuneRequest) -> queries.NewStudy:
    """The row of a request, as the API makes it."""
    problem = request.problem
    return queries.NewStudy(
        study_key=request.study_key,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype.value,
        layout=problem.layout.value,
        arch=request.arch,
        device_name=request.device,
        request=request.to_dict(),
        seed=request.seed,
    )


def study_of(database: Database, request: TuneRequest) -> str:
    """Id of the study of this request; queued if it is not there yet."""
    with database.write() as session:
        for study in queries.studies(session):
            if study.study_key == request.study_key:
                return study.id
        job = queries.create_job(session, request={}, mode=request.mode.value, studies=[new_study(request)])
        return queries.studies_of_job(session, job.id)[0].id


def trials_of(database: Database, study_id: str) -> tuple[Trial, ...]:
    """What is stored of a study."""
    with database.read() as session:
        study = queries.study(session, study_id)
        assert study is not None
        return stored_trials(session, study)
