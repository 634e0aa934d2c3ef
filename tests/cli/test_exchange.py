"""Studies for other tools: T4 files both ways, and Optuna storages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from tests.cli.conftest import Ran
from tuner import t4
from tuner.records import Outcome

if TYPE_CHECKING:
    from pathlib import Path

Cli = Callable[..., Ran]
TRIALS = "6"


@pytest.fixture
def study(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    """Id of a study of invented devices that is over."""
    monkeypatch.setenv("GEMM_TUNER_ENGINE", "fake")
    monkeypatch.setenv("GEMM_TUNER_FAKE_SCALE", "0")
    tune = ("tune", "64x128x64", "--arch", "sm_90a", "--mode", "measure", "--trials", TRIALS, "--json")
    job = cli(*tune).document
    identity: str = job["studies"][0]["id"]
    return identity


def test_t4_holds_every_trial_with_its_outcome(cli: Cli, study: str, tmp_path: Path) -> None:
    """Members, types and words are those of schema 1.0.0; times are milliseconds."""
    file = tmp_path / "study.json"
    ran = cli("results", "export", str(file), "--format", "t4", "--study", study, "--json")
    content = json.loads(file.read_text())
    shown = cli("show", study, "--json").document
    assert ran.document == {"file": str(file), "trials": len(shown["trials"])}
    assert content["schema_version"] == "1.0.0"
    assert content["metadata"]["problem"] == {"m": 64, "n": 128, "k": 64, "dtype": "bf16", "layout": "NT"}
    for entry, trial in zip(content["results"], shown["trials"], strict=True):
        assert set(entry) == {
            *("timestamp", "configuration", "objectives", "times", "invalidity", "correctness", "measurements"),
        }
        assert entry["invalidity"] in ("timeout", "compile", "runtime", "correctness", "constraints", "correct")
        assert isinstance(entry["correctness"], int)
        assert entry["configuration"] == trial["config"]
        measured = {one["name"]: (one["value"], one["unit"]) for one in entry["measurements"]}
        if trial["median_us"] is not None:
            assert measured["time"] == (pytest.approx(trial["median_us"] / 1e3), "ms")
            assert entry["times"]["runtimes"] == [pytest.approx(trial["median_us"] / 1e3)]


def test_every_outcome_has_a_word_in_t4() -> None:
    """A new one must not be forgotten."""
    assert set(t4.INVALIDITY) == {outcome.value for outcome in Outcome}


def fastest(cli: Cli, study: str) -> dict[str, Any]:
    """The trial of least median: what is best by noise may be another one."""
    trials = cli("show", study, "--json").document["trials"]
    measured: list[dict[str, Any]] = [one for one in trials if one["outcome"] == "MEASURED"]
    return min(measured, key=lambda one: one["median_us"])


def test_t4_comes_back_as_one_candidate(cli: Cli, study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best correct configuration, with nothing claimed but its time."""
    file = tmp_path / "study.json"
    cli("results", "export", str(file), "--format", "t4", "--study", study)
    best = fastest(cli, study)
    monkeypatch.setenv("GEMM_TUNER_HOME", str(tmp_path / "other"))
    taken = cli("results", "import", str(file), "--format", "t4", "--device", "h200", "--json").document
    assert (taken["results"], taken["added"]) == (1, 1)
    found = cli("best", "64x128x64", "--device", "h200", "--evidence", "measured", "--json").document
    assert (found["config"], found["evidence"], found["revision"]) == (best["config"], ["measured"], None)
    assert cli("results", "import", str(file), "--format", "t4", "--device", "h200", "--json").document["added"] == 0


def foreign(**changes: Any) -> dict[str, Any]:
    """What another tuner writes: no metadata, a slow and a fast configuration, one that failed."""
    config = {"pipe_depth": 4, "cta_group": 2, "num_consumers": 2, "blk_m": 64, "blk_n": 256, "blk_k": 64}

    def entry(time: float, invalidity: str = "correct", **knobs: int) -> dict[str, Any]:
        return {
            "timestamp": "2026-05-04 09:30:00",
            "configuration": config | knobs,
            "objectives": ["time"],
            "times": {"compilation": 1.0, "runtimes": [time]},
            "invalidity": invalidity,
            "correctness": 1,
            "measurements": [
                {"name": "time", "value": time, "unit": "ms"},
                {"name": "GFLOP/s", "value": 1, "unit": ""},
            ],
        }

    results = [entry(0.9), entry(0.2, pipe_depth=3), entry(0.1, "compile", pipe_depth=2)]
    return {"schema_version": "1.0.0", "results": results, **changes}


def test_t4_of_another_tuner_needs_to_be_told_problem_and_device(cli: Cli, tmp_path: Path) -> None:
    """It has no place for them; the fastest correct configuration is taken."""
    file = tmp_path / "foreign.json"
    file.write_text(json.dumps(foreign()))
    order = ("results", "import", str(file), "--format", "t4")
    assert "--shape" in cli(*order).error_line
    assert "--device" in cli(*order, "--shape", "4096x4096x4096").error_line
    assert cli(*order, "--shape", "4096x4096x4096", "--device", "h200").status == 0
    found = cli("best", "4096x4096x4096", "--device", "h200", "--evidence", "measured", "--json").document
    assert (found["median_us"], found["config"]["pipe_depth"]) == (200.0, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "is not JSON"),
        ("[]", "no T4 document"),
        ("{}", "no T4 document"),
        (json.dumps(foreign(schema_version="2.0.0")), "schema '2.0.0', this version reads 1.x"),
        (json.dumps(foreign(results=[])), "no correct configuration"),
        (json.dumps(foreign(results=[5, None, {"invalidity": "correct"}])), "no correct configuration"),
        (json.dumps(foreign()).replace("pipe_depth", "pipe_depht"), "pipe_depht"),
    ],
)
def test_what_is_no_t4_is_refused(cli: Cli, tmp_path: Path, text: str, words: str) -> None:
    """C8: status 2 and what is wrong; nothing is stored."""
    file = tmp_path / "file.json"
    file.write_text(text)
    options = ("--shape", "4096x4096x4096", "--device", "h200")
    ran = cli("results", "import", str(file), "--format", "t4", *options)
    assert ran.status == 2
    assert words in ran.error_line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "x.json", "--format", "t4"), "--study"),
        (("export", "x.jsonl", "--study", "0" * 32), "--format t4"),
        (("export", "x.json", "--format", "t4", "--study", "0" * 32), "no study"),
    ],
)
def test_wrong_orders_are_refused(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """Status 2 and one line."""
    ran = cli("results", *arguments)
    assert ran.status == 2
    assert words in ran.error_line


def test_a_study_is_written_to_an_optuna_storage(cli: Cli, study: str, tmp_path: Path) -> None:
    """Optuna itself finds the trials, their states, the best value and why the others failed."""
    storage = f"sqlite:///{tmp_path / 'optuna.db'}"
    ran = cli("show", study, "--optuna", storage)
    assert ran.status == 0, ran.err
    shown = cli("show", study, "--json").document
    (name,) = optuna.get_all_study_names(storage)
    assert name in ran.out
    loaded = optuna.load_study(study_name=name, storage=storage)
    assert len(loaded.trials) == len(shown["trials"])
    best = fastest(cli, study)
    assert (loaded.best_value, loaded.best_params) == (best["median_us"], best["config"])
    states = {trial.number: trial.state for trial in loaded.trials}
    for one in shown["trials"]:
        wanted = "COMPLETE" if one["outcome"] == "MEASURED" else None
        assert wanted is None or states[one["number"]].name == wanted
        assert loaded.trials[one["number"]].user_attrs["outcome"] == one["outcome"]
    again = cli("show", study, "--optuna", storage)
    assert again.status == 2
    assert "already: name another storage" in again.error_line


def test_a_storage_that_cannot_be_used_is_one_line(cli: Cli, study: str) -> None:
    """Status 2."""
    ran = cli("show", study, "--optuna", "sqlite:////no/such/folder/x.db")
    assert ran.status == 2
    assert "cannot be used as an Optuna storage" in ran.error_line
