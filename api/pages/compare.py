"""Two devices, two environments or two revisions, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from api.deps import Db
from api.pages.replies import page
from api.pages.route import PageRoute
from api.pages.words import ratio_of
from api.services import results
from api.services.freshness import parts_of
from api.services.results import time_us
from api.views.results import ResultView
from db import queries
from db.models import Result

router = APIRouter(prefix="/compare", route_class=PageRoute)

MOST_RESULTS = 5000
Key = tuple[int, int, int, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One problem on both sides.

    shape: of the problem
    left, right: results, None where a side has none
    time_ratio: left time over right time: above 1 the right side is faster
    apart: whether the 95 % intervals of both medians do not touch; None where one is not known
    """

    shape: str
    left: Result | None
    right: Result | None
    time_ratio: float | None
    apart: bool | None


@router.get("")
def chooser(db: Db, left: str = "", right: str = "") -> Response:
    """What can be compared; with ids of two results, those."""
    if left and right:
        return results_of(db, left, right)
    with db.read() as session:
        return page("compare.html", kind="", rows=[], left="", right="", **_choices(session))


@router.get("/devices")
def devices(db: Db, left: str, right: str) -> Response:
    """Today's answers of two devices."""
    with db.read() as session:
        sides = [queries.answers(session, device_name=name, limit=MOST_RESULTS) for name in (left, right)]
        return page("compare.html", kind="devices", rows=_rows(*sides), left=left, right=right, **_choices(session))


@router.get("/environments")
def environments(db: Db, left: str, right: str) -> Response:
    """The newest revisions that were made in two environments."""
    with db.read() as session:
        sides = [queries.answers(session, made_in=name, limit=MOST_RESULTS) for name in (left, right)]
        return page(
            "compare.html", kind="environments", rows=_rows(*sides), left=left, right=right, **_choices(session)
        )


@router.get("/results")
def results_of(db: Db, left: str, right: str) -> Response:
    """Two results field by field: two revisions, or any two."""
    with db.read() as session:
        pair = results.show(session, left.strip()), results.show(session, right.strip())
    return page(
        "compare_results.html",
        left=pair[0],
        right=pair[1],
        facts=_differences(*map(_facts, pair)),
        config=_differences(pair[0].config, pair[1].config),
        environment=_differences(*(_plain_environment(one) for one in pair)),
        same_problem=pair[0].problem == pair[1].problem,
    )


def _choices(session: Session) -> dict[str, Any]:
    environments = {key: _environment_name(key) for key in queries.published_environments(session)}
    names = {name: name for name, published in queries.answered_devices(session) if published}
    return {"devices": names, "environments": environments, "most": MOST_RESULTS}


def _environment_name(made_in: str) -> str:
    parts = parts_of(made_in)
    if not parts:
        return made_in or "unknown"
    return f"{parts['gpu_name']}, driver {parts['driver']}, CUDA {parts['cuda']}, {parts['toolchain']}"


def _rows(left: Any, right: Any) -> list[Row]:
    """Problems of either side in order; those of both first, so that there is something to see at once."""
    sides: tuple[dict[Key, Result], ...] = tuple({_key(one): one for one in side} for side in (left, right))
    keys = sorted(sides[0].keys() | sides[1].keys(), key=lambda key: (not all(key in side for side in sides), key))
    return [_row(sides[0].get(key), sides[1].get(key)) for key in keys]


def _key(result: Result) -> Key:
    return result.n, result.k, result.m, result.dtype, result.layout


def _row(left: Result | None, right: Result | None) -> Row:
    one = left or right
    assert one is not None
    times = [time_us(side) if side else None for side in (left, right)]
    ratio = times[0] / times[1] if times[0] and times[1] else None
    return Row(
        shape=f"{one.m}x{one.n}x{one.k} {one.dtype}",
        left=left,
        right=right,
        time_ratio=ratio,
        apart=_apart(left, right),
    )


def _apart(left: Result | None, right: Result | None) -> bool | None:
    if left is None or right is None or not left.interval_us or not right.interval_us:
        return None
    return bool(left.interval_us[1] < right.interval_us[0] or right.interval_us[1] < left.interval_us[0])


def _facts(result: ResultView) -> dict[str, Any]:
    return {
        "problem": f"{result.problem.m}x{result.problem.n}x{result.problem.k} {result.problem.dtype}",
        "device": result.device,
        "revision": result.revision,
        "time, us": result.median_us,
        "95 % interval, us": result.interval_us,
        "ratio to the library": ratio_of(result.ratio),
        "TFLOP/s": result.tflops,
        "evidence": result.evidence,
        "trials": result.trials,
        "made": f"{result.created_at:%Y-%m-%d %H:%M}",
    }


def _plain_environment(result: ResultView) -> dict[str, Any]:
    return {name: value for name, value in (result.environment or {}).items() if not isinstance(value, dict | list)}


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any, bool]]:
    """Name, both values and whether they differ, in the order of the left side."""
    names = dict.fromkeys([*left, *right])
    return [(name, left.get(name), right.get(name), left.get(name) != right.get(name)) for name in names]
