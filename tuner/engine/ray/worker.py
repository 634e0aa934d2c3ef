"""The worker of a node: one process that Ray starts there. It takes calls of all tuners and runs them as the `local`
engine does, so a hang or a crash takes a child process of it, never the node.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactError
from kernels.devices import profile_named
from tuner.engine.base import CertifyJob, EngineError, EvaluateJob, FinalJob, WorkerLost
from tuner.engine.fake import FAKE_CUDA, FAKE_TOOLCHAIN, fake_device
from tuner.engine.local import toolchain
from tuner.engine.ray.cache import ModuleCache
from tuner.engine.ray.plan import NodePlan
from tuner.engine.ray.wire import Answer, Call, Ending, Job, NodeReport
from tuner.engine.ray.work import modules_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tuner.engine.base import Engine
    from tuner.engine.ray.plan import Machine


class NodeWorker:
    """Methods are coroutines: any number of calls wait at the same time; the machine decides how many run."""

    def __init__(self, plan: NodePlan | None = None, machine: Machine | None = None) -> None:
        """Without arguments: what the node's environment says."""
        self._plan = plan or NodePlan.from_env()
        self._machine = machine or self._plan.machine()
        self._cache = ModuleCache(self._plan.artifacts, self._plan.artifacts_mib)

    async def describe(self) -> NodeReport:
        """What is here. Raises EngineError when there are no compilers."""
        gpus, plan = self._machine.gpus, self._plan
        serves = {gpu.name: gpu.name for gpu in gpus}
        if plan.engine == "fake":
            serves = {fake_device(profile).name: profile.name for profile in map(profile_named, plan.fake_devices)}
            return NodeReport(name=plan.name, gpus=gpus, serves=serves, toolchain=FAKE_TOOLCHAIN, cuda=FAKE_CUDA)
        found = await asyncio.to_thread(toolchain)
        return NodeReport(name=plan.name, gpus=gpus, serves=serves, toolchain=found.name, cuda=found.nvcc_version)

    async def health(self) -> str:
        """What is wrong with this node, or nothing. That it answers at all is part of the answer."""
        return await asyncio.to_thread(self._cache.try_disk)

    async def run(self, call: Call) -> Answer:
        """One job, to its end. Cancelled, it takes the job back, and ends the child that is at work on it."""
        try:
            if call.modules:  # the disk must not hold up the other calls
                await asyncio.to_thread(self._cache.take, call.modules)
            if missing := self._cache.missing(modules_of(call.job)):
                return Answer(ending=Ending.MISSING, value=missing)
            engine = self._engine(call)
            future = self._submit(engine, call)
        except (EngineError, ArtifactError) as error:
            return Answer(ending=Ending.UNFIT, reason=self._named(error))
        return await self._answer(engine, future)

    def close(self) -> None:
        """End the processes of this node."""
        self._machine.close()

    def _engine(self, call: Call) -> Engine:
        live = call.method != "compile" and any(gpu.name == call.profile.name for gpu in self._machine.gpus)
        if call.method != "compile" and not live:
            raise EngineError(f"no {call.profile.name} here")
        return self._machine.engine(call.profile, live=live)

    def _submit(self, engine: Engine, call: Call) -> Future[Any]:
        methods: dict[str, Callable[[Any], Future[Any]]] = {
            "compile": engine.compile,
            "evaluate": engine.evaluate,
            "final": engine.final,
            "certify": engine.certify,
        }
        return methods[call.method](_localized(call.job, self._cache))

    async def _answer(self, engine: Engine, future: Future[Any]) -> Answer:
        try:
            value = await asyncio.wrap_future(future)
        except WorkerLost as error:
            return Answer(ending=Ending.LOST, reason=self._named(error))
        except EngineError as error:
            return Answer(ending=Ending.UNFIT, reason=self._named(error))
        except asyncio.CancelledError:
            engine.drop([future])
            raise
        except RuntimeError as error:  # the machine was closed under it
            return Answer(ending=Ending.LOST, reason=self._named(error))
        return Answer(ending=Ending.VALUE, value=value)

    def _named(self, error: Exception) -> str:
        return f"node {self._plan.name}: {error}"


def _localized(job: Job, cache: ModuleCache) -> Job:
    """The job with the paths of this machine."""
    match job:
        case FinalJob():
            candidates = tuple(_located(candidate, cache) for candidate in job.candidates)
            return replace(job, candidates=candidates)
        case EvaluateJob():
            return _located(job, cache)
        case CertifyJob():
            return replace(job, module_path=cache.path(job.module_sha256))
        case _:
            return job


def _located(job: EvaluateJob, cache: ModuleCache) -> EvaluateJob:
    return replace(job, module_path=cache.path(job.module_sha256))
