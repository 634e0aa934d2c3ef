"""What searches learn from: stored times, winners of other problems, and snapshots of what was learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from db.models import Result, Snapshot, Study, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

TIMED = ("MEASURED", "STOPPED_EARLY")


def timed_trials(session: Session, device_name: str, *, limit: int) -> Sequence[Any]:
    """The newest measured trials on a device, with their problems. Called by the tuner before a study begins.

    Columns: m, n, k, dtype, layout, arch, config, median_us
    """
    query = (
        select(Study.m, Study.n, Study.k, Study.dtype, Study.layout, Study.arch, Trial.config, Trial.median_us)
        .join(Study, Trial.study_id == Study.id)
        .where(Study.device_name == device_name, Study.mode == "measure")
        .where(Trial.outcome.in_(TIMED), Trial.median_us.is_not(None))
        .order_by(Trial.finished_at.desc(), Trial.study_id, Trial.number)
        .limit(limit)
    )
    return session.execute(query).all()


def current_winners(session: Session, arch: str, *, limit: int) -> Sequence[Any]:
    """Current results of an architecture, newest first. Called by the tuner before a study begins.

    Columns: m, n, k, dtype, layout, arch, device_name, config
    """
    query = (
        select(
            Result.m, Result.n, Result.k, Result.dtype, Result.layout, Result.arch, Result.device_name, Result.config
        )
        .where(Result.arch == arch, Result.current.is_(True))
        .order_by(Result.created_at.desc(), Result.id)
        .limit(limit)
    )
    return session.execute(query).all()


def newest_snapshot(session: Session, device_name: str) -> Snapshot | None:
    """The snapshot learned last from a device's times. Called by the tuner before a study begins."""
    query = select(Snapshot).where(Snapshot.device_name == device_name).order_by(Snapshot.created_at.desc()).limit(1)
    return session.scalar(query)


def snapshot(session: Session, sha256: str) -> Snapshot | None:
    """A snapshot by its hash. Called by the tuner when a study goes on."""
    return session.get(Snapshot, sha256)


def add_snapshot(session: Session, new: Snapshot) -> None:
    """Keep a snapshot; one that is kept already stays as it is."""
    if session.get(Snapshot, new.sha256) is None:
        session.add(new)
        session.flush()


def note_search(session: Session, study_id: str, search: dict[str, Any]) -> None:
    """Note what a study's search began with. Called by the tuner before the first trial. Raises KeyError."""
    found = session.get(Study, study_id, with_for_update=True)
    if found is None:
        raise KeyError(study_id)
    found.search = search
    session.flush()
