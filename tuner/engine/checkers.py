"""Synccheck, racecheck and numsim as a check of an sm_100a winner: run in a process of their own, or found stored.

They look at reduced instances with the winner's knobs, on the CPU. Nothing short of clean answers on all of them is a
pass; where they cannot run or cannot judge, that is said and nobody blames the kernel.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from kernels.checkers import EXACT, CheckReport, reduced_instances
from kernels.verdicts_run import MARK, NO_ENGINE, VerdictJob
from tuner.engine.base import CHECKERS
from tuner.gpu.process import listened_to
from tuner.records import Check, Verdict

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

RUNNER = "kernels.verdicts_run"
# The engine's first build takes 6 minutes on two cores, a new kernel one or two for each instance and tool.
LIMIT_S = 2400.0
_FOUND = "error"


def run_checkers(
    job: VerdictJob, *, limit_s: float = LIMIT_S, runner: str = RUNNER, stop: threading.Event | None = None
) -> Check:
    """Get the verdicts on a config.

    limit_s: after which the process is killed
    runner: module that is run as the process
    stop: when set, the process is killed at once
    """
    with listened_to([runner, job.to_text()], {}, stop) as process:
        printed = _output(process, limit_s)
    if stop is not None and stop.is_set():
        return _not_run("cancelled")
    if printed is None:
        return _not_run(f"no verdict within {limit_s:g} s")
    return _check(job, process.returncode, printed.splitlines())


def _output(process: subprocess.Popen[str], limit_s: float) -> str | None:
    """All that the process prints, None when it does not end in time. Its standard input stays open until it ends."""
    # communicate() would close standard input first, which is how the process learns that its parent is gone
    stdin, process.stdin = process.stdin, None
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.stdin = stdin


def _check(job: VerdictJob, status: int, lines: Sequence[str]) -> Check:
    said = " | ".join(line.strip() for line in lines if not line.startswith(MARK))[-300:]
    if status == NO_ENGINE:
        return _not_run(f"the checkers cannot run here: {said}")
    if status:
        return _not_run(f"the checkers ended with exit status {status}: {said}")
    reports = (json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK))
    return judged(job, [CheckReport.from_dict(report) for report in reports])


def judged(job: VerdictJob, reports: Sequence[CheckReport]) -> Check:
    """What the reports on a config amount to."""
    tool = ", ".join(f"{name} {version}" for name, version in reports[0].versions.items()) if reports else ""
    if bad := next((report for report in reports if not report.passed), None):
        verdict = Verdict.FAILED if _blames(bad) else Verdict.NOT_RUN
        said = (f"synccheck {bad.sync}, racecheck {bad.race}, numsim {bad.numsim}", *bad.findings[:2])
        return Check(name=CHECKERS, verdict=verdict, detail=f"{'; '.join(said)} ({bad.problem.shape})", tool=tool)
    asked = [instance.problem for instance in reduced_instances(job.config, job.dtype)]
    if [report.problem for report in reports] != asked:
        return _not_run(f"verdicts on {len(reports)} of {len(asked)} reduced instances")
    shapes = " and ".join(problem.shape for problem in asked)
    detail = f"synccheck and racecheck clean, numsim exact to the bit: {shapes}"
    return Check(name=CHECKERS, verdict=Verdict.CLEAN, detail=detail, tool=tool)


def _blames(report: CheckReport) -> bool:
    """Whether a tool found a fault. `incomplete` and `review` are no pass and no finding, nor is a tool that failed."""
    wrong = report.numsim != EXACT and not report.numsim.startswith("failed")
    return _FOUND in (report.sync, report.race) or wrong


def _not_run(detail: str) -> Check:
    return Check(name=CHECKERS, verdict=Verdict.NOT_RUN, detail=detail)
