"""What is compiled for each row of the table."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import write_atomically
from kernels.config import Sm90GemmConfig
from kernels.gemm_sm90 import COPY_FAULTS, FAULTS, PINGPONG_FAULTS, SPLIT_FAULTS, STREAM_K_FAULTS
from kernels.problem import Dtype, GemmProblem
from kernels.stress import stress_builds

if TYPE_CHECKING:
    from collections.abc import Iterable

SM_COUNT = 132
TUNED = "tuned size"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Problem and config that bugs are planted in.

    name: empty for the first, which has most bugs
    problem: of the tuned size
    config: knobs
    """

    name: str
    problem: GemmProblem
    config: Sm90GemmConfig


@dataclass(frozen=True, kw_only=True)
class Row:
    """One bug in its setup, or the healthy kernel of a setup.

    fault: name in FAULTS, empty for the healthy kernel
    setup: where it is planted
    """

    fault: str
    setup: Setup

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return self.fault or f"healthy{self.setup.name and f' {self.setup.name}'}"


# Three chunks for two staging buffers, two tiles a cluster, 64 k-blocks: the epilogue race is there and does not show.
FIRST = Setup(
    name="",
    problem=GemmProblem(m=25344, n=384, k=4096, dtype=Dtype.FP16),
    config=Sm90GemmConfig(
        pipe_depth=3, cta_group=2, num_consumers=3, blk_m=64, blk_n=192, blk_k=64, epi_n=64, epi_stages=2
    ),
)
# Several tiles for each cluster of four parts of K.
SPLIT = Setup(
    name="split_k",
    problem=GemmProblem(m=2048, n=2048, k=4096, dtype=Dtype.FP16),
    config=Sm90GemmConfig(split_k=4, num_consumers=2, blk_n=64, blk_k=64, pipe_depth=4, epi_n=32),
)
# Eight tiles for each CTA, so that its consumers take turns four times; a tile does not come round the ring in whole.
PINGPONG = Setup(
    name="pingpong",
    problem=GemmProblem(m=16384, n=1024, k=4096, dtype=Dtype.FP16),
    config=Sm90GemmConfig(schedule="pingpong", num_consumers=2, blk_m=128, blk_n=128, blk_k=64, pipe_depth=5),
)
# Rows at every alignment, and the last stage of a tile cut short.
COPYING = Setup(
    name="cp_async",
    problem=GemmProblem(m=4096, n=2048, k=4095, dtype=Dtype.FP16),
    config=Sm90GemmConfig(load="cp_async", num_consumers=1, blk_m=128, blk_n=128, blk_k=64, pipe_depth=5),
)
# 160 tiles for 132 CTAs: each computes 1.2 tiles' worth, and most tiles have two parts.
STREAM_K = Setup(
    name="stream_k",
    problem=GemmProblem(m=2048, n=2560, k=4096, dtype=Dtype.FP16),
    config=Sm90GemmConfig(scheduler="stream_k", num_consumers=2, blk_n=256, blk_k=64, pipe_depth=4),
)
COST = Setup(name="cost", problem=GemmProblem(m=4096, n=4096, k=4096), config=Sm90GemmConfig())
# Bugs that leave somebody waiting for ever, at the first launch: their stress builds would only hang again.
HANGING = frozenset({"producer_phase", "arrive_count", "expect_tx", "half_multicast", "register_pool"})


def rows_of(faults: Iterable[str]) -> list[Row]:
    """The healthy kernel of each setup that is needed, before its bugs."""
    rows = [Row(fault="", setup=FIRST)]
    wanted = set(faults)
    for setup, planted in (
        (FIRST, FAULTS),
        (SPLIT, SPLIT_FAULTS),
        (PINGPONG, PINGPONG_FAULTS),
        (COPYING, COPY_FAULTS),
        (STREAM_K, STREAM_K_FAULTS),
    ):
        bugs = [fault for fault in planted if fault in wanted]
        if bugs and setup != FIRST:
            rows.append(Row(fault="", setup=setup))
        rows += [Row(fault=fault, setup=setup) for fault in bugs]
    return rows


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One build of one row.

    label: TUNED or that of the stress build
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


def as_dict(problem: GemmProblem) -> dict[str, Any]:
    """As JSON."""
    return {**asdict(problem), "dtype": problem.dtype.value, "layout": problem.layout.value}


def tuned(row: Row) -> Plan:
    """The kernel as it would be published."""
    return Plan(label=TUNED, problem=row.setup.problem)


def stress_plans(row: Row) -> list[Plan]:
    """The stress builds of the product, in its order; none for a bug that hangs."""
    if row.fault in HANGING:
        return []
    return [
        Plan(label=one.label, problem=one.problem, delays_ns=one.delays_ns)
        for one in stress_builds(row.setup.problem, row.setup.config, SM_COUNT)
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

    def __init__(self, rows: list[Row], folder: str, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        self._folder = folder
        self._futures: dict[tuple[str, str], Future[dict[str, Any]]] = {}
        for row in rows:
            # Every row is compared with what the healthy kernel computes, with and without delays.
            healthy = Row(fault="", setup=row.setup)
            for plan in (tuned(healthy), *stress_plans(healthy)):
                if not plan.delays_ns:
                    self._submit(healthy, plan)
            for plan in (tuned(row), *stress_plans(row)):
                self._submit(row, plan)
        cost = Row(fault="", setup=COST)
        self._submit(cost, tuned(cost))

    def get(self, row: Row, plan: Plan) -> dict[str, Any]:
        """The module of one plan. Waits for it."""
        return self._futures[row.name, plan.label].result()

    def job(self, row: Row, plan: Plan) -> dict[str, Any]:
        """For the child: the module, and the healthy one of the same problem. Waits for both."""
        healthy = Row(fault="", setup=row.setup)
        plans = [tuned(healthy)] if row.setup == COST else [tuned(healthy), *stress_plans(healthy)]
        same = next(one for one in plans if one.problem == plan.problem)
        return plan.job(self.get(row, plan), self.get(healthy, same))

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, row: Row, plan: Plan) -> None:
        if (row.name, plan.label) not in self._futures:
            task = (plan.problem, row.setup.config, row.fault, plan.delays_ns, self._folder)
            self._futures[row.name, plan.label] = self._pool.submit(build, *task)
