"""Twenty shapes that are in no landscape, tuned as a user would, and five of them searched ten times as long.

    python -m tests.soak.fresh_shapes OUT_DIR [--engine fake]

Through `gemm-tuner serve` on the first GPU: one job with `effort` normal, while NVML is asked how busy the card is;
then a job of so many more trials that may not stop early, with another seed. The long study's final times the winner of
the normal one beside its own (it is the revision before), so the share of the best known is a ratio of paired rounds.
Resumes: the database is OUT_DIR/home, and a job that is done is not done again. Exit status 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from kernels.problem import GemmProblem
from search_space.request import EFFORT_BUDGETS, Effort
from tests.soak.on_gpu import Json, say
from tests.soak.report import write_json
from tests.soak.two_gpus import serving
from tuner.cli.landscape import problem_of
from tuner.client import ClientError
from tuner.gpu.inventory import list_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tuner.client import Client

# Layers of models of many sizes at M of decode, mid and prefill, ragged ones, few tiles, both dtypes.
SHAPES = (
    *("1x8192x8192:bf16", "2x5120x13824:fp16", "8x10240x8192:bf16", "24x6144x5120:bf16", "48x3584x18944:bf16"),
    *("96x8192x1024:fp16", "160x5120x5120:bf16", "192x7168x2048:bf16", "320x4096x11008:bf16", "384x12288x4096:bf16"),
    *("640x2560x9728:bf16", "768x8192x8192:bf16", "1536x5120x5120:bf16", "2560x3072x3072:fp16", "3072x8192x4096:bf16"),
    *("6144x4096x1536:bf16", "1023x2047x4096:fp16", "333x1500x2000:bf16", "100x20000x1024:bf16", "256x512x12288:bf16"),
)
LONG = ("24x6144x5120:bf16", "192x7168x2048:bf16", "640x2560x9728:bf16", "1536x5120x5120:bf16", "1023x2047x4096:fp16")
LONGER = 10  # times the trials of the normal search
JOB_S = 1800.0
LIMITS = {"share_of_best_known": 0.99, "gpu_busy": 0.70, "candidates_a_minute": 40.0}


def main() -> int:
    """0 when every limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--engine", choices=("local", "fake"), default="local", help="fake: to try this script")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK:DTYPE")
    parser.add_argument("--long", nargs="*", default=LONG, metavar="MxNxK:DTYPE", help="those searched longer")
    parser.add_argument("--long-trials", type=int, default=LONGER * EFFORT_BUDGETS[Effort.NORMAL].trials)
    options = parser.parse_args()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    target = options.out_dir / "fresh_shapes.json"
    found: Json = json.loads(target.read_text()) if target.exists() else {"schema": 1}
    found["command"] = f"python -m tests.soak.fresh_shapes OUT_DIR --long-trials {options.long_trials}"
    with serving(options.out_dir / "home", options.engine, 1) as client:
        if "normal" not in found:
            with watching(options.engine) as busy:
                found["normal"] = tuned(client, options.shapes, {"effort": Effort.NORMAL.value})
            found["normal"]["gpu_busy"] = round(fmean(busy), 3) if busy else None
            write_json(target, found)
        if options.long and "long" not in found:
            search = {"budget": {"trials": options.long_trials, "wall_s": JOB_S}, "stop_early": False}
            found["long"] = tuned(client, options.long, search | {"seed": 1, "force": True})
    found |= judged(found)
    write_json(target, found)
    say(json.dumps({name: found[name] for name in ("figures", "limits", "kept")}))
    return 0 if found["kept"] else 1


@contextlib.contextmanager
def watching(engine: str) -> Iterator[list[float]]:
    """How busy the first card is, from 0 to 1, as the driver averages it over its own sampling period."""
    busy: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(list_gpus()[0].uuid)
        while not stop.wait(0.1):
            busy.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    thread = threading.Thread(target=watch, daemon=True)
    if engine != "fake":
        thread.start()
    try:
        yield busy
    finally:
        stop.set()
        if thread.is_alive():
            thread.join()


def tuned(client: Client, names: Sequence[str], search: Json) -> Json:
    """One job, and what became of its studies."""
    problems = [asdict(problem_of(name)) for name in names]
    submitted = client.submit_job({"problems": problems, "device": "h200", "mode": "measure", **search})
    job = client.wait(submitted["id"], timeout_s=JOB_S)
    rows = [study_row(client, study["id"]) for study in job["studies"]]
    seconds = (_moment(job["finished_at"]) - _moment(job["created_at"])).total_seconds()
    candidates = sum(row["measured"] for row in rows)
    row: Json = {"request": search, "wall_s": round(seconds, 1), "candidates": candidates, "studies": rows}
    row["candidates_a_minute"] = round(candidates / seconds * 60, 1)
    say(json.dumps({name: value for name, value in row.items() if name != "studies"}))
    return row


def study_row(client: Client, study_id: str) -> Json:
    """What is reported of one study: its own winner, and the answer that is published now."""
    study, trials = client.study(study_id), client.trials(study_id)
    problem = GemmProblem(**study["problem"])  # type: ignore[arg-type]
    measured = [trial for trial in trials if trial["gpu_s"]]
    times = [trial["median_us"] for trial in trials if trial["outcome"] == "MEASURED" and trial["median_us"]]
    row: Json = {
        "shape": problem.shape,
        "dtype": problem.dtype.value,
        "state": study["state"],
        "reason": study["reason"],
        "measured": len(measured),
        "gpu_s": round(sum(trial["gpu_s"] or 0.0 for trial in trials), 2),
        "best_of_trials_us": min(times, default=None),
        "config": None,
    }
    with contextlib.suppress(ClientError):  # nothing is published, of an invented device never
        best = client.best(m=problem.m, n=problem.n, k=problem.k, dtype=problem.dtype.value, device="h200")
        row |= {name: best[name] for name in ("result_id", "revision", "config", "median_us", "ratio", "environment")}
    return row


def judged(found: Json) -> Json:
    """The figures beside their limits. The share is 1 where the longer search kept the winner of the normal one."""
    normal, shares = {(row["shape"], row["dtype"]): row for row in found["normal"]["studies"]}, {}
    for long in found.get("long", {"studies": []})["studies"]:
        short = normal[long["shape"], long["dtype"]]
        if long["config"] is None or short["config"] is None:
            continue
        share = 1.0 if long["config"] == short["config"] else vendor_ratio(short) / vendor_ratio(long)
        shares[f"{long['shape']} {long['dtype']}"] = round(share, 4)
    figures: Json = {
        "share_of_best_known": shares,
        "gpu_busy": found["normal"]["gpu_busy"],
        "candidates_a_minute": found["normal"]["candidates_a_minute"],
    }
    kept = {
        "share_of_best_known": len(shares) == len(found.get("long", {"studies": [None]})["studies"])
        and min(shares.values(), default=0.0) >= LIMITS["share_of_best_known"],
        "gpu_busy": (figures["gpu_busy"] or 0.0) >= LIMITS["gpu_busy"],
        "candidates_a_minute": figures["candidates_a_minute"] >= LIMITS["candidates_a_minute"],
    }
    return {"figures": figures, "limits": LIMITS, "kept": all(kept.values())}


def vendor_ratio(row: Json) -> float:
    """The vendor library's time over ours, in paired rounds: comparable where the clock was another."""
    return float(row["ratio"]["cublaslt_best"]["median"])


def _moment(text: str | None) -> datetime:
    return datetime.fromisoformat(str(text))


if __name__ == "__main__":
    began = time.monotonic()
    status = main()
    say(f"{time.monotonic() - began:.0f} s")
    sys.exit(status)
