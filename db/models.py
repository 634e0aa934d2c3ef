"""The tables. Ids are uuid4 hex strings, times are aware UTC datetimes, JSON columns hold plain dicts and lists.

No relationship is mapped: every read is a named query of `db.queries`, so none is hidden behind an attribute.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Dialect


class State(StrEnum):
    """State of a job, a study or an export (an export is never PARTIAL or CANCELLED)."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


LIVE_STATES = (State.QUEUED, State.RUNNING)
FINAL_STATES = (State.DONE, State.PARTIAL, State.CANCELLED, State.FAILED)
EXPORT_STATES = (State.QUEUED, State.RUNNING, State.DONE, State.FAILED)


class DeviceState(StrEnum):
    """State of a GPU: READY and BUSY serve trials, SET_ASIDE failed its health checks, OFFLINE has no tuner."""

    READY = "READY"
    BUSY = "BUSY"
    SET_ASIDE = "SET_ASIDE"
    OFFLINE = "OFFLINE"


MODES = ("measure", "model")
BURST = "burst"  # the protocol that answers unless another is asked for
PHASES = ("trial", "final")
OUTCOMES = (
    "MEASURED",
    "MODELED",
    "STOPPED_EARLY",
    "REJECTED",
    "KNOWN_BAD",
    "COMPILE_FAILED",
    "SPILLED",
    "WRONG_RESULT",
    "NONDETERMINISTIC",
    "CHECK_FAILED",
    "INVALID_TIMING",
    "CRASHED",
    "TIMED_OUT",
    "OUT_OF_MEMORY",
)
# Weakest first: each scope of a token includes those before it.
SCOPES = ("read", "submit", "admin")
# Weakest first: the position is the level that `Result.evidence_level` stores.
EVIDENCE_ORDER = ("modeled", "simulated", "measured", "numeric", "checked")


def evidence_level(evidence: Iterable[str]) -> int:
    """Level of the strongest evidence of a list, from 0 (`modeled`) to 4 (`checked`). Raises ValueError if unknown."""
    level = 0
    for word in evidence:
        if word not in EVIDENCE_ORDER:
            raise ValueError(f"unknown evidence {str(word)!r}: use one of {', '.join(EVIDENCE_ORDER)}")
        level = max(level, EVIDENCE_ORDER.index(word))
    return level


def new_id() -> str:
    """A fresh id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def utc_now() -> datetime:
    """The present moment, aware, in UTC."""
    return datetime.now(UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime. SQLite keeps no time zone, so values are stored in UTC and read back as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Raises ValueError for a naive datetime: guessing its zone would store a wrong moment."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive datetime {value.isoformat()}: give it a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Attach UTC where the database returned a naive value."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


type JsonDict = dict[str, Any]

_JSON = JSON(none_as_null=True)
_ID = String(32)
_SHA = String(64)
_ANY_LENGTH = Text().with_variant(String(255), "sqlite")  # which keeps any length in both; so its table stays


def _one_of(column: str, values: Iterable[str]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


class Base(DeclarativeBase):
    """Base of all tables. Constraints have fixed names, so that a migration can address them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime(), JsonDict: _JSON, list[Any]: _JSON}  # noqa: RUF012  (read by SQLAlchemy)


class Job(Base):
    """What a person submitted: one or many problems.

    request: the body as it was posted
    priority: higher is claimed first; equal priorities go by age
    counts: {"studies": number by state, "outcomes": number of trials by outcome}, kept by `refresh_job_state`
    """

    __tablename__ = "jobs"
    __table_args__ = (
        _one_of("state", State),
        _one_of("mode", MODES),
        Index("ix_jobs_created_at_id", "created_at", "id"),
        Index("ix_jobs_state_created_at", "state", "created_at"),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True, default=new_id)
    state: Mapped[str] = mapped_column(String(16), default=State.QUEUED)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    finished_at: Mapped[datetime | None]
    request: Mapped[JsonDict]
    mode: Mapped[str] = mapped_column(String(16))
    force: Mapped[bool] = mapped_column(default=False)
    priority: Mapped[int] = mapped_column(default=0)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    counts: Mapped[JsonDict] = mapped_column(default=dict)


class Study(Base):
    """One problem on one device.

    study_key: hash of the request; equal keys ask for the same search
    request: what the tuner reads back, `TuneRequest.to_dict()`
    device_name: null until a tuner claims the study for a device
    environment_key: decides whether a finished study still answers a new request
    owner: the tuner process that runs it
    counts: number of trials by outcome
    coverage: configs worth asking about, and how many of them were asked, rejected, compiled and timed; null until the
        study ends
    best_us: median time of the best trial, or its modeled time in mode `model`, microseconds
    search: what the search began with beside the request: its starting configs, and `snapshot`, the sha256 of what was
        learned from other studies, or null; null until a tuner begins
    """

    __tablename__ = "studies"
    __table_args__ = (
        _one_of("state", State),
        _one_of("mode", MODES),
        Index("ix_studies_study_key_state", "study_key", "state"),
        Index("ix_studies_state_created_at", "state", "created_at"),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True, default=new_id)
    study_key: Mapped[str] = mapped_column(_SHA)
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    dtype: Mapped[str] = mapped_column(String(16))
    layout: Mapped[str] = mapped_column(String(8))
    arch: Mapped[str] = mapped_column(String(32))
    device_name: Mapped[str | None] = mapped_column(String(128))
    mode: Mapped[str] = mapped_column(String(16))
    request: Mapped[JsonDict]
    seed: Mapped[int] = mapped_column(BigInteger, default=0)
    state: Mapped[str] = mapped_column(String(16), default=State.QUEUED)
    reason: Mapped[str] = mapped_column(Text, default="")
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    environment: Mapped[JsonDict | None]
    environment_key: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    owner: Mapped[str | None] = mapped_column(String(128), index=True)
    counts: Mapped[JsonDict] = mapped_column(default=dict)
    coverage: Mapped[JsonDict | None]
    best_trial: Mapped[int | None]
    best_us: Mapped[float | None]
    search: Mapped[JsonDict | None]


class Snapshot(Base):
    """What was learned from stored times, as it was when studies began with it: the same seed gives the same answer.

    sha256: of `data`
    arch: architecture that it was learned for
    device_name: device whose times it was learned from
    rows: times that it was learned from
    data: as the tuner reads it back
    """

    __tablename__ = "snapshots"
    __table_args__ = (Index("ix_snapshots_device_name_created_at", "device_name", "created_at"),)

    sha256: Mapped[str] = mapped_column(_SHA, primary_key=True)
    arch: Mapped[str] = mapped_column(String(32))
    device_name: Mapped[str] = mapped_column(String(128))
    rows: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class JobStudy(Base):
    """A study as one problem of a job. Jobs share studies: a finished one, or one that another job already waits for.

    position: place in the job's list of problems, from 0
    weight: importance of the problem in the job
    """

    __tablename__ = "job_studies"
    __table_args__ = (Index("ix_job_studies_study_id", "study_id"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id"))
    weight: Mapped[float] = mapped_column(default=1.0)


class Trial(Base):
    """One candidate of a study, finished. The tuner is the only writer.

    toolchain: compiler that built it, empty where none ran; with `source_hash` it decides KNOWN_BAD
    median_us: measured median, microseconds
    modeled_us: estimate of the performance model, microseconds
    ratio: baseline time over ours, by baseline
    compile_s, gpu_s: wall seconds of compiling, seconds of GPU time
    """

    __tablename__ = "trials"
    __table_args__ = (
        _one_of("outcome", OUTCOMES),
        Index("ix_trials_source_hash_toolchain", "source_hash", "toolchain"),
    )

    study_id: Mapped[str] = mapped_column(ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    config: Mapped[JsonDict]
    config_key: Mapped[str] = mapped_column(_ANY_LENGTH)
    source_hash: Mapped[str | None] = mapped_column(_SHA)
    toolchain: Mapped[str] = mapped_column(String(255), default="")
    outcome: Mapped[str] = mapped_column(String(24))
    reason: Mapped[str] = mapped_column(Text, default="")
    evidence: Mapped[list[Any]] = mapped_column(default=list)
    modeled_us: Mapped[float | None]
    median_us: Mapped[float | None]
    ratio: Mapped[JsonDict | None]
    artifact_sha256: Mapped[str | None] = mapped_column(_SHA)
    compile_s: Mapped[float | None]
    gpu_s: Mapped[float | None]
    max_rel_error: Mapped[float | None]
    finished_at: Mapped[datetime] = mapped_column(default=utc_now)


class Measurement(Base):
    """Raw samples of one trial, in the search (`trial`) or among the finalists (`final`).

    samples_us: one time a round, microseconds
    baselines_us: the vendor library's times, round by round with `samples_us`
    discarded: rounds thrown away because something disturbed them
    states: the card at the end of each round, round by round with `samples_us`; null where nobody read it
    energy_mj: energy of one product by implementation, millijoules; null where nobody read it
    """

    __tablename__ = "measurements"
    __table_args__ = (
        _one_of("phase", PHASES),
        ForeignKeyConstraint(["study_id", "trial_number"], ["trials.study_id", "trials.number"], ondelete="CASCADE"),
        Index("ix_measurements_study_id_trial_number", "study_id", "trial_number"),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True, default=new_id)
    study_id: Mapped[str] = mapped_column(_ID)
    trial_number: Mapped[int]
    phase: Mapped[str] = mapped_column(String(8), default="trial")
    samples_us: Mapped[list[Any]]
    baselines_us: Mapped[JsonDict] = mapped_column(default=dict)
    protocol: Mapped[JsonDict]
    environment: Mapped[JsonDict]
    discarded: Mapped[int] = mapped_column(default=0)
    states: Mapped[list[Any] | None]
    energy_mj: Mapped[JsonDict | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Artifact(Base):
    """A built file in the artifact store, named by the hash of its bytes.

    problem_key: the problem it was built for
    facts: what the compiler said beyond the columns (stack, warnings, seconds)
    last_used_at: when it was built or exported last
    removed_at: when its file was removed to save space; config and toolchain say how to build it again
    """

    __tablename__ = "artifacts"
    __table_args__ = (
        Index("ix_artifacts_source_hash_toolchain", "source_hash", "toolchain"),
        Index("ix_artifacts_removed_at_last_used_at", "removed_at", "last_used_at"),
    )

    sha256: Mapped[str] = mapped_column(_SHA, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), default="module")
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    arch: Mapped[str] = mapped_column(String(32))
    sm_count: Mapped[int]
    source_hash: Mapped[str] = mapped_column(_SHA)
    config: Mapped[JsonDict]
    problem_key: Mapped[str] = mapped_column(String(128))
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    toolchain: Mapped[str] = mapped_column(String(255))
    facts: Mapped[JsonDict] = mapped_column(default=dict)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    last_used_at: Mapped[datetime] = mapped_column(default=utc_now)
    removed_at: Mapped[datetime | None]


class Device(Base):
    """A GPU that a tuner has seen."""

    __tablename__ = "devices"
    __table_args__ = (_one_of("state", DeviceState),)

    uuid: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    arch: Mapped[str] = mapped_column(String(32))
    sm_count: Mapped[int]
    state: Mapped[str] = mapped_column(String(16), default=DeviceState.READY)
    reason: Mapped[str] = mapped_column(Text, default="")
    environment: Mapped[JsonDict] = mapped_column(default=dict)
    last_seen_at: Mapped[datetime] = mapped_column(default=utc_now)


class Result(Base):
    """The best config that a study found for a problem on a device.

    protocol: kind of the protocol it was timed under, "burst" for a modeled one
    revision: null for a candidate; counts from 1 for each problem, device and protocol once published
    current: what readers get: the pinned revision of its problem, device and protocol, else their newest one; or their
        newest candidate of its evidence level
    pinned: whether someone wants this revision to stay the answer
    made_in: `environment_key` without the source hash: device, SM count, driver major, CUDA, toolchain
    evidence_level: position of the strongest evidence in EVIDENCE_ORDER
    interval_us: 95 % interval of the median, [low, high], microseconds
    tie_set: trials that the noise does not tell from this one; `withdrawn_reason` where a kernel was found bad later
    noise: relative gap below which two finalists are equal; null without a final
    aa_ratio: a finalist over its byte-identical twin in the final, {"median", "low", "high"}; null without a final
    checks: name, verdict, detail and tool of each check beyond the product itself
    trials: candidates that the study measured or modeled
    withdrawn_at: when its kernel was found to be bad; it is no answer any more, neither `current` nor `pinned`
    withdrawn_by: id of the study that found it
    withdrawn_reason: what it found
    """

    __tablename__ = "results"
    __table_args__ = (
        # Also the index behind questions about old revisions: all rows of a shape lie together.
        UniqueConstraint(
            *("m", "n", "k", "dtype", "layout", "arch", "device_name", "protocol", "revision"),
            name="uq_results_problem_revision",
        ),
        CheckConstraint("revision IS NULL OR revision >= 1", name="revision"),
        # Behind GET /v1/best. For one shape: a handful of current rows, however many old revisions. For the nearest:
        # equality on the first five, a range on n, and all that the search reads, so that no row is fetched.
        Index(
            "ix_results_nearby",
            *("current", "dtype", "layout", "arch", "protocol", "n", "k", "m", "device_name", "revision"),
            *("evidence_level", "made_in", "pinned", "id"),
            sqlite_where=text("current IS 1"),
            postgresql_where=text("current IS true"),
        ),
        Index("ix_results_artifact_sha256", "artifact_sha256"),
        Index("ix_results_created_at_id", "created_at", "id"),
        Index("ix_results_study_id", "study_id"),
        Index(
            "ix_results_withdrawn_at",
            "withdrawn_at",
            sqlite_where=text("withdrawn_at IS NOT NULL"),
            postgresql_where=text("withdrawn_at IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(_ID, primary_key=True, default=new_id)
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    dtype: Mapped[str] = mapped_column(String(16))
    layout: Mapped[str] = mapped_column(String(8))
    arch: Mapped[str] = mapped_column(String(32))
    device_name: Mapped[str] = mapped_column(String(128))
    protocol: Mapped[str] = mapped_column(String(16), default=BURST)
    study_id: Mapped[str | None] = mapped_column(ForeignKey("studies.id"))
    trial_number: Mapped[int | None]
    revision: Mapped[int | None]
    current: Mapped[bool] = mapped_column(default=True)
    pinned: Mapped[bool] = mapped_column(default=False)
    config: Mapped[JsonDict]
    evidence: Mapped[list[Any]]
    evidence_level: Mapped[int]
    environment: Mapped[JsonDict]
    environment_key: Mapped[str] = mapped_column(String(255), default="")
    made_in: Mapped[str] = mapped_column(String(255), default="")
    median_us: Mapped[float | None]
    modeled_us: Mapped[float | None]
    interval_us: Mapped[list[Any] | None]
    baselines_us: Mapped[JsonDict | None]
    ratio: Mapped[JsonDict | None]
    noise: Mapped[float | None]
    aa_ratio: Mapped[JsonDict | None]
    tie_set: Mapped[list[Any]] = mapped_column(default=list)
    checks: Mapped[list[Any]] = mapped_column(default=list)
    tflops: Mapped[float | None]
    max_rel_error: Mapped[float | None]
    trials: Mapped[int] = mapped_column(default=0)
    artifact_sha256: Mapped[str | None] = mapped_column(_SHA)
    source_hash: Mapped[str | None] = mapped_column(_SHA)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    published_at: Mapped[datetime | None]
    withdrawn_at: Mapped[datetime | None]
    withdrawn_by: Mapped[str | None] = mapped_column(_ID)
    withdrawn_reason: Mapped[str | None] = mapped_column(Text)


class Export(Base):
    """A bundle that someone asked for.

    request: the results, the format and `allow_unverified`
    owner: the process that writes the bundle
    """

    __tablename__ = "exports"
    __table_args__ = (_one_of("state", EXPORT_STATES), Index("ix_exports_state_created_at", "state", "created_at"))

    id: Mapped[str] = mapped_column(_ID, primary_key=True, default=new_id)
    state: Mapped[str] = mapped_column(String(16), default=State.QUEUED)
    reason: Mapped[str] = mapped_column(Text, default="")
    request: Mapped[JsonDict]
    owner: Mapped[str | None] = mapped_column(String(128))
    bundle_path: Mapped[str | None] = mapped_column(Text)
    bundle_sha256: Mapped[str | None] = mapped_column(_SHA)
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    finished_at: Mapped[datetime | None]


class Owner(Base):
    """A tuner process that shares the database with others. See `db.queries.owners`.

    expires_at: after this, by the database's clock, others take its studies over
    """

    __tablename__ = "owners"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    expires_at: Mapped[datetime]


class Token(Base):
    """A bearer token of the API. Only its hash is stored: whoever reads the database cannot use it.

    token_hash: SHA-256 of the token, which is 256 random bits, so nothing slower is needed
    scope: read, submit or admin; each may do what the ones before it may
    expires_at: null for a token without an end
    """

    __tablename__ = "tokens"
    __table_args__ = (_one_of("scope", SCOPES),)

    id: Mapped[str] = mapped_column(_ID, primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    token_hash: Mapped[str] = mapped_column(_SHA, unique=True)
    scope: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Change(Base):
    """How often something changed that readers keep in memory: they read it again when the number differs.

    topic: what changed, such as `answers`
    """

    __tablename__ = "changes"

    topic: Mapped[str] = mapped_column(String(32), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)
