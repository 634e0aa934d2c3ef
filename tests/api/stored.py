"""A database as it is after real work: the recorded results of an H200, with their studies, trials and samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from db import queries
from db.models import Trial, utc_now
from db.queries import NewMeasurement, NewResult, NewStudy
from kernels.config import Sm90GemmConfig
from tuner.records import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.orm import Session

    from db.database import Database

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "h200" / "dev.json"
ROWS_A_STATEMENT = 2000


def recorded_rows() -> list[dict[str, Any]]:
    """Rows of the recorded file."""
    rows: list[dict[str, Any]] = json.loads(RECORDED.read_text())["rows"]
    return rows


def few_rows() -> list[dict[str, Any]]:
    """Some of them, small and large M, with and without an aligned N: storing all takes seconds."""
    return [row for place, row in enumerate(recorded_rows()) if place < 6 or place % 8 == 0 or row["n"] % 8]


def store_row(session: Session, row: Mapping[str, Any], *, device: str | None = None, factor: float = 1.0) -> str:
    """A finished study with its winner, published; gives the result's id.

    device, factor: of an invented second device, whose times are so much longer
    """
    name = device or row["environment"]["gpu_name"]
    environment = {**row["environment"], "gpu_name": name}
    key = Environment.from_dict(environment).key(row["source_hash"])
    place = {item: row[item] for item in ("m", "n", "k", "dtype", "layout", "arch")}
    request = {"seed": 0, "protocol": row["protocol"]}
    study_key = f"{row['m']}-{row['n']}-{row['k']}-{row['dtype']}-{name}-{factor}"
    wanted = NewStudy(study_key=study_key, device_name=name, request=request, **place)
    job = queries.create_job(session, request={"effort": "normal"}, mode="measure", studies=[wanted])
    study = queries.studies_of_job(session, job.id)[0]
    median_us = row["median_us"] * factor
    queries.save_trial(
        session,
        study.id,
        0,
        config=row["config"],
        config_key="winner",
        outcome="MEASURED",
        evidence=["measured", "numeric"],
        source_hash=row["source_hash"],
        median_us=median_us,
        ratio={ours: value / factor for ours, value in row["ratio"].items()},
        measurement=NewMeasurement(
            samples_us=[sample * factor for sample in row["samples_us"]],
            baselines_us=row["baseline_samples_us"],
            protocol=row["protocol"],
            environment=environment,
            discarded=row["discarded"],
            states=[{"sm_clock_mhz": 1980.0, "power_w": 500.0 + at, "temperature_c": 45.0} for at in range(3)],
        ),
    )
    queries.finish_study(session, study.id, state="DONE")
    ratio = {
        one: {"median": value / factor, "low": low / factor, "high": high / factor}
        for one, value in row["ratio"].items()
        for low, high in [row["ratio_interval"][one]]
    }
    result = queries.add_result(
        session,
        NewResult(
            **place,
            device_name=name,
            study_id=study.id,
            trial_number=0,
            config=row["config"],
            evidence=row["evidence"],
            environment=environment,
            environment_key=key,
            median_us=median_us,
            interval_us=[edge * factor for edge in row["interval_us"]],
            baselines_us=row["baselines_us"],
            ratio=ratio,
            noise=row["noise"],
            aa_ratio=row["aa_ratio"],
            tie_set=[{"trial": 3, "config": row["config"]}],
            checks=row["checks"],
            tflops=row["tflops"] / factor,
            max_rel_error=row["max_rel_error"],
            trials=row["trials"],
            artifact_sha256=row["artifact_sha256"],
            source_hash=row["source_hash"],
        ),
    )
    queries.publish_result(session, result.id)
    return result.id


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What was stored.

    results: ids of the recorded rows' results, in order
    newest: id of the second revision of the first
    """

    results: list[str]
    newest: str


def store_all(database: Database) -> Stored:
    """Recorded rows on the H200, a few on an invented slower one, and one shape in two revisions."""
    rows = few_rows()
    with database.write() as session:
        queries.upsert_device(
            session,
            uuid="GPU-0",
            name="NVIDIA H200",
            arch="sm_90a",
            sm_count=132,
            environment=rows[0]["environment"],
        )
        found = [store_row(session, row) for row in rows]
        for row in rows[:5]:
            store_row(session, row, device="Slow H200", factor=1.25)
        later = rows[0] | {"environment": rows[0]["environment"] | {"driver": "590.10"}}
        return Stored(results=found, newest=store_row(session, later, factor=0.97))


def store_large_study(database: Database, trials: int) -> str:
    """One study with so many trials, of several outcomes; gives its id."""
    row = recorded_rows()[0]
    place = {item: row[item] for item in ("m", "n", "k", "dtype", "layout", "arch")}
    wanted = NewStudy(study_key=f"large-{trials}", device_name="NVIDIA H200", request={"seed": 0}, **place)
    with database.write() as session:
        job = queries.create_job(session, request={}, mode="measure", studies=[wanted])
        study = queries.studies_of_job(session, job.id)[0]
        for first in range(0, trials, ROWS_A_STATEMENT):
            numbers = range(first, min(trials, first + ROWS_A_STATEMENT))
            session.execute(insert(Trial), [_trial(study.id, number) for number in numbers])
        timed = -(-trials // 4) * 3
        study.counts = {"MEASURED": timed, "REJECTED": trials - timed}
        times = [(one["median_us"], one["number"]) for one in map(partial(_trial, study.id), range(min(trials, 2000)))]
        study.best_us, study.best_trial = min(time for time in times if time[0])
        session.flush()
        queries.finish_study(session, study.id, state="DONE")
    return study.id


def _trial(study_id: str, number: int) -> dict[str, Any]:
    timed = number % 4 < 3
    depth, width = 2 + number % 8, 16 + 16 * (number % 16)
    config = Sm90GemmConfig(pipe_depth=depth, blk_n=width, epi_n=16).to_dict()
    return {
        "study_id": study_id,
        "number": number,
        "config": config,
        "config_key": f"config-{number}",
        "outcome": "MEASURED" if timed else "REJECTED",
        "reason": "" if timed else f"pipe_depth = {depth}: a reason that names config {number}",
        "evidence": ["measured", "numeric"] if timed else [],
        "modeled_us": 9.0 + width / 64,
        "median_us": 10.0 + 40.0 / (1 + number % 977) + width / 128 if timed else None,
        "ratio": {"cublaslt_best": 1.1} if timed else None,
        "finished_at": utc_now(),
        "toolchain": "",
    }
