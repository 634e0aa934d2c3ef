"""Invented devices: every config has a time, some have a fault, and nothing takes longer than it is told to.

The cost of a config is what the performance model predicts, times a factor drawn from its key: a landscape with the
shape of the real ones and with surprises in it. Samples carry noise drawn from (config, round), so a run repeats bit
for bit.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from math import cos, log, pi, sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactError, ArtifactStore
from kernels.compile import CompiledKernel
from kernels.config import Sm100GemmConfig
from kernels.devices import invented_name
from kernels.ladder import StepConfig
from search_space.model import predict
from tuner.engine.base import (
    CHECKERS,
    CertifyJob,
    CertifyReply,
    CompileJob,
    CompileReply,
    DeviceFacts,
    EngineError,
    EvaluateJob,
    EvaluateReply,
    FinalJob,
    FinalReply,
    ModuleChanged,
    WorkerLost,
)
from tuner.engine.faults import (
    CHECK_OF,
    COMPILE_FAULTS,
    GPU_PHASES,
    IN_ONE_LAUNCH,
    OUTCOME_OF,
    Fault,
    FaultKind,
    FaultPlan,
    OtherWriter,
    Shows,
    uniform,
)
from tuner.engine.incumbent import BASELINE
from tuner.engine.turns import URGENT_IN_A_ROW, TurnPool
from tuner.records import Check, Environment, Evidence, Measurement, Outcome, Ratio, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from search_space.request import MeasureProtocol

FAKE_TOOLCHAIN = "fake 1.0"
FAKE_CUDA = "13.0"
STOP_EARLY_AT = 1.5  # a candidate slower than the incumbent by this factor is stopped; judged as on a real card
VERIFIED = (Evidence.MEASURED, Evidence.NUMERIC)


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeTimes:
    """How long things take.

    compile_s: a compile, before scaling
    evaluate_s: an evaluation, before scaling
    final_s: a final, before scaling; the checks of a winner take the GPU for as long
    stress_builds: compiles that checking a winner begins with
    stress_build_s: one of them, before scaling
    scale: factor on all of them; 0 finishes every job before its call returns
    compile_workers: compiles at a time
    gpus: evaluations at a time
    """

    compile_s: float = 2.0
    evaluate_s: float = 0.8
    final_s: float = 3.0
    stress_builds: int = 27
    stress_build_s: float = 1.3
    scale: float = 0.0
    compile_workers: int = 2
    gpus: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOptions:
    """What the invented device is like.

    ruggedness: spread of the factor between a config's time and the model's prediction
    noise: relative standard deviation of a sample
    live: whether it can run kernels; without, it only compiles
    faults: who misbehaves
    lock_s: seconds that another writer holds the database for a DATABASE_LOCKED
    times: how long things take
    """

    ruggedness: float = 0.15
    noise: float = 0.002
    live: bool = True
    faults: FaultPlan = field(default_factory=FaultPlan)
    lock_s: float = 0.1
    times: FakeTimes = field(default_factory=FakeTimes)


class FakeEngine:
    """An engine on an invented device. See `tuner.engine.base.Engine`."""

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        options: FakeOptions | None = None,
        artifacts: ArtifactStore | None = None,
        database: Path | None = None,
        card: str = "",
    ) -> None:
        """`artifacts` takes the modules; without a store they are not kept. `database` is what a DATABASE_LOCKED locks;
        without one it does nothing. `card` tells cards of one name apart.
        """
        self._options = options or FakeOptions()
        self._artifacts = artifacts
        self._other_writer = OtherWriter(database) if database else None
        self._happened: dict[tuple[str, str], int] = {}
        self._closing = threading.Event()
        times = self._options.times
        self._gpus = TurnPool(times.gpus, "fake-gpu") if times.scale else None
        self._compilers = (
            TurnPool(times.compile_workers, "fake-compile", self._urgent_in_a_row) if times.scale else None
        )
        self._device = fake_device(profile, live=self._options.live, card=card)

    @property
    def device(self) -> DeviceFacts:
        """See Engine."""
        return self._device

    def compile(self, job: CompileJob) -> Future[CompileReply]:
        """See Engine."""
        times = self._options.times
        return self._submit(
            self._compilers, times.compile_s * times.scale, lambda: self._compile(job), urgent=job.urgent
        )

    def evaluate(self, job: EvaluateJob) -> Future[EvaluateReply]:
        """See Engine."""
        times = self._options.times
        return self._submit(self._gpus, times.evaluate_s * times.scale, lambda: self._evaluate(job), urgent=job.urgent)

    def final(self, job: FinalJob) -> Future[FinalReply]:
        """See Engine."""
        times = self._options.times
        return self._submit(self._gpus, times.final_s * times.scale, lambda: self._final(job), urgent=True)

    def certify(self, job: CertifyJob) -> Future[CertifyReply]:
        """See Engine. The GPU is taken when the builds are compiled."""
        times, certifying = self._options.times, partial(self._certify, job)

        def check() -> Future[CertifyReply]:
            return self._submit(self._gpus, times.final_s * times.scale, certifying, urgent=True)

        if self._compilers is None:
            return check()
        delay_s = times.stress_build_s * times.scale
        builds = [self._submit(self._compilers, delay_s, lambda: None, urgent=True) for _ in range(times.stress_builds)]
        return _Builds(builds, check)

    def module_path(self, sha256: str) -> Path:
        """See Engine."""
        return self._artifacts.path(sha256) if self._artifacts else Path("not-kept") / sha256

    def has_module(self, sha256: str) -> bool:
        """See Engine."""
        return self._artifacts is None or self._artifacts.holds(sha256)

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """See Engine."""
        for future in futures:
            future.cancel()

    def close(self) -> None:
        """See Engine."""
        self._closing.set()
        for pool in (self._compilers, self._gpus):
            if pool is not None:
                pool.close()
        if self._other_writer is not None:
            self._other_writer.close()

    # ------------------------------------------------------------------ jobs

    def _submit[Reply](
        self, pool: TurnPool | None, delay_s: float, work: Callable[[], Reply], *, urgent: bool
    ) -> Future[Reply]:
        if pool is not None:
            return pool.submit(partial(self._delayed, delay_s, work), urgent=urgent)
        future: Future[Reply] = Future()
        try:
            future.set_result(work())
        except (WorkerLost, EngineError) as error:
            future.set_exception(error)
        return future

    def _urgent_in_a_row(self) -> int:
        """As the compile pool of a machine: a GPU that is short of work gets candidates in between."""
        is_short = self._gpus is not None and self._gpus.waiting < self._options.times.gpus
        return 1 if is_short else URGENT_IN_A_ROW

    def _delayed[Reply](self, delay_s: float, work: Callable[[], Reply]) -> Reply:
        self._closing.wait(delay_s)
        return work()

    def _compile(self, job: CompileJob) -> CompileReply:
        fault = self._fault(job.config, "compile")
        if fault is not None and fault.kind is FaultKind.DISK_FULL and self._happens(fault, job.config, "store"):
            raise EngineError("cannot store the module: no space left on device; free some and resume the study")
        kernel = fake_kernel(job, spill_bytes=4672 if fault and fault.kind is FaultKind.SPILLS else 0)
        if fault is not None and fault.kind in COMPILE_FAULTS and fault.kind in OUTCOME_OF:
            spilled = fault.kind is FaultKind.SPILLS
            reason = self._reason(fault, job.problem, job.config)
            return CompileReply(kernel=kernel if spilled else None, outcome=OUTCOME_OF[fault.kind], reason=reason)
        if self._artifacts is not None:
            try:
                self._artifacts.put(kernel.module)
            except ArtifactError as error:
                raise EngineError(str(error)) from error
        return CompileReply(kernel=kernel)

    def _load(self, job: EvaluateJob | CertifyJob) -> None:
        """As a child does before a kernel runs. Raises ModuleChanged."""
        if not self.has_module(job.module_sha256):
            raise ModuleChanged(f"{job.module_path} is not what was stored under {job.module_sha256[:12]}")

    def _evaluate(self, job: EvaluateJob) -> EvaluateReply:
        self._load(job)
        fault = self._fault(job.config, *GPU_PHASES)
        times = self._options.times
        if fault is not None and fault.kind is FaultKind.DATABASE_LOCKED and self._other_writer is not None:
            if self._happens(fault, job.config, "database"):
                self._other_writer.hold(self._options.lock_s)
        elif fault is not None and fault.shows is Shows.TRIAL and fault.kind not in COMPILE_FAULTS:
            reason = self._reason(fault, job.problem, job.config)
            return EvaluateReply(outcome=OUTCOME_OF[fault.kind], reason=reason, gpu_s=times.evaluate_s)
        measurement = self._measure(job.problem, job.config, job.protocol, "trial")
        error = 1e-3 * uniform("error", job.config.key)
        if slower := _slower(job, measurement):
            return EvaluateReply(
                outcome=Outcome.STOPPED_EARLY,
                reason=slower,
                measurement=replace(
                    measurement,
                    samples_us=measurement.samples_us[:3],
                    baselines_us={name: samples[:3] for name, samples in measurement.baselines_us.items()},
                ),
                evidence=VERIFIED,
                gpu_s=times.evaluate_s / 2,
                max_rel_error=error,
            )
        return EvaluateReply(
            outcome=Outcome.MEASURED,
            measurement=measurement,
            evidence=VERIFIED,
            gpu_s=times.evaluate_s,
            max_rel_error=error,
        )

    def _final(self, job: FinalJob) -> FinalReply:
        assert self._device.environment is not None
        failures = {}
        for candidate in job.candidates:
            self._load(candidate)
            fault = self._fault(candidate.config, "final")
            if fault is not None and fault.shows is Shows.FINAL:
                reason = self._reason(fault, job.problem, candidate.config)
                failures[candidate.source_hash] = EvaluateReply(outcome=OUTCOME_OF[fault.kind], reason=reason)
        measurements = {
            candidate.source_hash: self._measure(job.problem, candidate.config, job.protocol, "final")
            for candidate in job.candidates
            if candidate.source_hash not in failures
        }
        return FinalReply(
            measurements=measurements,
            aa_ratio=self._aa_ratio(job, measurements),
            failures=failures,
            environment=self._device.environment,
            gpu_s=self._options.times.final_s,
        )

    def _aa_ratio(self, job: FinalJob, measurements: Mapping[str, Measurement]) -> Ratio | None:
        """The first finalist that was measured, against its twin."""
        for candidate in job.candidates:
            if (first := measurements.get(candidate.source_hash)) is not None:
                twin = self._measure(job.problem, candidate.config, job.protocol, "final-twin")
                return Ratio.of_pairs(twin.samples_us, first.samples_us)
        return None

    def _certify(self, job: CertifyJob) -> CertifyReply:
        self._load(job)
        fault = self._fault(job.config, "certify")
        checks: list[Check] = []
        tools = (CHECKERS,) if isinstance(job.config, Sm100GemmConfig) else ()
        for name in ("structure", *tools, "stress", "soak", "memcheck"):
            if fault is not None and CHECK_OF.get(fault.kind) == name:
                reason = self._reason(fault, job.problem, job.config)
                return CertifyReply(checks=(*checks, Check(name=name, verdict=Verdict.FAILED, detail=reason)))
            checks.append(Check(name=name, verdict=Verdict.CLEAN))
        return CertifyReply(checks=tuple(checks))

    # ------------------------------------------------------------------ inventions

    def cost_us(self, problem: GemmProblem, config: GemmConfig) -> float:
        """The true time of a config in us: what its samples scatter around."""
        factor = 1 + self._options.ruggedness * uniform("cost", problem.key, _source_text(problem, config))
        if isinstance(config, StepConfig):  # a simple kernel of the ladder, which the model does not know
            return problem.flops / self._device.profile.peak_flops * 1e6 * 100 / config.step * factor
        return predict(problem, config, self._device.profile).time_us * factor

    def _measure(self, problem: GemmProblem, config: GemmConfig, protocol: MeasureProtocol, phase: str) -> Measurement:
        assert self._device.environment is not None
        cost_us, key = self.cost_us(problem, config), config.key
        vendor_us = problem.min_bytes / self._device.profile.bandwidth_bytes_per_s * 1e6 + (
            problem.flops / self._device.profile.peak_flops * 1.3e6
        )

        def samples(name: str, around_us: float) -> tuple[float, ...]:
            seeds = (f"{phase}:{name}:{key}:{problem.key}:{index}" for index in range(protocol.rounds))
            return tuple(around_us * (1 + self._options.noise * _gauss(seed)) for seed in seeds)

        return Measurement(
            samples_us=samples("ours", cost_us),
            baselines_us={"torch": samples("torch", vendor_us * 1.02), "cublaslt_best": samples("lt", vendor_us)},
            protocol=protocol,
            environment=self._device.environment,
        )

    def _fault(self, config: GemmConfig, *phases: str) -> Fault | None:
        """The fault of a config, if any. Raises WorkerLost when its child is to be killed in one of the phases."""
        fault = self._options.faults.of(config.key)
        if fault is None or fault.kind is not FaultKind.CHILD_KILLED:
            return fault
        if fault.phase in phases and self._happens(fault, config, fault.phase):
            raise WorkerLost(f"the child of {self._device.name} was killed (SIGKILL) in phase {fault.phase}")
        return None

    def _happens(self, fault: Fault, config: GemmConfig, where: str) -> bool:
        """Whether a fault that goes away by itself is still there; counts how often it was."""
        seen = self._happened.get((config.key, where), 0)
        self._happened[config.key, where] = seen + 1
        return seen < fault.times

    def _reason(self, fault: Fault, problem: GemmProblem, config: GemmConfig) -> str:
        at = f", launch {fault.launch}" if fault.kind in IN_ONE_LAUNCH else ""
        where = "" if fault.kind in COMPILE_FAULTS else f" on {self._device.name} ({self._device.uuid})"
        return f"{fault.kind}{at}: {config.key} for {problem}{where}"


class _Builds(Future[CertifyReply]):
    """Ends when the builds are compiled and what comes after them has ended."""

    def __init__(self, builds: Sequence[Future[None]], then: Callable[[], Future[CertifyReply]]) -> None:
        super().__init__()
        self._builds, self._then = builds, then
        self._left, self._lock = len(builds), threading.Lock()
        self._last: Future[CertifyReply] | None = None
        for build in builds:
            build.add_done_callback(self._built)

    def cancel(self) -> bool:
        """Take everything back that has not begun."""
        for future in (*self._builds, self._last):
            if future is not None:
                future.cancel()
        return super().cancel()

    def _built(self, build: Future[None]) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if build.cancelled():
            super().cancel()
        elif not left and not self.done():
            self._last = self._then()
            self._last.add_done_callback(self._ended)

    def _ended(self, last: Future[CertifyReply]) -> None:
        if last.cancelled():
            super().cancel()
        elif not self.set_running_or_notify_cancel():
            return
        elif (error := last.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(last.result())


def fake_device(profile: DeviceProfile, *, live: bool = True, card: str = "") -> DeviceFacts:
    """An invented device with the limits and rates of a profile; `card` tells several of one name apart."""
    name = invented_name(profile)
    uuid = f"GPU-{hashlib.sha256((name + card).encode()).hexdigest()[:32]}" if live else ""
    environment = Environment(
        gpu_name=name,
        gpu_uuid=uuid,
        arch=profile.arch.name,
        sm_count=profile.sm_count,
        driver="1.0",
        cuda=FAKE_CUDA,
        toolchain=FAKE_TOOLCHAIN,
        max_sm_clock_mhz=profile.clock_mhz,
    )
    return DeviceFacts(
        name=name, uuid=uuid, profile=replace(profile, name=name), environment=environment if live else None
    )


def fake_kernel(job: CompileJob, *, spill_bytes: int = 0) -> CompiledKernel:
    """A module that nothing can load, with the hashes and facts of one."""
    text = f"{_source_text(job.problem, job.config)}:{job.sm_count}"
    module = b"not a module\n" + text.encode()
    return CompiledKernel(
        module=module,
        sha256=hashlib.sha256(module).hexdigest(),
        source_hash=hashlib.sha256(text.encode()).hexdigest(),
        arch=job.config.arch.name,
        sm_count=job.sm_count,
        registers=168,
        spill_bytes=spill_bytes,
        stack_bytes=0,
        warnings=(),
        trace_s=0.4,
        lower_s=0.2,
        cubin_s=1.2,
        link_s=0.2,
        toolchain=FAKE_TOOLCHAIN,
    )


def _slower(job: EvaluateJob, measurement: Measurement) -> str:
    """Why a candidate cannot reach the incumbent, or nothing."""
    incumbent = job.raced_against
    if incumbent is None:
        return ""
    slowdown = median(incumbent.slowdowns(measurement.samples_us, measurement.baselines_us.get(BASELINE, ())))
    if slowdown <= STOP_EARLY_AT:
        return ""
    return f"{slowdown:.2f} times as long as the best so far, {incumbent.text()}"


def _source_text(problem: GemmProblem, config: GemmConfig) -> str:
    """What the source depends on: a group larger than the tiles there are walks them like one that just holds them."""
    tiles = config.cluster_tiles(problem)[1 if config.along_n else 0]
    return f"{problem.key}:{replace(config, l2_group_size=min(config.l2_group_size, tiles)).key}"


def _gauss(seed: str) -> float:
    """A standard normal number from a seed (Box-Muller)."""
    return sqrt(-2 * log(1 - uniform(seed, "r"))) * cos(2 * pi * uniform(seed, "s"))
