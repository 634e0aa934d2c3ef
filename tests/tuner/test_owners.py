"""Several tuners on one PostgreSQL: leases, studies that move, and a tuner that was only taken for dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from db import queries
from db.database import Database
from db.errors import DatabaseError
from db.models import new_id
from search_space.request import Budget, TuneRequest
from tests.soak.studies import study_of
from tests.tuner.support import PROBLEM, PROFILE, fake, instant_service, request, tune
from tuner.engine.fake import fake_device
from tuner.engines import FakeEngines
from tuner.owners import Owner
from tuner.records import Outcome
from tuner.service import run_service
from tuner.store import NotOwner, StudyRecorder, note_devices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

pytestmark = pytest.mark.postgres
WAIT_S = 60.0
MOVE_S = 30.0  # the promise: a dead owner's studies have moved by then
# A tuner of another machine: it shares the database and nothing else. Its trials take so long that it is at work when
# it is killed.
OTHER_MACHINE = """
import sys, threading
from pathlib import Path
from tests.tuner.support import instant_service
from tuner.engine.fake import fake_device
from tuner.engines import FakeEngines
from tuner.service import run_service
from dataclasses import replace
settings = replace(instant_service(Path(sys.argv[2]), sys.argv[1]), fake_scale=1.0)
run_service(settings, FakeEngines, threading.Event())
"""


@pytest.fixture
def database_url(postgres: PostgresServer, postgres_template: str) -> Iterator[str]:
    """A database with nothing in it."""
    name = f"owners_{new_id()[:12]}"
    yield postgres.create(name, template=postgres_template)
    postgres.drop(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Open."""
    with Database.open(database_url) as opened:
        yield opened


def live(database: Database) -> set[str]:
    """Owners whose lease runs."""
    with database.read() as session:
        return queries.live_owners(session)


def owner_of(database: Database, study_id: str) -> str | None:
    """Who has the study."""
    with database.read() as session:
        study = queries.study(session, study_id)
        assert study is not None
        return study.owner


def test_lease_is_renewed_for_as_long_as_the_process_lives(database: Database, tmp_path: Path) -> None:
    """Far beyond its length; in the end it is given back."""
    owner = Owner(tmp_path, database, lease_s=0.6)
    time.sleep(1.5)
    assert live(database) == {owner.name}
    assert not owner.is_replaced
    owner.close()
    assert live(database) == set()


def test_owner_of_another_machine_is_dead_when_its_lease_runs_out(database: Database, tmp_path: Path) -> None:
    """Its lock file lies in a folder that we do not see."""
    here, there = Owner(tmp_path / "here", database), Owner(tmp_path / "there", database, lease_s=0.3)
    try:
        assert not here.is_dead(there.name, all_here=False, alive=live(database))
        assert there._lease is not None
        there._lease._ended.set()  # as if it were frozen
        time.sleep(0.5)
        assert here.is_dead(there.name, all_here=False, alive=live(database))
    finally:
        here.close()
        there.close()


def test_lease_that_was_renewed_in_time_cannot_be_taken_over(database: Database, tmp_path: Path) -> None:
    """Between looking and taking over the owner may have come back."""
    owner = Owner(tmp_path, database)
    try:
        with database.write() as session:
            assert not queries.take_over(session, owner.name, proven=False)
        assert live(database) == {owner.name}
    finally:
        owner.close()


def test_tuner_that_was_taken_for_dead_notices_and_its_writes_are_refused(database: Database, tmp_path: Path) -> None:
    """A frozen process that wakes up must not write into a study that another one goes on with."""
    asked = request(4)
    study_id = study_of(database, asked)
    owner = Owner(tmp_path / "frozen", database, lease_s=0.6)
    try:
        with database.write() as session:
            assert queries.claim_next_study(session, owner.name) is not None
        recorder = StudyRecorder(database, study_id, asked, fake().device, owner=owner.name)
        first, late = tune(asked).trials[:2]
        recorder.save_trial(first, None)
        with database.write() as session:
            assert queries.take_over(session, owner.name, proven=True)
            assert queries.requeue_running(session, owner.name) == [study_id]
            assert queries.claim_next_study(session, "another") is not None
        with pytest.raises(NotOwner):
            recorder.save_trial(late, None)
        assert stored(database, study_id) == [(first.number, first.outcome)]
        assert owner._lease is not None
        assert owner._lease.lost.wait(5.0)
        assert owner.is_replaced
        assert owner_of(database, study_id) == "another"
    finally:
        owner.close()


def stored(database: Database, study_id: str) -> list[tuple[int, Outcome]]:
    """Numbers and outcomes of the trials that are saved."""
    with database.read() as session:
        return [(row.number, Outcome(row.outcome)) for row in queries.trials_of_study(session, study_id)]


def test_studies_of_a_killed_tuner_of_another_machine_move_within_30_s(database_url: str, tmp_path: Path) -> None:
    """With the default lease and heartbeat, and nothing but the database to tell; earlier trials stay as they are."""
    asked = TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=40), sampler="random")
    with Database.open(database_url) as database:
        study_id = study_of(database, asked)
        other = subprocess.Popen([sys.executable, "-c", OTHER_MACHINE, database_url, str(tmp_path / "there")])
        try:
            wait_for(lambda: len(stored(database, study_id)) >= 2)
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            killed_s = time.monotonic()
            before, dead = stored(database, study_id), owner_of(database, study_id)
            stop = threading.Event()
            settings = replace(instant_service(tmp_path / "here", database_url), poll_s=0.05)
            thread = threading.Thread(target=run_service, args=(settings, FakeEngines, stop))
            thread.start()
            try:
                wait_for(lambda: owner_of(database, study_id) not in (dead,))
                moved_s = time.monotonic() - killed_s
                wait_for(lambda: len(stored(database, study_id)) >= 40)
            finally:
                stop.set()
                thread.join()
        finally:
            other.kill()
            other.wait()
        assert moved_s < MOVE_S
        assert stored(database, study_id)[: len(before)] == before
        numbers = [number for number, _ in stored(database, study_id)]
        assert numbers == list(range(len(numbers)))


def wait_for(question: object) -> None:
    """Until it holds."""
    assert callable(question)
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_tuners_that_note_the_same_cards_at_the_same_time_do_not_fail(database_url: str) -> None:
    """Each tuner of a cluster sees all of its devices."""
    devices = [fake_device(PROFILE, card=str(index)) for index in range(4)]
    barrier, errors = threading.Barrier(8), []

    def note() -> None:
        with Database.open(database_url) as database:
            barrier.wait()
            try:
                note_devices(database, devices)
            except DatabaseError as error:
                errors.append(error)

    threads = [threading.Thread(target=note) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
