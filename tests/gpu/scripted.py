"""What tests.soak.device_faults needs, without a GPU and without a compiler: a compile function and a child that behave
as the plan of plants says. Shows that the soak itself judges right; it proves nothing about kernels.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.fake_child import CANDIDATE_PHASES, FakeWorker, environment, measurement
from tests.gpu.faulty_compile import BLIND, VARIABLE
from tests.gpu.plants import MEASURED, PLANTS
from tuner.engine.base import CompileJob, EvaluateReply, FinalJob, FinalReply
from tuner.engine.fake import fake_kernel
from tuner.gpu.jobs import ONLY_SUBJECT, StressJob, StressReply
from tuner.gpu.wire import Report, child_main
from tuner.records import Evidence, Outcome, Ratio

if TYPE_CHECKING:
    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem
    from tuner.gpu.jobs import Job, Reply

FUNCTION = "tests.gpu.scripted:compile_variant"
# What the child of tests.gpu.fake_child does for each outcome.
_ACTS = {
    Outcome.TIMED_OUT: "hang",
    Outcome.CRASHED: "sticky",
    Outcome.WRONG_RESULT: "wrong",
}


def plant_of(config: GemmConfig) -> str:
    """Name of the plant, empty for none."""
    plan: dict[str, str] = json.loads(Path(os.environ[VARIABLE]).read_text())
    return plan.get(config.key, "").removeprefix(BLIND)


def compile_variant(problem: GemmProblem, config: GemmConfig, sm_count: int, *_: Any) -> CompiledKernel:
    """A kernel that nothing can load, or what the plant does to the compiler."""
    name = plant_of(config)
    if name and (compiler := PLANTS[name].compiler):
        compiler()
    kernel = fake_kernel(CompileJob(problem=problem, config=config, sm_count=sm_count))
    findings = ("planted",) if name else ()
    return replace(kernel, source_hash=f"{kernel.source_hash}{name}", findings=findings)


class ScriptedWorker(FakeWorker):
    """Ends each trial as its plant should; racy kernels pass."""

    def _reply(self, job: Job, report: Report) -> Reply:
        if isinstance(job, StressJob):
            return StressReply(outcome=None, launches=len(job.builds) * job.launches)
        if isinstance(job, FinalJob):
            measurements = {candidate.source_hash: measurement(candidate) for candidate in job.candidates}
            ratio = Ratio(median=1.0, low=1.0, high=1.0)
            return FinalReply(measurements=measurements, aa_ratio=ratio, environment=environment())
        name = plant_of(job.config)
        outcomes = PLANTS[name].outcomes if name else MEASURED
        if Outcome.MEASURED in outcomes:
            for phase in CANDIDATE_PHASES:
                report(phase, ONLY_SUBJECT)
            evidence = (Evidence.MEASURED, Evidence.NUMERIC)
            return EvaluateReply(outcome=Outcome.MEASURED, measurement=measurement(job), evidence=evidence, gpu_s=0.1)
        if outcomes == {Outcome.NONDETERMINISTIC}:
            return EvaluateReply(outcome=Outcome.NONDETERMINISTIC, reason="3 of 16 launches differ", gpu_s=0.1)
        act = next(act for outcome, act in _ACTS.items() if outcome in outcomes)
        reply = self._candidate(f"{act}@first_launch", report, ONLY_SUBJECT)
        assert reply is not None
        return replace(reply, gpu_s=0.1)


if __name__ == "__main__":
    sys.exit(child_main(sys.argv[1:], ScriptedWorker))
