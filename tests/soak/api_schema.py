"""Thousands of requests made from the OpenAPI document, right ones and wrong ones: never a 5xx, never another answer
than the document promises.

    python -m tests.soak.api_schema --examples 20000 --out results/soak/api_schema.json

Half of the ids are of rows that exist, so that requests get beyond "there is no such job". Every refusal must have the
one shape of errors and name what is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import create_app
from api.settings import ApiSettings
from db import queries
from db.database import Database
from tests.api.conftest import SM90_CONFIG, job_body, new_result
from tests.db.rows import new_study
from tests.soak.report import hand_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
KNOWN_IDS = 0.5  # share of path and body ids that exist
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


class SchemaViolation(AssertionError):
    """An answer that no client could rely on."""


def fill(url: str) -> dict[str, str]:
    """A database with something of each kind; gives an id of each."""
    with Database.open(url) as database, database.write() as session:
        wanted = new_study(m=64, n=64, k=64)
        job = queries.create_job(session, request=job_body(), mode="measure", studies=[wanted])
        (study,) = queries.studies_of_job(session, job.id)
        queries.claim_next_study(session, "tuner")
        for number, outcome in enumerate(("MEASURED", "CRASHED")):
            queries.save_trial(
                session,
                study.id,
                number,
                config=SM90_CONFIG,
                config_key=f"config-{number}",
                outcome=outcome,
                reason="" if outcome == "MEASURED" else "illegal address",
                evidence=("measured", "numeric") if outcome == "MEASURED" else (),
                median_us=21.5 if outcome == "MEASURED" else None,
                measurement=queries.NewMeasurement(samples_us=(21.4, 21.6)) if outcome == "MEASURED" else None,
            )
        # Over, so that its stream of events ends.
        queries.finish_study(session, study.id, state="DONE")
        ids = {"job_id": job.id, "study_id": study.id}
        for m in (64, 128, 4096):
            result = queries.add_result(session, new_result(m=m))
            queries.publish_result(session, result.id)
        ids["result_id"] = result.id
        queries.add_result(session, new_result(m=256, evidence=("measured",)))
        ids["export_id"] = queries.create_export(
            session, {"results": [result.id], "format": "zip", "allow_unverified": False}
        ).id
        queries.upsert_device(session, uuid="GPU-1", name="NVIDIA H200", arch="sm_90a", sm_count=132)
    return ids


def application(folder: Path) -> tuple[FastAPI, dict[str, str]]:
    """The application over a filled database."""
    url = f"sqlite:///{folder / 'tuner.db'}"
    ids = fill(url)
    # The name by which an application is called without a network.
    settings = ApiSettings(database_url=url, exports_dir=folder, artifacts_dir=folder, allowed_hosts=("testserver",))
    return create_app(settings), ids


def run(examples: int, seed: int, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Send that many requests, spread over the routes. Raises what a failed check raises, with the request in it."""
    began = time.monotonic()
    statuses: Counter[int] = Counter()
    routes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the generator, about patterns that it cannot turn around
        app, ids = application(Path(name))
        document = schemathesis.openapi.from_asgi("/openapi.json", app)
        operations = [result.ok() for result in document.get_all_operations()]  # type: ignore[union-attr]
        turn = 0
        while sum(statuses.values()) < examples:
            # A route without parameters takes one request a turn, so the others take more turns.
            share = -(-(examples - sum(statuses.values())) // (len(operations) * len(MODES)))
            for operation in operations:
                before = sum(statuses.values())
                for mode in MODES:
                    _exercise(operation, mode, share, seed=seed + turn, ids=ids, statuses=statuses)
                sent = sum(statuses.values()) - before
                routes[operation.label] = routes.get(operation.label, 0) + sent
                report(f"turn {turn}, {operation.label}: {sent} requests")
            turn += 1
        app.state.database.close()
    return {
        "requests": sum(statuses.values()),
        "seed": seed,
        "routes": routes,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "wall_s": round(time.monotonic() - began, 1),
    }


def _exercise(
    operation: Any, mode: GenerationMode, examples: int, *, seed: int, ids: dict[str, str], statuses: Counter[int]
) -> None:
    rng = random.Random(f"{seed} {operation.label} {mode}")
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except Exception as error:  # a route without parameters cannot be called wrongly
        if mode is GenerationMode.NEGATIVE:
            return
        raise error from None

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )
    @given(case=strategy)
    def one(case: Any) -> None:
        _use_known_ids(case, ids, rng)
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        _check_refusal(case, response)

    try:
        one()
    except Exception as error:
        if mode is GenerationMode.NEGATIVE and type(error).__name__ in ("Unsatisfiable", "SkipTest"):
            return  # nothing about the route can be wrong
        raise


def _use_known_ids(case: Any, ids: dict[str, str], rng: random.Random) -> None:
    """Put ids of rows that exist in the place of invented ones."""
    for name in case.path_parameters or {}:
        if name in ids and rng.random() < KNOWN_IDS:
            case.path_parameters[name] = ids[name]
    body = case.body if isinstance(case.body, dict) else {}
    if isinstance(body.get("results"), list) and body["results"] and rng.random() < KNOWN_IDS:
        body["results"][0] = ids["result_id"]
    if isinstance(body.get("result"), str) and rng.random() < KNOWN_IDS:
        body["result"] = ids["result_id"]


def _check_refusal(case: Any, response: Any) -> None:
    """Every error has the one shape, and says something. Raises SchemaViolation."""
    if response.status_code < 400:
        return
    answer = json.loads(response.content)
    if not {"error", "detail", "hint"} <= set(answer) or not answer["detail"]:
        raise SchemaViolation(f"{case.method} {case.path}: {response.status_code} {answer!r}")


def main() -> int:
    """0 when every answer was one that the document promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = run(options.examples, options.seed, lambda line: print(line, file=sys.stderr, flush=True))
    command = f"python -m tests.soak.api_schema --examples {options.examples} --seed {options.seed}"
    hand_over({"schema": 1, "command": command, "schemathesis": schemathesis.__version__, **found}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
