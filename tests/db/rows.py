"""Rows that the tests store, with every field that does not matter filled in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from db import queries
from db.queries import NewMeasurement, NewResult, NewStudy

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from db.models import Job, Result, Trial

CHECKED = ("measured", "numeric", "checked")


def new_study(key: str = "a", **changes: Any) -> NewStudy:
    """A problem of a job; equal keys are equal requests."""
    base = NewStudy(
        study_key=key * 64,
        m=4096,
        n=4096,
        k=4096,
        dtype="bf16",
        layout="NT",
        arch="sm_90a",
        device_name=None,
        request={"key": key},
    )
    return replace(base, **changes)


def post_job(session: Session, *keys: str, **changes: Any) -> Job:
    """A job of one study a key, in mode `measure` unless changed."""
    fields: dict[str, Any] = {"request": {"keys": list(keys)}, "mode": "measure", **changes}
    return queries.create_job(session, studies=[new_study(key) for key in keys], **fields)


def only_study(session: Session, job: Job) -> str:
    """Id of the single study of a job."""
    (study,) = queries.studies_of_job(session, job.id)
    return study.id


def report(session: Session, study_id: str, number: int, **changes: Any) -> Trial:
    """A measured trial with its samples."""
    fields: dict[str, Any] = {
        "config": {"blk_m": 128, "number": number},
        "config_key": f"config-{number}",
        "outcome": "MEASURED",
        "evidence": ("measured",),
        "source_hash": f"{number:064x}",
        "toolchain": "nvcc 13.0.88",
        "median_us": 200.0 - number,
        "measurement": NewMeasurement(samples_us=(200.0, 201.5), baselines_us={"torch": (210.0, 211.0)}),
        **changes,
    }
    return queries.save_trial(session, study_id, number, **fields)


def new_result(**changes: Any) -> NewResult:
    """A result for 4096x4096x4096 on an H200, checked."""
    base = NewResult(
        m=4096,
        n=4096,
        k=4096,
        dtype="bf16",
        layout="NT",
        arch="sm_90a",
        device_name="NVIDIA H200",
        config={"blk_m": 128},
        evidence=CHECKED,
        environment={"driver": "580"},
        environment_key="h200-580",
        median_us=175.6,
        interval_us=(175.2, 176.0),
    )
    return replace(base, **changes)


def publish(session: Session, **changes: Any) -> Result:
    """A published result."""
    return queries.publish_result(session, queries.add_result(session, new_result(**changes)).id)
