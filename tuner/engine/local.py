"""The engine of this machine: a pool of compile processes, one child process for each GPU, modules in the artifact
store.

`LocalMachine` holds the processes; `LocalEngine` is its face for one kind of device. Engines of one machine share them.
"""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from kernels.artifacts import ArtifactError, ArtifactStore
from kernels.config import Sm100GemmConfig
from kernels.errors import ToolchainError
from kernels.toolchain import Toolchain, find_toolchain
from kernels.verdicts_run import VerdictJob
from tuner.engine.base import (
    CertifyJob,
    CertifyReply,
    CompileJob,
    CompileReply,
    DeviceFacts,
    DeviceLost,
    EngineError,
    EvaluateJob,
    EvaluateReply,
    FinalJob,
    FinalReply,
    WorkerLost,
)
from tuner.engine.certify import Apart, Certification
from tuner.engine.checkers import run_checkers
from tuner.engine.compile_pool import CompilePool, CompilePoolOptions, PoolReply
from tuner.engine.together import Together
from tuner.engine.turns import Turns
from tuner.gpu.jobs import PhaseLimits
from tuner.gpu.memcheck import memcheck
from tuner.gpu.soak import soak
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kernels.compile import CompiledKernel
    from kernels.devices import DeviceProfile
    from tuner.gpu.jobs import StressJob, StressReply
    from tuner.records import Check

_OUTCOME_OF_REPLY = {
    "failed": Outcome.COMPILE_FAILED,
    "died": Outcome.COMPILE_FAILED,
    "late": Outcome.TIMED_OUT,
}
RECOVERY_S = 60.0  # before a GPU that failed its health checks is tried again while others of its kind work


class Child(Protocol):
    """The parent's side of one GPU child process, as `tuner.gpu.host.GpuChild`. Calls take turns."""

    def evaluate(self, job: EvaluateJob) -> EvaluateReply:
        """Verify and time a module; raises WorkerLost, never for a candidate's fault."""

    def final(self, job: FinalJob) -> FinalReply:
        """Time finalists; raises WorkerLost, never for a candidate's fault."""

    def stress(self, job: StressJob) -> StressReply:
        """Verify stress builds; raises WorkerLost, never for a build's fault."""

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """How the machine is used.

    compile: the compile pool
    gpus: use the GPUs that are here; without, the machine only compiles
    limits: seconds a GPU child may stay in each phase
    spares: children of each GPU kept in reserve, for after a fault; 0 for none
    max_trials: evaluations after which a GPU child is replaced
    verdicts: folder of the verdicts of the sm_100a checkers; without one they do not run
    """

    compile: CompilePoolOptions = field(default_factory=CompilePoolOptions)
    gpus: bool = True
    limits: PhaseLimits = field(default_factory=PhaseLimits)
    spares: int = 1
    max_trials: int = 200
    verdicts: Path | None = None


class LocalMachine:
    """The processes of this machine. Close it to end them."""

    def __init__(
        self,
        options: LocalOptions,
        artifacts: ArtifactStore,
        *,
        list_gpus: Callable[[], Sequence[DeviceFacts]] | None = None,
        start_child: Callable[[int], Child] | None = None,
    ) -> None:
        """`list_gpus` and `start_child` (index of a GPU -> its child) are given by tests; default: the real ones."""
        self.artifacts = artifacts
        self.verdicts = options.verdicts
        self.pool = CompilePool(options.compile, self._is_gpu_short)
        self._start_child = start_child or partial(_start_gpu_child, options)
        self.gpus: tuple[DeviceFacts, ...] = ()
        if options.gpus:
            self.gpus = tuple((list_gpus or _list_gpus)())
        self._engines: dict[str, LocalEngine] = {}

    def _is_gpu_short(self) -> bool:
        return any(engine.is_short_of_work for engine in list(self._engines.values()))

    def engine(self, profile: DeviceProfile, *, live: bool) -> LocalEngine:
        """The engine for GPUs of this name, or, not live, for compiling against a data sheet."""
        key = f"{profile.name}:{live}"
        if key not in self._engines:
            indices = [index for index, gpu in enumerate(self.gpus) if live and gpu.name == profile.name]
            facts = self.gpus[indices[0]] if indices else sheet_facts(profile)
            self._engines[key] = LocalEngine(facts, self, indices, self._start_child)
        return self._engines[key]

    def close(self) -> None:
        """End every process."""
        for engine in self._engines.values():
            engine.close()
        self.pool.close()


class LocalEngine:
    """See `tuner.engine.base.Engine`. The GPUs behind it are of one kind; each evaluates one candidate at a time."""

    def __init__(
        self, facts: DeviceFacts, machine: LocalMachine, gpu_indices: Sequence[int], start_child: Callable[[int], Child]
    ) -> None:
        self._facts = facts
        self._machine = machine
        self._gpus = [_Gpu(index, machine.gpus[index].uuid, start_child) for index in gpu_indices]
        self._idle: SimpleQueue[_Gpu] = SimpleQueue()
        for gpu in self._gpus:
            self._idle.put(gpu)
        self._threads = ThreadPoolExecutor(len(self._gpus), "gpu") if self._gpus else None
        self._lock = threading.Lock()
        self._certifying: set[_Certifying] = set()
        self._queued = 0  # jobs that wait for a GPU
        self._turns: Turns[_Turn] = Turns()
        self._together = Together(self._alone, self._is_no_use_to_wait)

    @property
    def device(self) -> DeviceFacts:
        """See Engine."""
        return self._facts

    @property
    def is_short_of_work(self) -> bool:
        """Whether fewer jobs wait than there are GPUs to take them."""
        return self._queued < len(self._gpus)

    def compile(self, job: CompileJob) -> Future[CompileReply]:
        """See Engine."""
        inner = self._machine.pool.submit(job.problem, job.config, job.sm_count, urgent=job.urgent)
        outer: _Linked[CompileReply] = _Linked(inner)
        inner.add_done_callback(lambda done: self._built(job, done, outer))
        return outer

    def evaluate(self, job: EvaluateJob) -> Future[EvaluateReply]:
        """See Engine."""
        return self._on_gpu(lambda child: child.evaluate(job), urgent=job.urgent)

    def final(self, job: FinalJob) -> Future[FinalReply]:
        """See Engine."""
        return self._on_gpu(lambda child: child.final(job), urgent=True)

    def certify(self, job: CertifyJob) -> Future[CertifyReply]:
        """See Engine. The GPU is taken when the builds are compiled."""
        if self._threads is None:
            raise EngineError(f"no GPU of kind {self._facts.name} here: a winner cannot be checked")
        future = _Certifying(self._machine, job)
        with self._lock:
            self._certifying.add(future)
        threading.Thread(target=self._certify, args=(future,), name="certify", daemon=True).start()
        return future

    def _certify(self, future: _Certifying) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="gemm-tuner-stress-") as folder:
                future.set_result(self._checked(future, Path(folder)))
        except CancelledError:
            future.cancel()
        except Exception as error:  # a thread's end: whatever it is belongs to whoever waits for the future
            future.set_exception(error)
        finally:
            with self._lock:
                self._certifying.discard(future)
            future.work.drop()
            self._together.look()

    def _checked(self, future: _Certifying, folder: Path) -> CertifyReply:
        """All checks, one after the other. Raises CancelledError when dropped, EngineError, WorkerLost."""
        work = future.work
        built = work.build(folder)
        if isinstance(built, CertifyReply):
            return built
        before, modules = built
        stress = self._step(future, partial(self._on_gpu, urgent=True), lambda child: work.stress(child, modules))
        if not stress.passed:
            return work.reply(before, stress, None)
        checks = Apart(
            memcheck=lambda launches, uuid: memcheck(launches, device=uuid, stop=future.dropped),
            soak=lambda job, uuid: soak(job, device=uuid, stop=future.dropped),
        )
        apart = self._step(future, self._together.submit, lambda uuid: work.apart(modules, checks, uuid))
        return work.reply(before, stress, apart)

    def _step[Given, Reply](
        self,
        future: _Certifying,
        submit: Callable[[Callable[[Given], Reply]], Future[Reply]],
        work: Callable[[Given], Reply],
    ) -> Reply:
        """One step of a certification. Raises CancelledError when it was dropped before or meanwhile."""
        if future.dropped.is_set():
            raise CancelledError
        future.step = step = submit(work)
        if future.dropped.is_set():  # meanwhile
            self.drop([step])
        reply = step.result()
        if future.dropped.is_set():
            raise CancelledError
        return reply

    def module_path(self, sha256: str) -> Path:
        """See Engine."""
        return self._machine.artifacts.path(sha256)

    def has_module(self, sha256: str) -> bool:
        """See Engine."""
        return self._machine.artifacts.holds(sha256)

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """See Engine. A GPU child that is in the middle of a dropped job is ended; the next job starts a fresh one."""
        for future in futures:
            if isinstance(future, _Linked):
                future.dropped = True
                self._machine.pool.drop([future.inner])
            elif isinstance(future, _Certifying):
                future.dropped.set()
                future.work.drop()
                if future.step is not None:
                    self.drop([future.step])
            elif not future.cancel():
                for gpu in self._gpus:
                    gpu.drop(future)

    def close(self) -> None:
        """End the GPU children. The compile pool is the machine's."""
        with self._lock:
            certifying = list(self._certifying)
        self.drop(certifying)
        self._together.close()
        for gpu in self._gpus:
            gpu.close()
            self._idle.put(gpu)  # whoever waits for one shall find a closed one
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for turn in self._turns.drain():
            turn.future.cancel()

    def _on_gpu[Reply](self, work: Callable[[Child], Reply], *, urgent: bool = False) -> Future[Reply]:
        return self._taken(lambda gpu, future: gpu.run(future, work), urgent=urgent)

    def _alone[Reply](self, work: Callable[[str], Reply]) -> Future[Reply]:
        """A GPU without its child, for processes that the work starts itself."""
        return self._taken(lambda gpu, _: work(gpu.uuid), urgent=True)

    def _is_no_use_to_wait(self, come: int) -> bool:
        """Whether checks that may share a GPU wait for nothing: no timing, or no other winner that is being checked."""
        return not self._queued or len(self._certifying) <= come

    def _taken[Reply](self, work: Callable[[_Gpu, Future[Reply]], Reply], *, urgent: bool) -> Future[Reply]:
        if self._threads is None:
            raise EngineError(f"no GPU of kind {self._facts.name} here: only compiling is possible")
        future: Future[Reply] = Future()
        future.add_done_callback(self._left_the_queue)
        with self._lock:
            self._queued += 1
        self._turns.put(_Turn(work, future), urgent=urgent)
        try:
            self._threads.submit(self._next_turn)  # as many as there are turns
        except RuntimeError as error:  # shut down
            raise WorkerLost("the engine is closed") from error
        return future

    def _next_turn(self) -> None:
        gpu = self._idle.get()  # the turn is chosen when there is a GPU for it
        turn, lost = self._turns.take(), False
        if not turn.future.set_running_or_notify_cancel():
            self._idle.put(gpu)
            return
        with self._lock:
            self._queued -= 1
        settle: Callable[[], None]
        try:
            settle = partial(turn.future.set_result, turn.work(gpu, turn.future))
        except DeviceLost as error:
            lost = self._has_another(gpu)
            text = f"{error}; see what nvidia-smi says of the GPU, then resume the study"
            settle = partial(turn.future.set_exception, error if lost else EngineError(text))
        except BaseException as error:  # a thread's end: whatever it is belongs to whoever waits for the future
            settle = partial(turn.future.set_exception, error)
        self._put_back(gpu, lost=lost)
        self._together.look()
        settle()

    def _left_the_queue(self, future: Future[Any]) -> None:
        if future.cancelled():  # never ran
            with self._lock:
                self._queued -= 1
            self._together.look()

    def _has_another(self, gpu: _Gpu) -> bool:
        """Whether the job can be tried on another GPU. Else the device is the study's trouble, not the candidate's."""
        with self._lock:
            return any(not other.lost for other in self._gpus if other is not gpu)

    def _put_back(self, gpu: _Gpu, *, lost: bool) -> None:
        """Into the queue of idle GPUs; one that is lost after a while, or the next job would soon be there again."""
        with self._lock:
            gpu.lost = lost
        if not lost:
            self._idle.put(gpu)
            return
        timer = threading.Timer(RECOVERY_S, self._put_back, (gpu,), {"lost": False})
        timer.daemon = True
        timer.start()

    def _built(self, job: CompileJob, done: Future[PoolReply], outer: _Linked[CompileReply]) -> None:
        """Turn a reply of the pool into one of the engine; runs in the pool's thread, so storing is off the loop."""
        if done.cancelled() or outer.dropped:
            outer.cancel()
            return
        try:
            outer.set_result(self._reply(job, done.result()))
        except (EngineError, WorkerLost) as error:
            outer.set_exception(error)
        except ArtifactError as error:
            outer.set_exception(EngineError(f"{error}; free some space or fix the folder, then resume the study"))

    def _reply(self, job: CompileJob, reply: PoolReply) -> CompileReply:
        what = f"{job.config.key} for {job.problem} on {job.sm_count} SMs"
        if reply.kind == "lost":
            raise WorkerLost(f"{reply.reason} ({what})")
        if reply.kind != "value":
            return CompileReply(kernel=None, outcome=_OUTCOME_OF_REPLY[reply.kind], reason=f"{reply.reason} ({what})")
        kernel: CompiledKernel = reply.value
        if kernel.spill_bytes:
            reason = f"spills {kernel.spill_bytes} B at {kernel.registers} registers a thread ({what})"
            return CompileReply(kernel=kernel, outcome=Outcome.SPILLED, reason=reason)
        self._machine.artifacts.put(kernel.module)
        return CompileReply(kernel=kernel)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Work for a GPU, given that and its own future, which it ends."""

    work: Callable[[_Gpu, Future[Any]], Any]
    future: Future[Any]


class _Linked[Reply](Future[Reply]):
    """A future that is finished from another one."""

    def __init__(self, inner: Future[Any]) -> None:
        super().__init__()
        self.inner = inner
        self.dropped = False


class _Certifying(Future[CertifyReply]):
    """A certification: its builds compile, then it has the GPU, then it shares it with others.

    step: the one that waits for a GPU or is on it
    """

    def __init__(self, machine: LocalMachine, job: CertifyJob) -> None:
        super().__init__()
        self.step: Future[Any] | None = None
        self.dropped = threading.Event()
        checkers = partial(_checkers, machine.verdicts, self.dropped) if machine.verdicts else None
        self.work = Certification(machine.pool, job, checkers)


class _Gpu:
    """One GPU and its child, which is started when first needed.

    uuid: as NVML tells it
    lost: failed its health checks; left alone for a while
    """

    def __init__(self, index: int, uuid: str, start_child: Callable[[int], Child]) -> None:
        self.uuid = uuid
        self.lost = False
        self._index = index
        self._start_child = start_child
        self._child: Child | None = None
        self._future: Future[Any] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run[Reply](self, future: Future[Reply], work: Callable[[Child], Reply]) -> Reply:
        """Run a job on the child. Raises WorkerLost."""
        with self._lock:
            if self._closed:
                raise WorkerLost("the engine is closed")
            self._child = child = self._child or self._start_child(self._index)
            self._future = future
        try:
            return work(child)
        finally:
            with self._lock:
                self._future = None

    def drop(self, future: Future[Any]) -> None:
        """End the child if it is at work on this job."""
        with self._lock:
            child = self._child if self._future is future else None
            if child is not None:
                self._child = None
        if child is not None:
            child.close()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.close()


def sheet_facts(profile: DeviceProfile) -> DeviceFacts:
    """A device that nobody has here: its data sheet is all there is."""
    return DeviceFacts(name=profile.name, uuid="", profile=profile, environment=None)


def toolchain() -> Toolchain:
    """The compilers of this machine. Raises EngineError when there are none."""
    try:
        return find_toolchain()
    except ToolchainError as error:
        raise EngineError(str(error)) from error


def _checkers(folder: Path, stop: threading.Event, job: CertifyJob) -> Check:
    assert isinstance(job.config, Sm100GemmConfig)
    return run_checkers(VerdictJob(config=job.config, dtype=job.problem.dtype, store=folder), stop=stop)


def _list_gpus() -> Sequence[DeviceFacts]:
    from tuner.gpu.inventory import list_gpus

    return list_gpus()


def _start_gpu_child(options: LocalOptions, index: int) -> Child:
    from tuner.gpu.host import GpuChild

    compilers = toolchain()
    return GpuChild(
        index,
        limits=options.limits,
        toolchain=compilers.name,
        cuda=compilers.nvcc_version,
        spares=options.spares,
        max_trials=options.max_trials,
    )
