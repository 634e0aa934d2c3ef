"""Is the service up, and what does it count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select, text

from api.metrics import RequestMetrics, by_state, family
from api.views.devices import Health
from db.models import Export, Job, State, Study

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


def check(session: Session, version: str) -> Health:
    """Raises DatabaseError when the database does not answer."""
    session.execute(text("SELECT 1 FROM jobs LIMIT 1"))
    return Health(status="ok", version=version, database="ok")


def exposition(session: Session, metrics: RequestMetrics) -> str:
    """All metrics as text."""
    studies = _states(session, Study)
    waiting = studies.get(State.QUEUED, 0)
    lines = [
        *metrics.lines(),
        *by_state("gemm_tuner_jobs", "Jobs by state.", _states(session, Job)),
        *by_state("gemm_tuner_studies", "Studies by state.", studies),
        *by_state("gemm_tuner_exports", "Exports by state.", _states(session, Export)),
        *family("gemm_tuner_queue_length", "gauge", "Studies that wait for a tuner.", [((), waiting)]),
    ]
    return "\n".join(lines) + "\n"


def _states(session: Session, table: type[Job | Study | Export]) -> dict[str, int]:
    rows = session.execute(select(table.state, func.count()).group_by(table.state))
    return {str(state): int(count) for state, count in rows}
