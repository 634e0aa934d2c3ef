"""What two GPUs of one host give over one: the same job on one, then on both, through the service.

    python -m tests.soak.two_gpus OUT_DIR [--engine ray] [--trials 24]

Each arm is a service of its own with a home of its own: `gemm-tuner serve`, and with the engine ray a head and a node
beside it. A small job first lets every compile worker and GPU child start; then ten shapes are tuned. Throughput is
trials a second from the first trial of that job to its last; winners are compared by their tie sets. Random search,
because its candidates do not hang on times, so that both arms measure the same ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.problem import GemmProblem
from tests.cli.conftest import free_port
from tests.soak.on_gpu import Json, say
from tests.soak.report import write_json
from tuner.client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHAPES = (
    *("16x4096x4096", "32x2560x5120", "64x7168x4096", "128x4096x7168", "256x5120x6400"),
    *("512x4096x4096", "1024x4096x4096", "2048x6144x4096", "4096x4096x4096", "8192x2560x2560"),
)
WARM_SHAPES = ("64x5120x2880", "256x3072x4096")
GAIN = 1.8
READY_S = 120.0
JOB_S = 420.0


def main() -> int:
    """0 when two GPUs did the job at least GAIN times as fast, with the same winners or tie sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--engine", choices=("local", "ray", "fake"), default="ray", help="fake: to try this script")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK")
    options = parser.parse_args()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    arms = [
        arm(options.out_dir / f"{options.engine}-{count}", options.engine, count, options.shapes, options.trials)
        for count in (1, 2)
    ]
    found = compared(arms, options.engine, options.trials)
    write_json(options.out_dir / f"two_gpus_{options.engine}.json", found)
    say(json.dumps({name: value for name, value in found.items() if name != "arms"}))
    return 0 if found["met"] else 1


def arm(home: Path, engine: str, gpus: int, shapes: Sequence[str], trials: int) -> Json:
    """The job on so many GPUs."""
    with serving(home, engine, gpus) as client:
        tuned(client, WARM_SHAPES, trials=16)
        began = time.monotonic()
        job = tuned(client, shapes, trials=trials)
        wall_s = time.monotonic() - began
        studies = [study_row(client, study["id"]) for study in job["studies"]]
        times = [moment for study in studies for moment in study.pop("finished_at")]
        spread_s = (max(times) - min(times)).total_seconds()
        row: Json = {"gpus": gpus, "wall_s": round(wall_s, 1), "trials": len(times), "search_s": round(spread_s, 1)}
        row |= {"trials_per_s": round((len(times) - 1) / spread_s, 3), "studies": studies}
        row["cards"] = sorted({study["card"] for study in studies if study["card"]})
        say(json.dumps({name: value for name, value in row.items() if name != "studies"}))
        return row


def tuned(client: Client, shapes: Sequence[str], *, trials: int) -> Json:
    """The finished job."""
    problems = [asdict(GemmProblem.parse(shape, dtype="bf16")) for shape in shapes]
    body = {"problems": problems, "device": "h200", "mode": "measure", "sampler": "random"}
    submitted = client.submit_job(body | {"budget": {"trials": trials, "wall_s": JOB_S}})
    return dict(client.wait(submitted["id"], timeout_s=JOB_S))


def study_row(client: Client, study_id: str) -> Json:
    """What is compared of one study."""
    study, trials = client.study(study_id), client.trials(study_id)
    problem = GemmProblem(**study["problem"])  # type: ignore[arg-type]
    row: Json = {"shape": problem.shape, "state": study["state"], "reason": study["reason"], "winner": None}
    row |= {"tie_set": [], "median_us": None, "ratio": None, "evidence": [], "card": None}
    row["finished_at"] = [datetime.fromisoformat(str(trial["finished_at"])) for trial in trials if trial["gpu_s"]]
    with contextlib.suppress(ClientError):
        best = client.best(m=problem.m, n=problem.n, k=problem.k, device="h200")
        row |= {"winner": best["config"], "tie_set": [tied["config"] for tied in best["tie_set"]]}
        row |= {"median_us": best["median_us"], "ratio": best["ratio"], "evidence": best["evidence"]}
        row["card"] = (best["environment"] or {}).get("gpu_uuid")
    return row


def compared(arms: Sequence[Json], engine: str, trials: int) -> Json:
    """Gain and agreement of two arms."""
    one, two = arms
    gain = two["trials_per_s"] / one["trials_per_s"]
    agree = [
        first["winner"] is not None and (first["winner"] in second["tie_set"] or second["winner"] in first["tie_set"])
        for first, second in zip(one["studies"], two["studies"], strict=True)
    ]
    return {
        "schema": 1,
        "command": f"python -m tests.soak.two_gpus OUT_DIR --engine {engine} --trials {trials}",
        "gain": round(gain, 3),
        "gain_of_wall_time": round(one["wall_s"] / two["wall_s"], 3),
        "winners_agree": sum(agree),
        "shapes": len(agree),
        "met": gain >= GAIN and all(agree),
        "arms": list(arms),
    }


@contextmanager
def serving(home: Path, engine: str, gpus: int) -> Iterator[Client]:
    """A service with its cluster, ended at the exit."""
    visible = ",".join(map(str, range(gpus)))
    environment = {**os.environ, "GEMM_TUNER_HOME": str(home), "CUDA_VISIBLE_DEVICES": visible}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "GEMM_TUNER_STUDIES": "8"}
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with ExitStack() as stack:
        flags = ["--engine", engine]
        if engine == "ray":
            head = f"127.0.0.1:{free_port()}"
            port_of_head = head.partition(":")[2]
            stack.enter_context(running(["node", "--head", "--port", port_of_head], environment, home / "head.log"))
            stack.enter_context(running(["node", "--address", head], environment, home / "node.log"))
            flags += ["--ray-address", head]
        stack.enter_context(running(["serve", "--port", str(port), *flags], environment, home / "serve.log"))
        client = stack.enter_context(Client(f"http://127.0.0.1:{port}"))
        wait_until_live(client, gpus)
        yield client


def wait_until_live(client: Client, gpus: int) -> None:
    """Until the service lists so many GPUs. Raises SystemExit where they do not come."""
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ClientError):
            if sum(device["state"] in ("READY", "BUSY") for device in client.devices()["devices"]) >= gpus:
                return
        time.sleep(0.5)
    raise SystemExit(f"the service did not find {gpus} GPUs in {READY_S:g} s: see its log in OUT_DIR")


@contextmanager
def running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """One of our commands, in a process group that is ended at the exit."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tuner.cli.main", *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
