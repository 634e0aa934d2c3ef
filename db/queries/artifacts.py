"""Files of the artifact store: which there are, and which may go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, update

from db.models import LIVE_STATES, Artifact, Export, Result, State, Study, Trial, utc_now

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy.orm import Session


def add_artifact(
    session: Session,
    *,
    sha256: str,
    size_bytes: int,
    arch: str,
    sm_count: int,
    source_hash: str,
    config: dict[str, Any],
    problem_key: str,
    toolchain: str,
    kind: str = "module",
    registers: int | None = None,
    spill_bytes: int | None = None,
    facts: dict[str, Any] | None = None,
) -> Artifact:
    """Note a file of the artifact store. Called by the tuner after each build. The same bytes are noted once."""
    found = session.get(Artifact, sha256)
    if found is not None:
        found.last_used_at, found.removed_at = utc_now(), None  # built again, it is there again
        session.flush()
        return found
    new = Artifact(
        sha256=sha256,
        kind=kind,
        size_bytes=size_bytes,
        arch=arch,
        sm_count=sm_count,
        source_hash=source_hash,
        config=config,
        problem_key=problem_key,
        registers=registers,
        spill_bytes=spill_bytes,
        toolchain=toolchain,
        facts=facts or {},
    )
    session.add(new)
    session.flush()
    return new


def artifact(session: Session, sha256: str) -> Artifact | None:
    """One artifact by the hash of its bytes, or None. Called by the export."""
    return session.get(Artifact, sha256)


def note_use(session: Session, hashes: Collection[str]) -> None:
    """Artifacts that are used now are the last to be removed to save space. Called by the export."""
    session.execute(update(Artifact).where(Artifact.sha256.in_(hashes)).values(last_used_at=utc_now()))


def losers_of_study(session: Session, study_id: str) -> Sequence[str]:
    """Hashes of modules that a study that is over built, and that no result has. Called by the tuner after the final.

    All modules of its problem count, also those that an earlier study left; none while another study of the problem is
    at work, which may have built the same bytes. They can be built again from config and toolchain.
    """
    study = session.get(Study, study_id)
    if study is None or study.state in LIVE_STATES:
        return []
    same = [getattr(Study, name) == getattr(study, name) for name in ("m", "n", "k", "dtype", "layout", "arch")]
    at_work = select(Study.id).where(*same, Study.state == State.RUNNING).limit(1)
    if session.scalar(at_work) is not None:
        return []
    built = select(Trial.artifact_sha256).join(Study, Study.id == Trial.study_id).where(*same)
    kept = select(Result.artifact_sha256).where(Result.artifact_sha256.is_not(None))
    query = select(Artifact.sha256).where(Artifact.removed_at.is_(None), Artifact.sha256.in_(built))
    return session.scalars(query.where(Artifact.sha256.not_in(kept))).all()


def artifacts_over(session: Session, limit_bytes: int) -> Sequence[str]:
    """Hashes of the modules that have to go so that the rest fits, the longest unused first. Called by the tuner.

    Never one that a published revision or an ordered bundle names, or that a study at work may still need: where these
    alone are over the limit, they stay all the same.
    """
    total = session.scalar(select(func.sum(Artifact.size_bytes)).where(Artifact.removed_at.is_(None))) or 0
    if total <= limit_bytes:
        return []
    needed = set(session.scalars(select(Result.artifact_sha256).where(Result.revision.is_not(None))))
    needed |= set(session.scalars(_MODULES_AT_WORK)) | _named_by_bundles(session)
    query = select(Artifact.sha256, Artifact.size_bytes).where(Artifact.removed_at.is_(None))
    chosen = []
    for sha256, size_bytes in session.execute(query.order_by(Artifact.last_used_at, Artifact.sha256)):
        if total <= limit_bytes:
            break
        if sha256 not in needed:
            chosen.append(sha256)
            total -= size_bytes
    return chosen


_MODULES_AT_WORK = (
    select(Trial.artifact_sha256)
    .join(Study, Study.id == Trial.study_id)
    .where(Study.state.in_(LIVE_STATES), Trial.artifact_sha256.is_not(None))
)


def _named_by_bundles(session: Session) -> set[str | None]:
    orders = session.scalars(select(Export.request).where(Export.state != State.FAILED))
    ids = {identity for order in orders for identity in order.get("results", ())}
    return set(session.scalars(select(Result.artifact_sha256).where(Result.id.in_(ids))))


def note_removed(session: Session, hashes: Collection[str]) -> None:
    """These modules are about to be removed. Noted first: a file without a row that says so would be looked for."""
    session.execute(update(Artifact).where(Artifact.sha256.in_(hashes)).values(removed_at=utc_now()))


def removed_artifacts(session: Session) -> Sequence[str]:
    """Hashes of modules that are noted as removed. Called at start: a crash may have left files of them."""
    return session.scalars(select(Artifact.sha256).where(Artifact.removed_at.is_not(None))).all()
