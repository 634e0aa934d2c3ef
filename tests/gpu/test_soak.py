"""The parent's side of a soak, with a process that launches nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kernels.problem import GemmProblem
from tuner.gpu.soak import WAYS, SoakJob, SoakReport, soak
from tuner.records import Verdict

PROBLEM = GemmProblem(m=8, n=8, k=8)


def run(script: str, **options: Any) -> SoakReport:
    """Soak with the process that plays this script."""
    job = SoakJob(problem=PROBLEM, module_path=Path(script), module_sha256="0" * 64)
    return soak(job, runner="tests.gpu.fake_soak", **options)


def test_soak_is_ten_thousand_launches_in_three_ways() -> None:
    """What is asked of every winner."""
    assert sum(WAYS.values()) == 10_000
    report = run("right")
    assert (report.verdict, report.launches, report.gpu_s) == (Verdict.CLEAN, WAYS, 1.5)
    assert report.detail == (
        "10000 launches in a fresh process, each right and bitwise equal: "
        "2000 alone, 4000 on two streams, 4000 by graph replay"
    )


def test_fewer_launches_are_said() -> None:
    """A large kernel is cut short by the time limit, never silently."""
    report = run("slow")
    assert report.verdict is Verdict.CLEAN
    assert report.detail.startswith("5000 of 10000, as many as 30 s hold, launches in a fresh process")


@pytest.mark.parametrize(
    ("script", "verdict", "detail"),
    [
        ("races", Verdict.FAILED, "launched on two streams: 1 launches gave another result; up to 5 of 64 elements"),
        ("wrong at first", Verdict.FAILED, "launched for the first time: 3 of 64 elements wrong"),
        ("dies", Verdict.FAILED, "the process ended early: killed by SIGSEGV; last output: a warning of some library"),
        ("shot", Verdict.NOT_RUN, "the process ended early: killed by SIGKILL; last output: a warning of some library"),
        ("no memory", Verdict.NOT_RUN, "not enough device memory beside what is in use"),
    ],
)
def test_end_of_the_process_becomes_a_verdict(script: str, verdict: Verdict, detail: str) -> None:
    """B2: the kernel is blamed for what happens after its first launch, and for nothing else."""
    report = run(script)
    assert (report.verdict, report.detail) == (verdict, detail)


def test_launch_that_never_ends_is_killed_and_fails() -> None:
    """A6: two launches that wait for one another, say."""
    report = run("hangs", stall_s=1.0)
    assert report.verdict is Verdict.FAILED
    assert report.detail == "no end of a launch on two streams within 1 s: killed"


def test_soak_that_nobody_waits_for_is_killed_at_once() -> None:
    """A24: the GPU is free within a second of a cancel."""
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    began = time.monotonic()
    job = SoakJob(problem=PROBLEM, module_path=Path("hangs"), module_sha256="0" * 64)
    report = soak(job, stall_s=30.0, runner="tests.gpu.fake_soak", stop=stop)
    assert time.monotonic() - began < 5
    assert (report.verdict, report.detail) == (Verdict.NOT_RUN, "cancelled")


def test_process_that_never_gets_to_the_kernel_blames_nobody() -> None:
    """A slow machine is no fault of the kernel."""
    report = run("never starts", start_s=1.0)
    assert report.verdict is Verdict.NOT_RUN
    assert "within 1 s" in report.detail


@pytest.mark.parametrize("script", ["hangs", "never starts"])
def test_cancelled_soak_ends_at_once(script: str) -> None:
    """A24: the card is free again in less than a second, and nobody is blamed."""
    stop = threading.Event()
    stop.set()
    since = time.monotonic()
    report = run(script, stop=stop)
    assert (report.verdict, report.detail) == (Verdict.NOT_RUN, "cancelled")
    assert time.monotonic() - since < 10.0
