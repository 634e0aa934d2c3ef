"""Modules on disk after a study: the winner's, and no other."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from db import queries
from db.database import Database
from kernels.artifacts import ArtifactStore
from tests.soak.studies import new_study
from tests.tuner.support import instant_service, request
from tuner.engines import FakeEngines
from tuner.exporting import run_export
from tuner.retention import Retention
from tuner.service import run_service

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An instant service on a database of its own."""
    return instant_service(tmp_path)


def modules(settings: Settings) -> set[str]:
    """Hashes of the modules on disk."""
    return {path.stem for path in settings.artifacts_dir.glob("??/*.so")}


def tuned(settings: Settings, **changes: object) -> str:
    """Run one study to its end; gives the hash of the winner's module."""
    wanted = request(8, mode="model", **changes)
    with Database.open(settings.database_url) as database:
        with database.write() as session:
            queries.create_job(session, request={}, mode="model", studies=[new_study(wanted)])
        run_service(settings, FakeEngines, threading.Event(), until_idle=True)
        with database.read() as session:
            (result,) = queries.results(session, limit=1)
            assert result.artifact_sha256 is not None
            return result.artifact_sha256


def test_losers_are_removed_after_the_final(settings: Settings) -> None:
    """The winner's module stays; the trials still say what they built."""
    winner = tuned(settings)
    assert modules(settings) == {winner}
    with Database.open(settings.database_url) as database, database.read() as session:
        (study,) = queries.studies(session)
        built = {trial.artifact_sha256 for trial in queries.trials_of_study(session, study.id)} - {None}
        assert len(built) > 1
        assert set(queries.removed_artifacts(session)) == built - {winner}


def test_files_that_a_crash_left_are_removed_at_the_next_start(settings: Settings) -> None:
    """A module is noted as removed before its file goes, so it is never looked for in vain; the file goes later."""
    winner = tuned(settings)
    with Database.open(settings.database_url) as database:
        with database.read() as session:
            left = queries.removed_artifacts(session)[0]
        store = ArtifactStore(settings.artifacts_dir)
        store.path(left).parent.mkdir(exist_ok=True)
        store.path(left).write_bytes(b"left by a crash")
        Retention(database, store, limit_bytes=0).sweep()
    assert modules(settings) == {winner}


def test_export_of_a_removed_module_says_so(settings: Settings) -> None:
    """A candidate's module may go when space is short; the reason says what to do."""
    winner = tuned(settings)
    with Database.open(settings.database_url) as database:
        store = ArtifactStore(settings.artifacts_dir)
        with database.read() as session:
            (study,) = queries.studies(session)
            (result,) = queries.results(session)
        assert Retention(database, store, limit_bytes=1).after_study(study.id) == 1
        assert modules(settings) == set()
        order = {"results": [result.id], "format": "zip", "allow_unverified": True}
        with database.write() as session:
            identity = queries.create_export(session, order).id
        run_export(database, identity, order, artifacts=store, exports_dir=settings.exports_dir)
        with database.read() as session:
            export = queries.export(session, identity)
    assert export is not None
    assert export.state == "FAILED"
    assert "removed to save space: tune its problem again" in export.reason
    assert winner not in export.reason
