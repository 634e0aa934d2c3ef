"""What users of other tuners reported about keys, selection, storage and export (docs/guides/failures-service.md)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tvm_ffi

from api.app import create_app
from api.settings import ApiSettings
from db import queries
from db.database import Database
from kernels.artifacts import ArtifactStore
from kernels.compile import compile_kernel
from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from search_space.starting import preset
from tests.cli.test_export_bundle import StoredResult
from tests.tuner.support import STARTING, fake, instant_service, request, tune
from tuner.bundle import extract_bundle
from tuner.cli.embedded import BASE_URL, InProcess
from tuner.client import Client
from tuner.engine.faults import FaultKind, FaultPlan, Shows
from tuner.engines import FakeEngines
from tuner.export import build_bundle
from tuner.records import Outcome
from tuner.service import run_service

if TYPE_CHECKING:
    from tuner.settings import Settings

CHOSEN = Sm90GemmConfig(pipe_depth=2, cta_group=1, num_consumers=1, blk_m=64, blk_n=64, blk_k=64, epi_n=64)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An instant service on a database of its own."""
    return instant_service(tmp_path)


def client_of(settings: Settings) -> Client:
    """The service's routes on this database, as a process that was just started has them."""
    app = create_app(
        ApiSettings(
            database_url=settings.database_url, exports_dir=settings.exports_dir, artifacts_dir=settings.artifacts_dir
        )
    )
    return Client(BASE_URL, transport=InProcess(app))


def run_job(settings: Settings, *shapes: tuple[int, int, int], **body: Any) -> Any:
    """Post a job, tune it to its end, and give the job."""
    with client_of(settings) as client:
        problems = [{"m": m, "n": n, "k": k} for m, n, k in shapes]
        budget = {"trials": 6}
        job = client.submit_job({"problems": problems, "device": "h200", "budget": budget, **body})
        run_service(settings, FakeEngines, threading.Event(), until_idle=True)
        return client.job(job["id"])


# ------------------------------------------------------------------------------------------------ C and D


def test_c7_a_job_of_two_shapes_tunes_exactly_those_two(settings: Settings) -> None:
    """C7: neither a third one from somewhere, nor what was tuned before, nor one of them twice."""
    run_job(settings, (64, 512, 512))
    job = run_job(settings, (128, 512, 512), (256, 512, 512))
    assert [study["problem"]["m"] for study in job["studies"]] == [128, 256]
    with Database.open(settings.database_url) as database, database.read() as session:
        assert sorted(study.m for study in queries.studies(session)) == [64, 128, 256]
        assert sorted(result.m for result in queries.results(session)) == [64, 128, 256]


def test_c9_an_answer_is_the_same_after_a_restart(settings: Settings) -> None:
    """C9: byte for byte, also from a second process on the same database."""
    run_job(settings, (64, 512, 512))
    shape = {"m": 64, "n": 512, "k": 512, "device": "Fake H200"}
    answers = []
    for _ in range(2):
        with client_of(settings) as client, client_of(settings) as replica:
            answers += [json.dumps(client.best(**shape)), json.dumps(replica.best(**shape))]
    assert len(set(answers)) == 1
    assert json.loads(answers[0])["revision"] == 1


def test_d2_winner_is_no_slower_than_the_default_measured_beside_it() -> None:
    """D2: the starting configs, the default among them, are candidates of every study, timed in the same session."""
    result = tune(request(16))
    assert result.winner is not None
    assert result.winner.time_us is not None
    by_config = {trial.config.key: trial for trial in result.trials}
    default = by_config[STARTING[0].key]
    assert default.outcome in (Outcome.MEASURED, Outcome.STOPPED_EARLY)
    assert default.time_us is not None
    final = {number: measurement.median_us() for number, measurement in result.finals.items()}
    tied = set(result.tie_set)
    best_us = final.get(result.winner.number, result.winner.time_us)
    slower = [number for number, time_us in final.items() if time_us < best_us and number not in tied]
    assert slower == []
    assert best_us <= final.get(default.number, default.time_us) or default.number in tied


def test_d8_small_m_is_answered_by_a_measurement_with_its_ratio_to_the_library(settings: Settings) -> None:
    """D8: where a library's heuristic picks badly, the answer says how it compares, and both were timed together."""
    run_job(settings, (128, 160, 7168))
    with client_of(settings) as client:
        best = client.best(m=128, n=160, k=7168, device="Fake H200")
    assert (best["match"], best["evidence"]) == ("exact", ["measured", "numeric", "checked"])
    ratio = best["ratio"]["cublaslt_best"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_d10_effort_is_a_preset_of_trials_and_seconds_that_a_budget_overrides(settings: Settings) -> None:
    """D10: three tiers between nothing and everything, written down in README, and either number can be given."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for name, trials, wall_s in (("quick", 16, 180.0), ("normal", 40, 600.0), ("full", 200, 3600.0)):
        assert f"`{name}` {trials} trials or {wall_s:g} s" in readme
        with client_of(settings) as client:
            body = {"problems": [{"m": 8, "n": 64, "k": 64}], "arch": "sm_90a", "effort": name}
            for budget in ({}, {"trials": 3}):
                job = client.submit_job({**body, "budget": budget})
                study = client.study(job["studies"][0]["id"])
                assert study["request"]["budget"] == {"trials": budget.get("trials", trials), "wall_s": wall_s}


# ------------------------------------------------------------------------------------------------ G


def test_g6_a_killed_worker_and_a_failing_candidate_are_told_apart() -> None:
    """G6: the worker's death is no outcome, its trial runs again under its number; the failure is one, and is kept."""
    plan = FaultPlan(rates={FaultKind.CHILD_KILLED: 0.3, FaultKind.FAULTS: 0.3}, seed=5)
    result = tune(request(16), fake(faults=plan))
    kinds = {trial.number: plan.of(trial.config.key) for trial in result.trials}
    for trial in result.trials:
        fault = kinds[trial.number]
        if fault is not None and fault.kind is FaultKind.FAULTS and fault.shows is Shows.TRIAL:
            assert trial.outcome in (Outcome.CRASHED, Outcome.REJECTED, Outcome.KNOWN_BAD), trial
            assert trial.reason
        elif fault is None or fault.kind is not FaultKind.FAULTS:
            assert trial.outcome is not Outcome.CRASHED, trial
    killed = [number for number, fault in kinds.items() if fault and fault.kind is FaultKind.CHILD_KILLED]
    assert killed
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))


# ------------------------------------------------------------------------------------------------ H

OFFLINE = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError("the module wants the network")
socket.socket = socket.create_connection = refuse
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tvm", "torch", "kernels", "tuner", "db", "api"}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocked())
import tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
print(module["describe"]())
try:
    module["gemm"](1, 2, 3)
except Exception as error:
    print(type(error).__name__)
"""


def test_h1_exported_module_loads_without_network_compiler_or_this_project(tmp_path: Path) -> None:
    """H1: a really compiled module, unpacked, in a process that has apache-tvm-ffi, an empty PATH and nothing else."""
    problem = GemmProblem(m=64, n=64, k=64)
    kernel = compile_kernel(problem, CHOSEN, 132)
    store = ArtifactStore(tmp_path / "artifacts")
    result = replace(
        StoredResult(m=64, n=64, k=64, environment={"sm_count": 132}),
        config=CHOSEN.to_dict(),
        artifact_sha256=store.put(kernel.module),
    )
    build_bundle([result], store, tmp_path / "bundle.zip", allow_unverified=False)
    manifest = extract_bundle(tmp_path / "bundle.zip", tmp_path / "out")
    site = Path(tvm_ffi.__file__).parents[1]
    (tmp_path / "empty").mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path / "out" / manifest["modules"][0]["file"])],
        cwd=tmp_path / "empty",
        env={"PATH": str(tmp_path / "empty"), "PYTHONPATH": str(site), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    described, refusal = ran.stdout.splitlines()
    assert json.loads(described)["problem"] == {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "layout": "NT"}
    assert refusal == "TypeError"  # numbers are no tensors: refused before anything is launched


def test_h2_bundle_for_two_architectures_says_which_module_is_for_which(tmp_path: Path) -> None:
    """H2: versions, architecture, SMs and hash of each; picking one is reading the manifest."""
    store = ArtifactStore(tmp_path / "artifacts")
    results = [
        StoredResult(artifact_sha256=store.put(b"\x7fELF for Hopper")),
        StoredResult(
            id="r2",
            arch="sm_100a",
            device_name="NVIDIA B200",
            environment={"gpu_name": "NVIDIA B200", "sm_count": 148},
            config=preset("step9").to_dict(),
            artifact_sha256=store.put(b"\x7fELF for Blackwell"),
        ),
    ]
    manifest = build_bundle(results, store, tmp_path / "both.zip", allow_unverified=False)
    by_arch = {module["arch"]: module for module in manifest["modules"]}
    assert {arch: module["sm_count"] for arch, module in by_arch.items()} == {"sm_90a": 130, "sm_100a": 148}
    for arch, module in by_arch.items():
        assert arch in module["file"]
        assert manifest["files"][module["file"]]["sha256"] == module["sha256"]
    assert manifest["generator"].startswith("gemm-tuner")
    assert "NVIDIA driver" in manifest["requires"]["target"]
