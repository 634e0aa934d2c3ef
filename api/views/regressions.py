"""Bodies of /v1/regressions.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from typing import Literal

from pydantic import BaseModel

from api.examples import ID_EXAMPLE, PROBLEM_EXAMPLE
from api.views.base import Json, example
from api.views.problems import ProblemView


class RegressionSide(BaseModel):
    """One of two revisions that are compared."""

    result: str
    revision: int | None
    median_us: float | None
    interval_us: list[float] | None
    """95 % interval of the median."""
    ratio: Json
    """Baseline time over ours, by baseline: above 1 we are faster."""
    config: Json


class RegressionView(BaseModel):
    """A problem that was measured before and after its environment changed."""

    problem: ProblemView
    arch: str
    device: str | None
    change: str
    """What changed between the two."""
    verdict: Literal["slower", "faster", "same"]
    """`same` where the intervals of both touch."""
    time_ratio: float | None
    """Time now over time before: above 1 it became slower."""
    before: RegressionSide
    """Newest revision of another environment than today's answer."""
    after: RegressionSide
    """The revision that answers today."""


_SIDE = {
    "result": ID_EXAMPLE,
    "revision": 2,
    "median_us": 175.6,
    "interval_us": [175.2, 176.0],
    "ratio": {},
    "config": {},
}


class RegressionList(BaseModel):
    """One page of comparisons, and what waits to be measured again."""

    model_config = example(
        {
            "items": [
                {
                    "problem": PROBLEM_EXAMPLE,
                    "arch": "sm_90a",
                    "device": "NVIDIA H200",
                    "change": "driver was 570.86, is 580.95",
                    "verdict": "slower",
                    "time_ratio": 1.031,
                    "before": _SIDE,
                    "after": _SIDE | {"revision": 3, "median_us": 181.0, "interval_us": [180.4, 181.7]},
                }
            ],
            "next": None,
            "stale": 1,
            "submit": {"problems": [PROBLEM_EXAMPLE | {"device": "NVIDIA H200"}]},
        }
    )

    items: list[RegressionView]
    next: str | None
    """`after` of the next page, null on the last one."""
    stale: int
    """Answers whose environment no device has any more: not measured again since."""
    submit: Json | None
    """Body for POST /v1/jobs that measures them again, up to 4096; null when there is none."""
