"""Without a service: jobs are tuned, stopped and resumed in this process, on invented devices."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from db import queries
from db.database import Database
from db.errors import DatabaseError
from kernels.config import Sm90GemmConfig
from tests.cli.conftest import ROOT
from tests.db.rows import only_study, post_job, publish, report
from tuner import service
from tuner.bundle import load_bundle
from tuner.cli import watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]

TUNE = ("tune", "64x128x64", "--arch", "sm_90a", "--trials", "5", "--json")


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented devices that take no time."""
    monkeypatch.setenv("GEMM_TUNER_ENGINE", "fake")
    monkeypatch.setenv("GEMM_TUNER_FAKE_SCALE", "0")
    monkeypatch.setattr(watch, "POLL_S", 0.05)


def test_tune_measures_where_a_gpu_is_at_hand_and_best_knows_it_afterwards(cli: Cli) -> None:
    """The default mode is measure with a GPU; the job ends with a result that `best` returns."""
    ran = cli(*TUNE)
    assert ran.status == 0, ran.err
    (study,) = ran.document["studies"]
    assert (study["state"], study["mode"], study["counts"]["MEASURED"]) == ("DONE", "measure", 5)
    best = cli("best", "64x128x64", "--arch", "sm_90a", "--evidence", "measured", "--json").document
    assert best["match"] == "exact"
    assert best["config"] == study["best"]["config"]


def test_same_request_twice_returns_the_finished_study(cli: Cli) -> None:
    """Nothing is tuned again unless forced."""
    first, second, forced = cli(*TUNE).document, cli(*TUNE).document, cli(*TUNE, "--force").document
    assert second["studies"][0]["id"] == first["studies"][0]["id"]
    assert forced["studies"][0]["id"] != first["studies"][0]["id"]


def test_text_output_names_device_ratio_and_evidence(cli: Cli) -> None:
    """People see what the time is worth."""
    ran = cli(*TUNE[:-1])
    assert re.search(r"64x128x64 bf16 .* Fake H200 .* DONE .* measured", ran.out)
    assert "trial 5/5" in ran.err


def test_show_says_how_much_of_the_space_was_looked_at(cli: Cli) -> None:
    """Configs worth asking about, and what became of those that were asked."""
    study = cli(*TUNE).document["studies"][0]
    coverage = study["coverage"]
    assert coverage["asked"] == coverage["rejected"] + coverage["timed"] == sum(study["counts"].values())
    assert coverage["askable"] > coverage["asked"]
    assert (
        f"of {coverage['askable']} configs worth asking about: {coverage['asked']} asked"
        in cli("show", study["id"]).out
    )


def test_tune_under_sustained_load_is_another_study(cli: Cli) -> None:
    """The protocol is part of the question."""
    burst = cli(*TUNE).document["studies"][0]
    sustained = cli(*TUNE, "--protocol", "sustained").document["studies"][0]
    assert sustained["id"] != burst["id"]
    assert (burst["request"]["protocol"]["kind"], sustained["request"]["protocol"]["kind"]) == ("burst", "sustained")
    wrong = cli(*TUNE[:-1], "--protocol", "steady")
    assert wrong.status == 2
    assert "steady" in wrong.error_line


def test_modeled_times_are_said_to_be_modeled(cli: Cli) -> None:
    """With --mode model nothing in the output could be taken for a measurement."""
    ran = cli(*TUNE[:-1], "--mode", "model")
    assert ran.status == 0, ran.err
    assert "modeled, not checked" in ran.out


def test_export_by_shape_writes_a_bundle_that_loads_back(cli: Cli, tmp_path: Path) -> None:
    """A shape stands for its best result; a candidate needs the flag, and nothing is written without."""
    cli(*TUNE, "--mode", "model")
    bundle = tmp_path / "tuned.zip"
    order = ("export", "64x128x64", "--arch", "sm_90a", "-o", str(bundle))
    refused = cli(*order)
    assert refused.status == 1
    assert not bundle.exists()
    ran = cli(*order, "--allow-unverified", "--json")
    assert ran.status == 0, ran.err
    manifest = load_bundle(bundle)
    assert manifest["unverified"] is True
    assert manifest["modules"][0]["problem"] == {"m": 64, "n": 128, "k": 64, "dtype": "bf16", "layout": "NT"}
    assert ran.document["file"] == str(bundle)


def test_export_of_an_unverified_result_id_names_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    """The id is known, its evidence is not enough: status 2 with the words that are missing."""
    cli(*TUNE, "--mode", "model")
    result = cli("best", "64x128x64", "--arch", "sm_90a", "--evidence", "modeled", "--json").document["result_id"]
    ran = cli("export", result, "-o", str(tmp_path / "x.zip"))
    assert ran.status == 2
    assert "lacks numeric and checked" in ran.error_line


def test_wheel_goes_into_a_folder_and_takes_real_modules_only(cli: Cli, tmp_path: Path) -> None:
    """Its name says version and platform, so -o is a folder; an invented module is no library, and it says so."""
    tune = ("tune", "64x128x64", "--arch", "sm_90a", "--mode", "model", "--trials", "1")
    order = ("export", "64x128x64", "--arch", "sm_90a", "--format", "wheel", "--allow-unverified", "-o")
    assert "is no folder" in cli(*order, str(tmp_path / "x.whl")).error_line
    assert cli(*tune).status == 0
    (tmp_path / "out").mkdir()
    ran = cli(*order, str(tmp_path / "out"))
    assert ran.status == 1
    assert "is no shared library" in ran.error_line
    assert list((tmp_path / "out").iterdir()) == []


def test_export_to_a_missing_folder_is_refused_before_anything_is_ordered(cli: Cli, tmp_path: Path) -> None:
    """The target is looked at first."""
    ran = cli("export", "x", "-o", str(tmp_path / "missing" / "x.zip"))
    assert ran.status == 2
    assert "no such folder" in ran.error_line


def test_interrupted_job_is_cancelled_and_can_be_resumed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C keeps what is done; `job resume` goes on, to the same winner as a run that nobody disturbed."""
    monkeypatch.setenv("GEMM_TUNER_FAKE_SCALE", "0.05")
    asked = threading.Event()

    def interrupt_after_a_trial(self: object, statuses: list[watch.Status]) -> None:
        if statuses[0].counted and not asked.is_set():
            asked.set()
            raise KeyboardInterrupt

    monkeypatch.setattr("tuner.cli.watch._Lines.update", interrupt_after_a_trial)
    many = ("tune", "64x128x64", "--arch", "sm_90a", "--trials", "12")
    stopped = cli(*many)
    assert stopped.status == 1
    job = re.search(r"job (\w{32}) was cancelled", stopped.err)
    assert job is not None, stopped.err
    monkeypatch.setenv("GEMM_TUNER_FAKE_SCALE", "0")
    resumed = cli("job", "resume", job[1], "--json")
    assert resumed.status == 0, resumed.err
    (study,) = resumed.document["studies"]
    assert (study["state"], study["counts"]["MEASURED"]) == ("DONE", 12)
    numbers = [trial["number"] for trial in cli("show", study["id"], "--json").document["trials"]]
    assert numbers == list(range(len(numbers)))
    undisturbed = cli(*many, "--force", "--json").document["studies"][0]
    assert undisturbed["best"]["config"] == study["best"]["config"]


def test_finished_job_has_nothing_to_resume(cli: Cli) -> None:
    """A second start of a job that is done would only confuse."""
    job = cli(*TUNE).document["id"]
    ran = cli("job", "resume", job)
    assert ran.status == 2
    assert "nothing of it is left to do" in ran.error_line


def test_show_lists_trials_with_outcome_and_reason(cli: Cli) -> None:
    """Each trial says how it ended."""
    study = cli(*TUNE).document["studies"][0]["id"]
    text = cli("show", study).out
    assert text.count("MEASURED") >= 5
    assert "Fake H200" in text


def test_tuner_that_breaks_ends_the_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever for a tuner that is gone."""

    def broken(*_: object) -> None:
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(service, "run_service", broken)
    ran = cli(*TUNE[:-1])
    assert ran.status == 1
    assert "the tuner stopped: the disk is full" in ran.err
    assert "Traceback" not in ran.err


def test_several_problems_make_one_job(cli: Cli) -> None:
    """Each problem gets its row."""
    ran = cli("tune", "64x128x64", "128x128x64", "--arch", "sm_100a", "--trials", "2", "--json")
    assert ran.status == 0, ran.err
    assert [study["problem"]["m"] for study in ran.document["studies"]] == [64, 128]


def test_device_list_and_jobs_of_an_embedded_run(cli: Cli) -> None:
    """What the tuner announced stays visible after it ended."""
    job = cli(*TUNE).document["id"]
    assert job in cli("jobs").out
    assert "Fake H200" in json.dumps(cli("devices", "--json").document["devices"])


def test_terminated_tune_ends_as_ctrl_c_does(home: Path) -> None:
    """SIGTERM cancels the job, keeps what is done and says how to go on; nobody finds it RUNNING afterwards."""
    environment = os.environ | {"GEMM_TUNER_HOME": str(home), "GEMM_TUNER_FAKE_SCALE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "import sys; from tuner.cli.main import main; sys.exit(main())"]
    with subprocess.Popen(
        [*command, "tune", "64x128x64", "--arch", "sm_90a", "--trials", "40"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "trial" in line)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 1
    assert "was cancelled" in rest
    assert "job resume" in rest
    assert "Traceback" not in rest


def test_measuring_without_a_gpu_is_refused_before_anything_is_queued(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local engine finds no GPU here; the job is not left for a later command to trip over."""
    monkeypatch.setenv("GEMM_TUNER_ENGINE", "local")
    monkeypatch.setattr("tuner.engine.local._list_gpus", tuple)
    ran = cli("tune", "64x128x64", "--arch", "sm_90a", "--mode", "measure")
    assert ran.status == 1
    assert "no sm_90a GPU on this machine" in ran.error_line
    assert cli("jobs", "--json").document == []


@pytest.mark.parametrize("url", ["http://[::1", "notaurl", "ftp://127.0.0.1"])
def test_address_that_is_none_is_a_wrong_request(cli: Cli, url: str) -> None:
    """Exit status 2, and no advice to start a service that has nothing to do with it."""
    ran = cli("jobs", "--url", url)
    assert ran.status == 2
    assert "is no address of a service" in ran.error_line


def test_best_says_that_a_revision_was_withdrawn_and_why(cli: Cli, home: Path) -> None:
    """Asked for by its number, and beside the one that took its place."""
    home.mkdir()
    with Database.open(f"sqlite:///{home / 'gemm-tuner.db'}") as database, database.write() as session:
        bad = publish(session, source_hash="bad")
        study_id = only_study(session, post_job(session, "w"))
        queries.record_environment(session, study_id, device_name="NVIDIA H200", environment={}, environment_key="")
        found = report(session, study_id, 0, source_hash="bad", outcome="WRONG_RESULT", reason="1 element is wrong")
        queries.withdraw_source(session, study_id, found)
        publish(session, source_hash="good", config=Sm90GemmConfig().to_dict())
        identity = bad.id
    asked = ("best", "4096x4096x4096", "--device", "h200")
    ran = cli(*asked, "--revision", "1")
    assert ran.status == 1
    assert "was withdrawn: WRONG_RESULT: 1 element is wrong" in ran.error_line
    now = cli(*asked)
    assert now.status == 0
    assert "withdrawn: WRONG_RESULT: 1 element is wrong" in " ".join(now.out.split())
    (gone,) = cli(*asked, "--json").document["withdrawn"]
    assert (gone["revision"], gone["result_id"]) == (1, identity)
    history = cli("revisions", identity)
    assert "withdrawn: WRONG_RESULT" in " ".join(history.out.split())


def test_best_imports_neither_the_framework_nor_what_only_tuning_needs(home: Path) -> None:
    """Importing them took most of the time of the command."""
    code = (
        "import sys; from tuner.cli.main import main; main(['best', '4096x4096x4096', '--device', 'h200']);"
        "heavy = {'fastapi', 'optuna', 'numpy', 'alembic', 'tvm', 'torch', 'psutil', 'jinja2'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    environ = {**os.environ, "GEMM_TUNER_HOME": str(home)}
    for _ in range(2):  # the first one makes the database, for which Alembic is needed
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
    assert ran.returncode == 0, ran.stderr
