"""Jobs: what they share, how they stop, and the state they derive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from db import queries
from db.errors import IdempotencyConflict
from db.models import Job, Study
from tests.db.rows import new_study, only_study, post_job, report

if TYPE_CHECKING:
    from db.database import Database


def state_of(database: Database, job_id: str) -> str:
    """State of a job as a reader sees it."""
    with database.read() as session:
        found = queries.job(session, job_id)
        assert found is not None
        return found.state


def run_study(database: Database, state: str, *, owner: str = "tuner") -> Study:
    """Claim the next study and end it in that state."""
    with database.write() as session:
        claimed = queries.claim_next_study(session, owner)
        assert claimed is not None
        return queries.finish_study(session, claimed.id, state=state, reason="because")


def test_a_job_holds_its_problems_in_order_with_their_weights(database: Database) -> None:
    """Position and weight belong to the place in the job."""
    with database.write() as session:
        wanted = [new_study("b", m=64, weight=2.5), new_study("a", m=128)]
        posted = queries.create_job(session, request={}, mode="model", studies=wanted, priority=3)
    with database.read() as session:
        links = queries.job_studies(session, posted.id)
        assert [(link.weight, study.m, study.mode, study.state) for link, study in links] == [
            (2.5, 64, "model", "QUEUED"),
            (1.0, 128, "model", "QUEUED"),
        ]
        stored = queries.job(session, posted.id)
        assert stored is not None
        assert (stored.priority, stored.counts) == (3, {"studies": {"QUEUED": 2}, "outcomes": {}})


def test_the_same_request_again_gets_the_finished_study_at_once(database: Database) -> None:
    """C5: a second job for a finished problem is DONE when it is posted, unless it is forced."""
    with database.write() as session:
        first = post_job(session, "a")
    done = run_study(database, "DONE")
    with database.write() as session:
        second = post_job(session, "a")
        forced = post_job(session, "a", force=True)
        assert only_study(session, second) == only_study(session, first) == done.id
        assert only_study(session, forced) != done.id
    assert (second.state, forced.state) == ("DONE", "QUEUED")
    assert second.finished_at is not None


def test_a_finished_study_of_another_environment_is_not_shared(database: Database) -> None:
    """C3: an answer made by another toolchain does not satisfy the request."""
    with database.write() as session:
        post_job(session, "a")
        claimed = queries.claim_next_study(session, "tuner")
        assert claimed is not None
        queries.record_environment(
            session, claimed.id, device_name="NVIDIA H200", environment={"driver": "570"}, environment_key="old"
        )
        queries.finish_study(session, claimed.id, state="DONE")
        fields: dict[str, Any] = {"request": {}, "mode": "measure"}
        newer = queries.create_job(session, studies=[new_study("a", environment_key="new")], **fields)
        equal = queries.create_job(session, studies=[new_study("a", environment_key="old")], **fields)
        assert only_study(session, equal) == claimed.id
        assert only_study(session, newer) != claimed.id


@pytest.mark.parametrize("state", ["PARTIAL", "CANCELLED", "FAILED"])
def test_a_study_that_was_not_done_is_not_shared(database: Database, state: str) -> None:
    """Asking again after a failure or a cancel tunes again."""
    with database.write() as session:
        first = post_job(session, "a")
    run_study(database, state)
    with database.write() as session:
        second = post_job(session, "a")
        assert only_study(session, second) != only_study(session, first)


def test_two_jobs_wait_for_one_live_study(database: Database) -> None:
    """A problem that waits or runs already is not tuned twice."""
    with database.write() as session:
        first, second = post_job(session, "a"), post_job(session, "a")
        assert only_study(session, first) == only_study(session, second)
    run_study(database, "DONE")
    assert state_of(database, first.id) == state_of(database, second.id) == "DONE"


def test_a_problem_listed_twice_in_a_job_is_tuned_once(database: Database) -> None:
    """Even when forced: one fresh study, at both places."""
    with database.write() as session:
        posted = post_job(session, "a", "a", force=True)
        studies = queries.studies_of_job(session, posted.id)
        assert len(studies) == 2
        assert studies[0] is studies[1]
        assert posted.counts["studies"] == {"QUEUED": 1}


def test_one_job_mixes_finished_live_new_and_repeated_problems(database: Database) -> None:
    """Each place of the job holds the study that its own problem would get alone."""
    with database.write() as session:
        done = only_study(session, post_job(session, "a"))
    run_study(database, "DONE")
    with database.write() as session:
        live = only_study(session, post_job(session, "b"))
        posted = post_job(session, "c", "b", "a", "c", "d")
        ids = [study.id for study in queries.studies_of_job(session, posted.id)]
        assert ids[1:3] == [live, done]
        assert ids[0] == ids[3]
        assert len(set(ids)) == 4
        assert posted.counts["studies"] == {"QUEUED": 3, "DONE": 1}
        assert posted.state == "RUNNING"


def test_the_newest_finished_study_is_shared_before_a_live_one(database: Database) -> None:
    """A forced run that waits does not make others wait for it; of two that are done the newer answers."""
    with database.write() as session:
        post_job(session, "a")
        run = queries.claim_next_study(session, "tuner")
        assert run is not None
        queries.finish_study(session, run.id, state="DONE")
        post_job(session, "a", force=True)
        newer = queries.claim_next_study(session, "tuner")
        assert newer is not None
        assert only_study(session, post_job(session, "a")) == run.id
        queries.finish_study(session, newer.id, state="DONE")
        assert only_study(session, post_job(session, "a")) == newer.id


def test_a_job_of_thousands_takes_few_statements(database: Database) -> None:
    """The write lock is held for them: two statements a problem took 12 s for 4,096 problems."""
    wanted = [new_study("a", study_key=f"{number:064x}", m=number + 1) for number in range(1200)]
    for force, most in ((True, 10), (False, 20)):
        statements: list[str] = []

        def note(_c: Any, _cursor: Any, text: str, *_: Any, seen: list[str] = statements) -> None:
            seen.append(text)

        with database.write() as session:
            event.listen(session.get_bind(), "before_cursor_execute", note)
            posted = queries.create_job(session, request={}, mode="measure", studies=wanted, force=force)
            event.remove(session.get_bind(), "before_cursor_execute", note)
            summaries = queries.study_summaries(session, posted.id)
        assert len(statements) <= most
        assert [row.m for row in summaries] == list(range(1, 1201))
        assert posted.counts["studies"] == {"QUEUED": 1200}


def test_an_idempotency_key_gives_the_job_that_it_made(database: Database) -> None:
    """A request sent twice makes one job; another request under the key is refused by the job's name."""
    with database.write() as session:
        first = post_job(session, "a", idempotency_key="once")
    with database.write() as session:
        again = post_job(session, "a", idempotency_key="once")
        assert again.id == first.id
    with pytest.raises(IdempotencyConflict, match=f"'once' belongs to job {first.id}"), database.write() as session:
        post_job(session, "b", idempotency_key="once")
    with database.read() as session:
        assert len(queries.jobs(session)) == 1


def test_jobs_are_paged_newest_first(database: Database) -> None:
    """Each page starts after the last job of the one before, also where jobs share a moment."""
    with database.write() as session:
        posted = [post_job(session, "a") for _ in range(5)]
        for job in posted[1:4]:
            job.created_at = posted[1].created_at
    with database.read() as session:
        pages, after = [], None
        while page := queries.jobs(session, limit=2, after=after):
            pages.append([job.id for job in page])
            after = page[-1].id
        assert [len(page) for page in pages] == [2, 2, 1]
        assert sorted(job_id for page in pages for job_id in page) == sorted(job.id for job in posted)
        assert (pages[0][0], pages[2][0]) == (posted[4].id, posted[0].id)
        assert queries.jobs(session, state="DONE") == []
        assert queries.jobs(session, after="unknown") == []


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["DONE", "DONE"], "DONE"),
        (["DONE", "PARTIAL"], "PARTIAL"),
        (["DONE", "CANCELLED"], "PARTIAL"),
        (["DONE", "FAILED"], "PARTIAL"),
        (["PARTIAL", "FAILED"], "PARTIAL"),
        (["CANCELLED", "CANCELLED"], "CANCELLED"),
        (["FAILED", "FAILED"], "FAILED"),
        (["CANCELLED", "FAILED"], "FAILED"),
    ],
)
def test_a_job_ends_in_the_state_of_its_studies(database: Database, ends: list[str], expected: str) -> None:
    """QUEUED, then RUNNING while any study is live, then what the studies add up to."""
    with database.write() as session:
        posted = post_job(session, "a", "b")
    assert posted.state == "QUEUED"
    run_study(database, ends[0])
    assert state_of(database, posted.id) == "RUNNING"
    run_study(database, ends[1])
    assert state_of(database, posted.id) == expected
    with database.read() as session:
        stored = session.get(Job, posted.id)
        assert stored is not None
        assert stored.finished_at is not None
        assert sum(stored.counts["studies"].values()) == 2


def test_the_counts_of_a_job_add_up_the_outcomes_of_its_studies(database: Database) -> None:
    """One number for each outcome, over all studies."""
    with database.write() as session:
        posted = post_job(session, "a", "b")
        for study in queries.studies_of_job(session, posted.id):
            report(session, study.id, 0)
            report(session, study.id, 1, outcome="SPILLED", median_us=None, measurement=None)
        refreshed = queries.refresh_job_state(session, posted.id)
        assert refreshed.counts["outcomes"] == {"MEASURED": 2, "SPILLED": 2}


def test_cancelling_a_job_ends_what_waits_and_asks_what_runs(database: Database) -> None:
    """A24: queued studies end at once, the running one is asked to, and the job ends with it, keeping its trials."""
    with database.write() as session:
        posted = post_job(session, "a", "b")
        running = queries.claim_next_study(session, "tuner")
        assert running is not None
        report(session, running.id, 0)
    with database.write() as session:
        cancelled = queries.cancel_job(session, posted.id)
        assert cancelled is not None
        assert (cancelled.state, cancelled.cancel_requested) == ("RUNNING", True)
        states = {
            study.id: (study.state, study.cancel_requested) for study in queries.studies_of_job(session, posted.id)
        }
        assert states.pop(running.id) == ("RUNNING", True)
        assert list(states.values()) == [("CANCELLED", True)]
        assert queries.claim_next_study(session, "tuner") is None
    with database.write() as session:
        queries.finish_study(session, running.id, state="PARTIAL", reason="cancelled")
        assert len(queries.trials_of_study(session, running.id)) == 1
    assert state_of(database, posted.id) == "PARTIAL"


def test_cancelling_spares_a_study_that_another_job_waits_for(database: Database) -> None:
    """The cancelled job is over at once; the shared study goes on for the other, until that is cancelled too."""
    with database.write() as session:
        first, second = post_job(session, "a"), post_job(session, "a")
        study_id = only_study(session, first)
        queries.cancel_job(session, first.id)
        study = queries.study(session, study_id)
        assert study is not None
        assert (first.state, second.state, study.cancel_requested) == ("CANCELLED", "QUEUED", False)
        queries.cancel_job(session, second.id)
        assert (second.state, study.state) == ("CANCELLED", "CANCELLED")


def test_a_study_that_is_being_cancelled_is_not_shared(database: Database) -> None:
    """A job posted in that moment gets a study of its own."""
    with database.write() as session:
        first = post_job(session, "a")
        queries.claim_next_study(session, "tuner")
        queries.cancel_job(session, first.id)
        second = post_job(session, "a")
        assert only_study(session, second) != only_study(session, first)


def test_cancelling_what_is_over_or_unknown_changes_nothing(database: Database) -> None:
    """A second DELETE is harmless."""
    with database.write() as session:
        posted = post_job(session, "a")
    run_study(database, "DONE")
    with database.write() as session:
        again = queries.cancel_job(session, posted.id)
        assert again is not None
        assert (again.state, again.cancel_requested) == ("DONE", False)
        assert queries.cancel_job(session, "unknown") is None
    with pytest.raises(KeyError), database.write() as session:
        queries.refresh_job_state(session, "unknown")
