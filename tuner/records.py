"""What tuning leaves behind: outcomes, evidence, environments, measurements, trials. Plain values, to JSON and back.

Statistics are methods over the kept samples; `tuner.intervals` makes the intervals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from kernels.config import GemmConfig, config_from_dict
from search_space.request import MeasureProtocol
from tuner.intervals import median_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.problem import GemmProblem


class Outcome(StrEnum):
    """How a trial ended. All but the first three carry a reason for people."""

    MEASURED = "MEASURED"
    MODELED = "MODELED"
    STOPPED_EARLY = "STOPPED_EARLY"
    REJECTED = "REJECTED"
    KNOWN_BAD = "KNOWN_BAD"
    COMPILE_FAILED = "COMPILE_FAILED"
    SPILLED = "SPILLED"
    WRONG_RESULT = "WRONG_RESULT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    CHECK_FAILED = "CHECK_FAILED"
    INVALID_TIMING = "INVALID_TIMING"
    CRASHED = "CRASHED"
    TIMED_OUT = "TIMED_OUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"

    @property
    def counts_against_budget(self) -> bool:
        """Whether the trial used one of the trials that were asked for: it brought back a time."""
        return self in _COUNTED

    @property
    def is_own_fault(self) -> bool:
        """Whether the kernel itself is bad. Memory and times that cannot be may be the moment's fault."""
        return self in _OWN_FAULTS


_COUNTED = frozenset({Outcome.MEASURED, Outcome.MODELED, Outcome.STOPPED_EARLY})
_OWN_FAULTS = frozenset(
    {Outcome.WRONG_RESULT, Outcome.NONDETERMINISTIC, Outcome.CHECK_FAILED, Outcome.CRASHED, Outcome.TIMED_OUT}
)


class Evidence(StrEnum):
    """What stands behind a result."""

    MODELED = "modeled"
    SIMULATED = "simulated"
    MEASURED = "measured"
    NUMERIC = "numeric"
    CHECKED = "checked"


class Verdict(StrEnum):
    """What a check said. NOT_RUN is no pass."""

    CLEAN = "clean"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check of a winner.

    name: structure, checkers (sm_100a), stress, soak or memcheck
    verdict: what it said
    detail: what was run, what was found, or why it did not run
    tool: name and version of the tool, where it is not ours
    """

    name: str
    verdict: Verdict
    detail: str = ""
    tool: str = ""

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return {"name": self.name, "verdict": self.verdict.value, "detail": self.detail, "tool": self.tool}


class State(StrEnum):
    """States of a study, of a job and of an export."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where and with what something was measured. Empty text and zero mean that nobody could tell.

    gpu_name: as the CUDA driver prints it
    gpu_uuid: identity of the card
    arch: code that was run
    sm_count: streaming multiprocessors
    driver: driver version, such as "580.82.07"
    cuda: CUDA version of the compiler, such as "13.0"
    torch: version of torch that ran the baselines
    toolchain: compiler and template-library versions in one line
    sm_clock_mhz: SM clock seen under load
    max_sm_clock_mhz: highest SM clock that the card allows
    memory_clock_mhz: memory clock seen under load
    power_limit_w: enforced power limit
    power_w: power drawn under load
    temperature_c: temperature under load
    throttle_reasons: names of the clock limits that were active
    mig: whether the device is a MIG slice
    python: version of the interpreter
    packages: versions of other packages that matter, such as apache-tvm-ffi
    """

    gpu_name: str
    arch: str
    sm_count: int
    gpu_uuid: str = ""
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    toolchain: str = ""
    sm_clock_mhz: float = 0.0
    max_sm_clock_mhz: float = 0.0
    memory_clock_mhz: float = 0.0
    power_limit_w: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttle_reasons: tuple[str, ...] = ()
    mig: bool = False
    python: str = ""
    packages: tuple[tuple[str, str], ...] = ()

    def key(self, source_hash: str) -> str:
        """Decides equal or stale: name, SM count, driver major, CUDA, toolchain, source hash, as one readable line."""
        driver_major = self.driver.partition(".")[0]
        return "|".join((self.gpu_name, str(self.sm_count), driver_major, self.cuda, self.toolchain, source_hash))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "throttle_reasons": list(self.throttle_reasons), "packages": dict(self.packages)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Environment:
        """Fields that are missing get their default; fields of another version are dropped."""
        known = {item.name for item in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        kept["throttle_reasons"] = tuple(kept.get("throttle_reasons", ()))
        kept["packages"] = tuple(sorted(dict(kept.get("packages", {})).items()))
        return cls(**kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Baseline time over ours: above 1 we are faster.

    median: of the paired rounds
    low: lower end of the 95 % interval
    high: upper end of the 95 % interval
    """

    median: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values."""
        return {"median": self.median, "low": self.low, "high": self.high}

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Ratio:
        """Inverse of to_dict."""
        return cls(median=values["median"], low=values["low"], high=values["high"])

    @property
    def strays(self) -> float:
        """How far the interval reaches from 1: the noise, where both sides are one kernel."""
        return max(self.high - 1, 1 - self.low)

    @classmethod
    def of_pairs(cls, baseline_us: Sequence[float], ours_us: Sequence[float]) -> Ratio:
        """Median and interval of the ratios, round by round. Raises ValueError when the rounds do not pair up."""
        ratios = [theirs / ours for theirs, ours in zip(baseline_us, ours_us, strict=True)]
        low, high = median_interval(ratios)
        return cls(median=median(ratios), low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """The card at the end of one round, as NVML tells it; zero where it does not.

    sm_clock_mhz: SM clock
    memory_clock_mhz: memory clock
    power_w: power drawn
    temperature_c: of the chip
    throttle_reasons: names of the clock limits that were active
    """

    sm_clock_mhz: float
    memory_clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttle_reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "throttle_reasons": list(self.throttle_reasons)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CardState:
        """Inverse of to_dict; fields of another version are dropped."""
        known = {name: value for name, value in values.items() if name in {item.name for item in fields(cls)}}
        return cls(**{**known, "throttle_reasons": tuple(known.get("throttle_reasons", ()))})


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Times of one kernel. Raises ValueError for no sample, one that is not positive, or baselines that do not pair up.

    samples_us: time of one product, one entry a round
    protocol: how it was timed
    environment: where it was timed
    baselines_us: times of other implementations ("torch", "cublaslt_best"), round by round with samples_us
    discarded: rounds thrown away because of foreign activity or a changed clock limit
    states: the card at the end of each round, round by round with samples_us; empty without NVML
    energy_mj: energy of one product in mJ by implementation ("ours" and the baselines), the median of the rounds;
        only protocol `sustained` takes it, and only where the card counts its energy
    """

    samples_us: tuple[float, ...]
    protocol: MeasureProtocol
    environment: Environment
    baselines_us: dict[str, tuple[float, ...]]
    discarded: int = 0
    states: tuple[CardState, ...] = ()
    energy_mj: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.samples_us:
            raise ValueError("a measurement needs at least one sample")
        for name, samples in (("ours", self.samples_us), *self.baselines_us.items()):
            self._check_pairs(name, len(samples))
            if bad := [sample for sample in samples if not (isfinite(sample) and sample > 0)]:
                raise ValueError(f"{name} has a sample of {bad[0]} us: a time is finite and positive")
        if self.states:
            self._check_pairs("states", len(self.states))

    def _check_pairs(self, name: str, rounds: int) -> None:
        if rounds != len(self.samples_us):
            raise ValueError(f"{name} has {rounds} rounds, ours has {len(self.samples_us)}: rounds are paired")

    def median_us(self) -> float:
        """Median time of one product in us."""
        return median(self.samples_us)

    def interval_us(self) -> tuple[float, float]:
        """95 % interval of the median in us."""
        return median_interval(self.samples_us)

    def spread(self) -> float:
        """Median absolute deviation over the median: 0.01 is one percent."""
        middle = self.median_us()
        return median(abs(sample - middle) for sample in self.samples_us) / middle

    def tflops(self, problem: GemmProblem) -> float:
        """Rate at the median time, in 10^12 FLOP a second."""
        return problem.flops / self.median_us() / 1e6

    def baseline_median_us(self, baseline: str) -> float:
        """Median time of a baseline in us. Raises KeyError naming the baselines there are."""
        return median(self._baseline(baseline))

    def ratio(self, baseline: str) -> Ratio:
        """Baseline over ours from paired rounds. Raises KeyError naming the baselines there are."""
        return Ratio.of_pairs(self._baseline(baseline), self.samples_us)

    def ratios(self) -> dict[str, Ratio]:
        """The ratio to every baseline that was measured."""
        return {name: self.ratio(name) for name in self.baselines_us}

    def _baseline(self, name: str) -> tuple[float, ...]:
        if name not in self.baselines_us:
            raise KeyError(f"no baseline {name!r}: measured were {', '.join(self.baselines_us) or 'none'}")
        return self.baselines_us[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "samples_us": list(self.samples_us),
            "baselines_us": {name: list(samples) for name, samples in self.baselines_us.items()},
            "protocol": self.protocol.to_dict(),
            "environment": self.environment.to_dict(),
            "discarded": self.discarded,
            "states": [state.to_dict() for state in self.states],
            "energy_mj": dict(self.energy_mj),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """Inverse of to_dict."""
        return cls(
            samples_us=tuple(values["samples_us"]),
            baselines_us={name: tuple(samples) for name, samples in values.get("baselines_us", {}).items()},
            protocol=MeasureProtocol.from_dict(values["protocol"]),
            environment=Environment.from_dict(values["environment"]),
            discarded=values.get("discarded", 0),
            states=tuple(CardState.from_dict(state) for state in values.get("states") or ()),
            energy_mj=dict(values.get("energy_mj") or {}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One config that was asked for, and what became of it.

    number: place in its study, from 0
    config: knobs
    outcome: how it ended
    reason: for people; names what failed and what the numbers were, empty after success
    measurement: samples, kept for STOPPED_EARLY too
    modeled_us: what the performance model predicts
    evidence: what stands behind the time
    source_hash: of the generated source, empty when none was generated
    artifact_sha256: of the module, empty when none was built
    compile_s: seconds of compiling
    gpu_s: seconds on the GPU
    max_rel_error: largest error of an element against float32, relative to the bound's scale
    """

    number: int
    config: GemmConfig
    outcome: Outcome
    reason: str = ""
    measurement: Measurement | None = None
    modeled_us: float | None = None
    evidence: tuple[Evidence, ...] = ()
    source_hash: str = ""
    artifact_sha256: str = ""
    compile_s: float = 0.0
    gpu_s: float = 0.0
    max_rel_error: float | None = None

    @property
    def counts_against_budget(self) -> bool:
        """Whether it used one of the budget's trials: also one that failed in the final, for it had been measured."""
        return self.outcome.counts_against_budget or self.measurement is not None

    @property
    def time_us(self) -> float | None:
        """What the search minimises: the measured median, else for MODELED the predicted time; None after a failure."""
        if self.outcome is Outcome.MODELED:
            return self.modeled_us
        if self.counts_against_budget and self.measurement is not None:
            return self.measurement.median_us()
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "number": self.number,
            "arch": self.config.arch.name,
            "config": self.config.to_dict(),
            "outcome": self.outcome.value,
            "reason": self.reason,
            "measurement": self.measurement.to_dict() if self.measurement else None,
            "modeled_us": self.modeled_us,
            "evidence": [item.value for item in self.evidence],
            "source_hash": self.source_hash,
            "artifact_sha256": self.artifact_sha256,
            "compile_s": self.compile_s,
            "gpu_s": self.gpu_s,
            "max_rel_error": self.max_rel_error,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """Inverse of to_dict. Raises ConfigError for unknown knobs and ValueError for an unknown outcome."""
        kept = {name: value for name, value in values.items() if name not in ("arch", "config", "measurement")}
        kept["outcome"] = Outcome(values["outcome"])
        kept["evidence"] = tuple(Evidence(item) for item in values.get("evidence", ()))
        measurement = values.get("measurement")
        return cls(
            config=config_from_dict(values["arch"], values["config"]),
            measurement=Measurement.from_dict(measurement) if measurement else None,
            **kept,
        )
