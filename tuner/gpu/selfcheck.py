"""`python -m tuner.gpu.selfcheck`: a small and a big problem with torch.matmul as the candidate, as one JSON document.

Shows on a new machine that the child starts, that the referee accepts a right kernel and refuses planted wrong ones,
which baselines there are, what a candidate costs, and how quiet the clock is. Exit status 1 when anything is not as it
should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol
from tuner.engine.base import EvaluateJob, FinalJob
from tuner.engine.incumbent import Incumbent
from tuner.gpu.host import GpuChild, list_gpus
from tuner.gpu.jobs import Phase
from tuner.records import Outcome

if TYPE_CHECKING:
    from tuner.engine.base import EvaluateReply
    from tuner.gpu.context import Contexts
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.evaluate import Bench
    from tuner.gpu.referee import Kernel

SHAPES = ("64x7168x4096", "4096x4096x4096")


def sample_job(problem: GemmProblem, *, source_hash: str = "torch", incumbent: Incumbent | None = None) -> EvaluateJob:
    """A job whose module is never loaded."""
    return EvaluateJob(
        problem=problem,
        config=Sm90GemmConfig(),
        module_path=Path(source_hash),
        module_sha256="",
        source_hash=source_hash,
        protocol=MeasureProtocol(),
        phase="trial",
        incumbent=incumbent,
    )


class PhaseClock:
    """Stands in for the parent: notes how long each phase took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "", time.monotonic()

    def __call__(self, phase: Phase, subject: int | None = None) -> None:
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase.value, now


def check_shape(problem: GemmProblem, contexts: Contexts, device: LiveDevice) -> dict[str, Any]:
    """Verdicts, times and costs of one problem."""
    from tuner.gpu.baselines import matmul
    from tuner.gpu.evaluate import Bench, evaluate

    began = time.monotonic()
    context = contexts.get(problem, MeasureProtocol(), 0, PhaseClock())
    context_s = time.monotonic() - began
    clock = PhaseClock()
    bench = Bench(context=context, device=device, report=clock)
    job = sample_job(problem)
    reply = evaluate(matmul, job, bench)
    clock(Phase.START)
    best = Incumbent.of(reply.measurement) if reply.measurement else Incumbent(time_us=1.0)
    race = replace(job, incumbent=best)
    raced = evaluate(_twice(matmul), race, bench)
    return {
        "shape": str(problem),
        "context_s": round(context_s, 3),
        "sets": len(context.timing.sets),
        "reply": _summary(reply, problem),
        "phases_s": {name: round(seconds, 4) for name, seconds in clock.seconds.items()},
        "raced_twice_as_slow": _summary(raced, problem),
        "final": _final(job, bench),
        "planted": {name: _summary(evaluate(kernel, job, bench), problem) for name, kernel in _planted().items()},
        "screened_us": {name: round(us, 3) for name, us in context.baselines.screened_us.items()},
        "best": [context.baselines.texts[burst.name] for burst in context.baselines.best],
        "launches": {burst.name: burst.launches for burst in context.baselines.bursts(finalists=True)},
        "dropped": context.baselines.dropped,
    }


def _final(job: EvaluateJob, bench: Bench) -> dict[str, Any]:
    from tuner.gpu.baselines import matmul
    from tuner.gpu.finals import final

    def load(path: Path, sha256: str) -> Kernel:
        return matmul

    twins = tuple(replace(job, source_hash=name) for name in ("first", "second"))
    reply = final(FinalJob(problem=job.problem, candidates=twins, protocol=job.protocol, seed=0), load, bench)
    return {
        "aa_ratio": reply.aa_ratio.to_dict() if reply.aa_ratio else None,
        "ratios": {
            name: {baseline: ratio.to_dict() for baseline, ratio in measurement.ratios().items()}
            for name, measurement in reply.measurements.items()
        },
        "failures": {name: failure.reason for name, failure in reply.failures.items()},
        "gpu_s": round(reply.gpu_s, 3),
    }


def _twice(kernel: Kernel) -> Kernel:
    def twice(a: Any, b: Any, d: Any) -> None:
        kernel(a, b, d)
        kernel(a, b, d)

    return twice


def _planted() -> dict[str, Kernel]:
    """Wrong kernels: the referee must refuse each."""
    from tuner.gpu.baselines import matmul

    def one_wrong(a: Any, b: Any, d: Any) -> None:
        matmul(a, b, d)
        d[-1, -1] = d[0, 0]

    def stray_write(a: Any, b: Any, d: Any) -> None:
        matmul(a, b, d)
        d.as_strided((1,), (1,), d.storage_offset() + d.numel()).zero_()

    def nothing(a: Any, b: Any, d: Any) -> None:
        return

    return {"one wrong element": one_wrong, "stray write": stray_write, "no-op": nothing}


def _summary(reply: EvaluateReply, problem: GemmProblem) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "outcome": reply.outcome.value,
        "reason": reply.reason,
        "gpu_s": round(reply.gpu_s, 4),
        "max_rel_error": reply.max_rel_error,
    }
    if (measurement := reply.measurement) is not None:
        summary |= {
            "median_us": round(measurement.median_us(), 3),
            "samples_us": [round(sample, 3) for sample in measurement.samples_us],
            "tflops": round(measurement.tflops(problem), 1),
            "spread": round(measurement.spread(), 5),
            "discarded": measurement.discarded,
            "ratios": {name: ratio.to_dict() for name, ratio in measurement.ratios().items()},
            "environment": measurement.environment.to_dict(),
        }
    return summary


def problems_found(shapes: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    found = []
    for shape in shapes:
        name = shape["shape"]
        if shape["reply"]["outcome"] != Outcome.MEASURED:
            found.append(f"{name}: torch.matmul is {shape['reply']['outcome']}: {shape['reply']['reason']}")
        if shape["raced_twice_as_slow"]["outcome"] != Outcome.STOPPED_EARLY:
            found.append(f"{name}: a kernel of twice the time is {shape['raced_twice_as_slow']['outcome']}")
        for planted, reply in shape["planted"].items():
            if reply["outcome"] != Outcome.WRONG_RESULT:
                found.append(f"{name}: {planted} is {reply['outcome']}")
        ratio = shape["final"]["aa_ratio"]
        if ratio is None or not 0.98 <= ratio["median"] <= 1.02:
            found.append(f"{name}: A/A ratio {ratio}")
    return found


def main() -> int:
    """Print the summary. Returns the exit status."""
    parser = argparse.ArgumentParser(description="check referee, baselines and clock on this GPU")
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="MxNxK")
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    gpus = list_gpus()
    if not gpus:
        print(json.dumps({"problems": ["no supported GPU is visible"]}))
        return 1
    began = time.monotonic()
    with GpuChild(0) as child:
        facts = child.facts()
        child_start_s = time.monotonic() - began
    from tuner.gpu.context import Contexts
    from tuner.gpu.device import check_health, open_device

    device = open_device()
    check_health()
    contexts = Contexts(device)
    wanted = [GemmProblem.parse(text, dtype=options.dtype) for text in options.shapes]
    shapes = [check_shape(problem, contexts, device) for problem in wanted]
    found = problems_found(shapes)
    summary = {
        "gpus": [f"{gpu.name} {gpu.uuid}" for gpu in gpus],
        "child_start_s": round(child_start_s, 2),
        "child_environment": facts.environment.to_dict() if facts.environment else None,
        "profile": {"sm_count": facts.profile.sm_count, "clock_mhz": facts.profile.clock_mhz,
                    "l2_bytes": facts.profile.l2_bytes, "tb_per_s": facts.profile.bandwidth_bytes_per_s / 1e12},
        "shapes": shapes,
        "problems": found,
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
