"""The soak with real faulty kernels, rehearsed without a GPU: real processes, store and loop, scripted kernels."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from db.database import Database
from tests.gpu import scripted
from tests.gpu.faulty_compile import BLIND, VARIABLE, write_plan
from tests.gpu.plants import MEASURED, PLANTS
from tests.soak import device_faults
from tests.soak.device_faults import MIX, Bench, TimedChild, plans, seconds_a_trial
from tests.soak.studies import study_of, trials_of
from tests.tuner.support import PROFILE
from tuner.engine.fake import fake_device
from tuner.gpu.jobs import PhaseLimits
from tuner.records import Outcome, Trial

ROOT = Path(__file__).parents[2]
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


def test_scripted_faults_get_their_outcomes_and_a_soak_that_is_cut_short_goes_on(bench: Bench, tmp_path: Path) -> None:
    """A1, A3, A6, A9, A10, A21: through the processes of the product; no trial of the first run is run again."""
    before = set(device_faults.processes_left())  # of other tests in this process
    whole = plans(PROFILE, 0.01)[1]
    again = {"producer_phase", "half_multicast", "expect_tx", "no_full_wait", "no_empty_wait", "misaligned_address"}
    plan = replace(whole, plants={config: plant for config, plant in whole.plants.items() if plant not in again})
    write_plan(tmp_path / "plants.json", {config.key: plant for config, plant in plan.plants.items() if plant})
    with Database.open(f"sqlite:///{tmp_path / plan.name}.db") as database:
        study_id = study_of(database, plan.request)
        assert bench.run(plan, time.monotonic() + 3.0) is None
        first = trials_of(database, study_id)
        report = bench.run(plan, time.monotonic() + 200.0)
        stored = {trial.number: trial for trial in trials_of(database, study_id)}
    bench.machine.close()
    assert report is not None
    # There is no compute-sanitizer here.
    assert [text for text in report["problems"] if not text.startswith("the winner is not certified")] == []
    assert report["faults"] == len(MIX) - len(again)
    assert report["outcomes"]["healthy: MEASURED"] == 1
    assert report["outcomes"]["arrive_count: TIMED_OUT"] == 1
    assert report["resumed_after"] == len(first)
    assert all(stored[trial.number].config == trial.config for trial in first)
    assert set(device_faults.processes_left()) <= before


def test_recorded_faults_on_a_card_got_their_outcomes() -> None:
    """What the documentation says of results/h200/device_faults.json."""
    report = json.loads((ROOT / "results/h200/device_faults.json").read_text())
    assert report["faults"] >= 200
    assert (report["problems"], report["processes_left"]) == ([], [])
    assert len(report["trials"]) == report["faults"] + report["healthy_trials"]
    for _, number, plant, outcome, *_ in report["trials"]:
        allowed = MEASURED if plant == "healthy" else PLANTS[plant.removeprefix(BLIND)].outcomes
        assert outcome in allowed, (number, plant, outcome)
    race = report["studies"][0]
    assert race["outcomes"]["epilogue_restart: CHECK_FAILED"] == 3
    assert "failed its structure check" in race["reason"]
    assert race["reason"].count("failed its stress check") == 2


def test_every_plant_of_the_mix_finds_its_place() -> None:
    """One that does not change the kernel would test a healthy one, and a name that the template lacks would too."""
    from kernels.gemm_sm90 import FAULTS
    from kernels.lowering import lower

    assert set(MIX) == set(PLANTS)
    assert {plant.fault for plant in PLANTS.values() if plant.fault} <= set(FAULTS)
    plan = plans(PROFILE, 0.01)[1]
    config = next(config for config, plant in plan.plants.items() if plant == "tall_output")
    lowered = lower(plan.request.problem, config, PROFILE.sm_count)
    cuts = {name: plant.cut for name, plant in PLANTS.items() if plant.cut is not None}
    assert len(cuts) >= 7
    for name, cut in cuts.items():
        made = cut(lowered, plan.request.problem, config, PROFILE.sm_count)
        assert (made.source, made.launch) != (lowered.source, lowered.launch), name


def test_seconds_a_trial_show_a_fresh_child_in_the_trial_after_the_fault() -> None:
    """The report says what a fault costs, its clean-up included; compile failures cost the GPU nothing."""
    plan = plans(PROFILE, 0.01)[1]
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
