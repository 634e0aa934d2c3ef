"""Examples that OpenAPI shows. The tests read each back with its model."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

PROBLEM_EXAMPLE: Json = {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "layout": "NT"}
JOB_EXAMPLE: Json = {
    "problems": [PROBLEM_EXAMPLE | {"weight": 1.0}],
    "arch": "sm_90a",
    "device": None,
    "mode": "measure",
    "effort": "normal",
    "budget": {"trials": 40, "wall_s": 600},
    "sampler": "learned",
    "stop_early": None,
    "seed": 0,
    "priority": 0,
    "force": False,
}
ID_EXAMPLE = "5f0c6d2e9b7a4c1d8e3f2a1b0c9d8e7f"
WHEN_EXAMPLE = "2026-05-04T09:30:00Z"
CONFIG_EXAMPLE = {"pipe_depth": 4, "cta_group": 2, "num_consumers": 2, "blk_m": 64, "blk_n": 256, "blk_k": 64}
SHA_EXAMPLE = "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab"
JOB_SUMMARY_EXAMPLE: Json = {
    "id": ID_EXAMPLE,
    "state": "RUNNING",
    "mode": "measure",
    "force": False,
    "priority": 0,
    "cancel_requested": False,
    "created_at": WHEN_EXAMPLE,
    "finished_at": None,
}
TRIAL_EXAMPLE: Json = {
    "number": 7,
    "outcome": "MEASURED",
    "reason": "",
    "config": CONFIG_EXAMPLE,
    "evidence": ["measured", "numeric"],
    "modeled_us": 171.0,
    "median_us": 175.6,
    "ratio": {"cublaslt_best": 1.002},
    "compile_s": 1.9,
    "gpu_s": 0.4,
    "max_rel_error": 0.0017,
    "source_hash": SHA_EXAMPLE,
    "artifact_sha256": SHA_EXAMPLE,
    "finished_at": WHEN_EXAMPLE,
}
VERDICT_EXAMPLE = "as fast as cublaslt_best within the noise: 1.002 of its speed (95 % interval 0.999 to 1.004)"
COVERAGE_EXAMPLE: Json = {"askable": 48210, "asked": 61, "rejected": 21, "compiled": 40, "timed": 40}
MEASUREMENT_EXAMPLE: Json = {
    "phase": "final",
    "samples_us": [175.4, 175.6, 175.9],
    "baselines_us": {"torch": [176.9, 176.8, 176.7], "cublaslt_best": [175.8, 175.9, 176.0]},
    "discarded": 0,
    "protocol": {"kind": "burst", "burst_ms": 4.0, "rounds": 9, "idle_gap_ms": 5.0},
    "states": [{"sm_clock_mhz": 1980.0, "power_w": 512.0, "temperature_c": 46.0, "throttle_reasons": []}],
    "energy_mj": {},
}
WITHDRAWN_EXAMPLE: Json = {
    "result_id": ID_EXAMPLE,
    "revision": 3,
    "reason": "WRONG_RESULT: in the final: 1 of 16777216 elements is wrong (trial 40 of study 0b5e)",
    "at": "2026-11-30T11:42:48+00:00",
    "device": "NVIDIA H200",
}
BEST_EXAMPLE: Json = {
    "match": "exact",
    "problem": PROBLEM_EXAMPLE,
    "tuned_for": PROBLEM_EXAMPLE,
    "distance": 0.0,
    "arch": "sm_90a",
    "device": "NVIDIA H200",
    "config": CONFIG_EXAMPLE,
    "evidence": ["measured", "numeric", "checked"],
    "protocol": "burst",
    "environment": {"gpu_name": "NVIDIA H200", "driver": "580.95"},
    "revision": 3,
    "pinned": False,
    "median_us": 175.6,
    "tie_set": [],
    "ratio": {"cublaslt_best": {"median": 1.002, "low": 0.999, "high": 1.004}},
    "verdict": VERDICT_EXAMPLE,
    "stale": False,
    "stale_reason": "",
    "withdrawn": [],
    "artifact_sha256": SHA_EXAMPLE,
    "result_id": ID_EXAMPLE,
}
RESULT_EXAMPLE: Json = {
    "id": ID_EXAMPLE,
    "problem": PROBLEM_EXAMPLE,
    "arch": "sm_90a",
    "device": "NVIDIA H200",
    "study_id": ID_EXAMPLE,
    "trial_number": 7,
    "revision": 3,
    "pinned": False,
    "current": True,
    "config": CONFIG_EXAMPLE,
    "evidence": ["measured", "numeric", "checked"],
    "protocol": "burst",
    "environment": {"gpu_name": "NVIDIA H200", "driver": "580.95"},
    "environment_key": "NVIDIA H200|132|580|13.0|nvcc 13.0.88|9c56",
    "median_us": 175.6,
    "interval_us": [175.2, 176.0],
    "baselines_us": {"torch": 176.8, "cublaslt_best": 175.9},
    "ratio": {"cublaslt_best": {"median": 1.002, "low": 0.999, "high": 1.004}},
    "verdict": VERDICT_EXAMPLE,
    "noise": 0.0012,
    "aa_ratio": {"median": 1.0003, "low": 0.9991, "high": 1.0012},
    "measurement": MEASUREMENT_EXAMPLE,
    "coverage": COVERAGE_EXAMPLE,
    "tie_set": [],
    "checks": [{"name": "stress", "verdict": "clean", "detail": "700 launches right and bitwise equal", "tool": ""}],
    "tflops": 782.7,
    "max_rel_error": 0.0017,
    "trials": 40,
    "artifact_sha256": SHA_EXAMPLE,
    "source_hash": SHA_EXAMPLE,
    "created_at": WHEN_EXAMPLE,
    "published_at": WHEN_EXAMPLE,
    "withdrawn_at": None,
    "withdrawn_reason": "",
}
