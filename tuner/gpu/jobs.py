"""Jobs and limits of the GPU child that the engine interface does not define."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tuner.engine.base import EvaluateJob, EvaluateReply, FinalJob, FinalReply

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem
    from tuner.records import Outcome


ONLY_SUBJECT = 0  # of a trial, which has one candidate


class Phase(StrEnum):
    """What a child is doing. Each phase has its own time limit."""

    START = "start"
    HEALTH = "health"
    BASELINE = "baseline"
    LOAD = "load"
    FIRST_LAUNCH = "first_launch"
    VERIFY = "verify"
    MEASURE = "measure"

    @property
    def is_candidates(self) -> bool:
        """Whether candidates are at work in this phase: whichever the report names. In the others none is."""
        return self in _OF_CANDIDATE


_OF_CANDIDATE = frozenset({Phase.LOAD, Phase.FIRST_LAUNCH, Phase.VERIFY, Phase.MEASURE})


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseLimits:
    """Seconds a child may stay in one phase before its process group is killed.

    start_s: importing torch and creating the CUDA context
    health_s: the small known product in a fresh child
    baseline_s: inputs, float32 reference and screening of the vendor library, once a problem
    load_s: loading a module
    first_launch_s: the first launch, up to its end
    verify_s: all other launches and comparisons of the referee
    measure_s: one round of the clock; each round starts it again
    """

    start_s: float = 180.0
    health_s: float = 30.0
    baseline_s: float = 120.0
    load_s: float = 30.0
    first_launch_s: float = 15.0
    verify_s: float = 30.0
    measure_s: float = 30.0

    def of(self, phase: Phase) -> float:
        """The limit of one phase in seconds."""
        limit: float = getattr(self, f"{phase.value}_s")
        return limit


@dataclass(frozen=True, kw_only=True, slots=True)
class StressModule:
    """One build that makes a race likely to show: the shortest K over many tiles, or a delay at a barrier point.

    label: says what is special about the build, for the reason text
    problem: what this build computes, usually with another K than the tuned one
    module_path: file to load
    module_sha256: what the file must hash to
    """

    label: str
    problem: GemmProblem
    module_path: Path
    module_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StressJob:
    """Builds to verify, each on its own problem.

    config: knobs that the builds share, for the reason texts
    builds: in the order in which they are run; the first failure ends the job
    launches: of each build; every one is compared in full
    seed: of the input data
    """

    config: GemmConfig
    builds: tuple[StressModule, ...]
    launches: int = 100
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StressReply:
    """What the stress builds did.

    outcome: None when every launch of every build was right, else how the first one failed
    reason: for people; names build, config, shape and GPU after a failure
    failed_build: label of the build that failed
    launches: launches that were compared and found right
    gpu_s: seconds of GPU time used
    max_rel_error: largest relative Frobenius error of the builds; None when none got that far
    """

    outcome: Outcome | None
    reason: str = ""
    failed_build: str = ""
    launches: int = 0
    gpu_s: float = 0.0
    max_rel_error: float | None = None

    @property
    def passed(self) -> bool:
        """Whether all builds were right in every launch."""
        return self.outcome is None


type Job = EvaluateJob | FinalJob | StressJob
type Reply = EvaluateReply | FinalReply | StressReply
