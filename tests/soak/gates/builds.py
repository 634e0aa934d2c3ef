"""What is compiled for each row of the table."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernels.artifacts import write_atomically
from kernels.config import Sm90GemmConfig
from kernels.problem import Dtype, GemmProblem
from kernels.stress import stress_builds

HEALTHY = ""
SM_COUNT = 132
# Three chunks for two staging buffers, two tiles a cluster, 64 k-blocks: the epilogue race is there and does not show.
PROBLEM = GemmProblem(m=25344, n=384, k=4096, dtype=Dtype.FP16)
CONFIG = Sm90GemmConfig(
    pipe_depth=3, cta_group=2, num_consumers=3, blk_m=64, blk_n=192, blk_k=64, epi_n=64, epi_stages=2
)
COST_PROBLEM = GemmProblem(m=4096, n=4096, k=4096)
COST_CONFIG = Sm90GemmConfig()
# Bugs that leave somebody waiting for ever, at the first launch: their stress builds would only hang again.
HANGING = frozenset({"producer_phase", "arrive_count", "expect_tx", "half_multicast"})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One build of one row.

    label: "tuned size" or that of the stress build
    problem: what it computes
    delays_ns: of a stress build
    """

    label: str
    problem: GemmProblem
    delays_ns: dict[str, int] = field(default_factory=dict)

    def job(self, module: dict[str, Any], healthy: dict[str, Any]) -> dict[str, Any]:
        """For the child."""
        files = {"module": module, "healthy": healthy}
        return {"label": self.label, "problem": as_dict(self.problem), "delays_ns": self.delays_ns, **files}


TUNED = Plan(label="tuned size", problem=PROBLEM)
COST = Plan(label="cost", problem=COST_PROBLEM)


def as_dict(problem: GemmProblem) -> dict[str, Any]:
    """As JSON."""
    return {**asdict(problem), "dtype": problem.dtype.value, "layout": problem.layout.value}


def stress_plans(fault: str) -> list[Plan]:
    """The stress builds of the product, in its order; none for a bug that hangs."""
    if fault in HANGING:
        return []
    return [
        Plan(label=one.label, problem=one.problem, delays_ns=one.delays_ns)
        for one in stress_builds(PROBLEM, CONFIG, SM_COUNT)
    ]


def build(
    problem: GemmProblem, config: Sm90GemmConfig, fault: str, delays_ns: dict[str, int], folder: str
) -> dict[str, Any]:
    """Compile one module, in a process of the pool. One without delays is also judged by the structural rules."""
    from kernels.compile import compile_kernel
    from kernels.lowering import lower
    from kernels.structure import structural_findings

    kernel = compile_kernel(problem, config, SM_COUNT, fault=fault, delays_ns=delays_ns or None)
    path = Path(folder) / f"{kernel.sha256}.so"
    write_atomically(path, kernel.module)
    built: dict[str, Any] = {"path": str(path), "sha256": kernel.sha256, "toolchain": kernel.toolchain}
    if not delays_ns:
        lowered = lower(problem, config, SM_COUNT, fault=fault)
        since = time.perf_counter()
        findings = structural_findings(lowered, problem, config)
        broken = [one for one in findings if not one.is_open]
        built["structure"] = {
            "rules": list(dict.fromkeys(one.rule for one in broken)),
            "findings": [one.text for one in broken[:3]],
            "unjudged": [one.text for one in findings if one.is_open],
            "wall_s": round(time.perf_counter() - since, 3),
        }
    return built


class Builds:
    """Modules of some rows, compiled in the background in the order in which they are needed."""

    def __init__(self, rows: list[str], folder: str, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        self._folder = folder
        self._futures: dict[tuple[str, str], Future[dict[str, Any]]] = {}
        # Every row is compared with what the healthy kernel computes, with and without delays.
        for plan in (TUNED, *stress_plans(HEALTHY)):
            if not plan.delays_ns:
                self._submit(HEALTHY, plan)
        for row in rows:
            for plan in (TUNED, *stress_plans(row)):
                self._submit(row, plan)
        self._cost = self._pool.submit(build, COST_PROBLEM, COST_CONFIG, HEALTHY, {}, folder)

    def get(self, row: str, plan: Plan) -> dict[str, Any]:
        """The module of one plan. Waits for it."""
        return self._cost.result() if plan is COST else self._futures[row, plan.label].result()

    def job(self, row: str, plan: Plan) -> dict[str, Any]:
        """For the child: the module, and the healthy one of the same problem. Waits for both."""
        same = next(one for one in (COST, TUNED, *stress_plans(HEALTHY)) if one.problem == plan.problem)
        return plan.job(self.get(row, plan), self.get(HEALTHY, same))

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, row: str, plan: Plan) -> None:
        if (row, plan.label) not in self._futures:
            future = self._pool.submit(build, plan.problem, CONFIG, row, plan.delays_ns, self._folder)
            self._futures[row, plan.label] = future
