"""The soak with real faulty kernels, rehearsed without a GPU: real processes, store and loop, scripted kernels."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from db.database import Database
from tests.gpu import scripted
from tests.gpu.faulty_compile import VARIABLE, write_plan
from tests.gpu.plants import PLANTS, lower_planted
from tests.soak import device_faults
from tests.soak.device_faults import MIX, Bench, TimedChild, plans, seconds_a_trial
from tests.soak.studies import study_of, trials_of
from tests.tuner.support import PROFILE
from tuner.engine.fake import fake_device
from tuner.gpu.jobs import PhaseLimits
from tuner.records import Outcome, Trial

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = PhaseLimits(load_s=0.3, first_launch_s=0.3, verify_s=0.3, measure_s=0.3, start_s=30.0, health_s=30.0)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The soak's machine with a scripted compiler and a scripted child."""
    monkeypatch.setattr(device_faults, "FUNCTION", scripted.FUNCTION)
    monkeypatch.setattr(device_faults, "COMPILE_LIMIT_S", 1.0)
    monkeypatch.setenv(VARIABLE, "")
    gpu = fake_device(PROFILE)
    return Bench(
        tmp_path,
        gpu,
        lambda index: TimedChild(
            index,
            uuid=gpu.uuid,
            limits=LIMITS,
            spares=1,
            health_pause_s=0.01,
            child_module="tests.gpu.scripted",
            environ={**os.environ, "FAKE_CHILD_STATE": str(tmp_path)},
        ),
    )


def test_each_scripted_fault_gets_its_outcome_and_the_winner_is_healthy(bench: Bench, tmp_path: Path) -> None:
    """A1, A3, A6, A9, A10: one fault of each kind and a healthy config, through the processes of the product."""
    plan = plans(PROFILE, 0.01)[0]
    write_plan(tmp_path / "plants.json", {config.key: plant for config, plant in plan.plants.items() if plant})
    report = bench.run(plan, time.monotonic() + 200.0)
    bench.machine.close()
    assert report is not None
    assert report["faults"] == len(MIX) == len(PLANTS)
    # Stress builds are not scripted, and there is no compute-sanitizer here.
    assert [text for text in report["problems"] if not text.startswith("the winner is not certified")] == []
    assert report["outcomes"]["healthy: MEASURED"] == 1
    assert report["outcomes"]["arrive_count: TIMED_OUT"] == 1
    assert device_faults.processes_left() == []


def test_soak_that_is_cut_short_goes_on_after_the_last_trial(bench: Bench, tmp_path: Path) -> None:
    """A21: no trial of the first run is run again."""
    plan = plans(PROFILE, 0.01)[0]
    quick = {"wrong_row", "compiler_refuses", "no_op", "half_of_k", "not_deterministic", "no_store_wait", ""}
    plan = replace(plan, plants={config: plant for config, plant in plan.plants.items() if plant in quick})
    write_plan(tmp_path / "plants.json", {config.key: plant for config, plant in plan.plants.items() if plant})
    with Database.open(f"sqlite:///{tmp_path / plan.name}.db") as database:
        study_id = study_of(database, plan.request)
        assert bench.run(plan, time.monotonic() + 2.0) is None
        first = trials_of(database, study_id)
        report = bench.run(plan, time.monotonic() + 200.0)
        whole = trials_of(database, study_id)
    bench.machine.close()
    assert report is not None
    assert report["resumed_after"] == len(first)
    assert len(whole) == len(plan.plants)
    assert set(first) <= set(whole)


@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if not plant.compiler])
def test_each_plant_changes_the_kernel(name: str) -> None:
    """A plant that finds no place to be cut in would test a healthy kernel."""
    plan = plans(PROFILE, 0.01)[0]
    config = next(config for config, plant in plan.plants.items() if plant == name)
    from kernels.lowering import lower

    planted = lower_planted(plan.request.problem, config, PROFILE.sm_count, name)
    assert planted.source_hash != lower(plan.request.problem, config, PROFILE.sm_count).source_hash


def test_seconds_a_trial_show_a_fresh_child_in_the_trial_after_the_fault() -> None:
    """The report says what a fault costs, its clean-up included; compile failures cost the GPU nothing."""
    plan = plans(PROFILE, 0.01)[0]
    config = {plant: config for config, plant in plan.plants.items()}
    rows = [
        ("", Outcome.MEASURED, 0.1),
        ("arrive_count", Outcome.TIMED_OUT, 2.0),
        ("wrong_row", Outcome.WRONG_RESULT, 0.1),
    ]
    rows += [("no_op", Outcome.WRONG_RESULT, 0.1), ("compiler_aborts", Outcome.COMPILE_FAILED, 0.0)]
    trials = [Trial(number=n, config=config[p], outcome=o, gpu_s=s) for n, (p, o, s) in enumerate(rows)]
    took = seconds_a_trial(plan, list(zip((10.5, 12.5, 14.0, 14.1, 14.2), trials, strict=True)), 10.0)
    assert took == {"arrive_count": 2.0, "healthy": 0.5, "no_op": 0.1, "wrong_row, on a fresh child": 1.5}
