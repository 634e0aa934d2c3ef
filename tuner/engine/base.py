"""What the tuning loop asks of an engine: compile this, evaluate that, settle the final.

A candidate's own fault comes back as a reply with an outcome and a reason. An exception in a future is never about the
candidate:

RuntimeError
  x EngineError     the engine cannot work at all (no compiler, disk full); the study ends and says so
  x WorkerLost      the worker went away under the job; the loop tries the trial again under its number
      x DeviceLost    the device itself cannot be used: fresh workers failed too, before any candidate had run
      x ModuleChanged a stored module is gone or has other bytes: it is built again, then tried again
  x NoDevice        nothing here can run what was asked for
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tuner.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from search_space.request import MeasureProtocol
    from tuner.engine.incumbent import Incumbent
    from tuner.records import Check, Environment, Evidence, Measurement, Outcome, Ratio


CHECKERS = "checkers"  # name of the check by synccheck, racecheck and numsim


class EngineError(RuntimeError):
    """The engine cannot work; the message says why and what to do."""


class WorkerLost(RuntimeError):
    """A worker went away under a job, through no fault of the candidate as far as anyone can tell."""


class DeviceLost(WorkerLost):
    """A device cannot be used; fresh workers on it failed as well. Says nothing about any candidate."""


class ModuleChanged(WorkerLost):
    """A file is not the module that was stored: gone, cut short or changed. Says nothing about the candidate."""


class NoDevice(RuntimeError):
    """No device here is what the request asks for; the message says what there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The device that an engine serves.

    name: as the CUDA driver prints it
    uuid: identity of the card; empty when there is only a data sheet
    profile: limits and rates that checks and the model use
    environment: read from the live device; None when there is only a data sheet
    """

    name: str
    uuid: str
    profile: DeviceProfile
    environment: Environment | None

    @property
    def is_live(self) -> bool:
        """Whether kernels can be run on it."""
        return self.environment is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileJob:
    """One kernel to build.

    problem: what it computes
    config: knobs
    sm_count: SMs of the device it is built for
    urgent: whether the result of a finished search waits for it
    """

    problem: GemmProblem
    config: GemmConfig
    sm_count: int
    urgent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReply:
    """A kernel, or why there is none worth running.

    kernel: present after success and for SPILLED
    outcome: None after success, else COMPILE_FAILED, SPILLED, TIMED_OUT or CRASHED
    reason: for people, empty after success
    """

    kernel: CompiledKernel | None
    outcome: Outcome | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateJob:
    """One module to verify and to time.

    problem: what it computes
    config: knobs, for the reason texts
    module_path: file to load
    module_sha256: what the file must hash to
    source_hash: identity of the generated source
    protocol: how to time
    phase: "trial" while searching, "final" for a finalist
    seed: of the input data
    incumbent: best so far; a candidate that cannot reach it may be stopped early; None for no racing
    urgent: whether the result of a finished search waits for it
    """

    problem: GemmProblem
    config: GemmConfig
    module_path: Path
    module_sha256: str
    source_hash: str
    protocol: MeasureProtocol
    phase: Literal["trial", "final"]
    seed: int = 0
    incumbent: Incumbent | None = None
    urgent: bool = False

    @property
    def raced_against(self) -> Incumbent | None:
        """What a trial may be stopped early for; None in a final and where nothing is raced."""
        return None if self.phase == "final" else self.incumbent


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateReply:
    """What became of a module on the GPU.

    outcome: MEASURED, STOPPED_EARLY, or how it failed
    reason: for people; names config, shape and GPU after a failure
    measurement: samples, where any were taken
    evidence: what was established
    gpu_s: seconds of GPU time used
    max_rel_error: largest error against float32, None when it never got that far
    """

    outcome: Outcome
    reason: str = ""
    measurement: Measurement | None = None
    evidence: tuple[Evidence, ...] = ()
    gpu_s: float = 0.0
    max_rel_error: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalJob:
    """Finalists to time again, interleaved round by round.

    problem: what they compute
    candidates: in the order in which they are reported; the first one is run twice as the A/A pair
    protocol: how to time
    seed: of the input data and of the order within a round
    """

    problem: GemmProblem
    candidates: tuple[EvaluateJob, ...]
    protocol: MeasureProtocol
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalReply:
    """Times of the finalists from one process.

    measurements: by source hash; rounds of all of them pair up
    aa_ratio: the first candidate against its byte-identical twin; None when it could not be taken
    environment: during the final
    failures: how a finalist failed this time, by source hash
    gpu_s: seconds of GPU time used
    disturbed: why too few rounds counted for any finalist to be judged, through no fault of theirs; empty when enough
        did
    """

    measurements: Mapping[str, Measurement]
    aa_ratio: Ratio | None
    environment: Environment
    failures: Mapping[str, EvaluateReply] = field(default_factory=dict)
    gpu_s: float = 0.0
    disturbed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyJob:
    """A winner to be checked beyond its own product, before it is published.

    problem: what it computes
    config: knobs
    sm_count: SMs it was built for
    module_path: the very file that is to be published
    module_sha256: what the file must hash to
    source_hash: of its source: the structural rules must judge the same one
    seed: of the input data
    """

    problem: GemmProblem
    config: GemmConfig
    sm_count: int
    module_path: Path
    module_sha256: str
    source_hash: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyReply:
    """What the checks said.

    checks: those that ran or should have, in order
    gpu_s: seconds of GPU time used
    """

    checks: tuple[Check, ...]
    gpu_s: float = 0.0

    @property
    def certified(self) -> bool:
        """Every check ran and was clean: the evidence `checked`."""
        return bool(self.checks) and all(check.verdict is Verdict.CLEAN for check in self.checks)

    @property
    def failure(self) -> Check | None:
        """The first check that found something, or None. One that could not run found nothing."""
        return next((check for check in self.checks if check.verdict is Verdict.FAILED), None)

    @property
    def gap(self) -> Check | None:
        """The first check that could not run or judge, or None."""
        return next((check for check in self.checks if check.verdict is Verdict.NOT_RUN), None)

    @property
    def simulated(self) -> bool:
        """The checkers ran reduced instances on the CPU and were clean: the evidence `simulated`."""
        return any(check.name == CHECKERS and check.verdict is Verdict.CLEAN for check in self.checks)


class Engine(Protocol):
    """Compiles and evaluates for one kind of device. Futures may finish in any order; methods are thread-safe."""

    @property
    def device(self) -> DeviceFacts:
        """What candidates are built for and, when live, run on."""

    def compile(self, job: CompileJob) -> Future[CompileReply]:
        """Build a module and store it by content hash."""

    def evaluate(self, job: EvaluateJob) -> Future[EvaluateReply]:
        """Verify and time a module. Only on a live device."""

    def final(self, job: FinalJob) -> Future[FinalReply]:
        """Time finalists interleaved. Only on a live device."""

    def certify(self, job: CertifyJob) -> Future[CertifyReply]:
        """Structural rules, stress builds, soak and memory checks of a winner. Only on a live device."""

    def module_path(self, sha256: str) -> Path:
        """Where a module that this engine compiled lies."""

    def has_module(self, sha256: str) -> bool:
        """Whether that module is still there, and whole: a study may go on on another machine, or after a clean-up."""

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """Nobody waits for these any more: take queued ones back, stop running ones where that is possible."""

    def close(self) -> None:
        """End every process that the engine started."""
