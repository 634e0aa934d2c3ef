"""Recorded measurements: results of the service as a file that docs and tests read, and its table.

One row a problem; rows measured on different days and cards of one kind may stand in one file, each with its own
environment.
"""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from kernels.artifacts import write_atomically
from pictures.ratios import ALIGNMENT, class_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SCHEMA = 1
Json = dict[str, Any]


class RecordError(ValueError):
    """A file of recorded measurements cannot be read."""


def row_of(result: Mapping[str, Any], source: str = "") -> Json:
    """One row from a result as GET /v1/results/{id} gives it. `source` says where the shape comes from."""
    problem, ratios = result["problem"], result["ratio"] or {}
    baselines = result["baselines_us"] or {}
    return {
        "m": problem["m"],
        "n": problem["n"],
        "k": problem["k"],
        "dtype": problem["dtype"],
        "layout": problem["layout"],
        "arch": result["arch"],
        "result_id": result["id"],
        "source": source,
        "config": result["config"],
        "artifact_sha256": result["artifact_sha256"],
        "source_hash": result["source_hash"],
        "median_us": result["median_us"],
        "interval_us": result["interval_us"],
        "baselines_us": {"torch": None, "cublaslt_best": None, "triton": None, **baselines},
        "ratio": {name: ratio["median"] for name, ratio in ratios.items()},
        "ratio_interval": {name: [ratio["low"], ratio["high"]] for name, ratio in ratios.items()},
        "tflops": result["tflops"],
        "max_rel_error": result["max_rel_error"],
        "evidence": result["evidence"],
        "checks": result["checks"],
        "revision": result["revision"],
        "trials": result["trials"],
        "tie_set": len(result["tie_set"]),
        "created_at": result["created_at"],
        "noise": result["noise"],
        "aa_ratio": result["aa_ratio"],
        "coverage": result["coverage"],
        **_samples(result["measurement"]),
        "environment": result["environment"],
    }


def _samples(measurement: Mapping[str, Any] | None) -> Json:
    """The raw pairs, so that whoever measures again can compare intervals; nothing where they were not kept."""
    if measurement is None:
        return {}
    return {
        "protocol": measurement["protocol"],
        "samples_us": measurement["samples_us"],
        "baseline_samples_us": measurement["baselines_us"],
        "discarded": measurement["discarded"],
        "energy_mj": measurement["energy_mj"],
    }


def document(rows: Iterable[Json], *, command: str, protocol: Json, earlier: Json | None = None) -> Json:
    """A file's content: new rows take the place of earlier ones for the same problem, the others stay."""
    by_problem = {_key(row): row for row in (earlier or {}).get("rows", ())}
    by_problem |= {_key(row): row for row in rows}
    kept = sorted(by_problem.values(), key=_key)
    environment = kept[-1]["environment"] if kept else {}
    return {"schema": SCHEMA, "command": command, "environment": environment, "protocol": protocol, "rows": kept}


def read(path: Path) -> Json:
    """Raises RecordError for a file that is not one of ours or of a newer schema."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise RecordError(f"{path} holds no recorded measurements: it has no list of rows")
    if content.get("schema") != SCHEMA:
        raise RecordError(f"{path} has schema {content.get('schema')!r}, this version reads {SCHEMA}")
    for number, row in enumerate(content["rows"], 1):
        if wrong := _wrong(row):
            raise RecordError(f"{path}, row {number}: {wrong}")
    return content


def _wrong(row: Any) -> str:
    """What keeps a row from being read as a measurement of a problem; empty where nothing does."""
    if not isinstance(row, dict):
        return "is not an object"
    for name, kind in (("m", int), ("n", int), ("k", int), ("dtype", str)):
        if type(row.get(name)) is not kind:
            return f"{name} must be of type {kind.__name__}, got {row.get(name)!r}"
    return ""


def write(path: Path, content: Json) -> None:
    """Write the file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def table(content: Json) -> str:
    """The rows as a Markdown table, with the geometric means of both ratios below."""
    lines = [
        "| M x N x K | dtype | ours us | TFLOP/s | torch us | best cuBLAS us | over torch | over best cuBLAS "
        "| evidence | trials |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = content["rows"]
    lines += [_line(row) for row in rows]
    if rows:
        means = " | ".join(
            f"**{geometric_mean(row['ratio'][name] for row in rows):.3f}**" for name in ("torch", "cublaslt_best")
        )
        lines.append(f"| **geometric mean of {len(rows)}** | | | | | | {means} | | |")
    return "\n".join(lines)


def summary(content: Json, by: str) -> str:
    """Groups of rows as a Markdown table: by class of shape, or by path through the template."""
    group_of = {"class": _class, "path": _path}[by]
    groups: dict[str, list[Json]] = {}
    for row in sorted(content["rows"], key=lambda row: (row["n"] % ALIGNMENT > 0, *_key(row))):
        groups.setdefault(group_of(row), []).append(row)
    lines = [
        f"| {by} | rows | over torch | over best cuBLAS | least | most | memcheck clean | soaked in full |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in groups.items():
        ratios = [row["ratio"]["cublaslt_best"] for row in rows]
        over_torch = geometric_mean(row["ratio"]["torch"] for row in rows)
        clean = sum(_check(row, "memcheck").get("verdict") == "clean" for row in rows)
        soaked = sum(_check(row, "soak").get("detail", "").startswith("10000 launches") for row in rows)
        means = f"{over_torch:.3f} | {geometric_mean(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f}"
        lines.append(f"| {name} | {len(rows)} | {means} | {clean} | {soaked} |")
    return "\n".join(lines)


def _class(row: Json) -> str:
    return class_of(row["m"], row["n"])


def _path(row: Json) -> str:
    """What makes one kernel of a template another piece of code than the next."""
    config = row["config"]
    words = [config.get("schedule", "")]
    words += ["swap_ab"] if config.get("swap_ab") else []
    words += ["split_k"] if config.get("split_k", 1) > 1 else []
    words += [f"pair shares {config.get('share', '')}".strip()] if config["cta_group"] > 1 else []
    words += [config["load"]] if config.get("load", "tma") != "tma" else []
    words += ["any N"] if row["n"] % ALIGNMENT else []
    return ", ".join(word for word in words if word)


def _check(row: Json, name: str) -> Json:
    return next((check for check in row["checks"] if check["name"] == name), {})


def _line(row: Json) -> str:
    baselines, ratio = row["baselines_us"], row["ratio"]
    return (
        f"| {row['m']}x{row['n']}x{row['k']} | {row['dtype']} | {row['median_us']:.2f} | {row['tflops']:.0f} "
        f"| {baselines['torch']:.2f} | {baselines['cublaslt_best']:.2f} "
        f"| {ratio['torch']:.3f} | {ratio['cublaslt_best']:.3f} | {', '.join(row['evidence'])} | {row['trials']} |"
    )


def _key(row: Json) -> tuple[int, int, int, str]:
    return row["m"], row["n"], row["k"], row["dtype"]
