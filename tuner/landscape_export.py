"""Landscapes for other tuners: as T4, and as a cache file of Kernel Tuner for its simulation mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.problem import Dtype
from tuner import t4
from tuner.records import Outcome

if TYPE_CHECKING:
    from tuner.landscape import Landscape, Row

    Json = dict[str, Any]

FORMATS = ("t4", "kernel-tuner")
# What Kernel Tuner calls a config without a time, by ours.
ERRORS = {
    Outcome.COMPILE_FAILED: "CompilationFailedConfig",
    Outcome.SPILLED: "CompilationFailedConfig",
    Outcome.REJECTED: "InvalidConfig",
    Outcome.KNOWN_BAD: "InvalidConfig",
}
MS_PER_US = 1e-3


def exported(one: Landscape, form: str) -> Json:
    """The landscape in one of `FORMATS`."""
    return t4_document(one) if form == "t4" else kernel_tuner_cache(one)


def t4_document(one: Landscape) -> Json:
    """Each config with its outcome in the community's results format; times on the landscape's own scale."""
    problem = one.problem
    study = {
        "id": one.name,
        "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": Dtype(problem.dtype).value},
        "arch": one.profile.arch.name,
        "device": one.profile.name,
        "mode": "measure",
        "environment": next(iter(one.environments.values()), None),
    }
    return t4.document(study, [_trial(one, row) for _, row in sorted(one.rows.items())])


def _trial(one: Landscape, row: Row) -> Json:
    time_us = one.times_us.get(row.index)
    return {
        "config": one.configs[row.index].to_dict(),
        "outcome": row.outcome.value,
        "reason": row.reason,
        "median_us": None if row.outcome is Outcome.REJECTED else time_us,
        "modeled_us": None,
        "evidence": ["measured", "numeric"] if row.samples_us else [],
        "compile_s": row.compile_s,
        "gpu_s": row.gpu_s,
        "max_rel_error": row.max_rel_error,
        "finished_at": None,
    }


def kernel_tuner_cache(one: Landscape) -> Json:
    """As Kernel Tuner writes one: tune with the same parameters, `cache` this file and `simulation_mode=True`.

    Its searches see the configs of the landscape through `restrictions` that admit the keys of `cache` alone.
    """
    knobs = list(type(one.configs[0]).knobs())
    values = {knob: sorted({getattr(config, knob) for config in one.configs}) for knob in knobs}
    problem = one.problem
    return {
        "device_name": one.profile.name,
        "kernel_name": "gemm",
        "problem_size": [problem.m, problem.n, problem.k],
        "tune_params_keys": knobs,
        "tune_params": values,
        "objective": "time",
        "cache": dict(_cached(one, row, knobs) for _, row in sorted(one.rows.items())),
    }


def _cached(one: Landscape, row: Row, knobs: list[str]) -> tuple[str, Json]:
    config = one.configs[row.index]
    settings = {knob: getattr(config, knob) for knob in knobs}
    time_us = one.times_us.get(row.index)
    error = ERRORS.get(row.outcome, "RuntimeFailedConfig")
    times: Json = {"time": error, "__error__": error}
    if time_us is not None:
        times = {
            "time": time_us * MS_PER_US,
            "times": [sample * MS_PER_US for sample in row.samples_us] or [time_us * MS_PER_US],
        }
    return ",".join(map(str, settings.values())), {
        **settings,
        **times,
        "compile_time": row.compile_s * 1e3,
        "verification_time": 0.0,  # part of the benchmark's time
        "benchmark_time": row.gpu_s * 1e3,
        "strategy_time": 0.0,
        "framework_time": 0.0,
    }
