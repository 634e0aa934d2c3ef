"""What a search begins with is noted with its study, and is the same after a stop and for an equal request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from db import queries
from db.database import Database
from db.models import Study
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from tests.tuner.support import PROBLEM, fake, request, told, tune
from tuner.learning import begin_search
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.search.sampler import tried_first
from tuner.store import StudyRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHERS = (GemmProblem(m=32, n=7168, k=4096), GemmProblem(m=128, n=7168, k=4096))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """An empty store."""
    with Database.open(f"sqlite:///{tmp_path / 'tuner.db'}") as database:
        yield database


def _study(database: Database, asked: TuneRequest) -> Study:
    with database.write() as session:
        study = Study(
            study_key=asked.study_key,
            m=asked.problem.m,
            n=asked.problem.n,
            k=asked.problem.k,
            dtype=asked.problem.dtype.value,
            layout=asked.problem.layout.value,
            arch=asked.arch,
            mode=asked.mode.value,
            request=asked.to_dict(),
            seed=asked.seed,
            device_name=fake().device.name,
        )
        session.add(study)
        session.flush()
    return study


def _fill(database: Database) -> None:
    """Studies of two other problems, 35 random trials each."""
    for problem in OTHERS:
        asked = TuneRequest(problem=problem, arch="sm_90a", budget=Budget(trials=35), sampler="random")
        study, engine = _study(database, asked), fake()
        recorder = StudyRecorder(database, study.id, asked, engine.device)
        tune_study(asked, engine, recorder, starting=())


def test_study_begins_with_what_was_learned_and_goes_on_with_the_same(database: Database) -> None:
    """The snapshot is stored; after more trials a study that goes on still has its own."""
    pytest.importorskip("lightgbm")
    _fill(database)
    asked, device = request(sampler="learned"), fake().device
    study = _study(database, asked)
    first = begin_search(database, study, asked, device, None)
    assert first.model is not None
    assert (first.model.rows, first.model.groups) == (70, 2)
    with database.read() as session:
        again = queries.study(session, study.id)
    assert again is not None
    assert again.search is not None
    assert again.search["snapshot"] == first.model.sha256
    _fill(database)  # doubles the times: a new study learns anew
    resumed = begin_search(database, again, asked, device, None)
    assert resumed.starting == first.starting
    assert resumed.model is not None
    assert resumed.model.sha256 == first.model.sha256
    newer = begin_search(database, _study(database, asked), asked, device, None)
    assert newer.model is not None
    assert newer.model.sha256 != first.model.sha256
    forced = begin_search(database, _study(database, asked), asked, device, again)
    assert forced.model is not None
    assert forced.model.sha256 == first.model.sha256


def test_same_seed_and_snapshot_give_the_same_study(database: Database) -> None:
    """Killed after 9 trials and gone on, a learned search asks what it would have asked."""
    pytest.importorskip("lightgbm")
    _fill(database)
    asked = request(14, sampler="learned", in_flight=3)
    start = begin_search(database, _study(database, asked), asked, fake().device, None)
    arguments = {"starting": start.starting, "model": start.model}
    whole = tune(asked, **arguments)
    assert told(tune(asked, resume_from=whole.trials[:9], **arguments)) == told(whole)
    assert len({trial.config for trial in whole.trials}) == len(whole.trials)


def test_without_stored_times_the_search_still_works(database: Database) -> None:
    """An empty store teaches nothing; the performance model alone finds a good config in 12 trials."""
    asked = request(12, sampler="learned")
    start = begin_search(database, _study(database, asked), asked, fake().device, None)
    assert start.model is None
    learned = tune(asked, starting=start.starting)
    drawn = tune(request(12, sampler="random"), starting=())
    assert learned.best_us < drawn.best_us


def test_snapshot_of_another_version_is_passed_over(database: Database) -> None:
    """The study goes on without it, and says so in the log."""
    asked = request(sampler="learned")
    study = _study(database, asked)
    with database.write() as session:
        queries.note_search(session, study.id, {"starting": [], "snapshot": "0" * 64})
    with database.read() as session:
        noted = queries.study(session, study.id)
    assert noted is not None
    assert begin_search(database, noted, asked, fake().device, None).model is None


def test_only_the_learned_sampler_weighs_starting_configs_itself() -> None:
    """The others get all of them first."""
    starting = tune(request(1)).trials
    configs = [trial.config for trial in starting]
    assert tried_first("tpe", configs) == configs
    assert tried_first("learned", configs) == []


def test_recorder_of_memory_needs_no_store() -> None:
    """The loop runs a learned search without a database at all."""
    rng = random.Random(0)
    asked = request(6, sampler="learned", seed=rng.randrange(100))
    result = tune_study(asked, fake(), MemoryRecorder())
    assert result.winner is not None
    assert asked.problem == PROBLEM
