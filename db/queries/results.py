"""Results: the answers to "what is best for this problem", as candidates and as published revisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, func, or_, select, update

from db.database import hold
from db.errors import NotPublishable
from db.models import EVIDENCE_ORDER, Result, evidence_level, utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.orm import Session

CHECKED = EVIDENCE_ORDER.index("checked")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewResult:
    """A result to store; the fields are the columns of `Result`, which explains them."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str
    arch: str
    device_name: str
    config: dict[str, Any]
    evidence: Sequence[str]
    environment: dict[str, Any] = field(default_factory=dict)
    environment_key: str = ""
    study_id: str | None = None
    trial_number: int | None = None
    median_us: float | None = None
    modeled_us: float | None = None
    interval_us: Sequence[float] | None = None
    baselines_us: dict[str, Any] | None = None
    ratio: dict[str, Any] | None = None
    noise: float | None = None
    aa_ratio: dict[str, Any] | None = None
    tie_set: Sequence[Any] = ()
    checks: Sequence[Any] = ()
    tflops: float | None = None
    max_rel_error: float | None = None
    trials: int = 0
    artifact_sha256: str | None = None
    source_hash: str | None = None
    created_at: datetime | None = None


def add_result(session: Session, new: NewResult) -> Result:
    """Store a result as a candidate, which no reader sees by default. Called by the tuner at the end of a study.

    The candidate takes the place of the one before it for the same problem, device and level of evidence. Raises
    ValueError for an unknown word of evidence.
    """
    level = evidence_level(new.evidence)
    stored = Result(
        m=new.m,
        n=new.n,
        k=new.k,
        dtype=new.dtype,
        layout=new.layout,
        arch=new.arch,
        device_name=new.device_name,
        study_id=new.study_id,
        trial_number=new.trial_number,
        config=new.config,
        evidence=[str(word) for word in new.evidence],
        evidence_level=level,
        environment=new.environment,
        environment_key=new.environment_key,
        median_us=new.median_us,
        modeled_us=new.modeled_us,
        interval_us=None if new.interval_us is None else list(new.interval_us),
        baselines_us=new.baselines_us,
        ratio=new.ratio,
        noise=new.noise,
        aa_ratio=new.aa_ratio,
        tie_set=list(new.tie_set),
        checks=list(new.checks),
        tflops=new.tflops,
        max_rel_error=new.max_rel_error,
        trials=new.trials,
        artifact_sha256=new.artifact_sha256,
        source_hash=new.source_hash,
        created_at=new.created_at or utc_now(),
    )
    _hold(session, stored)
    _retire(session, _same_place(stored), Result.revision.is_(None), Result.evidence_level == level)
    session.add(stored)
    session.flush()
    return stored


def publish_result(session: Session, result_id: str) -> Result:
    """Give a candidate the next revision number of its problem and device. Called by the tuner after the last check.

    From the commit on it is what readers get; until then they keep the revision before. A result that has a revision
    is returned as it stands. Raises KeyError if unknown, NotPublishable without `numeric` and `checked` evidence.
    """
    found = session.get(Result, result_id)
    if found is None:
        raise KeyError(result_id)
    _hold(session, found)
    session.refresh(found)
    if found.revision is not None:
        return found
    missing = [word for word in ("numeric", "checked") if word not in found.evidence]
    if missing:
        raise NotPublishable(
            f"result {result_id} has evidence {found.evidence}, a revision also needs {missing}: "
            "verify it first, or export it with allow_unverified"
        )
    place = _same_place(found)
    last = session.scalar(select(func.max(Result.revision)).where(place)) or 0
    _retire(session, place, Result.revision.is_not(None))
    found.revision = last + 1
    found.current = True
    found.published_at = utc_now()
    session.flush()
    return found


def _same_place(one: Result) -> ColumnElement[bool]:
    return and_(
        *_problem(one.m, one.n, one.k, one.dtype, one.layout),
        Result.arch == one.arch,
        Result.device_name == one.device_name,
    )


def _hold(session: Session, one: Result) -> None:
    hold(session, f"results {one.m} {one.n} {one.k} {one.dtype} {one.layout} {one.arch} {one.device_name}")


def _retire(session: Session, *which: ColumnElement[bool]) -> None:
    session.execute(update(Result).where(*which, Result.current.is_(True)).values(current=False))


def _problem(m: int, n: int, k: int, dtype: str, layout: str) -> tuple[ColumnElement[bool], ...]:
    return (Result.m == m, Result.n == n, Result.k == k, Result.dtype == dtype, Result.layout == layout)


def _on(query: Select[Result], arch: str | None, device_name: str | None) -> Select[Result]:
    if arch is not None:
        query = query.where(Result.arch == arch)
    if device_name is not None:
        query = query.where(Result.device_name == device_name)
    return query


def shown(*, candidates: bool) -> ColumnElement[bool]:
    """Published revisions, and where `candidates`, also those with the parameter `evidence_level` or more."""
    published = Result.revision.is_not(None)
    return or_(published, Result.evidence_level >= bindparam("evidence_level")) if candidates else published


def results_exact(  # noqa: PLR0917  (as best_exact)
    session: Session,
    m: int,
    n: int,
    k: int,
    dtype: str,
    layout: str,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    limit: int = 100,
) -> Sequence[Result]:
    """Every result of a problem, candidates too, newest first. Called by the result page and the regression report."""
    query = _on(select(Result).where(*_problem(m, n, k, dtype, layout)), arch, device_name)
    return session.scalars(query.order_by(Result.created_at.desc(), Result.id).limit(limit)).all()


def results_for_nk(
    session: Session,
    n: int,
    k: int,
    dtype: str,
    layout: str,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    evidence: str = "checked",
    limit: int = 4096,
) -> Sequence[Result]:
    """Current results of fixed N and K, by M. Called by GET /v1/dispatch.

    Where `evidence` lets candidates in, an M may appear several times: revisions first, then by evidence.
    """
    level = evidence_level([evidence])
    query = _on(select(Result), arch, device_name).where(
        Result.current.is_(True),
        Result.dtype == dtype,
        Result.layout == layout,
        Result.n == n,
        Result.k == k,
        shown(candidates=level < CHECKED),
    )
    ordered = query.order_by(
        Result.m, Result.revision.is_(None), Result.evidence_level.desc(), Result.created_at.desc(), Result.id
    )
    return session.scalars(ordered.limit(limit), {"evidence_level": level}).all()


def results(
    session: Session,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    study_id: str | None = None,
    published: bool | None = None,
    limit: int = 50,
    after: str | None = None,
) -> Sequence[Result]:
    """A page of results, newest first. Called by GET /v1/results and by `results export`.

    published: only revisions, or only candidates; None for both
    after: id of the last result of the page before; an unknown id gives an empty page
    """
    query = _on(select(Result).order_by(Result.created_at.desc(), Result.id.desc()).limit(limit), arch, device_name)
    if study_id is not None:
        query = query.where(Result.study_id == study_id)
    if published is not None:
        query = query.where(Result.revision.is_not(None) if published else Result.revision.is_(None))
    if after is not None:
        last = session.get(Result, after)
        if last is None:
            return []
        query = query.where(
            or_(
                Result.created_at < last.created_at,
                and_(Result.created_at == last.created_at, Result.id < last.id),
            )
        )
    return session.scalars(query).all()


def result(session: Session, result_id: str) -> Result | None:
    """One result by its id, or None. Called by GET /v1/results/{id} and by the export."""
    return session.get(Result, result_id)


def revisions(session: Session, result_id: str) -> Sequence[Result]:
    """Published revisions of the problem and device of a result, newest first; empty for an unknown id.

    Called by GET /v1/results/{id}/revisions.
    """
    found = session.get(Result, result_id)
    if found is None:
        return []
    query = select(Result).where(_same_place(found), Result.revision.is_not(None))
    return session.scalars(query.order_by(Result.revision.desc())).all()
