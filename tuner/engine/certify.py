"""Checks of a winner beyond its own product: structural rules, stress builds, memory checks.

They answer what comparing results at the tuned size cannot: the epilogue race passes 200 of 200 launches at K = 4096.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernels.stress import stress_builds
from tuner.engine.base import CertifyJob, CertifyReply, EngineError
from tuner.gpu.jobs import StressJob, StressModule, StressReply
from tuner.records import Check, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kernels.compile import CompiledKernel
    from tuner.engine.compile_pool import CompilePool, PoolReply
    from tuner.gpu.memcheck import MemcheckReport

LAUNCHES = 100  # of each stress build; all are compared


class StressChild(Protocol):
    """What certifying needs of a GPU child."""

    def stress(self, job: StressJob) -> StressReply:
        """Verify builds on their own problems; raises WorkerLost, never for a build's fault."""


def certify(
    child: StressChild,
    pool: CompilePool,
    job: CertifyJob,
    *,
    memcheck: Callable[[list[dict[str, Any]]], MemcheckReport],
) -> CertifyReply:
    """Run all checks, cheapest first; stop at the first that finds something. Raises EngineError and WorkerLost."""
    plain = pool.submit(job.problem, job.config, job.sm_count, None, True)
    planned = stress_builds(job.problem, job.config, job.sm_count)
    submitted = [pool.submit(build.problem, job.config, job.sm_count, build.delays_ns or None) for build in planned]
    try:
        structure = _structure(plain)
        if structure.verdict is not Verdict.CLEAN:
            return CertifyReply(checks=(structure,))
        with tempfile.TemporaryDirectory(prefix="gemm-tuner-stress-") as folder:
            builds = []
            for build, future in zip(planned, submitted, strict=True):
                kernel = _kernel(future, f"stress build {build.label}")
                if isinstance(kernel, Check):
                    return CertifyReply(checks=(structure, kernel))
                path = Path(folder) / f"{kernel.sha256}.so"
                path.write_bytes(kernel.module)
                builds.append(
                    StressModule(
                        label=build.label, problem=build.problem, module_path=path, module_sha256=kernel.sha256
                    )
                )
            stress = child.stress(StressJob(config=job.config, builds=tuple(builds), launches=LAUNCHES, seed=job.seed))
            checks = [structure, _stress(stress, builds)]
            if stress.passed:
                # a build with delays touches the same addresses
                plain_builds = [build for build, plan in zip(builds, planned, strict=True) if not plan.delays_ns]
                checks.append(_memory(memcheck([_launch(build) for build in plain_builds])))
            return CertifyReply(checks=tuple(checks), gpu_s=stress.gpu_s)
    finally:
        pool.drop([plain, *submitted])


def _kernel(future: Future[PoolReply], what: str) -> CompiledKernel | Check:
    """The compiled kernel, or the check that its failure makes."""
    reply = future.result()
    if reply.kind == "value":
        kernel: CompiledKernel = reply.value
        return kernel
    return Check(name="stress", verdict=Verdict.NOT_RUN, detail=f"{what}: {reply.reason}")


def _structure(future: Future[PoolReply]) -> Check:
    kernel = _kernel(future, "the winner")
    if isinstance(kernel, Check):
        return Check(name="structure", verdict=Verdict.NOT_RUN, detail=kernel.detail)
    if kernel.findings is None:
        raise EngineError("the compile function checked no structural rules")
    return Check(
        name="structure",
        verdict=Verdict.FAILED if kernel.findings else Verdict.CLEAN,
        detail="; ".join(kernel.findings[:3]),
        tool=kernel.toolchain,
    )


def _stress(reply: StressReply, builds: list[StressModule]) -> Check:
    if reply.passed:
        shapes = ", ".join(f"{build.label} {build.problem.shape}" for build in builds)
        detail = f"{reply.launches} launches right and bitwise equal: {shapes}"
        return Check(name="stress", verdict=Verdict.CLEAN, detail=detail)
    return Check(name="stress", verdict=Verdict.FAILED, detail=f"{reply.outcome}: {reply.reason}")


def _memory(report: MemcheckReport) -> Check:
    verdict = Verdict.NOT_RUN if not report.ran else Verdict.CLEAN if report.clean else Verdict.FAILED
    tool = f"compute-sanitizer {report.version}" if report.version else ""
    return Check(name="memcheck", verdict=verdict, detail=report.detail, tool=tool)


def _launch(build: StressModule) -> dict[str, Any]:
    problem = build.problem
    return {
        "path": str(build.module_path),
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "dtype": problem.dtype.value,
    }
