"""Response bodies. Each has an example, which OpenAPI shows and the tests read back.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from api.examples import (
    BEST_EXAMPLE,
    COVERAGE_EXAMPLE,
    ID_EXAMPLE,
    JOB_EXAMPLE,
    JOB_SUMMARY_EXAMPLE,
    MEASUREMENT_EXAMPLE,
    PROBLEM_EXAMPLE,
    RESULT_EXAMPLE,
    SHA_EXAMPLE,
    TRIAL_EXAMPLE,
    WHEN_EXAMPLE,
)

Json = dict[str, Any]


def example(value: Json) -> ConfigDict:
    """Model settings with the body's example."""
    return ConfigDict(json_schema_extra={"examples": [value]}, use_attribute_docstrings=True)


class ErrorBody(BaseModel):
    """Every error."""

    model_config = example({"error": "NotFound", "detail": "no job 'abc'", "hint": "GET /v1/jobs lists the jobs"})

    error: str
    """Name of the error, for programs."""
    detail: str
    """What is wrong, for people."""
    hint: str
    """What to do about it; may be empty."""


class NoResultBody(ErrorBody):
    """404 of GET /v1/best."""

    model_config = example(
        {
            "error": "NoResult",
            "detail": "nothing is tuned for 4096x4096x4096 bf16 on sm_90a",
            "hint": "POST `submit` to /v1/jobs to tune it",
            "submit": JOB_EXAMPLE,
        }
    )

    submit: Json
    """Body for POST /v1/jobs that would tune the shape."""


class ProblemView(BaseModel):
    """One GEMM, D[M,N] = A[M,K] @ B[N,K]^T."""

    model_config = example(PROBLEM_EXAMPLE)

    m: int
    n: int
    k: int
    dtype: str
    layout: str


class StudyState(BaseModel):
    """A study of a job that was just submitted."""

    id: str
    state: str


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
    environment: Json | None
    revision: int | None
    """Number of the published revision; null for a candidate or a default."""
    pinned: bool
    """Someone wants this revision to stay the answer: PUT /v1/pins."""
    median_us: float | None
    """A measured median, or the model's estimate where `evidence` says `modeled`."""
    tie_set: list[Any]
    """Configs that the measurement cannot tell apart from this one."""
    ratio: Json
    """Baseline time over ours, by baseline: above 1 we are faster."""
    verdict: str
    """Faster or slower than the vendor library, in words."""
    stale: bool
    """The device's driver, CUDA or toolchain changed since it was measured."""
    stale_reason: str
    """What changed."""
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


class MeasurementView(BaseModel):
    """The raw samples that a result was chosen by."""

    model_config = example(MEASUREMENT_EXAMPLE)

    phase: Literal["trial", "final"]
    """Where they were taken: among the finalists, or in the search when there was no final."""
    samples_us: list[float]
    """Time of one product, one entry a round."""
    baselines_us: dict[str, list[float]]
    """Times of the vendor library, round by round with `samples_us`."""
    discarded: int
    """Rounds thrown away because another process used the GPU or a clock limit changed."""
    protocol: Json
    states: list[Json]
    """The card at the end of each round: clocks, power, temperature, active limits; empty where nobody read it."""
    energy_mj: dict[str, float]
    """Energy of one product by implementation, in millijoules; only protocol `sustained` takes it."""


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


class ResultView(BaseModel):
    """Winner of a study: a published revision, or a candidate."""

    model_config = example(RESULT_EXAMPLE)

    id: str
    problem: ProblemView
    arch: str
    device: str | None
    study_id: str | None
    trial_number: int | None
    revision: int | None
    pinned: bool
    """Someone wants this revision to stay the answer: PUT /v1/pins."""
    current: bool
    """The published revision that answers for its problem and device, or their newest candidate of its evidence."""
    config: Json
    evidence: list[str]
    environment: Json | None
    environment_key: str | None
    median_us: float | None
    interval_us: list[float] | None
    """95 % interval of the median."""
    baselines_us: Json
    ratio: Json
    """Baseline time over ours, by baseline, with its 95 % interval: above 1 we are faster."""
    verdict: str
    """Faster or slower than the vendor library, in words."""
    noise: float | None
    """Relative gap below which two finalists are equal; null without a final."""
    aa_ratio: Json | None
    """A finalist over its byte-identical twin in the same rounds; null without a final."""
    measurement: MeasurementView | None
    """Null for a modeled or imported result."""
    coverage: Json | None
    """Of the study: configs worth asking about, and how many were asked, rejected, compiled and timed."""
    tie_set: list[Any]
    checks: list[Any]
    """Structural rules, stress builds and memcheck: name, verdict, detail and tool of each."""
    tflops: float | None
    max_rel_error: float | None
    trials: int | None
    """Trials that the study ran."""
    artifact_sha256: str | None
    source_hash: str | None
    created_at: datetime
    published_at: datetime | None


class RevisionList(BaseModel):
    """One page of the published revisions of a problem and device, newest first."""

    model_config = example({"items": [RESULT_EXAMPLE], "next": 3})

    items: list[ResultView]
    next: int | None
    """`after` of the next page, null on the last one."""


class PinList(BaseModel):
    """Every pinned revision."""

    model_config = example({"items": [RESULT_EXAMPLE | {"pinned": True}]})

    items: list[ResultView]


class ResultList(BaseModel):
    """One page of results, newest first."""

    model_config = example({"items": [RESULT_EXAMPLE], "next": None})

    items: list[ResultView]
    next: str | None
    """`after` of the next page, null on the last one."""


class ExportView(BaseModel):
    """An export and, once it is DONE, where to get its bundle."""

    model_config = example(
        {
            "id": ID_EXAMPLE,
            "state": "DONE",
            "reason": "",
            "results": [ID_EXAMPLE],
            "format": "zip",
            "allow_unverified": False,
            "bundle": f"/v1/exports/{ID_EXAMPLE}/bundle",
            "file_name": "gemms-5f0c6d2e.zip",
            "bundle_sha256": SHA_EXAMPLE,
            "size_bytes": 183204,
            "created_at": WHEN_EXAMPLE,
            "finished_at": WHEN_EXAMPLE,
        }
    )

    id: str
    state: str
    reason: str
    results: list[str]
    format: str
    allow_unverified: bool
    bundle: str | None
    """Path of the bundle on this service; null until the export is DONE."""
    file_name: str | None
    """Name to store it under: pip reads a wheel's version and platform from it."""
    bundle_sha256: str | None
    size_bytes: int | None
    created_at: datetime
    finished_at: datetime | None


class DeviceView(BaseModel):
    """A GPU that a tuner has announced."""

    uuid: str
    name: str
    arch: str
    sm_count: int
    state: str
    reason: str
    environment: Json | None
    last_seen_at: datetime | None


class ProfileView(BaseModel):
    """A GPU model that mode `model` can estimate without one at hand."""

    name: str
    arch: str
    aliases: list[str]
    sm_count: int
    memory_bytes: int


class DeviceList(BaseModel):
    """Live devices and known profiles."""

    model_config = example(
        {
            "devices": [
                {
                    "uuid": "GPU-7d9b1a52",
                    "name": "NVIDIA H200",
                    "arch": "sm_90a",
                    "sm_count": 132,
                    "state": "IDLE",
                    "reason": "",
                    "environment": {"driver": "580.95"},
                    "last_seen_at": WHEN_EXAMPLE,
                }
            ],
            "profiles": [
                {
                    "name": "NVIDIA B200",
                    "arch": "sm_100a",
                    "aliases": ["b200"],
                    "sm_count": 148,
                    "memory_bytes": 180_000_000_000,
                }
            ],
        }
    )

    devices: list[DeviceView]
    profiles: list[ProfileView]


class Health(BaseModel):
    """The service answers and reaches its database."""

    model_config = example({"status": "ok", "version": "0.1.0", "database": "ok"})

    status: Literal["ok"]
    version: str
    database: Literal["ok"]
