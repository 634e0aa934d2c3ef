"""The service under load, with the load generator on the same cores.

    python -m tests.soak.load clients --clients 32 --seconds 300 --out results/soak/load.json
    python -m tests.soak.load best --results 1000000 --shapes 20000 --rate 300 --seconds 60 --out results/soak/load.json

`clients`: a service of invented devices, and clients that submit, poll, ask, cancel and export, each its next step
after the one before. `best`: a full store, and GET /v1/best for random stored shapes at a fixed rate, on time whether
the answers come or not (so that a slow answer is not hidden by those that wait behind it); then POST /v1/best with as
many shapes as a body may hold. Each writes its part of the file. Exit status 1 when a limit is passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import uvloop
from sqlalchemy import insert

from api.schemas import MAX_PROBLEMS
from db import queries
from db.database import Database
from db.models import Result, new_id, utc_now
from tests.soak.best_latency import (
    DEVICE,
    ENVIRONMENT,
    Shape,
    cpu_s,
    machine,
    published,
    serving,
    shapes,
    spread_ms,
    timed_ms,
)
from tests.soak.load_clients import Limits, run_clients
from tests.soak.report import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

SCHEMA = 1
ROWS_A_STATEMENT = 20_000
CONNECTIONS = 16
WARM_UP = 300  # requests before the clock starts
BULK_ROUNDS = 5
LIMIT_P99_MS = 15.0
LIMIT_BULK_MS = 300.0


# ------------------------------------------------------------------------------------------------ best


def fill(url: str, wanted: Sequence[Shape], results: int) -> int:
    """A new database with one live device and `results` revisions spread evenly over the shapes; gives the newest."""
    revisions = max(1, results // len(wanted))
    columns = [column.key for column in Result.__table__.columns]
    base = {name: getattr(published((1, 8, 8)), name) for name in columns}
    base |= {"created_at": utc_now(), "tie_set": base["tie_set"] or [], "checks": [], "trials": 40, "pinned": False}
    base |= {"made_in": "|".join((DEVICE, "132", "580", "13.0", "nvcc 13.0.88"))}
    with Database.open(url) as database:
        with database.write() as session:
            queries.upsert_device(
                session, uuid="GPU-1", name=DEVICE, arch="sm_90a", sm_count=132, environment=ENVIRONMENT
            )
        rows: list[dict[str, Any]] = []
        for revision in range(1, revisions + 1):
            for m, n, k in wanted:
                place = {"m": m, "n": n, "k": k, "revision": revision, "current": revision == revisions}
                rows.append({**base, **place, "id": new_id()})
            while len(rows) >= ROWS_A_STATEMENT or (rows and revision == revisions):
                some, rows = rows[:ROWS_A_STATEMENT], rows[ROWS_A_STATEMENT:]
                with database.write() as session:
                    session.execute(insert(Result), some)
    return revisions


@dataclass(slots=True)
class Asker:
    """Sends GET requests over kept connections. Written on sockets: an HTTP client takes as long as the service.

    where: host and port
    expected: bytes that every answer holds
    wrong: answers that were not 200, or lacked them
    """

    where: SplitResult
    expected: bytes
    wrong: list[str] = field(default_factory=list)
    _idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=asyncio.Queue)

    async def connect(self, connections: int) -> None:
        """Open the connections."""
        assert self.where.hostname is not None
        for _ in range(connections):
            self._idle.put_nowait(await asyncio.open_connection(self.where.hostname, self.where.port))

    async def get(self, target: str) -> None:
        """One question, from taking a connection to the last byte of the answer."""
        reader, writer = await self._idle.get()
        try:
            writer.write(f"GET {target} HTTP/1.1\r\nHost: {self.where.netloc}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            at = head.lower().index(b"content-length:") + len(b"content-length:")
            body = await reader.readexactly(int(head[at : head.index(b"\r", at)]))
        finally:
            self._idle.put_nowait((reader, writer))
        if not head.startswith(b"HTTP/1.1 200") or self.expected not in body:
            self.wrong.append((head[:15] + b" " + body[:120]).decode(errors="replace"))

    def close(self) -> None:
        """Close the connections."""
        while not self._idle.empty():
            self._idle.get_nowait()[1].close()


async def at_a_rate(asker: Asker, targets: Sequence[str], rate: float) -> list[float]:
    """Milliseconds from the moment each question was due to the end of its answer."""
    loop = asyncio.get_running_loop()
    began = loop.time() + 0.05

    async def ask(position: int, target: str) -> float:
        due = began + position / rate
        await asyncio.sleep(max(0.0, due - loop.time()))
        await asker.get(target)
        return (loop.time() - due) * 1e3

    times = []
    batch = max(1, round(rate))  # tasks are made a second ahead: making all at once would be a load of its own
    for first in range(0, len(targets), batch):
        await asyncio.sleep(max(0.0, began + (first - batch) / rate - loop.time()))
        tasks = [loop.create_task(ask(first + at, one)) for at, one in enumerate(targets[first : first + batch])]
        times.append(tasks)
    return [await task for tasks in times for task in tasks]


async def _ask_all(url: str, asked: Sequence[Shape], expected: bytes, rate: float) -> tuple[list[float], list[str]]:
    asker = Asker(urlsplit(url), expected)
    await asker.connect(CONNECTIONS)
    targets = [f"/v1/best?m={m}&n={n}&k={k}&dtype=bf16&device=h200" for m, n, k in asked]
    await at_a_rate(asker, targets[:WARM_UP], rate)
    times_ms = await at_a_rate(asker, targets, rate)
    asker.close()
    return times_ms, asker.wrong


def run_best(options: argparse.Namespace) -> dict[str, Any]:
    """GET at a rate, then bulk questions, on a store that was just filled."""
    stored, rng = shapes(options.shapes), random.Random(options.seed)
    asked = [rng.choice(stored) for _ in range(round(options.rate * options.seconds))]
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{name}/tuner.db"
        began = time.monotonic()
        revisions = fill(url, stored, options.results)
        fill_s = time.monotonic() - began
        size_bytes = (Path(name) / "tuner.db").stat().st_size
        print(f"{options.results} results in {fill_s:.0f} s, {size_bytes / 2**30:.2f} GiB", file=sys.stderr, flush=True)
        with serving(Path(name), url) as (address, pid):
            before_s = cpu_s(pid)
            expected = b'"match":"exact"'
            times_ms, wrong = uvloop.run(_ask_all(address, asked, expected, options.rate))
            server_cpu_s = cpu_s(pid) - before_s
            body = {"device": "h200"}
            with httpx.Client(base_url=address, timeout=60) as client:
                problems = [{"m": m, "n": n, "k": k} for m, n, k in rng.sample(stored, min(MAX_PROBLEMS, len(stored)))]
                post = [
                    timed_ms(lambda: client.post("/v1/best", json={**body, "problems": problems}))
                    for _ in range(BULK_ROUNDS)
                ]
    get = spread_ms(times_ms)
    return {
        "results": options.results,
        "shapes": options.shapes,
        "revisions_a_shape": revisions,
        "database_bytes": size_bytes,
        "get": {
            "requests": len(times_ms),
            "rate_per_s": options.rate,
            "seconds": options.seconds,
            **get,
            "wrong": len(wrong),
            "first_wrong": wrong[:3],
            "server_cpu_ms": round(server_cpu_s / (len(times_ms) + WARM_UP) * 1e3, 3),
        },
        "post": {"requests": len(post), "shapes": len(problems), **spread_ms(post)},
        "limits": {"get_p99_ms": LIMIT_P99_MS, "post_p50_ms": LIMIT_BULK_MS},
        "kept": bool(not wrong and get["p99_ms"] <= LIMIT_P99_MS and statistics.median(post) <= LIMIT_BULK_MS),
    }


# ------------------------------------------------------------------------------------------------ both


def write_part(path: Path, name: str, part: dict[str, Any]) -> None:
    """Put one part in the file; the other stays."""
    content = json.loads(path.read_text()) if path.exists() else {"schema": SCHEMA}
    write_json(path, {**content, name: part})


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    clients = parts.add_parser("clients")
    clients.add_argument("--clients", type=int, default=32)
    best = parts.add_parser("best")
    best.add_argument("--results", type=int, default=1_000_000)
    best.add_argument("--shapes", type=int, default=20_000)
    best.add_argument("--rate", type=float, default=300.0, help="questions a second")
    for part, seconds in ((clients, 300.0), (best, 60.0)):
        part.add_argument("--seconds", type=float, default=seconds)
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    command = f"python -m tests.soak.load {' '.join(sys.argv[1:] if arguments is None else arguments)}"
    load_before = machine()["load_1min"]
    if options.part == "best":
        report = run_best(options)
    else:
        report = run_clients(Limits(clients=options.clients, seconds=options.seconds, seed=options.seed))
    # The load before says what else the machine had to do.
    report = {"command": command, **report, "machine": {**machine(), "load_1min_before": load_before}}
    print(json.dumps(report, indent=1))
    if options.out:
        write_part(options.out, options.part, report)
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
