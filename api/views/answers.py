"""Bodies of /v1/best and /v1/dispatch.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from typing import Any, Literal

from pydantic import BaseModel

from api.examples import BEST_EXAMPLE, JOB_EXAMPLE, PROBLEM_EXAMPLE, WITHDRAWN_EXAMPLE
from api.views.base import ErrorBody, Json, example
from api.views.problems import ProblemView


class WithdrawnView(BaseModel):
    """A published revision whose kernel was found to be bad."""

    result_id: str
    revision: int
    reason: str
    """What was found, by which trial of which study."""
    at: str
    """When, UTC."""
    device: str | None = None
    """Named where no result answers, since a question may be about several devices."""


class NoResultBody(ErrorBody):
    """404 of GET /v1/best."""

    model_config = example(
        {
            "error": "NoResult",
            "detail": "nothing is tuned for 4096x4096x4096 bf16 on sm_90a",
            "hint": "POST `submit` to /v1/jobs to tune it",
            "submit": JOB_EXAMPLE,
            "withdrawn": [],
        }
    )

    submit: Json
    """Body for POST /v1/jobs that would tune the shape."""
    withdrawn: list[WithdrawnView]
    """What answered before and was found to be bad, newest first."""


class WithdrawnBody(ErrorBody):
    """410 of GET /v1/best: the revision that was asked for was found to be bad."""

    model_config = example(
        {
            "error": "WithdrawnResult",
            "detail": "revision 3 of 4096x4096x4096 bf16 on NVIDIA H200 was withdrawn: WRONG_RESULT: ...",
            "hint": "leave revision out for what answers today; do not use the kernel any more",
            "withdrawn": [WITHDRAWN_EXAMPLE],
        }
    )

    withdrawn: list[WithdrawnView]
    """The revisions of the problem and device that were found to be bad, newest first."""


class BestView(BaseModel):
    """Answer to one question about the best config."""

    model_config = example(BEST_EXAMPLE)

    match: Literal["exact", "nearest", "default"]
    """`exact`: tuned for this shape. `nearest`: tuned for another, legal here. `default`: the heuristic's choice."""
    problem: ProblemView
    """The shape that was asked for."""
    tuned_for: ProblemView | None
    """The shape that was tuned; `median_us`, `ratio` and `tie_set` are of this one. Null for `default`."""
    distance: float
    """Sum over M, N and K of |log2(asked / tuned)|; 0 for `exact` and `default`."""
    arch: str
    device: str | None
    """Device the time is of; the profile that the model used for `default`."""
    config: Json
    evidence: list[str]
    protocol: str | None
    """How it was timed: `burst` or `sustained`, null for `default`."""
    environment: Json | None
    revision: int | None
    """Number of the published revision; null for a candidate or a default."""
    pinned: bool
    """Someone wants this revision to stay the answer: PUT /v1/pins."""
    median_us: float | None
    """A measured median, or the model's estimate where `evidence` says `modeled`."""
    tie_set: list[Any]
    """Configs that the measurement cannot tell from this one, with a `withdrawn_reason` where one was found to be bad
    later."""
    ratio: Json
    """Baseline time over ours, by baseline: above 1 we are faster."""
    verdict: str
    """Faster or slower than the vendor library, in words."""
    stale: bool
    """The device's driver, CUDA or toolchain changed since it was measured."""
    stale_reason: str
    """What changed."""
    withdrawn: list[WithdrawnView]
    """Earlier answers for `problem` on this device that were found to be bad, newest first: do not use them."""
    artifact_sha256: str | None
    """The module built for exactly this shape; null for `nearest` and `default`."""
    result_id: str | None
    """Result that POST /v1/exports takes; null for `default`."""


class BestMiss(BaseModel):
    """A shape of a bulk question that nothing answers."""

    match: Literal["none"] = "none"
    problem: ProblemView
    error: str
    detail: str


class BestBulk(BaseModel):
    """Answers in the order of the shapes, and the request that would tune the ones without."""

    model_config = example({"items": [BEST_EXAMPLE], "submit": None})

    items: list[BestView | BestMiss]
    submit: Json | None
    """Body for POST /v1/jobs that would tune every shape without an answer; null when there is none."""


class DispatchRange(BaseModel):
    """The M for which one result is the nearest, both ends included."""

    m_min: int
    m_max: int
    best: BestView
    """The result as it answers for the M that it was tuned for; its module serves that M alone."""


class DispatchGap(BaseModel):
    """M without an answer, both ends included."""

    m_min: int
    m_max: int


class DispatchView(BaseModel):
    """For fixed N and K: which result answers for which M."""

    model_config = example(
        {
            "n": 4096,
            "k": 4096,
            "dtype": "bf16",
            "layout": "NT",
            "arch": "sm_90a",
            "device": "NVIDIA H200",
            "m_min": 1024,
            "m_max": 8192,
            "ranges": [{"m_min": 2048, "m_max": 8192, "best": BEST_EXAMPLE}],
            "gaps": [{"m_min": 1024, "m_max": 2047}],
            "submit": {"problems": [PROBLEM_EXAMPLE | {"m": 1024}], "device": "NVIDIA H200"},
        }
    )

    n: int
    k: int
    dtype: str
    layout: str
    arch: str
    device: str | None
    m_min: int
    m_max: int
    ranges: list[DispatchRange]
    """In the order of M, without overlap: results tuned for exactly this N and K, each within the threshold of M."""
    gaps: list[DispatchGap]
    """What is left between `m_min` and `m_max`."""
    submit: Json | None
    """Body for POST /v1/jobs that would tune the ends of the gaps; null when there is none."""
