"""Results: the answers to "what is best for this problem", as candidates and as published revisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Double, and_, bindparam, func, literal, or_, select, update

from db.database import hold
from db.errors import NotPublishable
from db.models import EVIDENCE_ORDER, Result, evidence_level, utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, ColumnElement, Select
    from sqlalchemy.orm import Session

_CHECKED = EVIDENCE_ORDER.index("checked")


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


def _shown(*, candidates: bool) -> ColumnElement[bool]:
    """Published revisions, and where `candidates`, also those with the parameter `evidence_level` or more."""
    published = Result.revision.is_not(None)
    return or_(published, Result.evidence_level >= bindparam("evidence_level")) if candidates else published


def best_exact(  # noqa: PLR0917  (a problem, in the order in which people say it)
    session: Session,
    m: int,
    n: int,
    k: int,
    dtype: str,
    layout: str,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    evidence: str = "checked",
    revision: int | None = None,
    environment_key: str | None = None,
) -> Result | None:
    """The answer for exactly this problem, or None. Called by GET and POST /v1/best.

    evidence: least evidence wanted. The newest published revision is the answer; only where there is none, and less
        than `checked` is asked for, the candidate with the most evidence, the newest of these
    revision: this published revision and no other
    environment_key: only results made in this environment; None accepts any
    Raises ValueError for an unknown word of evidence.
    """
    level = evidence_level([evidence])
    given: dict[str, Any] = {"arch": arch, "device_name": device_name, "revision": revision}
    given["environment_key"] = environment_key
    given = {name: value for name, value in given.items() if value is not None}
    statement = _best_statement(frozenset(given), candidates=level < _CHECKED)
    asked = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout, "evidence_level": level, **given}
    return session.scalar(statement, asked)


@cache
def _best_statement(given: frozenset[str], *, candidates: bool) -> Select[Result]:
    """The statement of `best_exact`, built once for each choice of filters.

    Building it costs more than running it: 2.7 ms of CPU time a question against 1.0 ms when kept (one million rows).
    """
    fixed = ("m", "n", "k", "dtype", "layout")
    query = select(Result).where(*(getattr(Result, name) == bindparam(name) for name in (*fixed, *sorted(given))))
    query = query.where(_shown(candidates=candidates))
    return query.order_by(
        # Portable spelling of "nulls last": SQLite and PostgreSQL place them at opposite ends.
        Result.published_at.is_(None),
        Result.published_at.desc(),
        Result.revision.desc(),
        Result.evidence_level.desc(),
        Result.created_at.desc(),
        Result.id,
    ).limit(1)


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


def results_nearby(
    session: Session,
    n: int,
    k: int,
    dtype: str,
    layout: str,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    m: int | None = None,
    evidence: str = "checked",
    factor: float = 2.0,
    limit: int = 32,
) -> Sequence[Result]:
    """Results of shapes whose N and K lie within a factor, roughly nearest first. Called by GET /v1/best.

    The caller computes the exact distance and checks that the config is legal for the asked shape. Of each problem and
    device only the current revision is looked at, or the current candidates where `evidence` asks for less.

    m: where given, M must lie within the factor too
    factor: N and K between a `factor`-th and `factor` times the asked one; at least 1
    limit: most results returned
    """
    level = evidence_level([evidence])
    asked = {"n": n, "k": k} if m is None else {"n": n, "k": k, "m": m}
    given = {"dtype": dtype, "layout": layout, "arch": arch, "device_name": device_name}
    given = {name: value for name, value in given.items() if value is not None}
    values: dict[str, Any] = {**given, "evidence_level": level, "limit": limit}
    for name, extent in asked.items():
        values |= {name: float(extent), f"{name}_low": int(extent / factor), f"{name}_high": int(extent * factor)}
    statement = _nearby_statement(tuple(asked), frozenset(given), candidates=level < _CHECKED)
    return session.scalars(statement, values).all()


@cache
def _nearby_statement(extents: tuple[str, ...], given: frozenset[str], *, candidates: bool) -> Select[Result]:
    """The statement of `results_nearby`, built once for each choice of filters."""
    nearness: ColumnElement[Any] = literal(0.0)
    where: list[ColumnElement[bool]] = [Result.current.is_(True), _shown(candidates=candidates)]
    where += [getattr(Result, name) == bindparam(name) for name in sorted(given)]
    for name in extents:
        column = getattr(Result, name)
        where += [column >= bindparam(f"{name}_low"), column <= bindparam(f"{name}_high")]
        # SQLite may lack log(), so rank by x/asked + asked/x: the least at x = asked, equal for x and asked^2/x as the
        # logarithmic distance is, and near to its square.
        asked: BindParameter[float] = bindparam(name, type_=Double())
        nearness += column / asked + asked / column
    # Ids first: the index holds all that this part reads, so of a wide range only the rows returned are fetched.
    ids = select(Result.id, nearness.label("nearness")).where(*where)
    nearest = ids.order_by(nearness, Result.m, Result.id).limit(bindparam("limit")).subquery()
    query = select(Result).join(nearest, Result.id == nearest.c.id)
    return query.order_by(nearest.c.nearness, Result.m, Result.id)


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
        _shown(candidates=level < _CHECKED),
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
