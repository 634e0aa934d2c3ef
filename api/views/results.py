"""Bodies of /v1/results.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from api.examples import MEASUREMENT_EXAMPLE, RESULT_EXAMPLE
from api.views.base import Json, example
from api.views.problems import ProblemView


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
    protocol: str
    """How it was timed: `burst` or `sustained`."""
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
    withdrawn_at: datetime | None
    """When its kernel was found to be bad: it answers nothing any more, and no bundle takes it."""
    withdrawn_reason: str
    """What was found, by which trial of which study; empty for a result that stands."""


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
