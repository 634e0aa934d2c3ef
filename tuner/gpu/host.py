"""The parent's side of a GPU: a child process that verifies and measures, watched, killed and replaced from here.

RuntimeError
  x WorkerLost (tuner.engine.base)   the child was closed, or killed from outside, under a job
      x ModuleChanged                a file is not the module that was stored
      x DeviceLost
          x GpuUnavailable           the GPU cannot be used, through no fault of a candidate
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.engine.base import (
    DeviceFacts,
    DeviceLost,
    EvaluateJob,
    EvaluateReply,
    FinalJob,
    FinalReply,
    ModuleChanged,
    WorkerLost,
)
from tuner.gpu.inventory import list_gpus
from tuner.gpu.jobs import Job, Phase, PhaseLimits, StressJob, StressReply
from tuner.gpu.process import ChildGone, ChildProcess
from tuner.gpu.spare import Spares
from tuner.gpu.watch import Fault, Watch
from tuner.gpu.wire import Done, Failed, Open, PhaseStarted, Ready, Unhealthy, Warm
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GpuChild", "GpuUnavailable", "PhaseLimits", "list_gpus"]

CHILD_MODULE = "tuner.gpu.child"
DAMAGES = "writes over the inputs or the reference: afterwards torch.matmul is judged differently"
ROOT = Path(__file__).resolve().parents[2]


class GpuUnavailable(DeviceLost):
    """The GPU failed its health checks, or what comes before any candidate. Says nothing about a candidate."""


class GpuChild:
    """One GPU, used through one long-lived child process at a time. Methods but `close` take turns.

    device_index: position in list_gpus()
    limits: seconds a child may stay in each phase
    toolchain, cuda: of the compiler that built the modules; recorded in environments
    spares: children in reserve that have imported torch but hold nothing of the GPU; 0 for none
    max_trials: evaluations after which a child is replaced, so that what modules leave behind cannot pile up
    health_attempts: fresh children tried before the GPU counts as unavailable
    health_pause_s: wait after a failed attempt, times the number of the attempt: a card may need time after a fault
    python: interpreter of the child
    child_module: module run as the child
    uuid: identity of the card; looked up by device_index when None
    environ: variables of the child; those of this process when None

    Raises GpuUnavailable for a device_index that does not exist.
    """

    def __init__(
        self,
        device_index: int,
        *,
        limits: PhaseLimits | None = None,
        toolchain: str = "",
        cuda: str = "",
        spares: int = 0,
        max_trials: int = 200,
        health_attempts: int = 3,
        health_pause_s: float = 2.0,
        python: str = sys.executable,
        child_module: str = CHILD_MODULE,
        uuid: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.limits = limits or PhaseLimits()
        self.uuid = uuid or _uuid_at(device_index)
        self._command = [python, "-m", child_module, "--uuid", self.uuid, "--toolchain", toolchain, "--cuda", cuda]
        self._environ = _child_environ(os.environ if environ is None else environ, self.uuid)
        self._max_trials = max_trials
        self._health_attempts = health_attempts
        self._health_pause_s = health_pause_s
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._child: ChildProcess | None = None
        self._spares = Spares(lambda: ChildProcess(self._command, self._environ), spares)
        self._facts: DeviceFacts | None = None
        self._trials = 0
        self.replacements = 0

    def __enter__(self) -> GpuChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what callers ask

    def facts(self) -> DeviceFacts:
        """The device as its child sees it. Starts the child. Raises GpuUnavailable."""
        with self._turn:
            if self._facts is None:
                self._ready_child()
            assert self._facts is not None
            return self._facts

    def evaluate(self, job: EvaluateJob) -> EvaluateReply:
        """Verify and measure one module. Raises WorkerLost, and nothing for what the module does."""
        with self._turn:
            result = self._run(job)
        if isinstance(result, Fault):
            return self._evaluate_fault(result, job)
        assert isinstance(result.reply, EvaluateReply)
        return self._named(result.reply, job)

    def final(self, job: FinalJob) -> FinalReply:
        """Measure finalists interleaved; one that fails or damages the others' data is left out, the rest start again.

        Raises WorkerLost, and nothing for what the modules do.
        """
        failures: dict[str, EvaluateReply] = {}
        gpu_s = 0.0
        remaining = job
        with self._turn:
            while remaining.candidates:
                result = self._run(remaining)
                if isinstance(result, Done) and not result.doubtful:
                    assert isinstance(result.reply, FinalReply)
                    named = {key: self._named(one, _candidate(job, key)) for key, one in result.reply.failures.items()}
                    return replace(result.reply, failures={**failures, **named}, gpu_s=gpu_s + result.gpu_s)
                if isinstance(result, Fault):
                    found, spent_s = self._fault_of_final(result, remaining), 0.0
                else:
                    found, spent_s = self._damaging(result, remaining)
                failures |= found
                gpu_s += result.gpu_s + spent_s
                rest = tuple(other for other in remaining.candidates if other.source_hash not in found)
                remaining = replace(remaining, candidates=rest)
            facts = self._facts
        if facts is None or facts.environment is None:
            raise GpuUnavailable(f"GPU {self.uuid}: no finalist, and no child that could tell the environment")
        return FinalReply(measurements={}, aa_ratio=None, environment=facts.environment, failures=failures, gpu_s=gpu_s)

    def _fault_of_final(self, fault: Fault, job: FinalJob) -> dict[str, EvaluateReply]:
        assert fault.subject is not None, "a fault of no finalist has ended in GpuUnavailable"
        culprit = job.candidates[fault.subject]
        return {culprit.source_hash: self._evaluate_fault(fault, culprit)}

    def _damaging(self, doubtful: Done, job: FinalJob) -> tuple[dict[str, EvaluateReply], float]:
        """Finalists that damage what all are judged by, each tried alone; and the seconds of GPU time that this took.

        Raises GpuUnavailable when none of them does it alone.
        """
        failures: dict[str, EvaluateReply] = {}
        gpu_s = 0.0
        for candidate in job.candidates:
            alone = replace(job, candidates=(candidate,))
            result = doubtful if alone == job else self._run(alone)
            gpu_s += 0.0 if result is doubtful else result.gpu_s
            if isinstance(result, Fault):
                failures |= self._fault_of_final(result, alone)
            elif result.doubtful:
                damage = EvaluateReply(outcome=Outcome.WRONG_RESULT, reason=DAMAGES, gpu_s=result.gpu_s)
                failures[candidate.source_hash] = self._named(damage, candidate)
        if not failures:
            raise GpuUnavailable(f"GPU {self.uuid}: a final damaged inputs or reference, and no finalist does so alone")
        return failures, gpu_s

    def stress(self, job: StressJob) -> StressReply:
        """Run stress builds. Raises WorkerLost, and nothing for what the builds do."""
        with self._turn:
            result = self._run(job)
        if isinstance(result, Fault):
            build = job.builds[result.subject or 0]
            place = f"{build.label}, {build.problem} with {job.config.key} on GPU {self.uuid}"
            return StressReply(
                outcome=result.outcome,
                reason=f"{result.reason} ({place})",
                failed_build=build.label,
                gpu_s=result.gpu_s,
            )
        reply = result.reply
        assert isinstance(reply, StressReply)
        if reply.passed:
            return reply
        return replace(reply, reason=f"{reply.reason} ({job.config.key} on GPU {self.uuid})")

    def close(self) -> None:
        """End the child, the spares and what they have started. A job in progress raises WorkerLost."""
        self._closed.set()
        while not self._turn.acquire(timeout=0.1):
            if (child := self._child) is not None:
                child.shoot()  # the thread that holds the turn sees the end of its messages and gives it back
        try:
            if self._child is not None:
                self._child.stop(grace_s=3.0)
                self._child = None
            self._spares.close()
        finally:
            self._turn.release()

    # ------------------------------------------------------------------ running a job

    def _run(self, job: Job) -> Done | Fault:
        """Run the job; once more, in a fresh child, where the first failed through no doing of a candidate of this job.

        A reply that is still doubtful comes from a child that has run nothing else. Raises GpuUnavailable.
        """
        for _ in range(2):
            result = self._run_once(job)
            if isinstance(result, Fault):
                if result.is_candidates:
                    return result
                self._drop_child()
            elif not result.doubtful:
                return result
            else:
                # Judged by damaged data. In a child that has run nothing else this job's own candidates did the damage.
                alone = self._trials == 1
                self._drop_child()
                if alone:
                    return result
        assert isinstance(result, Fault)
        reason = f"{result.reason}, in two children in a row"
        no_room = result.phase is Phase.BASELINE and result.outcome is Outcome.OUT_OF_MEMORY
        if no_room and not isinstance(job, FinalJob):  # finalists had the room when they were trials
            return replace(result, reason=f"the problem does not fit the device: {reason}")
        raise GpuUnavailable(f"GPU {self.uuid}: {reason}, while no candidate was at work")

    def _run_once(self, job: Job) -> Done | Fault:
        child = self._ready_child()
        self._trials += 1
        watch = Watch(limits=self.limits)
        try:
            child.send(job)
            while True:
                message = child.receive(watch.remaining_s())
                match message:
                    case PhaseStarted():
                        watch.begin(message)
                    case Done():
                        return message
                    case Failed():
                        if message.tainted:
                            self._drop_child()
                        if message.module_changed:
                            raise ModuleChanged(f"GPU {self.uuid}: {message.reason}")
                        return watch.fault(message.outcome, message.reason)
                    case Ready() | Unhealthy() | Warm():
                        self._drop_child()
                        return watch.fault(Outcome.CRASHED, "the child sent a message out of turn")
        except TimeoutError:
            self._drop_child()
            limit_s = self.limits.of(watch.phase)
            return watch.fault(Outcome.TIMED_OUT, f"no end of phase {watch.phase} within {limit_s:g} s; child killed")
        except ChildGone:
            return watch.fault(Outcome.CRASHED, self._obituary(child, watch.phase))

    def _obituary(self, child: ChildProcess, phase: Phase) -> str:
        """How the child ended, for people. Raises WorkerLost when that says nothing about the candidate at work."""
        ending = child.collect()
        self._child = None
        self.replacements += 1
        if self._closed.is_set():
            raise WorkerLost(f"GPU {self.uuid}: closed during a job")
        if ending.from_outside and phase.is_candidates:
            raise WorkerLost(f"GPU {self.uuid}: somebody else ended the child: {ending.text} in phase {phase}")
        lines = child.last_lines()
        return f"child died in phase {phase}: {ending.text}" + (f"; last output: {lines}" if lines else "")

    def _drop_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        self.replacements += 1
        try:
            child.kill()
        except TimeoutError as error:
            raise GpuUnavailable(f"GPU {self.uuid}: {error}") from error

    # ------------------------------------------------------------------ starting a child

    def _ready_child(self) -> ChildProcess:
        """The child at hand, or a fresh one that passed its health check. Raises GpuUnavailable."""
        if self._child is not None and self._trials >= self._max_trials:
            self._child.stop(grace_s=3.0)
            self._child = None
            self.replacements += 1
        reason = ""
        for attempt in range(1, self._health_attempts + 1):
            if self._closed.is_set():
                raise WorkerLost(f"GPU {self.uuid}: closed")
            if self._child is None:
                reason = self._start()
            if self._child is not None:
                self._spares.refill()
                return self._child
            if attempt < self._health_attempts:
                self._closed.wait(self._health_pause_s * attempt)
        raise GpuUnavailable(f"GPU {self.uuid}: {self._health_attempts} health checks failed; the last: {reason}")

    def _start(self) -> str:
        """Hand the GPU to a spare or to a new child, and await its health check. Returns why it failed, or nothing."""
        child = self._spares.take() or ChildProcess(self._command, self._environ)
        self._child, self._trials = child, 0
        watch = Watch(limits=self.limits, phase=Phase.START)
        try:
            child.send(Open())
            self._spares.refill()
            while True:
                message = child.receive(watch.remaining_s())
                match message:
                    case Warm():
                        pass
                    case PhaseStarted():
                        watch.begin(message)
                    case Ready():
                        self._facts = message.facts
                        return ""
                    case Unhealthy():
                        self._drop_child()
                        return message.reason
                    case _:
                        self._drop_child()
                        return "the child sent a message out of turn"
        except TimeoutError:
            self._drop_child()
            return f"no end of phase {watch.phase} within {self.limits.of(watch.phase):g} s; child killed"
        except ChildGone:
            return self._obituary(child, watch.phase)

    # ------------------------------------------------------------------ reasons for people

    def _evaluate_fault(self, fault: Fault, job: EvaluateJob) -> EvaluateReply:
        reply = EvaluateReply(outcome=fault.outcome, reason=fault.reason, gpu_s=fault.gpu_s)
        return self._named(reply, job)

    def _named(self, reply: EvaluateReply, job: EvaluateJob) -> EvaluateReply:
        """Add config, shape and GPU to the reason of a failure."""
        if reply.outcome in (Outcome.MEASURED, Outcome.STOPPED_EARLY):
            return reply
        return replace(reply, reason=f"{reply.reason} ({job.problem} with {job.config.key} on GPU {self.uuid})")


def _uuid_at(device_index: int) -> str:
    found = list_gpus()
    if 0 <= device_index < len(found):
        return found[device_index].uuid
    names = ", ".join(facts.name for facts in found) or "none"
    raise GpuUnavailable(f"no supported GPU at index {device_index}; visible are: {names}")


def _child_environ(environ: Mapping[str, str], uuid: str) -> dict[str, str]:
    """The card is chosen by its UUID: indices of CUDA and of NVML need not agree."""
    path = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH", ""))))
    return {**environ, "CUDA_VISIBLE_DEVICES": uuid, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _candidate(job: FinalJob, source_hash: str) -> EvaluateJob:
    return next(candidate for candidate in job.candidates if candidate.source_hash == source_hash)
