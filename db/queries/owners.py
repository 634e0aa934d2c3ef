"""Leases of tuner processes: who is alive, by the clock of the database, which all machines share. PostgreSQL only."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from db.models import Owner, Study

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


def take_lease(session: Session, name: str, *, lease_s: float) -> None:
    """Enter a process as alive. Called by the tuner before it claims anything."""
    expires_at = func.clock_timestamp() + timedelta(seconds=lease_s)
    session.execute(insert(Owner).values(name=name, expires_at=expires_at))


def renew_lease(session: Session, name: str, *, lease_s: float) -> bool:
    """Stay alive for so long from now. False when the lease had run out and somebody has taken the studies over."""
    expires_at = func.clock_timestamp() + timedelta(seconds=lease_s)
    renewed = session.execute(
        update(Owner).where(Owner.name == name).values(expires_at=expires_at).returning(Owner.name)
    )
    return renewed.scalar() is not None


def end_lease(session: Session, name: str) -> None:
    """The process ends in good order."""
    session.execute(delete(Owner).where(Owner.name == name))


def live_owners(session: Session) -> set[str]:
    """Names of the processes whose lease runs."""
    return set(session.scalars(select(Owner.name).where(Owner.expires_at > func.clock_timestamp())))


def take_over(session: Session, name: str, *, proven: bool) -> bool:
    """End the lease of a dead process, so that it cannot renew it. False when it has renewed it meanwhile.

    proven: whether its death is known otherwise, so that the lease need not run out
    """
    runs = select(Owner.expires_at > func.clock_timestamp()).where(Owner.name == name).with_for_update()
    if session.scalar(runs) and not proven:
        return False
    end_lease(session, name)
    return True


def owns_study(session: Session, study_id: str, owner: str) -> bool:
    """Whether a study is still this process's to write; holds its row until the transaction ends. On any database."""
    return session.scalar(_OWNER, {"study_id": study_id}) == owner


# Built once: it is asked for each trial.
_OWNER = select(Study.owner).where(Study.id == bindparam("study_id")).with_for_update()
