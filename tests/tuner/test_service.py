"""The tuner process on a real SQLite file with invented devices: run, cancel, export, recover, kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from db import queries
from db.database import Database
from db.models import Job, Study, new_id
from kernels.artifacts import ArtifactStore
from kernels.config import config_from_dict
from kernels.devices import profile_named
from search_space import samplers
from search_space.request import Budget, TuneRequest
from tests.conftest import BACKENDS
from tests.soak.studies import new_study
from tests.tuner.support import LATE, PROBLEM, Everyone, instant_service, request, tune
from tuner.engine.fake import FakeOptions, FakeTimes, fake_device
from tuner.engine.faults import TRIAL_LAUNCHES, Fault, FaultKind, FaultPlan
from tuner.engines import FakeEngines
from tuner.owners import Owner
from tuner.records import Outcome
from tuner.service import main, run_service
from tuner.settings import Settings, SettingsError
from tuner.store import StudyPlace, note_devices, save_result

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tuner.progress import StudyResult

WAIT_S = 60.0


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new SQLite file, or a database of PostgreSQL with nothing in it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'tuner.db'}"
        return
    server, name = request.getfixturevalue("postgres"), f"tuner_{new_id()[:12]}"
    yield server.create(name, template=request.getfixturevalue("postgres_template"))
    server.drop(name)


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """An instant service on each kind of database."""
    return instant_service(tmp_path, database_url)


def submit(settings: Settings, *requests: TuneRequest, force: bool = False) -> list[str]:
    """Queue a job with these studies, new ones where `force`; returns their ids."""
    with Database.open(settings.database_url) as database, database.write() as session:
        job = queries.create_job(
            session,
            request={},
            mode=requests[0].mode.value,
            force=force,
            studies=[new_study(asked) for asked in requests],
        )
        return [study.id for study in queries.studies_of_job(session, job.id)]


@contextmanager
def reading(settings: Settings) -> Iterator[Any]:
    """A session to look with."""
    with Database.open(settings.database_url) as database, database.read() as session:
        yield session


def serve_until_idle(settings: Settings, options: FakeOptions | None = None) -> None:
    """Run the service in this thread until nothing is left to do."""
    run_service(settings, lambda made: FakeEngines(made, options), threading.Event(), until_idle=True)


def test_study_is_tuned_and_its_certified_winner_is_published(settings: Settings) -> None:
    """Verified and checked, it becomes revision 1 of its problem on this device."""
    (study_id,) = submit(settings, request(16))
    serve_until_idle(settings)
    expected = tune(request(16), starting=None)
    with reading(settings) as session:
        study = queries.study(session, study_id)
        trials = queries.trials_of_study(session, study_id)
        (result,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
        finals = queries.measurements_of_study(session, study_id, phase="final")
        (job,) = session.query(Job).all()
    assert (study.state, job.state) == ("DONE", "DONE")
    assert study.device_name == "Fake H200"
    assert len(trials) == len(expected.trials)
    assert expected.winner is not None
    assert result.config == expected.winner.config.to_dict()
    assert result.revision == 1
    assert result.evidence == ["measured", "numeric", "checked"]
    assert result.ratio["cublaslt_best"]["low"] <= result.ratio["cublaslt_best"]["median"]
    assert result.tie_set[0]["config"] == result.config
    assert 1 <= len(finals) <= 5
    assert ArtifactStore(settings.artifacts_dir).path(result.artifact_sha256).is_file()


def test_mode_model_needs_no_gpu_and_says_modeled(settings: Settings) -> None:
    """Modeled results have a prediction and no median, and stay candidates."""
    submit(settings, request(6, mode="model"))
    serve_until_idle(settings)
    with reading(settings) as session:
        (result,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
    assert result.evidence == ["modeled"]
    assert result.revision is None
    assert result.median_us is None
    assert result.modeled_us > 0
    assert result.environment["sm_count"] == 132


def test_measuring_on_a_machine_without_that_gpu_fails_with_what_to_do(settings: Settings) -> None:
    """The local engine finds no GPU here."""
    from tuner.engines import LocalEngines

    class NoGpus(LocalEngines):
        """Whatever this machine has."""

        def devices(self) -> tuple[()]:
            """None."""
            return ()

        def engine_for(self, request: TuneRequest) -> Any:
            """As on a machine without GPUs."""
            self._machine.gpus = ()
            return super().engine_for(request)

    (study_id,) = submit(settings, request(4))
    run_service(settings, NoGpus, threading.Event(), until_idle=True)
    with reading(settings) as session:
        study = queries.study(session, study_id)
    assert study.state == "FAILED"
    assert "ask for mode 'model'" in study.reason


def test_study_whose_sampler_lacks_a_package_fails_with_what_to_install(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service that took the job may be another machine, so the tuner says it."""
    monkeypatch.setitem(samplers.NEEDED_MODULES, "gp", ("no_such_module",))
    (study_id,) = submit(settings, request(4, sampler="gp"))
    serve_until_idle(settings)
    with reading(settings) as session:
        study = queries.study(session, study_id)
    assert study.state == "FAILED"
    assert "needs no_such_module" in study.reason


def test_a7_known_bad_source_is_skipped_in_the_next_study(settings: Settings) -> None:
    """A7: the second seed meets configs of the first that failed, and does not run them."""
    faults = FaultPlan(rates={FaultKind.HANGS: 0.3, FaultKind.COMPILE_ABORTS: 0.1}, seed=3)
    options = FakeOptions(faults=faults)
    first, second = submit(settings, request(12), request(12, seed=1))
    serve_until_idle(settings, options)
    with reading(settings) as session:
        outcomes = {
            study_id: {row.config_key: row.outcome for row in queries.trials_of_study(session, study_id)}
            for study_id in (first, second)
        }
    hung = {key for key, outcome in outcomes[first].items() if outcome == "TIMED_OUT"}
    again = hung & set(outcomes[second])
    assert again
    assert {outcomes[second][key] for key in again} == {Outcome.KNOWN_BAD.value}


def test_b2_kernels_that_differ_in_the_final_are_remembered_and_never_published(settings: Settings) -> None:
    """B2, A7: one such verdict is enough, although the next study would find nothing wrong with them."""
    (first,) = submit(settings, request(12))
    serve_until_idle(settings, FakeOptions(faults=LATE))
    (second,) = submit(settings, request(12), force=True)
    serve_until_idle(settings)
    with reading(settings) as session:
        failed = queries.study(session, first)
        bad = queries.trials_of_study(session, first)
        again = {row.config_key: row for row in queries.trials_of_study(session, second)}
        (result,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
    assert (failed.state, failed.best_trial) == ("FAILED", None)
    assert f"{len(bad)} NONDETERMINISTIC (such as: in the final: " in failed.reason
    assert failed.counts == {"NONDETERMINISTIC": len(bad)}
    assert {row.outcome for row in bad} == {"NONDETERMINISTIC"}
    assert {word for row in bad for word in row.evidence} == {"measured"}
    assert {again[row.config_key].outcome for row in bad} == {"KNOWN_BAD"}
    assert f"trial {bad[0].number} of study {first}" in again[bad[0].config_key].reason
    assert (result.study_id, result.revision) == (second, 1)
    assert result.config not in [row.config for row in bad]


def test_a11_config_whose_workers_somebody_killed_is_tried_in_the_next_study(settings: Settings) -> None:
    """A11: that a person or the system killed its children says nothing about a candidate."""
    killed = Everyone(fault=Fault(kind=FaultKind.CHILD_KILLED, phase="verify", times=99))
    (first,) = submit(settings, request(8))
    serve_until_idle(settings, FakeOptions(faults=killed))
    (second,) = submit(settings, request(8), force=True)
    serve_until_idle(settings)
    with reading(settings) as session:
        lost = queries.trials_of_study(session, first)
        again = queries.study(session, second)
    assert {row.outcome for row in lost} == {"CRASHED"}
    assert all(row.reason.startswith("lost 3 workers on the GPU: ") for row in lost)
    assert again.state == "DONE"
    assert "KNOWN_BAD" not in again.counts
    assert sum(again.counts.get(word, 0) for word in ("MEASURED", "STOPPED_EARLY")) == 8


def test_cancel_of_a_running_study_takes_less_than_a_second(settings: Settings) -> None:
    """A24: the service looks several times a second, and drops what is in flight."""
    slow = FakeOptions(times=FakeTimes(compile_s=0.02, evaluate_s=0.02, scale=1.0, compile_workers=2))
    (study_id,) = submit(settings, replace(request(1000), budget=Budget(trials=1000, wall_s=600.0)))
    stop = threading.Event()
    thread = threading.Thread(target=run_service, args=(settings, lambda made: FakeEngines(made, slow), stop))
    thread.start()
    with Database.open(settings.database_url) as database:
        wait_for(database, study_id, lambda study: sum(study.counts.values()) >= 3)
        with database.write() as session:
            (job,) = session.query(Job).all()
            queries.cancel_job(session, job.id)
        asked_s = time.monotonic()
        wait_for(database, study_id, lambda study: study.state not in ("QUEUED", "RUNNING"))
        took_s = time.monotonic() - asked_s
        with database.read() as session:
            study = queries.study(session, study_id)
    stop.set()
    thread.join(WAIT_S)
    assert study is not None
    assert (study.state, study.reason) == ("PARTIAL", "cancelled")
    assert took_s < 2.0  # 0.3 s on an idle machine


def wait_for(database: Database, study_id: str, condition: Any) -> None:
    """Look until the study is as wanted."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with database.read() as session:
            study = queries.study(session, study_id)
        if study is not None and condition(study):
            return
        time.sleep(0.02)
    raise AssertionError("the study never got there")


def test_stopping_the_service_gives_its_studies_back_unfinished(settings: Settings) -> None:
    """SIGTERM is no cancel: the next process goes on."""
    slow = FakeOptions(times=FakeTimes(compile_s=0.02, evaluate_s=0.02, scale=1.0, compile_workers=2))
    (study_id,) = submit(settings, request(20))
    stop = threading.Event()
    thread = threading.Thread(target=run_service, args=(settings, lambda made: FakeEngines(made, slow), stop))
    thread.start()
    with Database.open(settings.database_url) as database:
        wait_for(database, study_id, lambda study: sum(study.counts.values()) >= 3)
    stop.set()
    thread.join(WAIT_S)
    with reading(settings) as session:
        study = queries.study(session, study_id)
        before = len(queries.trials_of_study(session, study_id))
        offline = {device.state for device in queries.devices(session)}
    assert (study.state, study.owner) == ("QUEUED", None)
    assert offline == {"OFFLINE"}
    serve_until_idle(settings)
    with reading(settings) as session:
        study = queries.study(session, study_id)
        assert study.state == "DONE"
        assert len(queries.trials_of_study(session, study_id)) > before


def test_export_is_built_or_fails_with_a_reason(settings: Settings) -> None:
    """A candidate is exported only when unverified ones are allowed."""
    submit(settings, request(6, mode="model"))
    serve_until_idle(settings)
    with Database.open(settings.database_url) as database, database.write() as session:
        (result,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
        ids = [
            queries.create_export(session, {"results": [which], "format": "zip", "allow_unverified": allowed}).id
            for which, allowed in ((result.id, True), (result.id, False), ("0" * 32, True))
        ]
    serve_until_idle(settings)
    with reading(settings) as session:
        good, unverified, missing = (queries.export(session, export_id) for export_id in ids)
    assert good.state == "DONE"
    assert os.path.getsize(good.bundle_path) == good.size_bytes
    assert (unverified.state, missing.state) == ("FAILED", "FAILED")
    assert "allow_unverified" in unverified.reason
    assert "no result" in missing.reason


def test_study_with_a_request_nobody_understands_fails_and_the_next_one_runs(settings: Settings) -> None:
    """One bad row does not stop the tuner."""
    bad, good = submit(settings, request(4), request(4, seed=1))
    with Database.open(settings.database_url) as database, database.write() as session:
        row = session.get(Study, bad)
        assert row is not None
        row.request = {**row.request, "colour": "blue"}
    serve_until_idle(settings)
    with reading(settings) as session:
        assert queries.study(session, bad).state == "FAILED"
        assert "colour" in queries.study(session, bad).reason
        assert queries.study(session, good).state == "DONE"


def test_dead_owner_is_told_from_a_living_one(tmp_path: Path) -> None:
    """The lock on the owner's file tells; an owner of another machine counts as alive."""
    one, other = Owner(tmp_path), Owner(tmp_path)
    assert not one.is_dead(other.name, all_here=True)
    assert not one.is_dead(one.name, all_here=True)
    name = other.name
    other.close()
    assert one.is_dead(name, all_here=True)
    assert one.is_dead("elsewhere/1234", all_here=True)
    assert not one.is_dead("elsewhere/1234", all_here=False)
    one.close()


# ---------------------------------------------------------------------- settings


def test_devices_are_noted_with_the_compilers_that_build_for_them(tmp_path: Path) -> None:
    """C3: a GPU's own facts name no toolchain, and without one a change of it would make no result stale."""
    facts = fake_device(profile_named("h200"))
    assert facts.environment is not None
    bare = replace(facts, environment=replace(facts.environment, toolchain="", cuda=""))
    with Database.open(f"sqlite:///{tmp_path}/x.db") as database:
        note_devices(database, [bare], toolchain="nvcc-13.0.88", cuda="13.0")
        with database.read() as session:
            environment = queries.devices(session)[0].environment
    assert (environment["toolchain"], environment["cuda"]) == ("nvcc-13.0.88", "13.0")


def test_settings_are_read_from_the_environment_once() -> None:
    """Names as in the documentation; a home decides where everything lies."""
    settings = Settings.from_env({"GEMM_TUNER_HOME": "/somewhere", "GEMM_TUNER_COMPILE_PROCESSES": "3"})
    assert settings.database_url == "sqlite:////somewhere/gemm-tuner.db"
    assert str(settings.artifacts_dir) == "/somewhere/artifacts"
    assert settings.compile_processes == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("GEMM_TUNER_COMPILE_PROCESSES", "two", "not an integer"),
        ("GEMM_TUNER_COMPILE_LIMIT_S", "-1", "above 0"),
        ("GEMM_TUNER_GPU_SPARES", "-1", "at least 0"),
        ("GEMM_TUNER_ENGINE", "steam", "use one of local, ray, fake"),
    ],
)
def test_a_setting_that_cannot_be_is_named(name: str, value: str, words: str) -> None:
    """The message says what is wrong."""
    with pytest.raises(SettingsError, match=words):
        Settings.from_env({"GEMM_TUNER_HOME": "/somewhere", name: value})


def test_database_that_is_not_ours_is_one_line_and_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is left as it was."""
    file = tmp_path / "notes.txt"
    file.write_text("dear diary, " * 100)
    before = file.read_bytes()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = main(["--database-url", f"sqlite:///{file}", "--artifacts-dir", str(tmp_path), "--engine", "fake"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert status == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("gemm-tuner: ")
    assert file.read_bytes() == before


# ---------------------------------------------------------------------- a published kernel that turns out to be bad


@pytest.mark.parametrize(
    "kind",
    [FaultKind.WRONG_ELEMENT, FaultKind.FAULTS, FaultKind.WRONG_RARELY, FaultKind.RACES_WHEN_STRESSED],
)
def test_published_revision_that_a_later_study_finds_to_be_bad_is_withdrawn(
    settings: Settings, kind: FaultKind
) -> None:
    """Found in a trial, in the final or by a check: the next best takes its place, and the history says why."""
    submit(settings, request(16))
    serve_until_idle(settings)
    with reading(settings) as session:
        (first,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
    key = config_from_dict("sm_90a", first.config).key
    launch = TRIAL_LAUNCHES + 1 if kind is FaultKind.WRONG_RARELY else 3
    (again,) = submit(settings, request(16), force=True)
    serve_until_idle(settings, FakeOptions(faults=FaultPlan(by_key={key: Fault(kind=kind, launch=launch)})))
    with reading(settings) as session:
        old, study = queries.result(session, first.id), queries.study(session, again)
        new = queries.best_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT", arch="sm_90a")
    assert (old.revision, old.current, old.withdrawn_by) == (1, False, again)
    assert str(kind) in old.withdrawn_reason
    assert (new.revision, new.study_id) == (2, again)
    assert new.config != first.config
    assert f"revision 1 (burst) is withdrawn: {old.withdrawn_reason}" in study.reason


def test_winner_that_another_study_found_bad_meanwhile_is_not_published(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two studies of a problem may measure one kernel at the same time, and only one of them sees it fail."""
    (other,) = submit(settings, request(1))
    serve_until_idle(settings)

    def found_by_another(database: Database, place: StudyPlace, result: StudyResult) -> None:
        with database.write() as session:
            own = queries.trial(session, place.study_id, result.winner.number)
            fields = {"config": own.config, "config_key": own.config_key, "source_hash": own.source_hash}
            known = {"toolchain": own.toolchain, "outcome": "WRONG_RESULT", "reason": "one element is wrong"}
            queries.save_trial(session, other, 99, **fields, **known)
        save_result(database, place, result)

    monkeypatch.setattr("tuner.service.save_result", found_by_another)
    (study_id,) = submit(settings, request(16))
    serve_until_idle(settings)
    with reading(settings) as session:
        study = queries.study(session, study_id)
        (result,) = queries.results(session, study_id=study_id)
        assert queries.finished_study(session, request(16).study_key) is None
    assert (result.revision, result.current, result.withdrawn_by) == (None, False, other)
    assert "not published: another study found the winner's kernel to be bad: WRONG_RESULT" in study.reason


def test_withdrawn_revision_leaves_no_answer_where_nothing_else_works(settings: Settings) -> None:
    """Nor is the old study shared with a new job: the problem is tuned again."""
    submit(settings, request(8))
    serve_until_idle(settings)
    submit(settings, request(8), force=True)
    serve_until_idle(settings, FakeOptions(faults=Everyone(fault=Fault(kind=FaultKind.NO_OP))))
    with reading(settings) as session:
        (result,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
        assert queries.best_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT") is None
        assert queries.finished_study(session, request(8).study_key) is None
    assert result.withdrawn_reason.startswith("WRONG_RESULT: does nothing, quickly")


def test_workers_lost_under_a_published_kernel_withdraw_nothing(settings: Settings) -> None:
    """Whoever ended them said nothing about the kernel."""
    submit(settings, request(8))
    serve_until_idle(settings)
    submit(settings, request(8), force=True)
    killed = Fault(kind=FaultKind.CHILD_KILLED, phase="verify", times=99)
    serve_until_idle(settings, FakeOptions(faults=Everyone(fault=killed)))
    with reading(settings) as session:
        best = queries.best_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
    assert best.revision == 1


def test_invented_device_is_tuned_for_by_its_own_name(settings: Settings) -> None:
    """As the list of devices shows it; its result answers for it."""
    (study_id,) = submit(
        settings, TuneRequest(problem=PROBLEM, arch="sm_90a", device="Fake H200", budget=Budget(trials=4))
    )
    serve_until_idle(settings)
    with reading(settings) as session:
        assert queries.study(session, study_id).state == "DONE"
        (result,) = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, "bf16", "NT")
    assert result.device_name == "Fake H200"
