"""One result: what is known of it, what it was measured by, what came before, and how to use or repeat it."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from api.deps import Db, ExportId, ResultId
from api.pages.replies import page, see
from api.pages.route import Form, PageRoute
from api.schemas import ExportIn, PinIn, RevisionsQuery
from api.services import exports, results
from api.services.exports import NEEDED_EVIDENCE
from api.views.results import ResultView
from db.database import Database
from db.models import FINAL_STATES
from kernels.arch import arch_named
from kernels.config import config_from_dict
from kernels.devices import PROFILES, DeviceProfile, default_profile
from kernels.errors import ConfigError, ProblemError
from kernels.problem import Dtype, GemmProblem
from pictures.curves import samples
from pictures.pipeline import timeline_picture
from search_space.explaining import describe

router = APIRouter(route_class=PageRoute)

ENVIRONMENT_SHOWN = ("gpu_name", "sm_count", "driver", "cuda", "toolchain", "torch", "power_limit_w")


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A result's config as `gemm-tuner explain` tells it.

    facts: needs, tiles, roofline, prediction and parts
    picture: the pipeline, modeled; None for a config that cannot run
    profile: device whose data sheet was used
    """

    facts: dict[str, Any]
    picture: str | None
    profile: str


@router.get("/results/{result_id}")
def show(result_id: ResultId, db: Db, request: Request) -> Response:
    """The whole page."""
    with db.read() as session:
        result = results.show(session, result_id)
        published = results.revisions(session, result_id, RevisionsQuery())
    measured = result.measurement
    base = str(request.base_url).rstrip("/")
    return page(
        "result.html",
        result=result,
        revisions=published.items,
        samples=samples(measured.samples_us, measured.baselines_us).fragment() if measured else None,
        clocks=_clocks(measured.states) if measured else [],
        explained=explained(result),
        missing=[word for word in NEEDED_EVIDENCE if word not in result.evidence],
        environment={name: (result.environment or {}).get(name) for name in ENVIRONMENT_SHOWN},
        reproduce=f"gemm-tuner reproduce {result.id} --url {base}",
        export_command=f"gemm-tuner export {result.id} -o tuned.zip --url {base}",
    )


@router.post("/results/{result_id}/export")
async def export(result_id: ResultId, form: Form, db: Db) -> Response:
    """Order a bundle and go to it."""
    body = ExportIn(
        results=[result_id],
        format="wheel" if form.get("format") == "wheel" else "zip",
        allow_unverified=form.get("allow_unverified") == "on",
    )
    return see(f"/exports/{await run_in_threadpool(_ordered, db, body)}")


def _ordered(db: Database, body: ExportIn) -> str:
    with db.write() as session:
        return exports.create(session, body).id


@router.post("/results/{result_id}/pin")
async def pin(result_id: ResultId, form: Form, db: Db) -> Response:
    """Pin the revision, or let it go."""
    await run_in_threadpool(_pinned, db, PinIn(result=result_id, pinned=form.get("pinned") == "yes"))
    return see(f"/results/{result_id}")


def _pinned(db: Database, body: PinIn) -> None:
    with db.write() as session:
        results.pin(session, body)


@router.get("/exports/{export_id}")
def exported(export_id: ExportId, db: Db, part: bool = False) -> Response:
    """The state of a bundle; the part of it that changes with `part`."""
    with db.read() as session:
        found = exports.show(session, export_id)
    return page("export_part.html" if part else "export.html", export=found, over=found.state in FINAL_STATES)


def _clocks(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Range of each reading of the card over the rounds."""
    found = []
    for name, label, unit in (
        ("sm_clock_mhz", "SM clock", "MHz"),
        ("memory_clock_mhz", "memory clock", "MHz"),
        ("power_w", "power", "W"),
        ("temperature_c", "temperature", "C"),
    ):
        values = [state[name] for state in states if state.get(name) is not None]
        if values:
            found.append({"label": label, "unit": unit, "low": min(values), "high": max(values)})
    limits = sorted({reason for state in states for reason in state.get("throttle_reasons") or ()})
    if states:
        found.append({"label": "clock limits", "unit": "", "low": ", ".join(limits) or "none", "high": ""})
    return found


def explained(result: ResultView) -> Explained | None:
    """None for a config that this version does not know any more."""
    stored = result.problem
    try:
        problem = GemmProblem(m=stored.m, n=stored.n, k=stored.k, dtype=Dtype.parse(stored.dtype))
        config = config_from_dict(result.arch, result.config)
    except (ConfigError, ProblemError):
        return None
    profile = _profile(result)
    facts = describe(problem, config, profile)
    legal = facts["violation"] is None
    picture = timeline_picture(problem, config, profile).fragment() if legal else None
    return Explained(facts=facts, picture=picture, profile=profile.name)


def _profile(result: ResultView) -> DeviceProfile:
    named = next((profile for profile in PROFILES if profile.name == result.device), None)
    return named or default_profile(arch_named(result.arch))
