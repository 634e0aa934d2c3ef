"""What the service's pages show beyond the routes for programs: many trials or results at a time, in a few columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import and_, func, or_, select

from db.models import Result, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Row, Select
    from sqlalchemy.orm import InstrumentedAttribute, Session

# Outcome and column of a trial's time, by mode of its study.
_TIMED = {"measure": ("MEASURED", "median_us"), "model": ("MODELED", "modeled_us")}

type Order = Literal["number", "fastest"]


def _time_of(mode: str) -> tuple[ColumnElement[bool], InstrumentedAttribute[float | None]]:
    outcome, column = _TIMED[mode]
    time: InstrumentedAttribute[float | None] = getattr(Trial, column)
    return and_(Trial.outcome == outcome, time.is_not(None)), time


def improvements(session: Session, study_id: str, mode: str) -> Sequence[Row[int, float]]:
    """Number and time of each trial that was better than all before it, in order. Called by the page of a study."""
    timed, time = _time_of(mode)
    before = func.min(time).over(order_by=Trial.number, rows=(None, -1))
    inner = select(Trial.number.label("number"), time.label("time_us"), before.label("before_us"))
    run = inner.where(Trial.study_id == study_id, timed).subquery()
    better = or_(run.c.before_us.is_(None), run.c.time_us < run.c.before_us)
    return session.execute(select(run.c.number, run.c.time_us).where(better).order_by(run.c.number)).all()


def last_number(session: Session, study_id: str) -> int | None:
    """Number of the newest trial of a study; None without one."""
    return session.scalar(select(func.max(Trial.number)).where(Trial.study_id == study_id))


def trials_page(
    session: Session,
    study_id: str,
    *,
    mode: str,
    order: Order = "number",
    outcome: str | None = None,
    reason: str | None = None,
    limit: int,
    after: int | None = None,
    before: int | None = None,
) -> Sequence[Trial]:
    """Trials for one page of a table, with one more than `limit` where there are more. Called by the page of a study.

    order: by number, or by time (only trials that were timed in full)
    reason: text that the reason must hold, in any case
    after, before: number of the last or the first trial of the page next to this one; with `before` rows come backwards
    """
    # The numbers first: sorting whole rows, with their configs, takes twice as long.
    query = select(Trial.number).where(Trial.study_id == study_id)
    if outcome is not None:
        query = query.where(Trial.outcome == outcome)
    if reason is not None:
        query = query.where(Trial.reason.icontains(reason, autoescape=True))
    if order == "number":
        query = _by_number(query, after, before)
    else:
        query = _by_time(query, session, study_id, mode, (after, before))
    numbers = session.scalars(query.limit(limit + 1)).all()
    rows = session.scalars(select(Trial).where(Trial.study_id == study_id, Trial.number.in_(numbers)))
    by_number = {row.number: row for row in rows}
    return [by_number[number] for number in numbers]


def _by_number(query: Select[int], after: int | None, before: int | None) -> Select[int]:
    if after is not None:
        query = query.where(Trial.number > after)
    if before is not None:
        query = query.where(Trial.number < before)
    return query.order_by(Trial.number if before is None else Trial.number.desc())


def _by_time(
    query: Select[int],
    session: Session,
    study_id: str,
    mode: str,
    between: tuple[int | None, int | None],
) -> Select[int]:
    timed, time = _time_of(mode)
    query, (after, before) = query.where(timed), between
    if after is not None:
        at = session.scalar(select(time).where(Trial.study_id == study_id, Trial.number == after))
        query = query.where(or_(time > at, and_(time == at, Trial.number > after)))
    if before is not None:
        at = session.scalar(select(time).where(Trial.study_id == study_id, Trial.number == before))
        query = query.where(or_(time < at, and_(time == at, Trial.number < before)))
        return query.order_by(time.desc(), Trial.number.desc())
    return query.order_by(time, Trial.number)


def timed_configs(
    session: Session, study_id: str, mode: str, *, most: int
) -> Sequence[Row[dict[str, Any], float | None]]:
    """Config and time of trials that were timed in full; of a long study every so manieth, for at most `most` of them.

    Called by the page of a study, for what each knob does.
    """
    timed, time = _time_of(mode)
    query = select(Trial.config, time).where(Trial.study_id == study_id, timed).order_by(Trial.number)
    last = last_number(session, study_id) or 0
    if last >= most:
        # An odd step: searches do things by turns of two and four.
        query = query.where(Trial.number % ((last // most + 1) | 1) == 0)
    return session.execute(query).all()


def answers(
    session: Session,
    *,
    device_name: str | None = None,
    made_in: str | None = None,
    dtype: str | None = None,
    modeled: bool = False,
    limit: int,
) -> Sequence[Result]:
    """Results that are answers, by shape. Called by the pages that show a whole device: map, roofline, comparison.

    made_in: instead of today's answers, the newest revision of each problem that was made in this environment
    modeled: candidates of mode `model` in place of published revisions
    """
    query = select(Result)
    if modeled:
        query = query.where(Result.current.is_(True), Result.revision.is_(None), Result.evidence_level == 0)
    elif made_in is None:
        query = query.where(Result.current.is_(True), Result.revision.is_not(None))
    else:
        query = query.where(Result.id.in_(_newest_made_in(made_in)))
    if device_name is not None:
        query = query.where(Result.device_name == device_name)
    if dtype is not None:
        query = query.where(Result.dtype == dtype)
    return session.scalars(query.order_by(Result.n, Result.k, Result.m, Result.dtype).limit(limit)).all()


def _newest_made_in(made_in: str) -> Select[str]:
    place = (Result.m, Result.n, Result.k, Result.dtype, Result.layout, Result.arch, Result.device_name)
    rank = func.row_number().over(partition_by=place, order_by=Result.revision.desc()).label("rank")
    ranked = select(Result.id.label("id"), rank).where(Result.made_in == made_in, Result.revision.is_not(None))
    ranked = ranked.where(Result.withdrawn_at.is_(None))
    found = ranked.subquery()
    return select(found.c.id).where(found.c.rank == 1)


def answered_devices(session: Session) -> Sequence[Row[str, int]]:
    """Name of each device that a current result is about, and how many of them are published; by name.

    Called by the device menus.
    """
    query = select(Result.device_name, func.count(Result.revision)).where(Result.current.is_(True))
    return session.execute(query.group_by(Result.device_name).order_by(Result.device_name)).all()


def published_environments(session: Session) -> Sequence[str]:
    """`made_in` of all published revisions, each once, in order. Called by the page that compares environments."""
    query = select(Result.made_in).where(Result.revision.is_not(None)).distinct()
    return session.scalars(query.order_by(Result.made_in)).all()


def studies_with_results(session: Session, study_ids: Sequence[str]) -> dict[str, str]:
    """Id of the newest result of each study that has one. Called by the page of a job."""
    query = select(Result.study_id, Result.id).where(Result.study_id.in_(study_ids)).order_by(Result.created_at)
    return {study_id: result_id for study_id, result_id in session.execute(query) if study_id is not None}
