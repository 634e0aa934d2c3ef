"""Bodies of /v1/jobs.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from datetime import datetime

from pydantic import BaseModel

from api.examples import ID_EXAMPLE, JOB_SUMMARY_EXAMPLE, PROBLEM_EXAMPLE
from api.views.base import example
from api.views.problems import ProblemView, StudyState


class JobSubmitted(BaseModel):
    """202 of POST /v1/jobs."""

    model_config = example({"id": ID_EXAMPLE, "state": "QUEUED", "studies": [{"id": ID_EXAMPLE, "state": "QUEUED"}]})

    id: str
    state: str
    studies: list[StudyState]
    """In the order of the problems; problems that are equal share one."""


class JobSummary(BaseModel):
    """A job in a list."""

    model_config = example(JOB_SUMMARY_EXAMPLE)

    id: str
    state: str
    mode: str
    force: bool
    priority: int
    cancel_requested: bool
    created_at: datetime
    finished_at: datetime | None


class JobList(BaseModel):
    """One page of jobs."""

    model_config = example({"items": [JOB_SUMMARY_EXAMPLE], "next": None})

    items: list[JobSummary]
    next: str | None
    """`after` of the next page, null on the last one."""


class JobStudyView(BaseModel):
    """A study as its job shows it."""

    id: str
    state: str
    reason: str
    """Why it is in this state, where that needs saying."""
    problem: ProblemView
    arch: str
    device: str | None
    """Null until a device is chosen for a study that asks only for an architecture."""
    weight: float
    counts: dict[str, int]
    """Trials by outcome."""
    best_trial: int | None
    best_us: float | None
    """Time of the best trial so far: a measured median, or the model's estimate in mode `model`."""


class JobView(JobSummary):
    """A job with its studies."""

    model_config = example(
        {
            **JOB_SUMMARY_EXAMPLE,
            "time_left_s": 84.5,
            "counts": {"MEASURED": 12, "REJECTED": 3},
            "states": {"RUNNING": 1},
            "studies": [
                {
                    "id": ID_EXAMPLE,
                    "state": "RUNNING",
                    "reason": "",
                    "problem": PROBLEM_EXAMPLE,
                    "arch": "sm_90a",
                    "device": "NVIDIA H200",
                    "weight": 1.0,
                    "counts": {"MEASURED": 12, "REJECTED": 3},
                    "best_trial": 7,
                    "best_us": 175.6,
                }
            ],
        }
    )

    time_left_s: float | None
    """Seconds until the search is over, from the pace so far, without the finals and checks; null until it is known."""
    counts: dict[str, int]
    """Trials of all studies by outcome."""
    states: dict[str, int]
    """Studies by state."""
    studies: list[JobStudyView]
