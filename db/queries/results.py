"""Results: the answers to "what is best for this problem", as candidates and as published revisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, func, or_, select, update
from sqlalchemy.orm import aliased

from db.database import ANSWERS, hold, note_change
from db.errors import NotPublishable
from db.models import BURST, EVIDENCE_ORDER, Result, evidence_level, utc_now

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Row, Select
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
    protocol: str = BURST
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

    The candidate takes the place of the one before it for the same problem, device, protocol and level of evidence.
    Raises ValueError for an unknown word of evidence.
    """
    level = evidence_level(new.evidence)
    note_change(session, ANSWERS)
    stored = Result(
        m=new.m,
        n=new.n,
        k=new.k,
        dtype=new.dtype,
        layout=new.layout,
        arch=new.arch,
        device_name=new.device_name,
        protocol=new.protocol,
        study_id=new.study_id,
        trial_number=new.trial_number,
        config=new.config,
        evidence=[str(word) for word in new.evidence],
        evidence_level=level,
        environment=new.environment,
        environment_key=new.environment_key,
        made_in=made_in(new.environment_key, new.source_hash),
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
    hold_place(session, stored)
    _retire(session, same_place(stored), Result.revision.is_(None), Result.evidence_level == level)
    session.add(stored)
    session.flush()
    return stored


def made_in(environment_key: str, source_hash: str | None) -> str:
    """The environment key without the source hash at its end."""
    return environment_key.removesuffix(f"|{source_hash}") if source_hash else environment_key


def publish_result(session: Session, result_id: str) -> Result:
    """Give a candidate the next revision number of its problem and device. Called by the tuner after the last check.

    From the commit on it is what readers get, unless another revision is pinned; until then they keep the revision
    before. A result that has a revision is returned as it stands. Raises KeyError if unknown, NotPublishable without
    `numeric` and `checked` evidence, or for a withdrawn one.
    """
    found = session.get(Result, result_id)
    if found is None:
        raise KeyError(result_id)
    hold_place(session, found)
    session.refresh(found)
    if found.revision is not None:
        return found
    _refuse_withdrawn(found)
    missing = [word for word in ("numeric", "checked") if word not in found.evidence]
    if missing:
        raise NotPublishable(
            f"result {result_id} has evidence {found.evidence}, a revision also needs {missing}: "
            "verify it first, or export it with allow_unverified"
        )
    place = same_place(found)
    last = session.scalar(select(func.max(Result.revision)).where(place)) or 0
    pinned = session.scalar(select(Result.id).where(place, Result.pinned.is_(True)).limit(1))
    if pinned is None:
        _retire(session, place, Result.revision.is_not(None))
    found.revision = last + 1
    found.current = pinned is None
    found.published_at = utc_now()
    note_change(session, ANSWERS)
    session.flush()
    return found


def pin_result(session: Session, result_id: str, *, pinned: bool) -> Result:
    """Let a revision stay the answer for its problem and device, or give the newest one back its place.

    Called by PUT /v1/pins. A pin takes the place of an earlier one; taking a pin from a result that has none changes
    nothing. Raises KeyError if unknown, NotPublishable for a candidate and for a withdrawn revision.
    """
    found = session.get(Result, result_id)
    if found is None:
        raise KeyError(result_id)
    hold_place(session, found)
    session.refresh(found)
    if found.revision is None:
        raise NotPublishable(f"result {result_id} is a candidate: only a published revision can be pinned")
    if found.pinned == pinned:
        return found
    _refuse_withdrawn(found)
    place = same_place(found)
    session.execute(update(Result).where(place, Result.pinned.is_(True)).values(pinned=False))
    _retire(session, place, Result.revision.is_not(None))
    newest = select(Result).where(place, Result.revision.is_not(None), Result.withdrawn_at.is_(None))
    newest = newest.order_by(Result.revision.desc()).limit(1)
    answer = found if pinned else session.scalars(newest).one()
    found.pinned = pinned
    answer.current = True
    note_change(session, ANSWERS)
    session.flush()
    session.refresh(found)
    return found


def pinned_results(session: Session) -> Sequence[Result]:
    """Every pinned revision, by problem and device. Called by GET /v1/pins."""
    query = select(Result).where(Result.current.is_(True), Result.pinned.is_(True))
    order = (Result.arch, Result.device_name, Result.dtype, Result.m, Result.n, Result.k)
    return session.scalars(query.order_by(*order)).all()


def _refuse_withdrawn(one: Result) -> None:
    if one.withdrawn_at is not None:
        raise NotPublishable(f"result {one.id} was withdrawn: {one.withdrawn_reason}")


# What one row of revisions is about.
_PLACE = ("m", "n", "k", "dtype", "layout", "arch", "device_name", "protocol")


def same_place(one: Result) -> ColumnElement[bool]:
    """Condition: the same problem, device and protocol."""
    return and_(*(getattr(Result, name) == getattr(one, name) for name in _PLACE))


def hold_place(session: Session, one: Result) -> None:
    """Make all changes of who answers for this problem, device and protocol follow one another."""
    hold(session, " ".join(["results", *(str(getattr(one, name)) for name in _PLACE)]))


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


def results(
    session: Session,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    study_id: str | None = None,
    published: bool | None = None,
    environment: str | None = None,
    limit: int = 50,
    after: str | None = None,
    oldest_first: bool = False,
) -> Sequence[Result]:
    """A page of results, newest first. Called by GET /v1/results and by `results export`.

    published: only revisions, or only candidates; None for both
    environment: only of this environment, as `environment_key` or `made_in` gives it
    after: id of the last result of the page before; an unknown id gives an empty page
    """
    order = (Result.created_at, Result.id)
    query = _on(select(Result).order_by(*(order if oldest_first else (one.desc() for one in order))), arch, device_name)
    query = query.limit(limit)
    if study_id is not None:
        query = query.where(Result.study_id == study_id)
    if published is not None:
        query = query.where(Result.revision.is_not(None) if published else Result.revision.is_(None))
    if environment is not None:
        query = query.where(or_(Result.environment_key == environment, Result.made_in == environment))
    if after is not None:
        last = session.get(Result, after)
        if last is None:
            return []
        earlier, smaller = Result.created_at < last.created_at, Result.id < last.id
        if oldest_first:
            earlier, smaller = Result.created_at > last.created_at, Result.id > last.id
        query = query.where(or_(earlier, and_(Result.created_at == last.created_at, smaller)))
    return session.scalars(query).all()


def result(session: Session, result_id: str) -> Result | None:
    """One result by its id, or None. Called by GET /v1/results/{id} and by the export."""
    return session.get(Result, result_id)


def revisions(
    session: Session, result_id: str, *, limit: int | None = None, below: int | None = None
) -> Sequence[Result]:
    """Published revisions of the problem and device of a result, newest first; empty for an unknown id.

    Withdrawn ones too, which say so. Called by GET /v1/results/{id}/revisions.
    below: number of the last revision of the page before
    """
    found = session.get(Result, result_id)
    if found is None:
        return []
    query = select(Result).where(same_place(found), Result.revision.is_not(None))
    if below is not None:
        query = query.where(Result.revision < below)
    return session.scalars(query.order_by(Result.revision.desc()).limit(limit)).all()


def changed_environments(
    session: Session,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    limit: int = 50,
    after: str | None = None,
) -> Sequence[tuple[Result, Result]]:
    """Revisions that are answers, each with the newest one before it that was made in another environment.

    Those without one before are left out. By id of the answer. Called by GET /v1/regressions.
    after: id of the last answer of the page before
    """
    answer, before = aliased(Result), aliased(Result)
    same = and_(*(getattr(before, name) == getattr(answer, name) for name in _PLACE))
    earlier = (
        select(func.max(before.revision))
        .where(same, before.revision < answer.revision, before.made_in != answer.made_in)
        .where(before.withdrawn_at.is_(None))
        .correlate(answer)
        .scalar_subquery()
    )
    query = select(answer, before).join(before, and_(same, before.revision == earlier))
    query = query.where(answer.current.is_(True), answer.revision.is_not(None))
    if arch is not None:
        query = query.where(answer.arch == arch)
    if device_name is not None:
        query = query.where(answer.device_name == device_name)
    if after is not None:
        query = query.where(answer.id > after)
    return [(new, old) for new, old in session.execute(query.order_by(answer.id).limit(limit))]


def answers_made_in(
    session: Session, environments: Collection[str], *, arch: str | None = None, device_name: str | None = None
) -> Sequence[Row[int, int, int, str, str, str]]:
    """Problem and device of the revisions that are answers and were made in one of these environments (`made_in`).

    Rows with m, n, k, dtype, layout and device_name, from the index. Called by GET /v1/regressions.
    """
    columns = (Result.m, Result.n, Result.k, Result.dtype, Result.layout, Result.device_name)
    query = select(*columns).where(Result.current.is_(True), Result.revision.is_not(None))
    query = query.where(Result.made_in.in_(list(environments)))
    if arch is not None:
        query = query.where(Result.arch == arch)
    if device_name is not None:
        query = query.where(Result.device_name == device_name)
    return session.execute(query.order_by(Result.device_name, Result.dtype, Result.n, Result.k, Result.m)).all()
