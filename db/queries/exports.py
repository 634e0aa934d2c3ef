"""Bundles that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from db.models import Export, State, utc_now

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


def create_export(session: Session, request: dict[str, Any]) -> Export:
    """Queue a bundle. Called by POST /v1/exports; returns the export with its id."""
    new = Export(request=request)
    session.add(new)
    session.flush()
    return new


def export(session: Session, export_id: str) -> Export | None:
    """One export by its id, or None. Called by GET /v1/exports/{id} and its bundle."""
    return session.get(Export, export_id)


def claim_next_export(session: Session, owner: str) -> Export | None:
    """Take the oldest queued export for this process; None where nothing waits. No two claimers get the same one."""
    query = (
        select(Export)
        .where(Export.state == State.QUEUED)
        .order_by(Export.created_at, Export.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    found = session.scalar(query)
    if found is None:
        return None
    found.state = State.RUNNING
    found.owner = owner
    session.flush()
    return found


def finish_export(
    session: Session,
    export_id: str,
    *,
    state: str,
    reason: str = "",
    bundle_path: str | None = None,
    bundle_sha256: str | None = None,
    size_bytes: int | None = None,
) -> Export:
    """End an export, DONE with its file or FAILED with a reason. Called by whoever claimed it.

    Raises KeyError for an unknown export, ValueError for a state that does not end one.
    """
    if state not in (State.DONE, State.FAILED):
        raise ValueError(f"{state!r} does not end an export: use DONE or FAILED")
    found = session.get(Export, export_id, with_for_update=True)
    if found is None:
        raise KeyError(export_id)
    found.state = state
    found.reason = reason
    found.owner = None
    found.bundle_path = bundle_path
    found.bundle_sha256 = bundle_sha256
    found.size_bytes = size_bytes
    found.finished_at = utc_now()
    session.flush()
    return found
