"""The ladder, built and timed: the same product by ever better kernels, beside the vendor library.

Where a GPU of the right kind is at hand every rung is verified and timed by the same referee and clock as any
candidate. Elsewhere the rungs are only compiled, and their times are not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.ladder import LIBRARY, PUBLISHED, PUBLISHED_SOURCE, Rung, StepConfig, as_published, simple_rungs
from kernels.resources import HEADER_BYTES, resources_of
from search_space.model import predict
from search_space.starting import preset
from tuner.engine.base import CompileJob, EvaluateJob
from tuner.explaining import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.compile import CompiledKernel
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from search_space.request import MeasureProtocol
    from tuner.engine.base import Engine, EvaluateReply

SCHEMA = 1
Json = dict[str, Any]
MECHANISMS = {
    "step7": "persistent scheduler, warp specialization",
    "step8": "cluster of two CTAs",
    "step9": "second consumer shares the staged B tile",
}


def rungs(arch: str) -> tuple[Rung, ...]:
    """Every rung of an architecture, slowest first."""
    prefix = "h-" if arch == "sm_90a" else ""
    presets = tuple(
        Rung(name=name, mechanism=mechanism, config=preset(f"{prefix}{name}")) for name, mechanism in MECHANISMS.items()
    )
    return simple_rungs(arch) + presets


def climb(
    problem: GemmProblem,
    engine: Engine,
    *,
    protocol: MeasureProtocol,
    command: str,
    tell: Callable[[str], None],
) -> Json:
    """Build every rung and, on a live device, time it.

    tell: called with one line for people after each rung
    Raises ConfigError for a problem that the simple kernels cannot serve, EngineError and WorkerLost.
    """
    profile, climbed = engine.device.profile, rungs(engine.device.profile.arch.name)
    jobs = [CompileJob(problem=problem, config=rung.config, sm_count=profile.sm_count) for rung in climbed]
    futures = [engine.compile(job) for job in jobs]
    rows = []
    for rung, future in zip(climbed, futures, strict=True):
        built = future.result()
        row: Json = {"name": rung.name, "mechanism": rung.mechanism, "config": rung.config.to_dict()}
        row |= _facts(rung, built.kernel) | {"modeled_us": _modeled_us(problem, rung, profile)}
        row |= {"outcome": built.outcome, "reason": built.reason, "median_us": None}
        if built.kernel is not None and built.outcome is None and engine.device.is_live:
            row |= _timed(problem, rung, built.kernel, engine, protocol)
        rows.append(row | _published(rung.name))
        tell(f"{rung.name}: {_time_text(row)}")
    rows.append(_library_row(rows))
    for row in rows:
        row["speedup"] = _speedup(rows[0], row)
    return {
        "schema": SCHEMA,
        "command": command,
        "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype.value},
        "device": engine.device.name,
        "arch": profile.arch.name,
        "measured": engine.device.is_live,
        "environment": next((row["environment"] for row in reversed(rows) if row.get("environment")), None),
        "protocol": protocol.to_dict(),
        "published": {"source": PUBLISHED_SOURCE, "same_problem": as_published(problem, profile.arch.name)},
        "rows": [{name: value for name, value in row.items() if name != "environment"} for row in rows],
    }


def _facts(rung: Rung, kernel: CompiledKernel | None) -> Json:
    """What the compilers made of a rung."""
    config = rung.config
    simple = isinstance(config, StepConfig)
    smem_bytes = (
        HEADER_BYTES + config.stage_bytes + config.epilogue_bytes if simple else resources_of(config).smem_bytes
    )
    facts: Json = {"smem_bytes": smem_bytes, "tmem_columns": config.arch.tmem_columns, "threads": config.threads}
    if kernel is None:
        return facts
    return facts | facts_of(kernel)


def _modeled_us(problem: GemmProblem, rung: Rung, profile: DeviceProfile) -> float | None:
    """The performance model knows the templates only."""
    return None if isinstance(rung.config, StepConfig) else predict(problem, rung.config, profile).time_us


def _timed(problem: GemmProblem, rung: Rung, kernel: CompiledKernel, engine: Engine, protocol: MeasureProtocol) -> Json:
    job = EvaluateJob(
        problem=problem,
        config=rung.config,
        module_path=engine.module_path(kernel.sha256),
        module_sha256=kernel.sha256,
        source_hash=kernel.source_hash,
        protocol=protocol,
        phase="trial",
    )
    return _times(problem, engine.evaluate(job).result())


def _times(problem: GemmProblem, reply: EvaluateReply) -> Json:
    found: Json = {
        "outcome": reply.outcome,
        "reason": reply.reason,
        "evidence": [item.value for item in reply.evidence],
        "max_rel_error": reply.max_rel_error,
    }
    measurement = reply.measurement
    if measurement is None:
        return found
    return found | {
        "median_us": measurement.median_us(),
        "interval_us": list(measurement.interval_us()),
        "samples_us": list(measurement.samples_us),
        "baselines_us": {name: measurement.baseline_median_us(name) for name in measurement.baselines_us},
        "ratio": {name: ratio.median for name, ratio in measurement.ratios().items()},
        "tflops": measurement.tflops(problem),
        "environment": measurement.environment.to_dict(),
    }


def _library_row(rows: list[Json]) -> Json:
    """The vendor library as it was timed beside the last rung that was."""
    beside = next((row for row in reversed(rows) if row.get("baselines_us")), None)
    row: Json = {"name": LIBRARY, "mechanism": "vendor library, its best choice", "median_us": None, "modeled_us": None}
    if beside is not None:
        row["median_us"] = beside["baselines_us"]["cublaslt_best"]
        row["tflops"] = beside["tflops"] * beside["median_us"] / row["median_us"]
    return row | _published(LIBRARY)


def _published(name: str) -> Json:
    ms, speedup = PUBLISHED[name]
    return {"published_ms": ms, "published_speedup": speedup}


def _speedup(first: Json, row: Json) -> float | None:
    return first["median_us"] / row["median_us"] if first["median_us"] and row["median_us"] else None


def _time_text(row: Json) -> str:
    if row["median_us"] is not None:
        return f"{row['median_us']:.1f} us"
    return f"{row['outcome']}: {row['reason']}" if row["outcome"] else "compiled, not measured"
