"""Bodies that the service answers with, as types: plain JSON for whoever runs the program, checked by mypy."""

from __future__ import annotations

from typing import Any, TypedDict

Json = dict[str, Any]


class Problem(TypedDict):
    """One GEMM."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str


class StudyState(TypedDict):
    """A study right after its job was submitted."""

    id: str
    state: str


class JobSubmitted(TypedDict):
    """Answer of submit_job."""

    id: str
    state: str
    studies: list[StudyState]


class JobSummary(TypedDict):
    """A job in a list."""

    id: str
    state: str
    mode: str
    force: bool
    priority: int
    cancel_requested: bool
    created_at: str
    finished_at: str | None


class JobStudy(TypedDict):
    """A study as its job shows it; best_us in microseconds."""

    id: str
    state: str
    reason: str
    problem: Problem
    arch: str
    device: str | None
    weight: float
    counts: dict[str, int]
    best_trial: int | None
    best_us: float | None


class Job(JobSummary):
    """A job with its studies; counts: trials by outcome, states: studies by state."""

    time_left_s: float | None
    counts: dict[str, int]
    states: dict[str, int]
    studies: list[JobStudy]


class Trial(TypedDict):
    """One config that was tried."""

    number: int
    outcome: str
    reason: str
    config: Json
    evidence: list[str]
    modeled_us: float | None
    median_us: float | None
    ratio: Json
    compile_s: float | None
    gpu_s: float | None
    max_rel_error: float | None
    source_hash: str | None
    artifact_sha256: str | None
    finished_at: str | None


class Study(TypedDict):
    """One problem on one device."""

    id: str
    study_key: str
    state: str
    reason: str
    problem: Problem
    arch: str
    device: str | None
    mode: str
    seed: int
    request: Json
    environment: Json | None
    environment_key: str | None
    counts: dict[str, int]
    coverage: dict[str, int] | None
    best: Trial | None
    created_at: str
    started_at: str | None
    finished_at: str | None


class Best(TypedDict):
    """Answer to one question; see the route's description for what each member means."""

    match: str
    problem: Problem
    tuned_for: Problem | None
    distance: float
    arch: str
    device: str | None
    config: Json
    evidence: list[str]
    protocol: str | None
    environment: Json | None
    revision: int | None
    pinned: bool
    median_us: float | None
    tie_set: list[Any]
    ratio: Json
    verdict: str
    stale: bool
    stale_reason: str
    withdrawn: list[Json]
    artifact_sha256: str | None
    result_id: str | None


class Export(TypedDict):
    """An export; `bundle` is null until it is DONE."""

    id: str
    state: str
    reason: str
    results: list[str]
    format: str
    allow_unverified: bool
    bundle: str | None
    file_name: str | None
    bundle_sha256: str | None
    size_bytes: int | None
    created_at: str
    finished_at: str | None


class Devices(TypedDict):
    """Live devices, and the profiles that mode `model` knows."""

    devices: list[Json]
    profiles: list[Json]


class Health(TypedDict):
    """Answer of /healthz."""

    status: str
    version: str
    database: str
