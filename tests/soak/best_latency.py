"""How long GET and POST /v1/best take on loopback: a real `python -m api` process, a full store, one keep-alive client.

    python -m tests.soak.best_latency --results 5000 --requests 2000

Prints one JSON object. GET is asked for shapes that are stored, so each answer is an exact hit; with `--nearest`, for
shapes that lie between stored ones. POST asks for as many stored shapes at once as a body may hold. Exit status 1 when
the median of GET is over `--limit-ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from api.schemas import MAX_PROBLEMS
from db import queries
from db.database import Database
from db.models import Result, evidence_level, utc_now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Shape = tuple[int, int, int]

DEVICE = "NVIDIA H200"
NK = ((4096, 4096), (8192, 8192), (6144, 4096), (28672, 4096), (2560, 2568))  # layers that a server would ask for
STEP_M = 16
WARM_UP = 50  # requests before the clock starts: imports, statement caches, the connection
ROUNDS = 5  # bulk questions
START_S = 30.0
ENVIRONMENT = {"gpu_name": DEVICE, "sm_count": 132, "driver": "580.82.07", "cuda": "13.0", "toolchain": "nvcc 13.0.88"}
CONFIG = {"pipe_depth": 4, "cta_group": 2, "num_consumers": 2, "blk_m": 64, "blk_n": 256, "blk_k": 64}


def shapes(count: int) -> list[Shape]:
    """`count` different shapes: M in steps of 16 for each N and K."""
    return [(STEP_M * (index // len(NK) + 1), *NK[index % len(NK)]) for index in range(count)]


def published(shape: Shape) -> Result:
    """One published result with a body of the usual size."""
    m, n, k = shape
    evidence = ["measured", "numeric", "checked"]
    return Result(
        m=m,
        n=n,
        k=k,
        dtype="bf16",
        layout="NT",
        arch="sm_90a",
        device_name=DEVICE,
        revision=1,
        config=CONFIG,
        evidence=evidence,
        evidence_level=evidence_level(evidence),
        environment=ENVIRONMENT,
        environment_key="synthetic",
        median_us=175.6,
        interval_us=[175.2, 176.0],
        ratio={name: {"median": 1.01, "low": 1.0, "high": 1.02} for name in ("torch", "cublaslt_best")},
        tie_set=[{"number": 7, "config": CONFIG, "median_us": 175.7}],
        artifact_sha256="a" * 64,
        published_at=utc_now(),
    )


def fill(url: str, wanted: Sequence[Shape]) -> None:
    """A new database with one live device and one published result a shape."""
    with Database.open(url) as database, database.write() as session:
        queries.upsert_device(session, uuid="GPU-1", name=DEVICE, arch="sm_90a", sm_count=132, environment=ENVIRONMENT)
        session.add_all([published(shape) for shape in wanted])


@contextmanager
def serving(folder: Path, url: str) -> Iterator[tuple[str, int]]:
    """The API as users start it; gives its address and process id. Its log goes to a file, as it would to a journal."""
    log = folder / "api.log"
    command = [sys.executable, "-m", "api", "--port", "0", "--database-url", url]
    command += ["--exports-dir", str(folder), "--artifacts-dir", str(folder)]
    with log.open("w") as stream, subprocess.Popen(command, stderr=stream) as process:
        try:
            yield f"http://127.0.0.1:{_port(process, log)}", process.pid
        finally:
            process.terminate()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        first, end, _ = log.read_text().partition("\n")
        if end:
            return int(json.loads(first)["port"])
        time.sleep(0.05)
    raise RuntimeError(f"the API did not start: {log.read_text()[-500:]}")


def timed_ms(ask: Callable[[], httpx.Response]) -> float:
    """Milliseconds from the call to the whole answer. Raises httpx.HTTPStatusError."""
    started = time.perf_counter()
    ask().raise_for_status()
    return (time.perf_counter() - started) * 1e3


def spread_ms(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile (nearest rank) and largest."""
    ordered = sorted(times_ms)
    p99 = ordered[max(0, -(-99 * len(ordered) // 100) - 1)]
    return {
        "p50_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(p99, 3),
        "max_ms": round(ordered[-1], 3),
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far. Read from Linux's procfs, in ticks of 10 ms."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def single(client: httpx.Client, asked: Sequence[Shape], pid: int) -> dict[str, Any]:
    """GET /v1/best for one shape after the other."""

    def ask(shape: Shape) -> Callable[[], httpx.Response]:
        params: dict[str, str | int] = {"m": shape[0], "n": shape[1], "k": shape[2], "device": "h200"}
        return lambda: client.get("/v1/best", params=params)

    for shape in asked[:WARM_UP]:
        ask(shape)()
    before_s = cpu_s(pid)
    times_ms = [timed_ms(ask(shape)) for shape in asked]
    server_cpu_ms = round((cpu_s(pid) - before_s) / len(asked) * 1e3, 2)  # tells less of what else the machine does
    return {"requests": len(times_ms), **spread_ms(times_ms), "server_cpu_ms": server_cpu_ms}


def bulk(client: httpx.Client, asked: Sequence[Shape]) -> dict[str, Any]:
    """POST /v1/best for all shapes at once, a few times."""
    body = {"device": "h200", "problems": [{"m": m, "n": n, "k": k} for m, n, k in asked]}
    times_ms = [timed_ms(lambda: client.post("/v1/best", json=body)) for _ in range(ROUNDS)]
    return {"requests": len(times_ms), "shapes": len(asked), **spread_ms(times_ms)}


def machine() -> dict[str, Any]:
    """What the times depend on; the load tells whether others used the machine meanwhile."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def measure(results: int, requests: int, seed: int, nearest: bool) -> dict[str, Any]:
    """Everything in one object."""
    stored, rng = shapes(results), random.Random(seed)
    asked = [rng.choice(stored) for _ in range(requests)]
    if nearest:
        asked = [(m + 1, n, k) for m, n, k in asked]
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{name}/tuner.db"
        fill(url, stored)
        with serving(Path(name), url) as (address, pid), httpx.Client(base_url=address, timeout=60) as client:
            get, post = single(client, asked, pid), bulk(client, stored[:MAX_PROBLEMS])
    return {
        "schema": 1,
        "results": results,
        "match": "nearest" if nearest else "exact",
        "get": get,
        "post": post,
        "machine": machine(),
    }


def main() -> int:
    """0 when the median of GET keeps the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=int, default=5000, help="results stored (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=2000, help="GET requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which stored shapes are asked for")
    parser.add_argument("--nearest", action="store_true", help="ask GET for shapes between the stored ones")
    parser.add_argument("--limit-ms", type=float, default=5.0, help="largest median of GET (default: %(default)s)")
    arguments = parser.parse_args()
    report = measure(arguments.results, arguments.requests, arguments.seed, arguments.nearest)
    print(json.dumps(report, indent=1))
    return 0 if report["get"]["p50_ms"] <= arguments.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
