"""Finalists in the same rounds as one another, an A/A twin and the best of the vendor library; and stress builds."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from search_space.request import MIN_ROUNDS
from tuner.engine.base import EvaluateJob, EvaluateReply, FinalJob, FinalReply
from tuner.gpu.clock import Burst, capture, graph_ms
from tuner.gpu.context import make_referee
from tuner.gpu.evaluate import FINAL_REPEATS, Bench, refused
from tuner.gpu.jobs import Phase, StressJob, StressReply
from tuner.gpu.rounds import Rounds, measure
from tuner.records import Outcome, Ratio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernels.problem import GemmProblem
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.referee import Kernel, Referee, Verdict
    from tuner.gpu.wire import Report

TWIN = "aa"
ATTEMPTS = 3  # of a final whose rounds something disturbed
# How far the interval of the A/A pair may stray from 1. In bursts it was less than 0.9 % in 71 of 72 finals on H200s,
# in one 6 %: such noise makes nearly everything a tie (results/h200/dev.json, aa_ratio). Under load the power limiter
# alone moves it by 1.6 % (4096x7168x16384), and a final that is taken again there costs 20 s.
MOST_NOISE = {"burst": 0.01, "sustained": 0.02}
DISTURBED_PAUSE_S = 5.0


class LoadKernel(Protocol):
    """How a file becomes a kernel (tuner.gpu.child.load_module)."""

    def __call__(self, path: Path, sha256: str) -> Kernel:
        """Raises ChangedError for a file that is not what was stored, LoadError for one that is no module."""


@dataclass(frozen=True, kw_only=True)
class Readied:
    """A finalist that was verified and captured.

    job: what was asked
    kernel: kept as long as its graphs
    burst: its graph
    twin: a second graph of the same kernel, of the first finalist only
    verdict: of the referee, with the verified output
    """

    job: EvaluateJob
    kernel: Kernel
    burst: Burst
    twin: Burst | None
    verdict: Verdict

    @property
    def name(self) -> str:
        """Source hash: name of its samples."""
        return self.job.source_hash


def final(job: FinalJob, load: LoadKernel, bench: Bench) -> FinalReply:
    """Verify all finalists, then measure them, an A/A twin of the first and the baselines in the same rounds.

    May raise what a kernel raises; the report has then named the finalist.
    """
    began = time.monotonic()
    failures: dict[str, EvaluateReply] = {}
    readied: list[Readied] = []
    for subject, candidate in enumerate(job.candidates):
        since = time.monotonic()
        one = _ready(candidate, subject, load, bench, twin=not readied)
        if isinstance(one, Readied):
            readied.append(one)
        else:
            failures[candidate.source_hash] = refused(one, since)
    rounds = _measure(readied, job, bench) if readied else Rounds()
    failures |= _check_again(readied, bench)
    return _reply(readied, rounds, bench, failures, time.monotonic() - began)


def _ready(candidate: EvaluateJob, subject: int, load: LoadKernel, bench: Bench, *, twin: bool) -> Readied | Verdict:
    bench.report(Phase.LOAD, subject)
    kernel = load(candidate.module_path, candidate.module_sha256)
    verdict = bench.context.referee.verify(kernel, bench.report, repeats=FINAL_REPEATS, subject=subject)
    if verdict.outcome is not None:
        return verdict
    bench.report(Phase.MEASURE, subject)
    sets, burst_ms = bench.context.timing.sets, graph_ms(bench.context.protocol)
    return Readied(
        job=candidate,
        kernel=kernel,
        burst=capture(candidate.source_hash, kernel, sets, burst_ms=burst_ms, subject=subject),
        twin=capture(TWIN, kernel, sets, burst_ms=burst_ms, subject=subject) if twin else None,
        verdict=verdict,
    )


def _measure(readied: Sequence[Readied], job: FinalJob, bench: Bench) -> Rounds:
    """All rounds of the protocol; again after a pause when something else disturbed most of them, or two bursts of one
    kernel disagreed. Of several attempts the one with the least noise.
    """
    ours = [burst for one in readied for burst in (one.burst, one.twin) if burst is not None]
    quietest, least = Rounds(), math.inf
    for attempt in range(ATTEMPTS):
        if attempt:
            bench.report(Phase.MEASURE)
            time.sleep(DISTURBED_PAUSE_S)
        rounds = measure(
            [*ours, *bench.context.baselines.bursts(finalists=True)],
            job.protocol,
            card=bench.device.card,
            order=random.Random(f"{job.seed}:{attempt}"),
            report=bench.report,
            enough=lambda _: False,
        )
        noise = _noise(rounds, readied)
        if not quietest.rounds or noise < least:
            quietest, least = rounds, noise
        if noise <= MOST_NOISE[job.protocol.kind]:
            break
    return quietest


def _noise(rounds: Rounds, readied: Sequence[Readied]) -> float:
    """How far the interval of the A/A pair strays from 1; infinite where too few rounds count."""
    if len(rounds.kept()) < MIN_ROUNDS:
        return math.inf
    return _aa_ratio(rounds, readied).strays


def _aa_ratio(rounds: Rounds, readied: Sequence[Readied]) -> Ratio:
    """Of the first finalist's twin to itself."""
    return Ratio.of_pairs(rounds.times_us(TWIN), rounds.times_us(readied[0].name))


def _check_again(readied: Sequence[Readied], bench: Bench) -> dict[str, EvaluateReply]:
    failures: dict[str, EvaluateReply] = {}
    for one in readied:
        since = time.monotonic()
        bench.report(Phase.VERIFY, one.burst.subject)
        again = bench.context.referee.verify_again(one.burst.replay, one.verdict.bits)
        if again.outcome is not None:
            failures[one.name] = refused(again, since, rel_error=one.verdict.max_rel_error)
    return failures


def _reply(
    readied: Sequence[Readied], rounds: Rounds, bench: Bench, failures: dict[str, EvaluateReply], gpu_s: float
) -> FinalReply:
    if not readied or len(rounds.kept()) < MIN_ROUNDS:
        return FinalReply(
            measurements={},
            aa_ratio=None,
            environment=bench.device.environment(),
            failures=failures,
            gpu_s=gpu_s,
            disturbed=rounds.why_discarded() if readied else "",
        )
    for one in readied:
        if one.name not in failures and (reason := bench.untrue(one.name, rounds)):
            error = one.verdict.max_rel_error
            failures[one.name] = EvaluateReply(outcome=Outcome.INVALID_TIMING, reason=reason, max_rel_error=error)
    measurements = {
        one.name: bench.measurement(one.name, rounds, finalists=True) for one in readied if one.name not in failures
    }
    environments = [measurement.environment for measurement in measurements.values()]
    return FinalReply(
        measurements=measurements,
        aa_ratio=_aa_ratio(rounds, readied),
        environment=environments[0] if environments else bench.device.environment(),
        failures=failures,
        gpu_s=gpu_s,
    )


# ---------------------------------------------------------------------- stress builds


def stress(job: StressJob, load: LoadKernel, device: LiveDevice, report: Report) -> StressReply:
    """Verify each build on its own problem with many launches. May raise what a build raises."""
    began = time.monotonic()
    launches, worst = 0, 0.0
    referees: dict[GemmProblem, Referee] = {}
    for subject, build in enumerate(job.builds):
        if build.problem not in referees:
            report(Phase.BASELINE, subject)
            referees[build.problem] = make_referee(build.problem, device, job.seed)
        report(Phase.LOAD, subject)
        kernel = load(build.module_path, build.module_sha256)
        verdict = referees[build.problem].verify(kernel, report, repeats=job.launches, subject=subject)
        worst = max(worst, verdict.max_rel_error or 0.0)
        if verdict.outcome is not None:
            return StressReply(
                outcome=verdict.outcome,
                reason=f"stress build {build.label}, {build.problem}: {verdict.reason}",
                failed_build=build.label,
                launches=launches,
                gpu_s=time.monotonic() - began,
                max_rel_error=worst,
            )
        launches += verdict.launches
    return StressReply(outcome=None, launches=launches, gpu_s=time.monotonic() - began, max_rel_error=worst)
