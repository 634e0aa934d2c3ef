"""Measuring a stored result again: is its ratio to the vendor library still true, here and today?

A claim is what was stored: the ratio to `cublaslt_best` with its interval, and how it was measured. It comes from a
result of the service, or from a row of a file of recorded measurements. Its module is loaded where it is at hand and
built again where it is not, verified in full, and timed under the stored protocol in the same rounds as the vendor
library, as in a final. Absolute times are not compared: they depend on the card and the day, the ratio much less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernels.config import GemmConfig, config_from_dict
from kernels.errors import ConfigError, ProblemError
from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol, RequestError
from tuner.engine.base import CompileJob, CompileReply, Engine, EvaluateJob, FinalJob, FinalReply
from tuner.records import Environment, Measurement, Ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

BASELINE = "cublaslt_best"
TOLERANCE = 0.01  # of the medians, where the intervals do not meet
WIDEST = 0.02  # half-width of an interval that still says something by meeting another one
SEED = 1  # of inputs and placement: fixed, and another one than that of most studies
CLOCK_CHANGE = 0.02  # of the SM clock under load that is worth a warning

Json = dict[str, Any]


class ClaimError(ValueError):
    """A result or a row states nothing that could be measured again; the message says what is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What was stored.

    name: for people: the result's id, or file and shape
    problem: what is computed
    config: knobs
    ratio: `cublaslt_best` over ours, with its 95 % interval
    protocol: how it was timed
    environment: where it was timed
    artifact_sha256: of the module, empty when unknown
    source_hash: of the generated source, empty when unknown
    """

    name: str
    problem: GemmProblem
    config: GemmConfig
    ratio: Ratio
    protocol: MeasureProtocol
    environment: Environment
    artifact_sha256: str = ""
    source_hash: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """What became of a claim.

    claim: what was stored
    reproduced: whether it holds
    reason: why, with both intervals in it or with the failure
    measurement: of today, None when there is none
    module: "stored" when the stored module was timed, "built again" otherwise, empty when there was none
    warnings: how the environment differs from the stored one
    """

    claim: Claim
    reproduced: bool
    reason: str
    measurement: Measurement | None = None
    module: str = ""
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> Json:
        """Plain JSON values."""
        claim, measured = self.claim, self.measurement
        return {
            "name": claim.name,
            "problem": {
                "m": claim.problem.m,
                "n": claim.problem.n,
                "k": claim.problem.k,
                "dtype": claim.problem.dtype.value,
                "layout": claim.problem.layout.value,
            },
            "config": claim.config.to_dict(),
            "reproduced": self.reproduced,
            "reason": self.reason,
            "stored": {"ratio": claim.ratio.to_dict(), "environment": claim.environment.to_dict()},
            "measured": measured.to_dict() | {"ratio": measured.ratio(BASELINE).to_dict()} if measured else None,
            "module": self.module,
            "warnings": list(self.warnings),
        }


# ---------------------------------------------------------------------- claims


def claim_of_result(result: Mapping[str, Any]) -> Claim:
    """From a result as GET /v1/results/{id} gives it. Raises ClaimError, also for a withdrawn one."""
    if reason := result.get("withdrawn_reason"):  # a service from before there was any does not say
        raise ClaimError(f"result {result['id']} was withdrawn, and claims nothing any more: {reason}")
    samples = result.get("measurement") or {}
    values = {
        **result["problem"],
        "arch": result["arch"],
        "config": result["config"],
        "ratio": (result["ratio"] or {}).get(BASELINE),
        "pairs": (samples.get("baselines_us", {}).get(BASELINE), samples.get("samples_us")),
        "protocol": samples.get("protocol"),
        "environment": result["environment"],
        "artifact_sha256": result["artifact_sha256"],
        "source_hash": result["source_hash"],
    }
    return _claim(f"result {result['id']}", values)


def claim_of_row(row: Mapping[str, Any], file: str, protocol: Mapping[str, Any] | None) -> Claim:
    """From a row of a file of recorded measurements; `protocol` is that of the file. Raises ClaimError."""
    name = f"{file} {row.get('m')}x{row.get('n')}x{row.get('k')} {row.get('dtype')}"
    environment = row.get("environment") or {}
    median = (row.get("ratio") or {}).get(BASELINE)
    low, high = (row.get("ratio_interval") or {}).get(BASELINE) or (median, median)
    values = {
        **{key: row.get(key) for key in ("m", "n", "k", "dtype", "config", "artifact_sha256", "source_hash")},
        "layout": row.get("layout", "NT"),
        "arch": row.get("arch", environment.get("arch")),
        "ratio": None if median is None else {"median": median, "low": low, "high": high},
        "pairs": ((row.get("baseline_samples_us") or {}).get(BASELINE), row.get("samples_us")),
        "protocol": row.get("protocol", protocol),
        "environment": environment,
    }
    return _claim(name, values)


def _claim(name: str, values: Mapping[str, Any]) -> Claim:
    theirs, ours = values["pairs"]
    ratio = values["ratio"]
    if isinstance(ratio, (int, float)):
        ratio = {"median": ratio, "low": ratio, "high": ratio}
    if not (theirs and ours) and ratio is None:
        raise ClaimError(f"{name} has no ratio to {BASELINE}: it was not measured, so there is nothing to reproduce")
    try:
        claim = Claim(
            name=name,
            problem=GemmProblem(**{key: values[key] for key in ("m", "n", "k", "dtype", "layout")}),
            config=config_from_dict(values["arch"], values["config"]),
            ratio=Ratio.of_pairs(theirs, ours) if theirs and ours else Ratio.from_dict(ratio),
            protocol=MeasureProtocol.from_dict(values["protocol"] or {}),
            environment=Environment.from_dict(values["environment"]),
            artifact_sha256=values["artifact_sha256"] or "",
            source_hash=values["source_hash"] or "",
        )
    except (ProblemError, ConfigError, RequestError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ClaimError(f"{name} cannot be read: {error}") from error
    except ZeroDivisionError as error:
        raise ClaimError(f"{name} cannot be read: a sample of zero is no time") from error
    values_of_ratio = (claim.ratio.low, claim.ratio.median, claim.ratio.high)
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value > 0 for value in values_of_ratio):
        raise ClaimError(f"{name} cannot be read: its ratio must be finite and above zero, got {values_of_ratio}")
    return claim


# ---------------------------------------------------------------------- the verdict


def judge(stored: Ratio, now: Ratio) -> tuple[bool, str]:
    """Whether the two agree, and why."""
    gap = abs(now.median / stored.median - 1)
    intervals = f"stored {_interval(stored)}, now {_interval(now)}"
    overlap = stored.low <= now.high and now.low <= stored.high
    widest = max((ratio.high - ratio.low) / (2 * ratio.median) for ratio in (stored, now))
    if overlap and widest <= WIDEST:
        return True, f"the 95 % intervals overlap: {intervals}"
    if gap < TOLERANCE:
        return True, f"the medians differ by {100 * gap:.2f} %, less than 1 %: {intervals}"
    if overlap:
        warning = f"but one of +-{100 * widest:.1f} % meets nearly anything, measure again on a quiet card"
        return True, f"the 95 % intervals overlap, {warning}: {intervals}"
    return False, f"the medians differ by {100 * gap:.2f} % and the 95 % intervals do not meet: {intervals}"


def _interval(ratio: Ratio) -> str:
    return f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"


def differences(stored: Environment, now: Environment) -> list[str]:
    """What is not as it was, for people. What either side does not know is no difference."""
    found = []
    for name, label in _COMPARED:
        before, after = getattr(stored, name), getattr(now, name)
        if before and after and before != after:
            found.append(f"{label} was {before}, is {after}")
    before, after = (dict(environment.packages).get(BASELINE) for environment in (stored, now))
    if before and after and before != after:
        found.append(f"the vendor library was best with {before}, is with {after}")
    clocks = stored.sm_clock_mhz, now.sm_clock_mhz
    if all(clocks) and abs(clocks[1] / clocks[0] - 1) > CLOCK_CHANGE:
        found.append(f"SM clock under load was {clocks[0]:.0f} MHz, is {clocks[1]:.0f} MHz")
    if stored.throttle_reasons != now.throttle_reasons:
        found.append(
            f"active clock limits were {', '.join(stored.throttle_reasons) or 'none'}, "
            f"are {', '.join(now.throttle_reasons) or 'none'}"
        )
    return found


_COMPARED = (
    ("gpu_name", "GPU"),
    ("gpu_uuid", "card"),
    ("sm_count", "SM count"),
    ("driver", "driver"),
    ("cuda", "CUDA"),
    ("torch", "torch"),
    ("toolchain", "toolchain"),
    ("power_limit_w", "power limit in W"),
    ("max_sm_clock_mhz", "highest SM clock in MHz"),
)


# ---------------------------------------------------------------------- measuring again


@dataclass(slots=True)
class _Module:
    """The module of a claim: at hand, or being built."""

    building: Future[CompileReply] | None = None
    sha256: str = ""
    source_hash: str = ""
    origin: str = "stored"
    warnings: list[str] = field(default_factory=list)


def reproduce(
    claims: Sequence[Claim], engine: Engine, on_done: Callable[[Reproduction], None] = lambda _: None
) -> list[Reproduction]:
    """Measure each claim on the engine's device; missing modules are built side by side, ahead of the measurements.

    Raises EngineError and WorkerLost when the engine cannot work, which says nothing about a claim.
    """
    modules = [_module(claim, engine) for claim in claims]
    done: list[Reproduction] = []
    try:
        for claim, module in zip(claims, modules, strict=True):
            done.append(_one(claim, module, engine))
            on_done(done[-1])
    finally:
        engine.drop([module.building for module in modules if module.building is not None])
    return done


def _module(claim: Claim, engine: Engine) -> _Module:
    sm_count = engine.device.profile.sm_count
    if claim.artifact_sha256 and claim.environment.sm_count == sm_count and engine.has_module(claim.artifact_sha256):
        return _Module(sha256=claim.artifact_sha256, source_hash=claim.source_hash or claim.artifact_sha256)
    job = CompileJob(problem=claim.problem, config=claim.config, sm_count=sm_count)
    return _Module(building=engine.compile(job), origin="built again")


def _one(claim: Claim, module: _Module, engine: Engine) -> Reproduction:
    if module.building is not None and (failure := _built(claim, module, module.building.result())):
        return Reproduction(claim=claim, reproduced=False, reason=failure)
    job = EvaluateJob(
        problem=claim.problem,
        config=claim.config,
        module_path=engine.module_path(module.sha256),
        module_sha256=module.sha256,
        source_hash=module.source_hash,
        protocol=claim.protocol,
        phase="final",
        seed=SEED,
    )
    final = FinalJob(problem=claim.problem, candidates=(job,), protocol=claim.protocol, seed=SEED)
    return _judged(claim, module, engine.final(final).result())


def _built(claim: Claim, module: _Module, reply: CompileReply) -> str:
    """Note what was built; why there is nothing to measure, or nothing."""
    kernel = reply.kernel
    if reply.outcome is not None or kernel is None:
        return f"its module cannot be built here: {reply.outcome}: {reply.reason}"
    module.sha256, module.source_hash = kernel.sha256, kernel.source_hash
    if claim.source_hash and claim.source_hash != kernel.source_hash:
        module.warnings.append("the template now generates another source for its config")
    elif claim.artifact_sha256 and claim.artifact_sha256 != kernel.sha256:
        module.warnings.append("the module that was built now is not the stored one, byte for byte")
    return ""


def _judged(claim: Claim, module: _Module, reply: FinalReply) -> Reproduction:
    measurement = reply.measurements.get(module.source_hash)
    warnings = [*module.warnings, *differences(claim.environment, reply.environment)]
    if measurement is None:
        failure = reply.failures.get(module.source_hash)
        reason = f"{failure.outcome}: {failure.reason}" if failure else f"not measured: {reply.disturbed}"
        return Reproduction(
            claim=claim, reproduced=False, reason=reason, module=module.origin, warnings=tuple(warnings)
        )
    reproduced, reason = judge(claim.ratio, measurement.ratio(BASELINE))
    return Reproduction(
        claim=claim,
        reproduced=reproduced,
        reason=reason,
        measurement=measurement,
        module=module.origin,
        warnings=tuple(warnings),
    )
