"""Studies and their trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from api.services.lookup import found
from api.views.problems import ProblemView
from api.views.studies import StudyView, TrialList, TrialView
from db import queries

if TYPE_CHECKING:
    from sqlalchemy import Row
    from sqlalchemy.orm import Session

    from api.schemas import TrialsQuery
    from db.models import Result, Study, Trial


def show(session: Session, study_id: str) -> StudyView:
    """Raises NotFound."""
    study = found_study(session, study_id)
    best = None if study.best_trial is None else queries.trial(session, study.id, study.best_trial)
    return StudyView(
        id=study.id,
        study_key=study.study_key,
        state=study.state,
        reason=study.reason,
        problem=problem_view(study),
        arch=study.arch,
        device=study.device_name,
        mode=study.mode,
        seed=study.seed,
        request=study.request,
        environment=study.environment,
        environment_key=study.environment_key,
        counts=study.counts,
        coverage=study.coverage,
        best=trial_view(best) if best else None,
        created_at=study.created_at,
        started_at=study.started_at,
        finished_at=study.finished_at,
    )


def trials(session: Session, study_id: str, query: TrialsQuery) -> TrialList:
    """One page. Raises NotFound."""
    study = found_study(session, study_id)
    rows = queries.trials_of_study(session, study.id, outcome=query.outcome, limit=query.limit + 1, after=query.after)
    page = rows[: query.limit]
    return TrialList(items=[trial_view(row) for row in page], next=page[-1].number if len(rows) > query.limit else None)


def found_study(session: Session, study_id: str) -> Study:
    """Raises NotFound."""
    return found(queries.study, session, study_id, "study", hint="GET /v1/jobs/{id} lists the studies of a job")


def problem_view(row: Study | Result | Row[*tuple[Any, ...]]) -> ProblemView:
    """The problem's columns as one object."""
    return ProblemView(m=row.m, n=row.n, k=row.k, dtype=row.dtype, layout=row.layout)


def trial_view(trial: Trial) -> TrialView:
    """A trial as its study shows it."""
    return TrialView(
        number=trial.number,
        outcome=trial.outcome,
        reason=trial.reason,
        config=trial.config,
        evidence=trial.evidence,
        modeled_us=trial.modeled_us,
        median_us=trial.median_us,
        ratio=trial.ratio or {},
        compile_s=trial.compile_s,
        gpu_s=trial.gpu_s,
        max_rel_error=trial.max_rel_error,
        source_hash=trial.source_hash or None,
        artifact_sha256=trial.artifact_sha256 or None,
        finished_at=trial.finished_at,
    )
