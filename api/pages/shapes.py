"""A whole device at a time: the ratio to the library over shapes, and the roofline."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from api.deps import Db
from api.pages.replies import page
from api.pages.route import PageRoute
from api.pages.words import BINS, ratio_of
from api.services.results import time_us
from api.services.targets import Targets
from db import queries
from db.models import Result
from db.queries import Shape
from kernels.devices import PROFILES, default_profile
from kernels.problem import Dtype, GemmProblem
from pictures.roofline import Point, picture

router = APIRouter(route_class=PageRoute)

MOST_RESULTS = 5000


@dataclass(slots=True)
class Family:
    """Results with one N and K, by M."""

    n: int
    k: int
    by_m: dict[int, list[Result]] = field(default_factory=dict)


@router.get("/map")
def shape_map(db: Db, device: str = "", dtype: str = "", modeled: bool = False) -> Response:
    """Rows are (N, K), columns are M, cells the ratio to the vendor library."""
    with db.read() as session:
        chosen, found = _answers(session, device, dtype, modeled)
        gone = _withdrawn(session, chosen, dtype or None) if not modeled else {}
        families = _families(found, gone)
        return page(
            "map.html",
            **_menu(session, chosen, dtype, modeled),
            ms=sorted({result.m for result in found} | {m for m, _, _ in gone}),
            families=families,
            withdrawn=gone,
            count=len(found),
            most=MOST_RESULTS,
            ratio_of=ratio_of,
            bins=BINS,
        )


@router.get("/roofline")
def roofline(db: Db, device: str = "", dtype: str = "", modeled: bool = False) -> Response:
    """All results of a device under its roof."""
    with db.read() as session:
        chosen, found = _answers(session, device, dtype, modeled)
        arch = found[0].arch if found else ""
        named = next((profile for profile in PROFILES if profile.name == chosen), None)
        profile = named or (default_profile(Targets(()).named(arch).arch) if arch else None)
        points = [point for result in found if (point := _point(result))]
        return page(
            "roofline.html",
            **_menu(session, chosen, dtype, modeled),
            picture=picture(points, profile).fragment() if points and profile else None,
            points=sorted(points, key=lambda point: point.flops_per_byte),
            profile=profile,
            own_profile=named is not None,
            count=len(found),
            most=MOST_RESULTS,
        )


def _answers(session: Session, device: str, dtype: str, modeled: bool) -> tuple[str, list[Result]]:
    """The device that is shown, the first with such results where none is named, and its results."""
    names = (name for name, published in queries.answered_devices(session) if published or modeled)
    chosen = device or next(names, "")
    rows = queries.answers(session, device_name=chosen, dtype=dtype or None, modeled=modeled, limit=MOST_RESULTS)
    return chosen, list(rows)


def _menu(session: Session, chosen: str, dtype: str, modeled: bool) -> dict[str, Any]:
    names = dict.fromkeys(name for name, _ in queries.answered_devices(session))
    names |= {chosen: None} if chosen else {}
    return {"device": chosen, "devices": list(names), "dtype": dtype, "modeled": modeled, "dtypes": list(Dtype)}


def _withdrawn(session: Session, device: str, dtype: str | None) -> dict[Shape, list[Result]]:
    """What answered for shapes that nothing answers for any more, because its kernel was found to be bad."""
    found: dict[Shape, list[Result]] = {}
    for result in queries.withdrawn_without_answer(session, device_name=device, dtype=dtype, limit=MOST_RESULTS):
        found.setdefault((result.m, result.n, result.k), []).append(result)
    return found


def _families(found: list[Result], withdrawn: Iterable[Shape]) -> list[Family]:
    families: dict[tuple[int, int], Family] = {(n, k): Family(n=n, k=k) for _, n, k in withdrawn}
    for result in found:
        family = families.setdefault((result.n, result.k), Family(n=result.n, k=result.k))
        family.by_m.setdefault(result.m, []).append(result)
    return [families[place] for place in sorted(families)]


def _point(result: Result) -> Point | None:
    time = time_us(result)
    if not time:
        return None
    problem = GemmProblem(m=result.m, n=result.n, k=result.k, dtype=Dtype.parse(result.dtype))
    return Point(
        name=str(problem),
        flops_per_byte=problem.flops / problem.min_bytes,
        tflops=problem.flops / time / 1e6,
        modeled="measured" not in result.evidence,
        link=f"/results/{result.id}",
    )
