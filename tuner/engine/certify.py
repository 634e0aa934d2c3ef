"""Checks of a winner beyond its own product: structural rules, stress builds, a soak in a fresh process, memory checks;
for sm_100a also synccheck, racecheck and numsim.

They answer what comparing results at the tuned size cannot: the epilogue race passes 200 of 200 launches at K = 4096.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kernels.config import Sm100GemmConfig
from kernels.stress import StressBuild, stress_builds
from tuner.engine.base import CHECKERS, CertifyJob, CertifyReply, EngineError
from tuner.gpu.jobs import StressJob, StressModule, StressReply
from tuner.gpu.soak import SoakJob, SoakReport
from tuner.records import Check, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from kernels.compile import CompiledKernel
    from tuner.engine.compile_pool import CompilePool, PoolReply
    from tuner.gpu.memcheck import SanitizerReport

LAUNCHES = 100  # of each stress build; all are compared


class StressChild(Protocol):
    """What certifying needs of a GPU child."""

    def stress(self, job: StressJob) -> StressReply:
        """Verify builds on their own problems; raises WorkerLost, never for a build's fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Checks that run in processes of their own, on the GPU with the UUID they are given.

    soak: launches one module many times
    memcheck: launches modules under compute-sanitizer
    """

    soak: Callable[[SoakJob, str], SoakReport]
    memcheck: Callable[[list[dict[str, Any]], str], SanitizerReport]


class Certification:
    """The checks of one winner, cheapest first; the first that finds something ends them.

    The builds compile from the moment this is made, so that the GPU need not wait for them: `build`, `stress`, `apart`.
    """

    def __init__(
        self, pool: CompilePool, job: CertifyJob, checkers: Callable[[CertifyJob], Check] | None = None
    ) -> None:
        """checkers: runs synccheck, racecheck and numsim; without it no sm_100a winner is certified."""
        self._pool, self._job, self._checkers = pool, job, checkers
        self._planned = stress_builds(job.problem, job.config, job.sm_count)
        self._plain = pool.submit(job.problem, job.config, job.sm_count, None, True, urgent=True)
        self._submitted = [
            pool.submit(build.problem, job.config, job.sm_count, build.delays_ns or None, urgent=True)
            for build in self._planned
        ]

    def drop(self) -> None:
        """Take the compiles back that are not done."""
        self._pool.drop([self._plain, *self._submitted])

    def build(self, folder: Path) -> tuple[tuple[Check, ...], list[StressModule]] | CertifyReply:
        """Wait for the compiles, and run what needs no GPU.

        The checks made, and the stress builds in `folder`; or an answer where these checks settle it. Raises
        EngineError.
        """
        structure = _structure(self._plain, self._job)
        if structure.verdict is Verdict.FAILED:
            return CertifyReply(checks=(structure,))
        modules = []
        for build, future in zip(self._planned, self._submitted, strict=True):
            kernel = _kernel(future, f"stress build {build.label}")
            if isinstance(kernel, Check):
                return CertifyReply(checks=(structure, kernel))
            path = folder / f"{kernel.sha256}.so"
            path.write_bytes(kernel.module)
            modules.append(
                StressModule(label=build.label, problem=build.problem, module_path=path, module_sha256=kernel.sha256)
            )
        checks = (structure, *self._checked())
        if checks[-1].verdict is Verdict.FAILED:
            return CertifyReply(checks=checks)
        return checks, modules

    def _checked(self) -> tuple[Check, ...]:
        """What the tools say of an sm_100a winner. They take minutes: they come when all else without a GPU holds."""
        if not isinstance(self._job.config, Sm100GemmConfig):
            return ()
        if self._checkers is None:
            return (Check(name=CHECKERS, verdict=Verdict.NOT_RUN, detail="this engine cannot run the checkers"),)
        return (self._checkers(self._job),)

    def stress(self, child: StressChild, modules: list[StressModule]) -> StressReply:
        """Launch the stress builds. Raises WorkerLost."""
        return child.stress(
            StressJob(config=self._job.config, builds=tuple(modules), launches=LAUNCHES, seed=self._job.seed)
        )

    def apart(self, modules: list[StressModule], checks: Apart, uuid: str) -> tuple[SoakReport, SanitizerReport]:
        """Soak and memcheck on that GPU at the same time: neither is timed, and starting them takes most of either."""
        job = SoakJob(
            problem=self._job.problem,
            module_path=self._job.module_path,
            module_sha256=self._job.module_sha256,
            seed=self._job.seed,
        )
        # a build with delays touches the same addresses
        plain = [module for module, plan in zip(modules, self._planned, strict=True) if not plan.delays_ns]
        with ThreadPoolExecutor(1, "memcheck") as thread:
            memory = thread.submit(checks.memcheck, [_launch(module) for module in plain], uuid)
            return checks.soak(job, uuid), memory.result()

    def reply(
        self, before: tuple[Check, ...], stress: StressReply, apart: tuple[SoakReport, SanitizerReport] | None
    ) -> CertifyReply:
        """What all checks found, those made `before` first; `apart` None when the stress builds failed."""
        checks, gpu_s = [*before, _stress(stress, self._planned)], stress.gpu_s
        if apart is not None:
            soaked, memory = apart
            checks += [Check(name="soak", verdict=soaked.verdict, detail=soaked.detail), _memory(memory)]
            gpu_s += soaked.gpu_s
        return CertifyReply(checks=tuple(checks), gpu_s=gpu_s)


def _kernel(future: Future[PoolReply], what: str) -> CompiledKernel | Check:
    """The compiled kernel, or the check that its failure makes."""
    reply = future.result()
    if reply.kind == "value":
        kernel: CompiledKernel = reply.value
        return kernel
    return Check(name="stress", verdict=Verdict.NOT_RUN, detail=f"{what}: {reply.reason}")


def _structure(future: Future[PoolReply], job: CertifyJob) -> Check:
    kernel = _kernel(future, "the winner")
    if isinstance(kernel, Check):
        return Check(name="structure", verdict=Verdict.NOT_RUN, detail=kernel.detail)
    if kernel.findings is None:
        raise EngineError("the compile function checked no structural rules")
    if kernel.source_hash != job.source_hash:
        detail = "the template has changed since this kernel was built: the rules would judge another source"
        return Check(name="structure", verdict=Verdict.NOT_RUN, detail=detail, tool=kernel.toolchain)
    verdict = Verdict.FAILED if kernel.findings else Verdict.NOT_RUN if kernel.unjudged else Verdict.CLEAN
    detail = "; ".join((*kernel.findings, *(f"cannot judge: {text}" for text in kernel.unjudged))[:3])
    return Check(name="structure", verdict=verdict, detail=detail, tool=kernel.toolchain)


def _stress(reply: StressReply, planned: Sequence[StressBuild]) -> Check:
    if not reply.passed:
        return Check(name="stress", verdict=Verdict.FAILED, detail=f"{reply.outcome}: {reply.reason}")
    shapes = ", ".join(f"{build.label} {build.problem.shape}" for build in planned if not build.delays_ns)
    delayed = sum(bool(build.delays_ns) for build in planned)
    detail = f"{reply.launches} launches right and bitwise equal: {shapes}, and {delayed} builds with delays"
    return Check(name="stress", verdict=Verdict.CLEAN, detail=detail)


def _memory(report: SanitizerReport) -> Check:
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
