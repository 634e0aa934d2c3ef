"""Request bodies and query parameters. Types and ranges are checked here, rules of the hardware in `api.problems`.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from api.examples import ID_EXAMPLE, JOB_EXAMPLE
from kernels.problem import MAX_EXTENT
from search_space.request import MAX_SEED, MAX_TRIALS, MAX_WALL_S, Effort, Mode
from search_space.samplers import DEFAULT_SAMPLER, LEARNED

MAX_PROBLEMS = 4096
MAX_EXPORT_RESULTS = 256
MAX_NAME_CHARS = 128
MAX_PAGE = 500
MAX_PRIORITY = 1000


def _plain_integer(value: Any) -> Any:
    """Query strings reach pydantic as text, and pydantic reads `1.0` and `1_000` as integers: we do not."""
    if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]{1,20}", value):
        raise ValueError(f"must be an integer, got {ascii(value)[:60]}")
    return value


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Extent = Annotated[int, Field(strict=True, ge=1, le=MAX_EXTENT)]
QueryInt = BeforeValidator(_plain_integer)
QueryExtent = Annotated[int, QueryInt, Field(ge=1, le=MAX_EXTENT)]


class EvidenceName(StrEnum):
    """What is known of a result, weakest first."""

    MODELED = "modeled"
    SIMULATED = "simulated"
    MEASURED = "measured"
    NUMERIC = "numeric"
    CHECKED = "checked"


class SamplerName(StrEnum):
    """Who chooses the next config."""

    LEARNED = "learned"
    TPE = "tpe"
    GP = "gp"
    CMAES = "cmaes"
    RANDOM = "random"
    BRUTE = "brute"


class StateName(StrEnum):
    """State of a job or a study."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


class Strict(BaseModel):
    """A body or a set of query parameters: a field that is not listed is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ProblemIn(Strict):
    """One GEMM, D[M,N] = A[M,K] @ B[N,K]^T."""

    m: Extent
    """Rows of A and D."""
    n: Extent
    """Rows of B, columns of D; a multiple of 8 on sm_100a."""
    k: Extent
    """Columns of A and B; a multiple of 8 on sm_100a."""
    dtype: Name = "bf16"
    """`bf16` or `fp16`."""
    layout: Name = "NT"
    """`NT`: A is (M, K), B is (N, K), both with K contiguous."""


class JobProblem(ProblemIn):
    """One GEMM of a job."""

    weight: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 1.0
    """How much this problem matters beside the others; weights of equal problems add up."""
    arch: Name | None = None
    """Architecture of this problem, in place of the job's arch and device."""
    device: Name | None = None
    """Device of this problem, in place of the job's arch and device."""


class BudgetIn(Strict):
    """When a study stops; what is left out comes from `effort`."""

    trials: Annotated[int, Field(strict=True, ge=1, le=MAX_TRIALS)] | None = None
    """Trials that give a time, at least 1."""
    wall_s: Annotated[float, Field(strict=True, gt=0, le=MAX_WALL_S, allow_inf_nan=False)] | None = None
    """Seconds from the start of the study."""


class ProtocolIn(Strict):
    """How candidates are timed; what is left out gets the default of its kind."""

    kind: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = "burst"
    """`burst`: short bursts at full clocks with idle time between. `sustained`: continuous load at the power limit."""
    rounds: Annotated[int, Field(strict=True)] | None = None
    """Most bursts of each candidate, 6 to 1000."""
    burst_ms: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """GPU time of one burst."""
    idle_gap_ms: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """Idle time before each burst; only `burst` has any."""
    warm_up_s: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """Seconds of load before the first round; only `sustained` has any."""


class JobIn(Strict):
    """A tuning job: one or many problems, and one of arch, device for the job or for each problem."""

    model_config = ConfigDict(json_schema_extra={"examples": [JOB_EXAMPLE]})

    problems: Annotated[list[JobProblem], Field(min_length=1, max_length=MAX_PROBLEMS)]
    """1 to 4096 problems; equal ones share a study."""
    arch: Name | None = None
    """`sm_90a` or `sm_100a`: any device that runs it."""
    device: Name | None = None
    """Name or alias of a device, for example `h200`."""
    mode: Mode = Mode.MEASURE
    """`measure` times candidates on a GPU; `model` compiles and estimates without one."""
    effort: Effort = Effort.NORMAL
    """Named budget."""
    budget: BudgetIn = BudgetIn()
    """Overrides the budget of `effort`."""
    protocol: ProtocolIn = ProtocolIn()
    """How candidates are timed."""
    sampler: SamplerName = SamplerName(DEFAULT_SAMPLER)
    """Who chooses the next config; `gp` and `cmaes` need the tuner's extra `search`."""
    stop_early: Annotated[bool, Field(strict=True)] | None = None
    """End a study before its budget is used, when weight times the expected gain of another trial is not worth it; only
    `learned` can tell. Without a value: yes, unless `budget.trials` is given."""
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] = 0
    """Same seed, same measurements: same winner."""
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Studies of a job with a higher one are begun first; among equals the older job."""
    force: Annotated[bool, Field(strict=True)] = False
    """Tune again although a finished study answers the request."""

    @field_validator("stop_early")
    @classmethod
    def _can_stop(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        """Of the field and not of the whole, so that the answer names the field."""
        if value and (sampler := info.data.get("sampler", LEARNED)) != LEARNED:
            raise ValueError(f"needs sampler {LEARNED}: {sampler} does not tell what it expects to gain")
        return value

    @property
    def stops_early(self) -> bool:
        """What `stop_early` comes to: a person who names a number of trials gets that many."""
        if self.stop_early is not None:
            return self.stop_early
        return self.sampler == LEARNED and self.budget.trials is None


class BestOptions(Strict):
    """What a question about the best config may add to the shape."""

    dtype: Name = "bf16"
    """`bf16` or `fp16`."""
    layout: Name = "NT"
    """Storage of the operands."""
    device: Name
    """Device name or alias, or an architecture."""
    evidence: EvidenceName | None = None
    """Least evidence wanted; without it only published revisions (`numeric` and `checked`) answer."""
    protocol: Literal["burst", "sustained"] = "burst"
    """How it was timed: in short bursts, or under continuous load. A result under one never answers for the other."""
    environment: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Only results of this environment: an `environment_key`, whole or without the source hash at its end."""
    allow_stale: bool = False
    """Answer also with results whose driver, CUDA or toolchain is not the device's any more; they say what changed."""
    allow_default: bool = False
    """Answer with the heuristic's modeled config when nothing tuned is close enough."""


class BestQuery(BestOptions):
    """Query string of GET /v1/best."""

    m: QueryExtent
    """Rows of A and D."""
    n: QueryExtent
    """Rows of B, columns of D."""
    k: QueryExtent
    """Columns of A and B."""
    revision: Annotated[int, QueryInt, Field(ge=1, le=MAX_EXTENT)] | None = None
    """Exactly this published revision; without it the pinned one, else the newest."""


class DispatchQuery(BestOptions):
    """Query string of GET /v1/dispatch."""

    n: QueryExtent
    """Rows of B, columns of D."""
    k: QueryExtent
    """Columns of A and B."""
    m_min: QueryExtent = 1
    """Smallest M of the table."""
    m_max: QueryExtent | None = None
    """Largest M of the table; without it the largest that has an answer."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.m_max is not None and self.m_max < self.m_min:
            raise ValueError(f"m_max must be at least m_min, got {self.m_max} and {self.m_min}")
        return self


class PinIn(Strict):
    """Which revision shall stay the answer."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"result": ID_EXAMPLE, "pinned": True}]})

    result: Name
    """Id of a published result."""
    pinned: Annotated[bool, Field(strict=True)] = True
    """False lets it go: the newest revision answers again."""


class BulkShape(Strict):
    """One shape of a bulk question; what it leaves out comes from the question."""

    m: Extent
    """Rows of A and D."""
    n: Extent
    """Rows of B, columns of D."""
    k: Extent
    """Columns of A and B."""
    dtype: Name | None = None
    """`bf16` or `fp16`."""


class BestBulkIn(BestOptions):
    """Many questions at once, about one device."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"problems": [{"m": 4096, "n": 4096, "k": 4096}], "device": "h200"}]}
    )

    allow_stale: Annotated[bool, Field(strict=True)] = False
    """Answer also with results whose driver, CUDA or toolchain is not the device's any more; they say what changed."""
    allow_default: Annotated[bool, Field(strict=True)] = False
    """Answer with the heuristic's modeled config when nothing tuned is close enough."""
    problems: Annotated[list[BulkShape], Field(min_length=1, max_length=MAX_PROBLEMS)]
    """1 to 4096 shapes; at most 256 with `allow_default`."""


class ExportIn(Strict):
    """An order for one bundle of prebuilt modules."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"results": [ID_EXAMPLE], "format": "zip", "allow_unverified": False}]}
    )

    results: Annotated[list[Name], Field(min_length=1, max_length=MAX_EXPORT_RESULTS)]
    """Ids of results, as GET /v1/best and GET /v1/results give them."""
    format: Literal["zip", "wheel"] = "zip"
    """`zip`: modules with a manifest. `wheel`: a Python package whose `matmul` picks among them."""
    allow_unverified: Annotated[bool, Field(strict=True)] = False
    """Export results that lack `numeric` or `checked`; the manifest repeats it."""


Limit = Annotated[int, QueryInt, Field(ge=1, le=MAX_PAGE)]
RowId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class JobsQuery(Strict):
    """Query string of GET /v1/jobs."""

    state: StateName | None = None
    """Only jobs in this state."""
    mode: Mode | None = None
    """Only jobs of this mode."""
    limit: Limit = 50
    """Entries of one page."""
    after: RowId | None = None
    """`next` of the page before."""


class RevisionsQuery(Strict):
    """Query string of GET /v1/results/{result_id}/revisions."""

    limit: Limit = 50
    """Entries of one page."""
    after: Annotated[int, QueryInt, Field(ge=1, le=MAX_EXTENT)] | None = None
    """`next` of the page before."""


class RegressionsQuery(Strict):
    """Query string of GET /v1/regressions."""

    device: Name | None = None
    """Only this device or architecture."""
    verdict: Literal["slower", "faster", "same"] | None = None
    """Only these; pages may be short then, `next` says whether more follow."""
    limit: Limit = 50
    """Problems looked at for one page."""
    after: RowId | None = None
    """`next` of the page before."""


class TrialsQuery(Strict):
    """Query string of GET /v1/studies/{study_id}/trials."""

    outcome: Annotated[str, Field(pattern="^[A-Z_]{1,32}$")] | None = None
    """Only trials with this outcome, for example `MEASURED`."""
    limit: Limit = 50
    """Entries of one page."""
    after: Annotated[int, QueryInt, Field(ge=0, le=MAX_EXTENT)] | None = None
    """`next` of the page before."""


class ResultsQuery(Strict):
    """Query string of GET /v1/results."""

    device: Name | None = None
    """Only this device or architecture."""
    study: RowId | None = None
    """Only results of this study."""
    published: bool | None = None
    """Only published revisions, or only candidates."""
    environment: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Only results of this environment: an `environment_key`, whole or without the source hash at its end."""
    limit: Limit = 50
    """Entries of one page."""
    after: RowId | None = None
    """`next` of the page before."""
