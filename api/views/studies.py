"""Bodies of /v1/studies.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from datetime import datetime

from pydantic import BaseModel

from api.examples import COVERAGE_EXAMPLE, ID_EXAMPLE, PROBLEM_EXAMPLE, SHA_EXAMPLE, TRIAL_EXAMPLE, WHEN_EXAMPLE
from api.views.base import Json, example
from api.views.problems import ProblemView


class TrialView(BaseModel):
    """One config that was tried."""

    model_config = example(TRIAL_EXAMPLE)

    number: int
    outcome: str
    reason: str
    """Why it has this outcome, with the numbers."""
    config: Json
    evidence: list[str]
    modeled_us: float | None
    median_us: float | None
    ratio: Json
    """Baseline time over ours, by baseline: above 1 we are faster."""
    compile_s: float | None
    gpu_s: float | None
    max_rel_error: float | None
    source_hash: str | None
    artifact_sha256: str | None
    finished_at: datetime | None


class TrialList(BaseModel):
    """One page of trials, in number order."""

    model_config = example({"items": [TRIAL_EXAMPLE], "next": 7})

    items: list[TrialView]
    next: int | None
    """`after` of the next page, null on the last one."""


class StudyView(BaseModel):
    """One problem on one device."""

    model_config = example(
        {
            "id": ID_EXAMPLE,
            "study_key": SHA_EXAMPLE,
            "state": "DONE",
            "reason": "",
            "problem": PROBLEM_EXAMPLE,
            "arch": "sm_90a",
            "device": "NVIDIA H200",
            "mode": "measure",
            "seed": 0,
            "request": {},
            "environment": {"gpu_name": "NVIDIA H200", "driver": "580.95"},
            "environment_key": SHA_EXAMPLE,
            "counts": {"MEASURED": 40},
            "coverage": COVERAGE_EXAMPLE,
            "best": TRIAL_EXAMPLE,
            "created_at": WHEN_EXAMPLE,
            "started_at": WHEN_EXAMPLE,
            "finished_at": WHEN_EXAMPLE,
        }
    )

    id: str
    study_key: str
    state: str
    reason: str
    problem: ProblemView
    arch: str
    device: str | None
    mode: str
    seed: int
    request: Json
    """Everything that decides what the study does."""
    environment: Json | None
    environment_key: str | None
    counts: dict[str, int]
    """Trials by outcome; GET /v1/studies/{id}/trials gives the reason of each."""
    coverage: Json | None
    """Configs worth asking about, and how many were asked, rejected, compiled and timed; null until the study ends."""
    best: TrialView | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
