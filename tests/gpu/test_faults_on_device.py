"""Real kernels that hang, fault or are wrong, and a compiler that crashes, through the loop (A1, A2, A3, A6, B3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernels.artifacts import ArtifactStore
from kernels.compile import compile_kernel
from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from search_space.starting import starting_configs
from tests.gpu.faulty_compile import FUNCTION, VARIABLE, write_plan
from tests.gpu.jobs import evaluate_job
from tests.gpu.plants import PLANTS
from tests.soak.device_faults import TimedChild, device_memory_mb
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.gpu.host import GpuChild
from tuner.gpu.inventory import list_gpus
from tuner.gpu.jobs import PhaseLimits
from tuner.gpu.memcheck import memcheck
from tuner.gpu.nvml import Card
from tuner.gpu.wire import Warm
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.records import Evidence, Outcome, State

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.engine.base import DeviceFacts

pytestmark = pytest.mark.gpu

PROBLEM = GemmProblem.parse("64x4096x2048")
# blk_n -> plant; the configs between them, with blk_n 64, are healthy
PLANTED = {
    48: "arrive_count",
    32: "illegal_address",
    80: "wrong_row",
    96: "compiler_aborts",
    112: "misaligned_address",
    128: "not_deterministic",
}


def test_every_real_fault_costs_only_its_own_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1, A2, A3, A4, A6, B2, B3: each gets its outcome and a reason with config, shape and GPU; healthy trials between
    them are measured.
    """
    gpus = [gpu for gpu in list_gpus() if gpu.profile.arch.name == "sm_90a"]
    if not gpus:
        pytest.skip("needs a Hopper GPU: the faults are planted in the Hopper template")
    starting = [
        Sm90GemmConfig(
            num_consumers=1, blk_n=blk_n, blk_k=128, epi_n=16, epi_stages=1, l2_group_size=1, pipe_depth=depth
        )
        for blk_n, depth in (
            *((64, 6), (48, 6), (64, 5), (32, 8), (64, 4), (80, 6)),
            *((96, 5), (112, 4), (64, 3), (128, 4), (64, 7)),
        )
    ]
    monkeypatch.setenv(VARIABLE, "")
    planted = {config.key: PLANTED[config.blk_n] for config in starting if config.blk_n in PLANTED}
    write_plan(tmp_path / "plants.json", planted)
    machine = LocalMachine(
        LocalOptions(
            compile=CompilePoolOptions(function=FUNCTION, processes=4), limits=PhaseLimits(first_launch_s=5.0), spares=1
        ),
        ArtifactStore(tmp_path),
        list_gpus=lambda: gpus[:1],
    )
    recorder = MemoryRecorder()
    request = TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=5), sampler="random")
    try:
        result = tune_study(request, machine.engine(gpus[0].profile, live=True), recorder, starting=starting)
    finally:
        machine.close()
    for trial in result.trials:
        fault = planted.get(trial.config.key)
        if fault is None:
            assert trial.outcome in (Outcome.MEASURED, Outcome.STOPPED_EARLY), (trial.outcome, trial.reason)
            continue
        assert trial.outcome in PLANTS[fault].outcomes, (fault, trial.outcome, trial.reason)
        assert str(PROBLEM) in trial.reason
        assert trial.config.key in trial.reason
        if fault != "compiler_aborts":
            assert gpus[0].uuid in trial.reason
    assert {planted[trial.config.key] for trial in result.trials if trial.config.key in planted} == set(
        PLANTED.values()
    )
    assert result.state is State.DONE
    assert result.winner is not None
    assert result.winner.config.key not in planted
    assert Evidence.CHECKED in result.evidence, [check.to_dict() for check in result.checks]


@pytest.fixture
def gpu() -> DeviceFacts:
    """The first supported GPU."""
    found = list_gpus()
    if not found:
        pytest.skip("no GPU of a supported kind")
    return found[0]


SMALL = GemmProblem(m=64, n=2048, k=1024)


def test_spare_takes_nothing_of_the_card_and_saves_the_import(gpu: DeviceFacts) -> None:
    """A1: after a lost context the next candidate waits for a context, not for an import of torch."""
    card = Card(gpu.uuid)
    before = card.process_ids()
    with TimedChild(0, uuid=gpu.uuid, spares=1, child_module="tests.gpu.planted_child") as child:
        child.facts()
        used_mb = device_memory_mb(gpu.uuid)
        assert isinstance(child._spares._waiting[0].receive(120.0), Warm)
        assert device_memory_mb(gpu.uuid) - used_mb < 8.0
        assert len(card.process_ids() - before) == 1
        assert child.evaluate(evaluate_job("illegal_address", problem=SMALL)).outcome is Outcome.CRASHED
        assert child.evaluate(evaluate_job("right", problem=SMALL)).outcome is Outcome.MEASURED
        cold_s, with_spare_s = child.starts_s
        print(f"a healthy child after {cold_s:.2f} s cold, {with_spare_s:.2f} s from a spare")
        assert with_spare_s < cold_s / 2


@pytest.mark.parametrize("shape", ["1536x256x2048", "128x512x147456"])
def test_a17_shape_that_faulted_elsewhere_is_right_and_clean_under_memcheck(
    gpu: DeviceFacts, tmp_path: Path, shape: str
) -> None:
    """A17: the first starting config of shapes that other libraries read or wrote out of bounds for."""
    problem = GemmProblem.parse(shape)
    config = starting_configs(problem, gpu.profile)[0]
    kernel = compile_kernel(problem, config, gpu.profile.sm_count)
    store = ArtifactStore(tmp_path)
    store.put(kernel.module)
    job = replace(
        evaluate_job(str(store.path(kernel.sha256)), problem=problem), config=config, module_sha256=kernel.sha256
    )
    with GpuChild(0, uuid=gpu.uuid) as child:
        reply = child.evaluate(job)
    assert reply.outcome is Outcome.MEASURED, reply.reason
    launch = {"path": str(store.path(kernel.sha256)), "m": problem.m, "n": problem.n, "k": problem.k, "dtype": "bf16"}
    report = memcheck([launch], device=gpu.uuid)
    assert report.clean, report.detail


def test_kernel_that_overwrites_its_input_spoils_no_later_one(gpu: DeviceFacts) -> None:
    """B3: the inputs belong to the child and are used again, so its next candidates would all look wrong."""
    with GpuChild(0, uuid=gpu.uuid, spares=1, child_module="tests.gpu.planted_child") as child:
        outcomes = [
            child.evaluate(evaluate_job(name, problem=SMALL)).outcome
            for name in ("right", "overwrites_input", "right", "overwrites_input", "right")
        ]
    right, wrong = Outcome.MEASURED, Outcome.WRONG_RESULT
    assert outcomes == [right, wrong, right, wrong, right]
