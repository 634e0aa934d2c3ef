"""What became slower after a change of driver, CUDA or toolchain, and what nobody has measured since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from api.schemas import MAX_PROBLEMS
from api.services.freshness import parts_of, stale_reason
from api.services.results import target_filter, time_us
from api.services.studies import problem_view
from api.views.regressions import RegressionList, RegressionSide, RegressionView
from db import queries

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from api.schemas import RegressionsQuery
    from api.services.kept import Known
    from db.models import Result

    Verdict = Literal["slower", "faster", "same"]


def report(session: Session, query: RegressionsQuery, known: Known) -> RegressionList:
    """One page. Raises UnknownTarget."""
    arch, device_name = target_filter(query.device, known.targets)
    rows = queries.changed_environments(
        session, arch=arch, device_name=device_name, limit=query.limit + 1, after=query.after
    )
    page = rows[: query.limit]
    views = [_view(after, before) for after, before in page]
    waiting = queries.answers_made_in(session, known.stale, arch=arch, device_name=device_name) if known.stale else ()
    problems = [
        {"m": row.m, "n": row.n, "k": row.k, "dtype": row.dtype, "layout": row.layout, "device": row.device_name}
        for row in waiting[:MAX_PROBLEMS]
    ]
    return RegressionList(
        items=[view for view in views if query.verdict in (None, view.verdict)],
        next=page[-1][0].id if len(rows) > query.limit else None,
        stale=len(waiting),
        submit={"problems": problems} if problems else None,
    )


def _view(after: Result, before: Result) -> RegressionView:
    then, now = time_us(before), time_us(after)
    changed = stale_reason(before.environment, after.environment)
    return RegressionView(
        problem=problem_view(after),
        arch=after.arch,
        device=after.device_name,
        change=changed or stale_reason(parts_of(before.made_in), parts_of(after.made_in)) or "another environment",
        verdict=_verdict(after, before),
        time_ratio=now / then if then and now else None,
        before=_side(before),
        after=_side(after),
    )


def _side(result: Result) -> RegressionSide:
    return RegressionSide(
        result=result.id,
        revision=result.revision,
        median_us=time_us(result),
        interval_us=result.interval_us,
        ratio=result.ratio or {},
        config=result.config,
    )


def _verdict(after: Result, before: Result) -> Verdict:
    """A change within the noise of both is none: only intervals that lie apart count."""
    (then_low, then_high), (now_low, now_high) = _interval(before), _interval(after)
    if now_low > then_high:
        return "slower"
    return "faster" if now_high < then_low else "same"


def _interval(result: Result) -> tuple[float, float]:
    low_high: Any = result.interval_us or (time_us(result) or 0.0,) * 2
    return low_high[0], low_high[1]
