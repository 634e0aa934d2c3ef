"""Jobs for tests of the GPU child."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol
from tuner.engine.base import EvaluateJob, FinalJob

if TYPE_CHECKING:
    from tuner.engine.incumbent import Incumbent

PROBLEM = GemmProblem(m=512, n=512, k=512)


def evaluate_job(
    module: str,
    *,
    problem: GemmProblem = PROBLEM,
    incumbent: Incumbent | None = None,
    protocol: MeasureProtocol | None = None,
    phase: Literal["trial", "final"] = "trial",
) -> EvaluateJob:
    """A job for a module of this name, which need not exist."""
    return EvaluateJob(
        problem=problem,
        config=Sm90GemmConfig(),
        module_path=Path(module),
        module_sha256="0" * 64,
        source_hash=f"hash of {module}",
        protocol=protocol or MeasureProtocol(),
        phase=phase,
        incumbent=incumbent,
    )


def final_job(*modules: str, problem: GemmProblem = PROBLEM, protocol: MeasureProtocol | None = None) -> FinalJob:
    """A final of these modules."""
    protocol = protocol or MeasureProtocol()
    candidates = tuple(evaluate_job(module, problem=problem, protocol=protocol) for module in modules)
    return FinalJob(problem=problem, candidates=candidates, protocol=protocol, seed=0)
