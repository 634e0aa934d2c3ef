"""Real kernels that hang, fault or are wrong, and a compiler that crashes, through the loop (A1, A2, A3, A6, B3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernels.artifacts import ArtifactStore
from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from tests.gpu.faulty_compile import FAULTS
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.gpu.host import GpuChild
from tuner.gpu.inventory import list_gpus
from tuner.gpu.jobs import PhaseLimits
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.records import Evidence, Outcome, State

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

PROBLEM = GemmProblem.parse("64x4096x2048")
EXPECTED = {
    "arrive_count": Outcome.TIMED_OUT,
    "illegal_address": Outcome.CRASHED,
    "wrong_row": Outcome.WRONG_RESULT,
    "compiler crash": Outcome.COMPILE_FAILED,
}


def test_every_real_fault_costs_only_its_own_trial(tmp_path: Path) -> None:
    """Each gets its outcome and a reason with config, shape and GPU; healthy trials between them are measured."""
    gpus = [gpu for gpu in list_gpus() if gpu.profile.arch.name == "sm_90a"]
    if not gpus:
        pytest.skip("needs a Hopper GPU: the faults are planted in the Hopper template")
    starting = [
        Sm90GemmConfig(
            num_consumers=1, blk_n=blk_n, blk_k=128, epi_n=16, epi_stages=1, l2_group_size=1, pipe_depth=depth
        )
        for blk_n, depth in ((64, 6), (48, 6), (64, 5), (32, 8), (64, 4), (80, 6), (96, 5), (64, 7))
    ]
    machine = LocalMachine(
        LocalOptions(compile=CompilePoolOptions(function="tests.gpu.faulty_compile:compile_variant", processes=4)),
        ArtifactStore(tmp_path),
        list_gpus=lambda: gpus[:1],
        start_child=lambda _: GpuChild(0, uuid=gpus[0].uuid, limits=PhaseLimits(first_launch_s=5.0)),
    )
    recorder = MemoryRecorder()
    request = TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=4), sampler="random")
    try:
        result = tune_study(request, machine.engine(gpus[0].profile, live=True), recorder, starting=starting)
    finally:
        machine.close()
    for trial in result.trials:
        fault = FAULTS.get(trial.config.blk_n)
        if fault is None:
            assert trial.outcome in (Outcome.MEASURED, Outcome.STOPPED_EARLY), (trial.outcome, trial.reason)
            continue
        assert trial.outcome is EXPECTED[fault], (fault, trial.outcome, trial.reason)
        assert str(PROBLEM) in trial.reason
        assert trial.config.key in trial.reason
        if fault != "compiler crash":
            assert gpus[0].uuid in trial.reason
    assert {FAULTS[trial.config.blk_n] for trial in result.trials if trial.config.blk_n in FAULTS} == set(EXPECTED)
    assert result.state is State.DONE
    assert result.winner is not None
    assert result.winner.config.blk_n not in FAULTS
    assert Evidence.CHECKED in result.evidence, [check.to_dict() for check in result.checks]
