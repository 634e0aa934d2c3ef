"""Published results whose kernel was found to be bad: they stay in the history and are no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from db import queries
from db.errors import NotPublishable
from tests.db.rows import new_result, only_study, post_job, publish, report
from tests.db.test_results import best, which

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

    from db.database import Database
    from db.models import Result


def fail(session: Session, study_id: str, number: int = 0, **changes: Any) -> Sequence[Result]:
    """A trial that was wrong, and what is withdrawn for it."""
    fields = {"source_hash": "bad", "outcome": "WRONG_RESULT", "reason": "1 element is wrong", **changes}
    return queries.withdraw_source(session, study_id, report(session, study_id, number, **fields))


def study_on_h200(session: Session) -> str:
    """A study of the problem that `new_result` is about."""
    study_id = only_study(session, post_job(session, "w"))
    queries.record_environment(session, study_id, device_name="NVIDIA H200", environment={}, environment_key="")
    return study_id


def test_every_revision_of_a_bad_source_is_withdrawn_and_the_newest_that_is_left_answers(database: Database) -> None:
    """Whatever the protocol, published or not; sources, devices and shapes beside it stay as they are."""
    with database.write() as session:
        good = publish(session, source_hash="good")
        bad = [publish(session, source_hash="bad") for _ in range(2)]
        sustained = publish(session, source_hash="bad", protocol="sustained")
        candidate = queries.add_result(session, new_result(source_hash="bad", evidence=("measured",)))
        elsewhere = [publish(session, source_hash="bad", **one) for one in ({"m": 8}, {"device_name": "NVIDIA H100"})]
        found = fail(session, study_on_h200(session))
        assert {row.id for row in found} == {row.id for row in (*bad, sustained, candidate)}
        assert best(session, device_name="NVIDIA H200") is good
        assert [row.revision for row in queries.revisions(session, good.id)] == [3, 2, 1]
        assert all(row.withdrawn_at is None and row.current for row in (good, *elsewhere))
        assert all(row.withdrawn_reason.startswith("WRONG_RESULT: 1 element is wrong (trial 0 of ") for row in found)
        assert queries.publish_result(session, queries.add_result(session, new_result()).id).revision == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "OUT_OF_MEMORY"},
        {"outcome": "COMPILE_FAILED"},
        {"outcome": "MEASURED"},
        {"outcome": "CRASHED", "reason": "lost 3 workers on the GPU: SIGKILL"},
        {"source_hash": None},
    ],
)
def test_what_is_not_the_kernels_fault_withdraws_nothing(database: Database, changes: dict[str, Any]) -> None:
    """The same failures that are not remembered against a candidate."""
    with database.write() as session:
        publish(session, source_hash="bad")
        assert fail(session, study_on_h200(session), **changes) == ()


def test_withdrawing_ends_a_pin_and_neither_pin_nor_publication_comes_back(database: Database) -> None:
    """A person pinned it before anybody knew."""
    with database.write() as session:
        bad, good = publish(session, source_hash="bad"), publish(session, source_hash="good")
        queries.pin_result(session, bad.id, pinned=True)
        fail(session, study_on_h200(session))
        assert best(session) is good
        assert queries.pinned_results(session) == []
        with pytest.raises(NotPublishable, match="was withdrawn: WRONG_RESULT"):
            queries.pin_result(session, bad.id, pinned=True)
        queries.pin_result(session, good.id, pinned=True)
        queries.pin_result(session, good.id, pinned=False)
        assert best(session) is good


@pytest.mark.parametrize(
    ("changes", "is_bad"),
    [
        ({}, True),
        ({"toolchain": "nvcc 12.9"}, False),
        ({"source_hash": "other"}, False),
        ({"outcome": "OUT_OF_MEMORY"}, False),
        ({"outcome": "CRASHED", "reason": "lost 3 workers on the GPU: SIGKILL"}, False),
        ({"reason": "forgotten: 1 element is wrong"}, False),
    ],
)
def test_source_that_was_found_bad_while_a_study_went_on_is_not_published_by_it(
    database: Database, changes: dict[str, Any], is_bad: bool
) -> None:
    """The study asked what is known before its trial; another found the fault since. As for a candidate otherwise."""
    with database.write() as session:
        own = only_study(session, post_job(session, "o"))
        report(session, own, 0, source_hash="bad")
        fail(session, study_on_h200(session), **changes)
        new = queries.add_result(session, new_result(source_hash="bad", study_id=own, trial_number=0))
        reason = queries.withdraw_known_bad(session, new)
        assert reason.startswith("WRONG_RESULT: 1 element is wrong (trial 0 of ") == is_bad
        assert (new.withdrawn_at is not None) == (not new.current) == bool(reason) == is_bad
        if is_bad:
            with pytest.raises(NotPublishable, match="was withdrawn"):
                queries.publish_result(session, new.id)


def test_withdrawn_results_are_found_by_neither_environment_nor_comparison(database: Database) -> None:
    """Only a question for that very revision still shows it."""
    with database.write() as session:
        bad = publish(session, source_hash="bad", environment_key="driver-570")
        publish(session, source_hash="good", environment_key="driver-580")
        fail(session, study_on_h200(session))
        shape = (4096, 4096, 4096)
        assert queries.best_exact_many(session, [shape], which(environment="driver-570")) == {}
        assert best(session, environment_key="driver-570") is None
        assert best(session, revision=1) is bad
        assert queries.changed_environments(session) == []
        assert queries.answers(session, made_in="driver-570", limit=9) == []


def test_shape_that_lost_its_only_answer_is_listed(database: Database) -> None:
    """For the map: one with an answer is not."""
    with database.write() as session:
        publish(session, source_hash="bad")
        fail(session, study_on_h200(session))

        def without() -> list[int | None]:
            found = queries.withdrawn_without_answer(session, device_name="NVIDIA H200", dtype=None, limit=9)
            return [row.revision for row in found]

        assert without() == [1]
        publish(session, source_hash="good")
        assert without() == []


def test_known_bad_source_that_is_published_is_withdrawn_too(database: Database) -> None:
    """A failure that was stored before anything was withdrawn."""
    with database.write() as session:
        publish(session, source_hash="bad")
        assert len(fail(session, study_on_h200(session), outcome="KNOWN_BAD", reason="failed before")) == 1


@pytest.mark.parametrize("found_before", [False, True])
def test_a_tied_config_that_is_found_to_be_bad_is_marked_in_the_answer(database: Database, found_before: bool) -> None:
    """It tied in the final, and another study finds out: before that final's result is stored, or after."""
    with database.write() as session:
        tuned = only_study(session, post_job(session, "t"))
        for number, source in enumerate(("good", "bad", "other")):
            report(session, tuned, number, source_hash=source)
        ties = [{"trial": number, "config": {"pipe_depth": number}, "median_us": 9.0} for number in range(3)]
        finder = study_on_h200(session)
        if found_before:
            fail(session, finder)
        new = queries.add_result(session, new_result(study_id=tuned, trial_number=0, source_hash="good", tie_set=ties))
        assert queries.withdraw_known_bad(session, new) == ""
        queries.publish_result(session, new.id)
        if not found_before:
            assert not fail(session, finder)
        assert new.withdrawn_at is None
        assert best(session, device_name="NVIDIA H200") is new
        session.flush()
        session.expire_all()
        first, marked, last = new.tie_set
    assert (first, last) == (ties[0], ties[2])
    assert marked.pop("withdrawn_reason") == f"WRONG_RESULT: 1 element is wrong (trial 0 of study {finder})"
    assert marked == ties[1]
