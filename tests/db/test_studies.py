"""Claiming, recovering and ending studies; their trials and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy.exc import IntegrityError

from db import queries
from db.queries import NewMeasurement
from tests.db.rows import new_study, only_study, post_job, report

if TYPE_CHECKING:
    from db.database import Database
    from db.models import Study


def claim(database: Database, owner: str = "tuner", **filters: list[str]) -> Study | None:
    """Claim in a transaction of its own."""
    with database.write() as session:
        return queries.claim_next_study(session, owner, **filters)


def test_the_job_with_the_highest_priority_is_claimed_first_then_the_oldest(database: Database) -> None:
    """Priority, then age of the job, then place in the job."""
    with database.write() as session:
        for keys, priority in (("a", 0), ("bc", 0), ("d", 5)):
            post_job(session, *keys, priority=priority)
    claimed = [claim(database) for _ in range(5)]
    assert [study and study.request["key"] for study in claimed] == ["d", "a", "b", "c", None]
    with database.read() as session:
        assert [job.state for job in queries.jobs(session)] == ["RUNNING"] * 3


def test_a_shared_study_takes_the_priority_of_the_job_that_wants_it_most(database: Database) -> None:
    """A second, urgent job for a waiting problem moves it to the front."""
    with database.write() as session:
        post_job(session, "a", "b")
        post_job(session, "b", priority=1)
    first = claim(database)
    assert first is not None
    assert first.request == {"key": "b"}


def test_a_claim_names_the_owner_and_the_time(database: Database) -> None:
    """What a later start of the tuner needs to find a dead owner's work."""
    with database.write() as session:
        post_job(session, "a")
    claimed = claim(database, "host:17")
    assert claimed is not None
    assert (claimed.state, claimed.owner) == ("RUNNING", "host:17")
    assert claimed.started_at is not None
    with database.read() as session:
        assert [study.id for study in queries.running_studies(session)] == [claimed.id]
        assert queries.running_studies(session, "host:18") == []


def test_a_tuner_claims_only_what_it_can_run(database: Database) -> None:
    """Filters on mode, architecture and device; a study that names no device fits any."""
    with database.write() as session:
        wanted = [
            new_study("a", arch="sm_100a"),
            new_study("b", device_name="NVIDIA H100 PCIe"),
            new_study("c"),
        ]
        queries.create_job(session, request={}, mode="measure", studies=wanted)
    assert claim(database, modes=["model"]) is None
    found = claim(database, modes=["measure"], archs=["sm_90a"], device_names=["NVIDIA H200"])
    assert found is not None
    assert found.request == {"key": "c"}
    assert claim(database, archs=["sm_90a"], device_names=["NVIDIA H200"]) is None


def test_a_dead_owners_studies_are_queued_again_with_their_trials(database: Database) -> None:
    """A21: finished trials stay, the next claimer goes on; other owners are left alone."""
    with database.write() as session:
        post_job(session, "a", "b")
        dead, alive = (queries.claim_next_study(session, owner) for owner in ("dead", "alive"))
        assert dead is not None
        assert alive is not None
        report(session, dead.id, 0)
        mine, other = (queries.create_export(session, {}).id for _ in range(2))
        queries.claim_next_export(session, "dead")
        queries.claim_next_export(session, "alive")
    with database.write() as session:
        assert queries.requeue_running(session, "dead") == [dead.id]
    with database.write() as session:
        assert [
            (export and export.state) for export in (queries.export(session, mine), queries.export(session, other))
        ] == [
            "QUEUED",
            "RUNNING",
        ]
        again = queries.claim_next_study(session, "heir")
        assert again is not None
        assert (again.id, again.owner, again.started_at) == (dead.id, "heir", dead.started_at)
        assert [trial.number for trial in queries.trials_of_study(session, dead.id)] == [0]
        assert [study.id for study in queries.running_studies(session, "alive")] == [alive.id]


@pytest.mark.parametrize(("trials", "expected"), [(0, "CANCELLED"), (1, "PARTIAL")])
def test_a_dead_owners_study_that_was_asked_to_stop_ends(database: Database, trials: int, expected: str) -> None:
    """Nobody would claim it again, so recovery ends it, with what it has."""
    with database.write() as session:
        posted = post_job(session, "a")
        claimed = queries.claim_next_study(session, "dead")
        assert claimed is not None
        for number in range(trials):
            report(session, claimed.id, number)
        queries.cancel_job(session, posted.id)
        queries.requeue_running(session, "dead")
        found = queries.job(session, posted.id)
        assert found is not None
        assert (claimed.state, found.state) == (expected, expected)


def test_a_study_ends_once(database: Database) -> None:
    """Repeated after a crash, finish_study changes nothing; a live state does not end a study."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        ended = queries.finish_study(session, study_id, state="DONE", best_trial=4, best_us=12.5)
        assert (ended.state, ended.best_trial, ended.best_us, ended.owner) == ("DONE", 4, 12.5, None)
        assert queries.finish_study(session, study_id, state="FAILED").state == "DONE"
        with pytest.raises(ValueError, match="'RUNNING' does not end a study"):
            queries.finish_study(session, study_id, state="RUNNING")
        with pytest.raises(KeyError):
            queries.finish_study(session, "unknown", state="DONE")


def test_the_newest_done_study_of_a_key_is_found(database: Database) -> None:
    """With an environment key, only one made in it."""
    with database.write() as session:
        for environment_key in ("old", "new"):
            study_id = only_study(session, post_job(session, "a", force=True))
            queries.record_environment(
                session, study_id, device_name="NVIDIA H200", environment={}, environment_key=environment_key
            )
            queries.finish_study(session, study_id, state="DONE")
        newest, older = (queries.finished_study(session, "a" * 64, key) for key in (None, "old"))
        assert newest is not None
        assert older is not None
        assert (newest.environment_key, older.environment_key) == ("new", "old")
        assert queries.finished_study(session, "a" * 64, "other") is None
        assert queries.finished_study(session, "b" * 64) is None
        many = queries.newest_finished(session, ["a" * 64, "b" * 64])
        assert newest is not None
        assert list(many) == ["a" * 64]
        assert many["a" * 64].environment_key == newest.environment_key


def test_a_trial_is_stored_once_with_its_samples(database: Database) -> None:
    """The first report of a number wins; a second, whatever it says, adds neither row nor count."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        report(session, study_id, 7, ratio={"torch": 1.05})
    with database.write() as session:
        again = report(session, study_id, 7, median_us=1.0, outcome="CRASHED")
        assert (again.median_us, again.outcome, again.ratio) == (193.0, "MEASURED", {"torch": 1.05})
    with database.read() as session:
        assert len(queries.trials_of_study(session, study_id)) == 1
        (samples,) = queries.measurements_of_study(session, study_id)
        assert (samples.samples_us, samples.baselines_us) == ([200.0, 201.5], {"torch": [210.0, 211.0]})
        study = queries.study(session, study_id)
        assert study is not None
        assert study.counts == {"MEASURED": 1}


def test_only_a_time_of_the_studys_mode_becomes_its_best(database: Database) -> None:
    """A modeled or stopped candidate is not the best of a measured study, and the other way round."""
    with database.write() as session:
        measured = only_study(session, post_job(session, "a"))
        report(session, measured, 0, outcome="MODELED", median_us=None, modeled_us=1.0)
        report(session, measured, 1, outcome="STOPPED_EARLY", median_us=2.0)
        report(session, measured, 2, median_us=50.0)
        report(session, measured, 3, median_us=50.0)
        report(session, measured, 4, median_us=60.0)
        modeled = only_study(session, post_job(session, "b", mode="model"))
        report(session, modeled, 0, outcome="MODELED", median_us=None, modeled_us=9.0, measurement=None)
        found = [queries.study(session, study_id) for study_id in (measured, modeled)]
        assert [study and (study.best_trial, study.best_us) for study in found] == [(2, 50.0), (0, 9.0)]


def test_a_trial_needs_a_study_and_a_known_outcome(database: Database) -> None:
    """The store refuses words that design.md does not have."""
    with pytest.raises(KeyError), database.write() as session:
        report(session, "unknown", 0)
    with pytest.raises(IntegrityError, match="ck_trials_outcome"), database.write() as session:
        report(session, only_study(session, post_job(session, "a")), 0, outcome="BROKEN")


def test_trials_are_paged_by_number_and_filtered_by_outcome(database: Database) -> None:
    """The order of numbers, whatever the order of reports."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        for number in (3, 0, 2, 1):
            report(session, study_id, number, outcome="SPILLED" if number == 2 else "MEASURED")
        page = queries.trials_of_study(session, study_id, limit=2, after=0)
        assert [trial.number for trial in page] == [1, 2]
        spilled = queries.trials_of_study(session, study_id, outcome="SPILLED")
        assert [trial.number for trial in spilled] == [2]
        one = queries.trial(session, study_id, 3)
        assert one is not None
        assert one.config == {"blk_m": 128, "number": 3}


def test_first_finished_study_of_a_request_is_the_oldest_on_that_device(database: Database) -> None:
    """A study that runs the request again follows it, whatever ended meanwhile."""
    ended = []
    with database.write() as session:
        for name in ("H200", "H200", "H100"):
            job = post_job(session, "a", force=True)
            found = queries.studies_of_job(session, job.id)[0]
            found.device_name = name
            queries.finish_study(session, found.id, state="DONE")
            ended.append(found.id)
    with database.read() as session:
        first, other, none = (
            queries.first_finished_study(session, new_study().study_key, name) for name in ("H200", "H100", "B200")
        )
    assert (first and first.id, other and other.id, none) == (ended[0], ended[2], None)


def test_finalists_samples_lie_beside_those_of_the_search(database: Database) -> None:
    """Selected by number and phase."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        report(session, study_id, 0)
        report(session, study_id, 1)
        queries.save_measurement(session, study_id, 1, NewMeasurement(samples_us=(9.0,), discarded=2), phase="final")
        finals = queries.measurements_of_study(session, study_id, number=1, phase="final")
        assert [(final.samples_us, final.discarded) for final in finals] == [([9.0], 2)]
        assert len(queries.measurements_of_study(session, study_id)) == 3
    with pytest.raises(IntegrityError, match=r"(?i)foreign key"), database.write() as session:
        queries.save_measurement(session, study_id, 99, NewMeasurement(samples_us=(9.0,)), phase="final")


def test_a_source_that_failed_on_this_device_and_toolchain_is_known_bad(database: Database) -> None:
    """A7: remembered with its reason, for that device and toolchain alone, and not for faults of the moment."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        queries.record_environment(session, study_id, device_name="NVIDIA H200", environment={}, environment_key="h200")
        report(session, study_id, 0, outcome="TIMED_OUT", reason="no end after 30 s", source_hash="hang")
        report(session, study_id, 1, outcome="OUT_OF_MEMORY", source_hash="big")
        bad = queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "hang")
        assert bad is not None
        assert bad.reason == "no end after 30 s"
        assert queries.known_bad(session, "NVIDIA H100 PCIe", "nvcc 13.0.88", "hang") is None
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.1", "hang") is None
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "big") is None


def test_a11_trial_that_lost_its_workers_is_not_known_to_be_bad(database: Database) -> None:
    """A11: somebody ended its workers, which says nothing about the kernel; its own older failure still counts."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        queries.record_environment(session, study_id, device_name="NVIDIA H200", environment={}, environment_key="h200")
        lost = "lost 3 workers on the GPU: somebody else ended the child: SIGKILL in phase verify"
        report(session, study_id, 0, outcome="CRASHED", reason=lost, source_hash="healthy")
        report(session, study_id, 1, outcome="CRASHED", reason="child died in phase verify", source_hash="bad")
        report(session, study_id, 2, outcome="CRASHED", reason=lost, source_hash="bad")
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "healthy") is None
        bad = queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "bad")
        assert bad is not None
        assert bad.number == 1


def test_failure_that_an_operator_forgot_stands_in_its_trial_and_counts_no_more(database: Database) -> None:
    """Nothing is lost: outcome and reason stay readable. What was no failure is not touched."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        queries.record_environment(session, study_id, device_name="NVIDIA H200", environment={}, environment_key="h200")
        report(session, study_id, 0, outcome="TIMED_OUT", reason="no end after 30 s", source_hash="one")
        report(session, study_id, 1, outcome="CRASHED", reason="an Xid", source_hash="two")
        report(session, study_id, 2)
        assert queries.forget_failures(session, study_id, 1) == [1]
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "one") is not None
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "two") is None
        assert queries.forget_failures(session, study_id) == [0]
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", "one") is None
        ends = [(trial.outcome, trial.reason) for trial in queries.trials_of_study(session, study_id)]
    assert ends == [("TIMED_OUT", "forgotten: no end after 30 s"), ("CRASHED", "forgotten: an Xid"), ("MEASURED", "")]


def test_b2_finalist_that_fails_is_neither_counted_as_measured_nor_the_best(database: Database) -> None:
    """B2: its samples stay, the next fastest is the best, and its source is known to be bad."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        queries.record_environment(session, study_id, device_name="NVIDIA H200", environment={}, environment_key="h200")
        for number in range(3):  # the last one is the fastest
            report(session, study_id, number, evidence=("measured", "numeric"))
        for _ in range(2):  # a transaction may be repeated
            queries.fail_trial(
                session, study_id, 2, outcome="NONDETERMINISTIC", reason="in the final", evidence=["measured"]
            )
        study = queries.study(session, study_id)
        failed = queries.trial(session, study_id, 2)
        assert study is not None
        assert failed is not None
        assert study.counts == {"MEASURED": 2, "NONDETERMINISTIC": 1}
        assert (study.best_trial, study.best_us) == (1, 199.0)
        assert (failed.outcome, failed.evidence) == ("NONDETERMINISTIC", ["measured"])
        assert len(queries.measurements_of_study(session, study_id, number=2)) == 1
        assert queries.known_bad(session, "NVIDIA H200", "nvcc 13.0.88", f"{2:064x}") is not None
        for number in range(2):
            queries.fail_trial(session, study_id, number, outcome="CHECK_FAILED", reason="stress")
        assert (study.best_trial, study.best_us) == (None, None)
        queries.fail_trial(session, study_id, 99, outcome="CRASHED", reason="not there")


def test_studies_are_paged_newest_first(database: Database) -> None:
    """Filtered by state where asked."""
    with database.write() as session:
        post_job(session, "a", "b", "c")
        newest = queries.studies(session, limit=2)
        rest = queries.studies(session, after=newest[-1].id)
        assert [study.request["key"] for study in (*newest, *rest)] == ["c", "b", "a"]
        assert queries.studies(session, state="RUNNING") == []
        assert queries.studies(session, after="unknown") == []


def test_a_config_has_a_key_of_any_length(database: Database) -> None:
    """One knob more made them longer than 255 characters, and PostgreSQL refused every trial of them."""
    with database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        report(session, study_id, 0, config_key="k" * 2_000)
    with database.read() as session:
        assert [trial.config_key for trial in queries.trials_of_study(session, study_id)] == ["k" * 2_000]
