"""Every row through every gate."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import write_atomically
from kernels.gemm_sm90 import EVERY_FAULT
from tests.soak.gates.builds import COST, Builds, Plan, Row, as_dict, rows_of, stress_plans, tuned
from tests.soak.gates.process import GateProcess
from tuner.gpu.memcheck import sanitize
from tuner.gpu.soak import SoakJob, soak

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA = 1
SEED = 1
WARM = 2
SANITIZERS = ("memcheck", "racecheck")
APART_AT_ONCE = 6
SANITIZER_S = 20.0
HANGS = "hangs already when compared"
COMMAND = "python -m tests.soak.gates run OUT_DIR"


class Gates:
    """Runs what is missing and writes after each step, so that a run that is cut can go on.

    path: the results
    limit_s: no step begins after it
    """

    def __init__(self, path: Path, *, limit_s: float) -> None:
        self._path = path
        self._began = time.monotonic()
        self._limit_s = limit_s
        self.found: dict[str, Any] = {"schema": SCHEMA, "command": COMMAND, "rows": {}}
        if path.is_file():
            self.found = json.loads(path.read_text(encoding="utf-8"))
        self._warm: deque[GateProcess] = deque()

    def run(self, rows: Sequence[Row], processes: int) -> None:
        """All gates on these rows."""
        missing = [row for row in rows if not self._complete(row)]
        builds: Builds | None = None
        with tempfile.TemporaryDirectory(prefix="gates-") as folder:
            try:
                builds = Builds(missing, folder, processes)
                self._fill()
                self._exclusive(missing, builds)
                self._apart(missing, builds)
            finally:
                for process in self._warm:
                    process.kill()
                if builds is not None:
                    builds.close()
        self.found["wall_s"] = round(self.found.get("wall_s", 0.0) + time.monotonic() - self._began, 1)
        self._write()

    # ------------------------------------------------------------------ one after the other: nothing else on the GPU

    def _exclusive(self, rows: Sequence[Row], builds: Builds) -> None:
        for row in rows:
            kept = self._row(row)
            if "structure" not in kept:
                built = builds.get(row, tuned(row))
                kept["structure"], self.found["toolchain"] = built["structure"], built["toolchain"]
            if "comparison" not in kept and self._has_time():
                kept["comparison"] = self._launched(row, [tuned(row)], builds, by_inputs=True)
                self._write()
            if "stress" not in kept and self._has_time():
                plans = stress_plans(row)
                hangs = "hung" in kept["comparison"] or not plans
                kept["stress"] = {"not_run": HANGS} if hangs else self._launched(row, plans, builds, by_inputs=False)
            self._write()
            self._say(row, kept)
        if "cost" not in self.found and self._has_time():
            cost = Row(fault="", setup=COST)
            self.found["cost"] = self._launched(cost, [tuned(cost)], builds, by_inputs=False, stage="cost")
            self._write()

    def _launched(
        self, row: Row, plans: Sequence[Plan], builds: Builds, *, by_inputs: bool, stage: str = "builds"
    ) -> dict[str, Any]:
        """Builds of one row in one process."""
        jobs = [builds.job(row, plan) for plan in plans]
        since = time.monotonic()
        process = self._warm.popleft()
        found: dict[str, Any] = {"builds": []}
        for message in process.run({"stage": stage, "builds": jobs, "seed": SEED, "by_inputs": by_inputs}):
            if "ready" in message:
                self.found.setdefault("environment", message["environment"])
                since = time.monotonic()
            elif "begin" in message:
                found["at"] = message["begin"]
            elif "build" in message:
                found["builds"].append(message)
            else:
                found.update(message)
        self._fill()
        return {**found, "wall_s": round(time.monotonic() - since, 2)}

    # ------------------------------------------------------------------ a few at a time: timing does not matter here

    def _apart(self, rows: Sequence[Row], builds: Builds) -> None:
        """The soak and the sanitizers, in processes that share the card."""
        gates: dict[str, Callable[[Row, Builds], dict[str, Any] | None]]
        gates = {"soak": self._soaked, **{tool: partial(self._sanitized, tool) for tool in SANITIZERS}}
        with ThreadPoolExecutor(APART_AT_ONCE) as threads:
            futures = {
                (row, gate): threads.submit(run, row, builds)
                for gate, run in gates.items()
                for row in rows
                if gate not in self._row(row)
            }
            for (row, gate), future in futures.items():
                found = future.result()
                if found is not None:
                    self._row(row)[gate] = found
                    self._write()
                    print(f"{time.monotonic() - self._began:5.0f} s {row.name}: {gate} {found}", flush=True)

    def _soaked(self, row: Row, builds: Builds) -> dict[str, Any] | None:
        """None when there is no time left."""
        kept = self._row(row)
        if not self._has_time():
            return None
        if _caught_by_launching(kept):
            return {"not_run": "comparison or repeat has caught it"}
        since = time.monotonic()
        module = builds.get(row, tuned(row))
        job = SoakJob(
            problem=row.setup.problem, module_path=Path(module["path"]), module_sha256=module["sha256"], seed=SEED
        )
        report = soak(job, stall_s=10.0)
        return {
            "verdict": report.verdict.value,
            "detail": report.detail,
            "launches": dict(report.launches),
            "gpu_s": report.gpu_s,
            "wall_s": round(time.monotonic() - since, 2),
        }

    def _sanitized(self, tool: str, row: Row, builds: Builds) -> dict[str, Any] | None:
        """None when there is no time left."""
        if not self._has_time():
            return None
        plans = [plan for plan in stress_plans(row) if not plan.delays_ns]
        if not plans or "hung" in self._row(row)["comparison"]:
            return {"not_run": HANGS}
        since = time.monotonic()
        launches = []
        for plan in plans:
            problem = as_dict(plan.problem)
            shape = {key: problem[key] for key in ("m", "n", "k", "dtype")}
            launches.append({"path": builds.get(row, plan)["path"], **shape})
        report = sanitize(tool, launches, timeout_s=SANITIZER_S)
        if report.version:
            self.found["sanitizer"] = report.version
        wall_s = round(time.monotonic() - since, 2)
        return {"ran": report.ran, "errors": report.errors, "detail": report.detail, "wall_s": wall_s}

    # ------------------------------------------------------------------ bookkeeping

    def _complete(self, row: Row) -> bool:
        kept = self._row(row)
        return {"structure", "comparison", "stress", "soak", *SANITIZERS} <= kept.keys()

    def _row(self, row: Row) -> dict[str, Any]:
        """What is known of a row."""
        first = {
            "meaning": EVERY_FAULT.get(row.fault, "no bug"),
            "problem": as_dict(row.setup.problem),
            "config": row.setup.config.to_dict(),
        }
        kept: dict[str, Any] = self.found["rows"].setdefault(row.name, first)
        return kept

    def _fill(self) -> None:
        while len(self._warm) < WARM:
            self._warm.append(GateProcess())

    def _has_time(self) -> bool:
        return time.monotonic() - self._began < self._limit_s

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, (json.dumps(self.found, indent=1) + "\n").encode())

    def _say(self, row: Row, kept: dict[str, Any]) -> None:
        builds = kept.get("stress", {}).get("builds", [])
        said = {
            "structure": kept["structure"]["rules"],
            "tuned size": [build["outcome"] for build in kept.get("comparison", {}).get("builds", [])],
            "stress": f"{sum(build['outcome'] != 'clean' for build in builds)} of {len(builds)} builds",
        }
        stops = [kept.get(stage, {}).get(end) for stage in ("comparison", "stress") for end in ("hung", "crashed")]
        print(f"{time.monotonic() - self._began:5.0f} s {row.name}: {said} {[s for s in stops if s]}", flush=True)


def _caught_by_launching(kept: dict[str, Any]) -> bool:
    """Whether comparing or repeating at the tuned size has already found it: a soak would find it too."""
    comparison = kept.get("comparison", {})
    return comparison.keys().isdisjoint({"done"}) or any(build["outcome"] != "clean" for build in comparison["builds"])


def run(out: Path, *, faults: Sequence[str], limit_s: float, processes: int = 0) -> dict[str, Any]:
    """All gates on these bugs and on the healthy kernels; returns what stands in OUT/gates.json."""
    gates = Gates(out / "gates.json", limit_s=limit_s)
    gates.run(rows_of(faults), processes or os.cpu_count() or 1)
    return gates.found
