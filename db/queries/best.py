"""What is best for a problem: for exactly this one, for many at once, or tuned near it.

Statements are built once for each choice of filters. Building one costs more than running it: 2.7 ms of CPU time for a
question against 1.0 ms when kept (one million rows).
"""

from __future__ import annotations

from functools import cache
from itertools import batched
from typing import TYPE_CHECKING, Any

from sqlalchemy import Double, Integer, and_, bindparam, func, literal, select, union_all

from db.models import Result, evidence_level
from db.queries.results import CHECKED, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import BindParameter, ColumnElement, Row, Select, Subquery
    from sqlalchemy.orm import Session

Shape = tuple[int, int, int]  # M, N, K

# What an answer to "which config is best" shows of a result.
ANSWER_COLUMNS = (
    *(Result.id, Result.m, Result.n, Result.k, Result.dtype, Result.layout, Result.arch, Result.device_name),
    *(Result.revision, Result.config, Result.evidence, Result.environment, Result.median_us, Result.modeled_us),
    *(Result.tie_set, Result.ratio, Result.artifact_sha256),
)
SHAPES_A_STATEMENT = 256  # SQLite takes 500 parts of a compound select, and older builds 999 parameters


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
    statement = _best_statement(frozenset(given), candidates=level < CHECKED)
    asked = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout, "evidence_level": level, **given}
    return session.scalar(statement, asked)


@cache
def _best_statement(given: frozenset[str], *, candidates: bool) -> Select[Result]:
    fixed = ("m", "n", "k", "dtype", "layout")
    query = select(Result).where(*(getattr(Result, name) == bindparam(name) for name in (*fixed, *sorted(given))))
    return query.where(shown(candidates=candidates)).order_by(*_best_first()).limit(1)


def _best_first() -> tuple[ColumnElement[Any], ...]:
    return (
        # Portable spelling of "nulls last": SQLite and PostgreSQL place them at opposite ends.
        Result.published_at.is_(None),
        Result.published_at.desc(),
        Result.revision.desc(),
        Result.evidence_level.desc(),
        Result.created_at.desc(),
        Result.id.asc(),
    )


def best_exact_many(
    session: Session,
    shapes: Collection[Shape],
    dtype: str,
    layout: str,
    *,
    arch: str | None = None,
    device_name: str | None = None,
    evidence: str = "checked",
) -> dict[Shape, Row[*tuple[Any, ...]]]:
    """What `best_exact` answers for each (M, N, K), with one statement for hundreds. Called by POST /v1/best.

    The rows have the columns of `ANSWER_COLUMNS`: whole results, of thousands, take twice as long. Shapes without
    an answer are left out. Raises ValueError for an unknown word of evidence.
    """
    level = evidence_level([evidence])
    given = {"arch": arch, "device_name": device_name}
    given = {name: value for name, value in given.items() if value is not None}
    statement = _best_many_statement(frozenset(given), candidates=level < CHECKED)
    found: dict[Shape, Row[*tuple[Any, ...]]] = {}
    for some in batched(dict.fromkeys(shapes), SHAPES_A_STATEMENT):
        asked = {"dtype": dtype, "layout": layout, "evidence_level": level, **given, **_shape_values(some)}
        found |= {(row.m, row.n, row.k): row for row in session.execute(statement, asked)}
    return found


def _asked_shapes() -> Subquery:
    """A table of the asked shapes, of fixed length.

    Joined, because SQLite 3.40 scans the whole index for `(m, n, k) IN (...)`, and looks up each row of a join.
    """
    numbers = range(SHAPES_A_STATEMENT)
    one = (select(*(bindparam(f"{name}{at}", type_=Integer()).label(name) for name in "mnk")) for at in numbers)
    return union_all(*one).subquery()


def _shape_values(shapes: Sequence[Shape]) -> dict[str, int]:
    """Parameters of `_asked_shapes`; the last shape fills the table."""
    filled = [*shapes, *[shapes[-1]] * (SHAPES_A_STATEMENT - len(shapes))]
    return {f"{name}{at}": extent for at, one in enumerate(filled) for name, extent in zip("mnk", one, strict=True)}


@cache
def _best_many_statement(given: frozenset[str], *, candidates: bool) -> Select[*tuple[Any, ...]]:
    """Ids first: only the rows returned are fetched."""
    place = func.row_number().over(partition_by=(Result.m, Result.n, Result.k), order_by=_best_first())
    shapes = _asked_shapes()
    same = and_(*(getattr(Result, name) == shapes.c[name] for name in "mnk"))
    ranked = (
        select(Result.id, place.label("place"))
        .join(shapes, same)
        .where(*(getattr(Result, name) == bindparam(name) for name in ("dtype", "layout", *sorted(given))))
        .where(shown(candidates=candidates))
    )
    best = ranked.subquery()
    return select(*ANSWER_COLUMNS).join(best, Result.id == best.c.id).where(best.c.place == 1)


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
) -> Sequence[Row[*tuple[Any, ...]]]:
    """Results of shapes whose N and K lie within a factor, roughly nearest first. Called by GET /v1/best.

    Rows with id, m, n, k, revision and evidence_level, all from the index. The caller computes the exact distance,
    loads what it wants, and checks that the config is legal for the asked shape. Of each problem and device only the
    current revision is looked at, or the current candidates where `evidence` asks for less.

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
    statement = _nearby_statement(tuple(asked), frozenset(given), candidates=level < CHECKED)
    return session.execute(statement, values).all()


@cache
def _nearby_statement(extents: tuple[str, ...], given: frozenset[str], *, candidates: bool) -> Select[*tuple[Any, ...]]:
    nearness: ColumnElement[Any] = literal(0.0)
    where: list[ColumnElement[bool]] = [Result.current.is_(True), shown(candidates=candidates)]
    where += [getattr(Result, name) == bindparam(name) for name in sorted(given)]
    for name in extents:
        column = getattr(Result, name)
        where += [column >= bindparam(f"{name}_low"), column <= bindparam(f"{name}_high")]
        # SQLite may lack log(), so rank by x/asked + asked/x: the least at x = asked, equal for x and asked^2/x as the
        # logarithmic distance is, and near to its square.
        asked: BindParameter[float] = bindparam(name, type_=Double())
        nearness += column / asked + asked / column
    # The index holds all of these columns: of a wide range no row is fetched.
    columns = (Result.id, Result.m, Result.n, Result.k, Result.revision, Result.evidence_level)
    return select(*columns).where(*where).order_by(nearness, Result.m, Result.id).limit(bindparam("limit"))
