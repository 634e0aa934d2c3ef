"""What a child does with one module: verify, measure, verify again.

A kernel is any callable `f(A, B, D)`, so tests and the self-check can pass plain functions.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.engine.base import EvaluateJob, EvaluateReply
from tuner.gpu.clock import Burst, capture
from tuner.gpu.jobs import Phase
from tuner.gpu.limits import impossible
from tuner.gpu.rounds import Rounds, exhausted, hopeless, measure, precise
from tuner.records import Environment, Evidence, Measurement, Outcome

if TYPE_CHECKING:
    from tuner.gpu.context import ProblemContext
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.referee import Kernel, Verdict
    from tuner.gpu.wire import Report

CANDIDATE = "candidate"
TRIAL_REPEATS = 16
FINAL_REPEATS = 100


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where kernels of one problem are tried.

    context: inputs, reference, buffers, baselines
    device: the GPU
    report: tells the parent which phase begins
    """

    context: ProblemContext
    device: LiveDevice
    report: Report

    def environment(self, rounds: Rounds, best: str) -> Environment:
        """During the rounds that count. `best` says what `cublaslt_best` was."""
        readings = tuple(one.reading for one in rounds.kept() if one.reading is not None)
        return self.device.environment(readings, notes=(("cublaslt_best", best),))

    def untrue(self, samples_us: tuple[float, ...], rounds: Rounds) -> str:
        """Why samples cannot be believed, or nothing."""
        if not samples_us:
            return f"no sample counts: {rounds.why_discarded()}"
        return impossible(samples_us, self.context.problem, self.device.profile, self.context.timing.pool_bytes)


def evaluate(kernel: Kernel, job: EvaluateJob, bench: Bench, *, began: float | None = None) -> EvaluateReply:
    """Verify and measure one kernel. May raise what the kernel raises.

    began: when the candidate got the GPU, on the monotonic clock; None for now
    """
    began = time.monotonic() if began is None else began
    repeats = FINAL_REPEATS if job.phase == "final" else TRIAL_REPEATS
    verdict = bench.context.referee.verify(kernel, bench.report, repeats=repeats)
    if verdict.outcome is not None:
        return refused(verdict, began)
    bench.report(Phase.MEASURE)
    burst = capture(CANDIDATE, kernel, bench.context.timing.sets, burst_ms=job.protocol.burst_ms)
    rounds = _measure(burst, job, bench)
    bench.report(Phase.VERIFY)
    again = bench.context.referee.verify_again(burst.replay, verdict.bits)
    if again.outcome is not None:
        return refused(again, began, rel_error=verdict.max_rel_error)
    return _reply(rounds, job, bench, verdict, time.monotonic() - began)


def refused(verdict: Verdict, began: float, *, rel_error: float | None = None) -> EvaluateReply:
    """The reply to a kernel that the referee refused."""
    assert verdict.outcome is not None
    error = verdict.max_rel_error if rel_error is None else rel_error
    gpu_s = time.monotonic() - began
    return EvaluateReply(outcome=verdict.outcome, reason=verdict.reason, gpu_s=gpu_s, max_rel_error=error)


def _measure(burst: Burst, job: EvaluateJob, bench: Bench) -> Rounds:
    baselines = bench.context.baselines
    names = baselines.names(finalists=False)

    def enough(rounds: Rounds) -> bool:
        return precise(rounds, CANDIDATE, names) or bool(_too_slow(rounds, job)) or exhausted(rounds, burst)

    return measure(
        [burst, *baselines.bursts(finalists=False)],
        job.protocol,
        card=bench.device.card,
        order=random.Random(f"{job.seed}:{job.source_hash}"),
        report=bench.report,
        enough=enough,
    )


def _too_slow(rounds: Rounds, job: EvaluateJob) -> str:
    return hopeless(rounds, CANDIDATE, job.incumbent_us if job.phase == "trial" else None)


def _reply(rounds: Rounds, job: EvaluateJob, bench: Bench, verdict: Verdict, gpu_s: float) -> EvaluateReply:
    samples_us = rounds.times_us(CANDIDATE)
    if reason := bench.untrue(samples_us, rounds):
        return EvaluateReply(
            outcome=Outcome.INVALID_TIMING,
            reason=reason,
            evidence=(Evidence.NUMERIC,),
            gpu_s=gpu_s,
            max_rel_error=verdict.max_rel_error,
        )
    baselines_us, best = bench.context.baselines.samples_us(rounds, finalists=False)
    measurement = Measurement(
        samples_us=samples_us,
        protocol=job.protocol,
        environment=bench.environment(rounds, best),
        baselines_us=baselines_us,
        discarded=rounds.discarded,
    )
    slower = _too_slow(rounds, job)
    return EvaluateReply(
        outcome=Outcome.STOPPED_EARLY if slower else Outcome.MEASURED,
        reason=slower,
        measurement=measurement,
        evidence=(Evidence.MEASURED, Evidence.NUMERIC),
        gpu_s=gpu_s,
        max_rel_error=verdict.max_rel_error,
    )
