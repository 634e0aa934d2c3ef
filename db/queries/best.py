"""What is best for a problem: for exactly this one, for many at once, or tuned near it.

Statements are built once for each choice of filters: building one costs more than running it. Questions are asked for
many shapes at a time, one GET being a list of one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import JSON, BigInteger, Float, Integer, String, Text, and_, bindparam, case, cast, func, or_, select
from sqlalchemy import column as any_column
from sqlalchemy import type_coerce as read_as

from db.database import Database
from db.models import BURST, Result, evidence_level
from db.queries.results import CHECKED, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sqlalchemy import ColumnElement, Select, Subquery
    from sqlalchemy.orm import Session

    Source = Session | Database

Shape = tuple[int, int, int]  # M, N, K


class Answer(NamedTuple):
    """What an answer to "which config is best" shows of a result, whose columns these are.

    The JSON columns are the text that is stored: answers hand it on, and parsing it is most of what they would cost. A
    tuple, because reading a member of a row of SQLAlchemy 2.1 takes 4 us, and an answer reads twenty. `pinned` is 0 or
    1 where SQLite's driver gives it.
    """

    id: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    arch: str
    device_name: str
    protocol: str
    revision: int | None
    pinned: bool | int
    evidence_level: int
    made_in: str
    median_us: float | None
    modeled_us: float | None
    artifact_sha256: str | None
    config: str
    evidence: str
    environment: str
    tie_set: str
    ratio: str | None


_JSON_COLUMNS = ("config", "evidence", "environment", "tie_set", "ratio")
_ANSWER_COLUMNS = tuple(
    cast(getattr(Result, name), Text).label(name) if name in _JSON_COLUMNS else getattr(Result, name)
    for name in Answer._fields
)
_WIDTH = len(Answer._fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Which:
    """Which results may answer.

    dtype, layout, arch: of the problem
    device_name: exactly this device; None for any of the architecture
    protocol: how it was timed: a result under one never answers for the other
    evidence: least evidence wanted. Published revisions are the answer; only where there is none, and less than
        `checked` is asked for, the candidate with the most evidence, the newest of these
    environment: only results of this environment (`made_in` or the whole key), older revisions too; None for any
    stale: `made_in` of results that are no answer, unless they are pinned
    """

    dtype: str
    layout: str
    arch: str
    device_name: str | None = None
    protocol: str = BURST
    evidence: str = "checked"
    environment: str | None = None
    stale: Sequence[str] = ()

    @property
    def values(self) -> dict[str, Any]:
        """Parameters of the statements. Raises ValueError for an unknown word of evidence."""
        given = {"device_name": self.device_name, "environment": self.environment}
        asked = {"dtype": self.dtype, "layout": self.layout, "arch": self.arch, "protocol": self.protocol}
        asked |= {name: value for name, value in given.items() if value is not None}
        return asked | {"evidence_level": evidence_level([self.evidence]), "stale": json.dumps(list(self.stale))}

    @property
    def kind(self) -> _Kind:
        """What decides the text of a statement."""
        return _Kind(
            device=self.device_name is not None,
            environment=self.environment is not None,
            candidates=evidence_level([self.evidence]) < CHECKED,
            stale=bool(self.stale),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    device: bool
    environment: bool
    candidates: bool
    stale: bool

    def conditions(self, dialect: str) -> list[ColumnElement[bool]]:
        names = ["dtype", "layout", "arch", "protocol", *(["device_name"] if self.device else [])]
        found = [getattr(Result, name) == bindparam(name) for name in names]
        found.append(shown(candidates=self.candidates))
        if self.environment:
            asked = bindparam("environment", type_=String())
            found.append(or_(Result.made_in == asked, Result.environment_key == asked))
            found.append(Result.withdrawn_at.is_(None))
        else:
            found.append(Result.current.is_(True))  # what is withdrawn is not
        if self.stale:
            found.append(or_(Result.pinned.is_(True), Result.made_in.not_in(_texts(dialect, "stale"))))
        return found


def _texts(dialect: str, name: str) -> Select[str]:
    """The texts of one parameter, a JSON list: a statement with a parameter for each could not be kept."""
    asked = bindparam(name, type_=String())
    if dialect == "postgresql":
        table = func.json_array_elements_text(cast(asked, JSON)).table_valued("value", name=name)
    else:
        table = func.json_each(asked).table_valued("value", name=name)
    return select(table.c.value)


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
    protocol: str = BURST,
    evidence: str = "checked",
    revision: int | None = None,
    environment_key: str | None = None,
) -> Result | None:
    """The whole result that answers exactly this problem, or None. Called by the tuner and for a named revision.

    protocol, evidence: as in `Which`
    revision: this published revision and no other, withdrawn or not
    environment_key: only results made in this environment; None accepts any
    Raises ValueError for an unknown word of evidence.
    """
    level = evidence_level([evidence])
    given: dict[str, Any] = {"arch": arch, "device_name": device_name, "revision": revision}
    given["environment_key"] = environment_key
    given = {name: value for name, value in given.items() if value is not None}
    statement = _best_statement(frozenset(given), candidates=level < CHECKED)
    asked = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout, "protocol": protocol, **given}
    asked["evidence_level"] = level
    return session.scalar(statement, asked)


@cache
def _best_statement(given: frozenset[str], *, candidates: bool) -> Select[Result]:
    fixed = ("m", "n", "k", "dtype", "layout", "protocol")
    query = select(Result).where(*(getattr(Result, name) == bindparam(name) for name in (*fixed, *sorted(given))))
    if not given & {"revision", "environment_key"}:
        query = query.where(Result.current.is_(True))
    elif "revision" not in given:
        query = query.where(Result.withdrawn_at.is_(None))
    order = (
        # Portable spelling of "nulls last": SQLite and PostgreSQL place them at opposite ends.
        Result.published_at.is_(None),
        Result.published_at.desc(),
        Result.revision.desc(),
        Result.evidence_level.desc(),
        Result.created_at.desc(),
        Result.id.asc(),
    )
    return query.where(shown(candidates=candidates)).order_by(*order).limit(1)


def best_exact_many(source: Source, shapes: Collection[Shape], which: Which) -> dict[Shape, Answer]:
    """The answer for each (M, N, K) that has one, with one statement for all. Called by GET and POST /v1/best.

    source: a session, or the database itself where nothing else is asked
    Raises ValueError for an unknown word of evidence.
    """
    statement = _best_many_statement(which.kind, _dialect(source))
    found: dict[Shape, list[Sequence[Any]]] = {}
    for row in _rows(source, statement, {**which.values, "shapes": _shapes_text(shapes)}):
        if row[0] is not None:
            found.setdefault((row[1], row[2], row[3]), []).append(row)
    chosen = {shape: rows[0] if len(rows) == 1 else _first_of(rows) for shape, rows in found.items()}
    return {shape: Answer._make(row[:_WIDTH]) for shape, row in chosen.items()}


def _rows(source: Source, statement: Select[*tuple[Any, ...]], values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
    """All rows. Past the session's own `execute`: what it does for models takes longer than these statements."""
    if isinstance(source, Database):
        return source.rows(statement, values)
    return source.connection().execute(statement, values).all()


def _dialect(source: Source) -> str:
    return source.dialect_name if isinstance(source, Database) else source.get_bind().dialect.name


@cache
def _best_many_statement(kind: _Kind, dialect: str) -> Select[*tuple[Any, ...]]:
    """All rows that may answer: with the index over current results, one or two a shape."""
    asked = _asked_shapes(dialect)
    same = and_(*(getattr(Result, name) == asked.c[name] for name in "mnk"))
    # Only compared with one another, so whatever the driver gives will do.
    order = (read_as(Result.published_at, String).label("published"), read_as(Result.created_at, String).label("made"))
    return select(*_ANSWER_COLUMNS, *order).select_from(asked).outerjoin(Result, and_(same, *kind.conditions(dialect)))


def _first_of(rows: Iterable[Sequence[Any]]) -> Sequence[Any]:
    """The newest revision; of candidates the one with the most evidence, the newest of these."""

    def order(row: Sequence[Any]) -> tuple[Any, ...]:
        answer, (published, made) = Answer._make(row[:_WIDTH]), row[_WIDTH:]
        is_published = answer.revision is not None
        return is_published, published if is_published else answer.evidence_level, answer.revision or 0, made

    by_id = sorted(rows, key=itemgetter(0))
    return max(by_id, key=order)


def _shapes_text(shapes: Collection[Shape]) -> str:
    return json.dumps([list(shape) for shape in dict.fromkeys(shapes)], separators=(",", ":"))


def _asked_shapes(dialect: str) -> Subquery:
    """The asked shapes as a table, from one parameter: thousands of parameters take longer than the search itself.

    Joined, because SQLite 3.40 scans the whole index for `(m, n, k) IN (...)`. With an outer join, because that fixes
    the order: without statistics SQLite takes the results first and goes through the asked shapes for each.
    """
    extents: list[ColumnElement[int]]
    if dialect == "postgresql":
        table = func.json_array_elements(cast(bindparam("shapes", type_=String()), JSON)).table_valued(
            any_column("value", JSON), name="asked"
        )
        extents = [cast(table.c.value.op("->>")(at), Integer) for at in range(3)]
    else:
        table = func.json_each(bindparam("shapes", type_=String())).table_valued("value", name="asked")
        extents = [func.json_extract(table.c.value, f"$[{at}]", type_=Integer) for at in range(3)]
    return select(*(extent.label(name) for name, extent in zip("mnk", extents, strict=True))).subquery("shapes")


class Nearby(NamedTuple):
    """A result near an asked shape.

    nearness: product of the three ratios of asked and tuned extents, each at least 1; its logarithm is the distance
    """

    id: str
    m: int
    n: int
    k: int
    nearness: float


def nearby_many(
    source: Source, shapes: Collection[Shape], which: Which, *, factor: float, limit: int
) -> dict[Shape, list[Nearby]]:
    """Results whose M, N and K all lie within a factor of the asked ones, nearest first. Called by GET /v1/best.

    At most `limit` results a shape, all from the index; `answers_by_id` loads what the caller wants of them. Ties go to
    revisions, then to more evidence.
    """
    statement = _nearby_statement(which.kind, _dialect(source))
    values = {**which.values, "shapes": _shapes_text(shapes), "factor": factor, "limit": limit}
    found: dict[Shape, list[Nearby]] = {}
    for row in _rows(source, statement, values):
        if row[0] is not None:
            found.setdefault((row[5], row[6], row[7]), []).append(Nearby._make(row[:5]))
    return found


@cache
def _nearby_statement(kind: _Kind, dialect: str) -> Select[*tuple[Any, ...]]:
    asked, factor = _asked_shapes(dialect), bindparam("factor", type_=Float())
    near: list[ColumnElement[bool]] = []
    nearness: ColumnElement[Any] | None = None
    for name in "nkm":
        column, wanted = getattr(Result, name), cast(asked.c[name], Float)
        # Whole limits, one wider than they must be: PostgreSQL uses no index for an integer beside a fraction.
        near += [column >= cast(wanted / factor, BigInteger) - 1, column <= cast(wanted * factor, BigInteger) + 1]
        ratio = case((column >= asked.c[name], column / wanted), else_=wanted / column)
        near.append(ratio <= factor)
        nearness = ratio if nearness is None else nearness * ratio
    assert nearness is not None
    order = (nearness, Result.revision.is_(None), Result.evidence_level.desc(), Result.m, Result.n, Result.id)
    place = func.row_number().over(partition_by=(asked.c.m, asked.c.n, asked.c.k), order_by=order)
    names = (asked.c[name].label(f"asked_{name}") for name in "mnk")
    ranked = (
        select(Result.id, Result.m, Result.n, Result.k, nearness.label("nearness"), *names, place.label("place"))
        .select_from(asked)
        .outerjoin(Result, and_(*near, *kind.conditions(dialect)))
        .subquery("ranked")
    )
    return select(ranked).where(ranked.c.place <= bindparam("limit")).order_by(ranked.c.place)


def answers_by_id(session: Session, ids: Collection[str]) -> Mapping[str, Answer]:
    """Results as answers, by id. Called for nearby results."""
    rows = _rows(session, _BY_ID, {"ids": list(ids)}) if ids else ()
    return {row[0]: Answer._make(row) for row in rows}


_BY_ID = select(*_ANSWER_COLUMNS).where(Result.id.in_(bindparam("ids", expanding=True)))


def current_environments(session: Session) -> Sequence[str]:
    """`made_in` of all results that may be answers, each once. Called when results or devices changed."""
    return session.scalars(select(Result.made_in).where(Result.current.is_(True)).distinct()).all()


def tuned_m(source: Source, n: int, k: int, which: Which) -> Sequence[int]:
    """Every M that has an answer with exactly these N and K, in order. Called by GET /v1/dispatch."""
    statement = _tuned_m_statement(which.kind, _dialect(source))
    return [row[0] for row in _rows(source, statement, {**which.values, "n": n, "k": k})]


@cache
def _tuned_m_statement(kind: _Kind, dialect: str) -> Select[*tuple[Any, ...]]:
    family = (Result.n == bindparam("n"), Result.k == bindparam("k"))
    return select(Result.m).where(*family, *kind.conditions(dialect)).distinct().order_by(Result.m)
