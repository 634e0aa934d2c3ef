"""An exported module in a process that has torch and apache-tvm-ffi and no compiler: right, and as fast as stored.

    python -m tests.soak.fresh_process BUNDLE.zip RECORDED.json

Verifies and times every module of a bundle with the product's own referee and clock, next to the vendor library, and
compares the ratio with the one that was stored. Exit status 1 when a ratio differs by more than 1 %.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.config import config_from_dict
from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol
from tuner.engine.base import EvaluateJob, FinalJob
from tuner.gpu.child import GpuWorker
from tuner.gpu.inventory import list_gpus

if TYPE_CHECKING:
    from tuner.gpu.wire import Report

ABSENT = ("tvm", "optuna", "sqlalchemy", "fastapi")
TOLERANCE = 0.01


def quiet(*_: object, **__: object) -> None:
    """Nobody watches the phases of this process."""


def check(worker: GpuWorker, folder: Path, entry: dict[str, Any], report: Report) -> dict[str, Any]:
    """Verify and time one module of the bundle."""
    path = folder / entry["file"]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    problem = GemmProblem(**{name: entry["problem"][name] for name in ("m", "n", "k", "dtype", "layout")})
    job = EvaluateJob(
        problem=problem,
        config=config_from_dict(entry["arch"], entry["config"]),
        module_path=path,
        module_sha256=sha256,
        source_hash=sha256,
        protocol=MeasureProtocol(),
        phase="final",
        seed=12345,
    )
    answer: Any = worker.run(FinalJob(problem=problem, candidates=(job,), protocol=MeasureProtocol(), seed=1), report)
    reply = answer.reply
    if sha256 not in reply.measurements:
        return {"shape": problem.shape, "dtype": problem.dtype, "failure": reply.failures[sha256].reason}
    measurement = reply.measurements[sha256]
    ratio = measurement.ratio("cublaslt_best")
    return {
        "shape": problem.shape,
        "dtype": problem.dtype.value,
        "median_us": measurement.median_us(),
        "ratio": ratio.median,
        "interval": [ratio.low, ratio.high],
    }


def main(bundle: str, recorded: str) -> int:
    """0 when every module is right and its ratio is the stored one within 1 %."""
    present = [name for name in ABSENT if importlib.util.find_spec(name) is not None]
    stored = {
        (f"{row['m']}x{row['n']}x{row['k']}", row["dtype"]): row["ratio"]["cublaslt_best"]
        for row in json.loads(Path(recorded).read_text())["rows"]
    }
    worker = GpuWorker({"uuid": list_gpus()[0].uuid, "toolchain": "", "cuda": ""})
    worker.start(quiet)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(bundle) as archive:
            archive.extractall(name)
        for entry in json.loads((Path(name) / "manifest.json").read_text())["modules"]:
            began = time.monotonic()
            row = check(worker, Path(name), entry, quiet)
            row["stored_ratio"] = stored.get((row["shape"], row["dtype"]))
            if "ratio" in row and row["stored_ratio"]:
                row["within_1_percent"] = abs(row["ratio"] / row["stored_ratio"] - 1) <= TOLERANCE
            row["wall_s"] = round(time.monotonic() - began, 2)
            rows.append(row)
    print(json.dumps({"installed_but_not_needed": present, "rows": rows}, indent=1))
    return 0 if rows and all(row.get("within_1_percent") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
