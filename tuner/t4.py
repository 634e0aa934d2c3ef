"""T4, the results format that the auto-tuning community shares (schema 1.0.0): every trial of a study with its outcome.

Times are milliseconds, as other tuners write them. What the schema has no place for (the problem, the device, why a
trial failed) stands in `metadata` and in `measurements`, which the schema leaves open.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = dict[str, Any]

SCHEMA_VERSION = "1.0.0"
OBJECTIVE = "time"
MS_PER_US = 1e-3
# Outcome of ours, word of theirs. What was legal and never built counts as a broken constraint.
INVALIDITY = {
    "MEASURED": "correct",
    "MODELED": "correct",
    "STOPPED_EARLY": "correct",
    "REJECTED": "constraints",
    "KNOWN_BAD": "constraints",
    "COMPILE_FAILED": "compile",
    "SPILLED": "compile",
    "WRONG_RESULT": "correctness",
    "NONDETERMINISTIC": "correctness",
    "CHECK_FAILED": "correctness",
    "INVALID_TIMING": "runtime",
    "CRASHED": "runtime",
    "OUT_OF_MEMORY": "runtime",
    "TIMED_OUT": "timeout",
}


class T4Error(ValueError):
    """The text is not T4, or holds nothing that can be taken over."""


def document(study: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> Json:
    """A study and its trials, as the service's routes give them."""
    metadata = {name: study[name] for name in ("problem", "arch", "device", "mode", "environment")}
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {"generator": "gemm-tuner", "study": study["id"], **metadata},
        "results": [_entry(trial) for trial in trials],
    }


def _entry(trial: Mapping[str, Any]) -> Json:
    time_us = trial["median_us"] if trial["median_us"] is not None else trial["modeled_us"]
    time_ms = None if time_us is None else time_us * MS_PER_US
    measured = {
        OBJECTIVE: (time_ms, "ms"),
        "gpu_time": (None if trial["gpu_s"] is None else trial["gpu_s"] * 1e3, "ms"),
        "max_rel_error": (trial["max_rel_error"], ""),
        "outcome": (trial["outcome"], ""),
        "evidence": (trial["evidence"], ""),
        "reason": (trial["reason"] or None, ""),
    }
    invalidity = INVALIDITY[trial["outcome"]]
    return {
        "timestamp": trial["finished_at"],
        "configuration": trial["config"],
        "objectives": [OBJECTIVE],
        "times": {
            "compilation_time": (trial["compile_s"] or 0.0) * 1e3,
            "runtimes": [] if trial["median_us"] is None else [trial["median_us"] * MS_PER_US],
        },
        "invalidity": invalidity,
        "correctness": 0 if invalidity == "correctness" else 1,
        "measurements": [
            {"name": name, "value": value, "unit": unit}
            for name, (value, unit) in measured.items()
            if value is not None
        ],
    }


def read(text: str) -> Json:
    """The document. Raises T4Error naming what is wrong with it."""
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise T4Error(f"is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), list):
        raise T4Error("is no T4 document: it has no list of results")
    version = content.get("schema_version")
    if not isinstance(version, str) or version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise T4Error(f"has T4 schema {version!r}, this version reads {SCHEMA_VERSION.partition('.')[0]}.x")
    return content


def best_config(content: Mapping[str, Any]) -> tuple[Json, float]:
    """The correct configuration with the least time, and that time in us. Raises T4Error where there is none."""
    timed = [
        (time_ms, entry["configuration"]) for entry in content["results"] if (time_ms := _time_ms(entry)) is not None
    ]
    if not timed:
        raise T4Error(f"holds no correct configuration with a measurement named {OBJECTIVE!r}")
    time_ms, config = min(timed, key=lambda one: one[0])
    return config, time_ms / MS_PER_US


def _time_ms(entry: Any) -> float | None:
    """None for an entry that is broken, was not correct or has no time."""
    if not isinstance(entry, dict) or entry.get("invalidity") != "correct" or entry.get("correctness") == 0:
        return None
    if not isinstance(entry.get("configuration"), dict):
        return None
    for measured in entry.get("measurements") or ():
        if not isinstance(measured, dict) or measured.get("name") != OBJECTIVE:
            continue
        value, unit = measured.get("value"), measured.get("unit")
        factor = {"ms": 1.0, "us": 1e-3, "s": 1e3, "seconds": 1e3, "milliseconds": 1.0}.get(str(unit))
        if factor and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
            return float(value) * factor
    return None
