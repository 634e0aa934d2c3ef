"""The form that submits a job, checked while it is filled in.

The form is turned into the body of POST /v1/jobs, and that body is checked and stored by what checks and stores the
requests of programs: there is one set of rules.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response
from pydantic import ValidationError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.deps import Db
from api.errors import ApiError, RequestError, validation_messages
from api.pages.presets import GPUS, MODELS, MOST_SHAPES, TOKENS, shapes_of
from api.pages.replies import page, see
from api.pages.route import Form, PageRoute
from api.schemas import JobIn
from api.services import devices, jobs
from api.views.devices import DeviceView, ProfileView
from db.database import Database
from db.models import DeviceState
from db.queries import NewStudy
from kernels.arch import ARCHES
from search_space.request import PROTOCOL_KINDS, Effort, Mode
from search_space.samplers import DEFAULT_SAMPLER, SAMPLERS

router = APIRouter(prefix="/submit", route_class=PageRoute)

DEFAULTS = {
    "shapes": "",
    "dtype": "bf16",
    "target": "",
    "mode": "",
    "effort": Effort.NORMAL.value,
    "trials": "",
    "wall_s": "",
    "protocol": PROTOCOL_KINDS[0],
    "sampler": DEFAULT_SAMPLER,
    "seed": "0",
    "priority": "0",
    "force": "",
    "model": next(iter(MODELS)),
    "tokens": TOKENS,
    "gpus": "1",
}
_LINE = re.compile(r"(\d+)\s*[x×, ]\s*(\d+)\s*[x×, ]\s*(\d+)(?:\s*\*\s*(\d+(?:\.\d+)?))?")
_WHOLE = re.compile(r"[+-]?\d{1,20}")


@router.get("")
def form(db: Db, shapes: str = "", dtype: str = "bf16", target: str = "") -> Response:
    """The empty form, or one with shapes that a link brings."""
    return _form_page(db, DEFAULTS | {"shapes": shapes, "dtype": dtype, "target": target})


@router.post("/fill")
async def fill(form: Form, db: Db) -> Response:
    """The form with the shapes of a model filled in."""
    fields = DEFAULTS | form
    problems: list[str] = []
    try:
        tokens = [_whole(text, "tokens") for text in re.split(r"[,\s]+", fields["tokens"].strip()) if text]
        found = shapes_of(fields["model"], tokens, _whole(fields["gpus"], "gpus"))
        fields["shapes"] = "\n".join(f"{m}x{n}x{k}" for m, n, k in found)
    except RequestError as error:
        problems = [error.detail]
    return await run_in_threadpool(_form_page, db, fields, problems)


@router.post("/check")
async def check(form: Form, db: Db) -> Response:
    """What would become of the form as it stands; asked while it is filled in."""
    return await run_in_threadpool(_checked, db, DEFAULTS | form)


@router.post("")
async def submit(form: Form, db: Db) -> Response:
    """Submit, and go to the job; or the form again with what is wrong."""
    return await run_in_threadpool(_submitted, db, DEFAULTS | form)


def _checked(db: Database, fields: dict[str, str]) -> Response:
    if not fields["shapes"].strip():
        return page("submit_check.html", problems=[], body=None, studies=[])
    with db.read() as session:
        body, studies, problems = _read(session, fields)
    return page("submit_check.html", problems=problems, body=body, studies=studies)


def _submitted(db: Database, fields: dict[str, str]) -> Response:
    with db.read() as session:
        body, studies, problems = _read(session, fields)
    if body is None or problems:
        return _form_page(db, fields, problems, status=422)
    with db.write() as session:
        job = jobs.submit(session, body, studies, _once(fields))
    return see(f"/jobs/{job.id}")


def _once(fields: Mapping[str, str]) -> str:
    """The same form sent twice is one job; a changed one is another."""
    content = repr(sorted(fields.items())).encode()
    return f"page-{hashlib.sha256(content).hexdigest()}"


def _form_page(db: Database, fields: dict[str, str], problems: list[str] | None = None, status: int = 200) -> Response:
    with db.read() as session:
        listed = devices.listing(session)
    live = [device for device in listed.devices if device.state != DeviceState.OFFLINE]
    targets = _targets(live, listed.profiles)
    shown = fields | {"nonce": secrets.token_hex(8)}
    shown["target"] = fields["target"] or next(iter(targets))
    shown["mode"] = fields["mode"] or (Mode.MEASURE if live else Mode.MODEL).value
    return page(
        "submit.html",
        status=status,
        fields=shown,
        problems=problems or [],
        targets=targets,
        models=list(MODELS),
        gpus=GPUS,
        most_shapes=MOST_SHAPES,
        efforts={effort.value: effort.budget for effort in Effort},
        modes={
            Mode.MEASURE.value: "measure on a GPU",
            Mode.MODEL.value: "compile and estimate, without a GPU",
        },
        samplers=SAMPLERS,
        usual_sampler=DEFAULT_SAMPLER,
    )


def _targets(live: list[DeviceView], profiles: list[ProfileView]) -> dict[str, str]:
    """What a job can name, what is at hand first: devices with a data sheet by name, others by their architecture."""
    names = dict.fromkeys(device.name for device in live)
    by_arch = {
        arch: [name for name in names if any(one.name == name and one.arch == arch for one in live)] for arch in ARCHES
    }
    devices = {
        f"device:{one.name}": f"{one.name} ({'at hand' if one.name in names else 'none at hand'})" for one in profiles
    }
    arches = {
        f"arch:{arch}": f"any device of {arch} ({', '.join(found) + ' at hand' if found else 'none at hand'})"
        for arch, found in by_arch.items()
    }
    everything = devices | arches
    return dict(sorted(everything.items(), key=lambda item: "(none at hand)" in item[1]))


# ---------------------------------------------------------------------- from the form to the body of a job


def _read(session: Session, fields: Mapping[str, str]) -> tuple[JobIn | None, list[NewStudy], list[str]]:
    """The job, the studies it asks for, and what is wrong with it, each as `where: what`."""
    try:
        body = JobIn.model_validate(_body(fields))
        return body, jobs.wanted_studies(session, body), []
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        return None, [], [_by_line(message) for message in validation_messages(found)]
    except ApiError as error:
        hint = f" ({error.hint})" if error.hint and "openapi" not in error.hint else ""
        return None, [], [_by_line(error.detail + hint)]


def _by_line(message: str) -> str:
    """`problems[2].k: ...` as `shape 3, k: ...`."""
    message = message.replace("problems: must not be empty", "shapes: at least one is needed")
    return re.sub(r"problems\[(\d+)\]\.?(\w*)", lambda found: f"shape {int(found[1]) + 1}, {found[2]}", message)


def _body(fields: Mapping[str, str]) -> dict[str, Any]:
    """Raises RequestError naming the field."""
    kind, _, name = fields["target"].partition(":")
    return {
        "problems": [
            {**_shape(line, place), "dtype": fields["dtype"]}
            for place, line in enumerate(filter(str.strip, re.split(r"[\n;]+", fields["shapes"])), 1)
        ],
        kind if kind in ("arch", "device") else "device": name or None,
        "mode": fields["mode"] or Mode.MEASURE.value,
        "effort": fields["effort"],
        "budget": {"trials": _optional(fields["trials"], "trials"), "wall_s": _seconds(fields["wall_s"])},
        "protocol": {"kind": fields["protocol"]},
        "sampler": fields["sampler"],
        "seed": _whole(fields["seed"], "seed"),
        "priority": _whole(fields["priority"], "priority"),
        "force": fields["force"] == "on",
    }


def _shape(line: str, place: int) -> dict[str, Any]:
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise RequestError(f"shape {place}: {ascii(line.strip())[:60]} is no shape: write MxNxK, such as 64x7168x4096")
    weight = {"weight": float(found[4])} if found[4] else {}
    return {"m": int(found[1]), "n": int(found[2]), "k": int(found[3]), **weight}


def _optional(text: str, name: str) -> int | None:
    return _whole(text, name) if text.strip() else None


def _whole(text: str, name: str) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        raise RequestError(f"{name}: must be an integer, got {ascii(text)[:60]}")
    return int(text)


def _seconds(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"wall_s: must be a number of seconds, got {ascii(text)[:60]}") from None
