"""What a child does with one module: verify, measure, verify again.

A kernel is any callable `f(A, B, D)`, so tests and the self-check can pass plain functions.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from search_space.request import MIN_ROUNDS
from tuner.engine.base import EvaluateJob, EvaluateReply
from tuner.gpu.baselines import BEST, TORCH
from tuner.gpu.clock import Burst, capture, graph_ms
from tuner.gpu.jobs import ONLY_SUBJECT, Phase
from tuner.gpu.limits import impossible
from tuner.gpu.rounds import MIN_ROUNDS_TO_STOP, Rounds, enough_for, hopeless, measure
from tuner.records import Evidence, Measurement, Outcome

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

    def measurement(self, name: str, rounds: Rounds, *, finalists: bool = False) -> Measurement:
        """What the rounds say of one implementation, next to the vendor library in the same rounds."""
        baselines = self.context.baselines
        best = baselines.best_in(rounds, finalists=finalists)
        readings = rounds.readings(name)
        energy = {"ours": rounds.energy_mj(name), TORCH: rounds.energy_mj(TORCH), BEST: rounds.energy_mj(best)}
        return Measurement(
            samples_us=rounds.times_us(name),
            protocol=self.context.protocol,
            environment=self.device.environment(readings, notes=((BEST, baselines.texts[best]),)),
            baselines_us={TORCH: rounds.times_us(TORCH), BEST: rounds.times_us(best)},
            discarded=rounds.discarded,
            states=tuple(reading.state() for reading in readings),
            energy_mj={key: value for key, value in energy.items() if value is not None},
        )

    def untrue(self, name: str, rounds: Rounds, *, fewest: int = MIN_ROUNDS) -> str:
        """Why samples cannot be believed, or nothing. `fewest` rounds have to count."""
        samples_us = rounds.times_us(name)
        if len(samples_us) < fewest:
            return f"only {len(samples_us)} rounds count, {fewest} are needed: {rounds.why_discarded()}"
        return impossible(
            samples_us,
            self.context.problem,
            self.device.profile,
            self.context.timing.pool_bytes,
            seen_mhz=max((reading.sm_clock_mhz for reading in rounds.readings(name)), default=0.0),
        )


def evaluate(kernel: Kernel, job: EvaluateJob, bench: Bench, *, began: float | None = None) -> EvaluateReply:
    """Verify and measure one kernel. May raise what the kernel raises.

    began: when the candidate got the GPU, on the monotonic clock; None for now
    """
    began = time.monotonic() if began is None else began
    repeats = FINAL_REPEATS if job.phase == "final" else TRIAL_REPEATS
    verdict = bench.context.referee.verify(kernel, bench.report, repeats=repeats, subject=ONLY_SUBJECT)
    if verdict.outcome is not None:
        return refused(verdict, began)
    bench.report(Phase.MEASURE, ONLY_SUBJECT)
    sets, burst_ms = bench.context.timing.sets, graph_ms(job.protocol)
    burst = capture(CANDIDATE, kernel, sets, burst_ms=burst_ms, subject=ONLY_SUBJECT)
    rounds = _measure(burst, job, bench)
    bench.report(Phase.VERIFY, ONLY_SUBJECT)
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
    return measure(
        [burst, *baselines.bursts(finalists=False)],
        job.protocol,
        card=bench.device.card,
        order=random.Random(f"{job.seed}:{job.source_hash}"),
        report=bench.report,
        enough=enough_for(burst, baselines.names(finalists=False), job.raced_against),
    )


def _reply(rounds: Rounds, job: EvaluateJob, bench: Bench, verdict: Verdict, gpu_s: float) -> EvaluateReply:
    slower = hopeless(rounds, CANDIDATE, job.raced_against)
    reason = bench.untrue(CANDIDATE, rounds, fewest=MIN_ROUNDS_TO_STOP if slower else MIN_ROUNDS)
    if reason:
        return EvaluateReply(
            outcome=Outcome.INVALID_TIMING,
            reason=reason,
            evidence=(Evidence.NUMERIC,),
            gpu_s=gpu_s,
            max_rel_error=verdict.max_rel_error,
        )
    return EvaluateReply(
        outcome=Outcome.STOPPED_EARLY if slower else Outcome.MEASURED,
        reason=slower,
        measurement=bench.measurement(CANDIDATE, rounds),
        evidence=(Evidence.MEASURED, Evidence.NUMERIC),
        gpu_s=gpu_s,
        max_rel_error=verdict.max_rel_error,
    )
