"""What is best for a problem: candidates, revisions, nearby shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError

from db import queries
from db.errors import NotPublishable
from tests.db.rows import new_result, publish

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from db.database import Database
    from db.models import Result

SHAPE = (4096, 4096, 4096, "bf16", "NT")


def best(session: Session, **asked: Any) -> Result | None:
    """The answer for the usual shape on an H200's architecture."""
    return queries.best_exact(session, *SHAPE, **{"arch": "sm_90a", **asked})


def test_a_candidate_is_shown_only_where_less_than_checked_is_asked_for(database: Database) -> None:
    """A result that was never published is no answer by default."""
    with database.write() as session:
        candidate = queries.add_result(session, new_result(evidence=("measured", "numeric")))
        assert candidate.revision is None
        assert best(session) is None
        for evidence in ("modeled", "simulated", "measured", "numeric"):
            found = best(session, evidence=evidence)
            assert found is not None
            assert found.id == candidate.id
        with pytest.raises(ValueError, match="'hearsay'"):
            best(session, evidence="hearsay")


def test_the_candidate_with_the_most_evidence_is_preferred_then_the_newest(database: Database) -> None:
    """A modeled guess that is newer does not hide a measurement."""
    with database.write() as session:
        queries.add_result(session, new_result(evidence=("measured",), median_us=1.0))
        newer = queries.add_result(session, new_result(evidence=("measured",), median_us=2.0))
        queries.add_result(session, new_result(evidence=("modeled",), median_us=None, modeled_us=0.5))
        found = best(session, evidence="modeled")
        assert found is not None
        assert found.id == newer.id


def test_an_answer_changes_only_when_a_revision_is_published(database: Database) -> None:
    """F1: readers keep the revision they have, whatever candidates come in."""
    with database.write() as session:
        first = publish(session)
    with database.write() as session:
        faster = queries.add_result(session, new_result(median_us=100.0))
        for evidence in ("checked", "modeled"):
            found = best(session, evidence=evidence)
            assert found is not None
            assert (found.id, found.revision) == (first.id, 1)
        queries.publish_result(session, faster.id)
        found = best(session)
        assert found is not None
        assert (found.id, found.revision) == (faster.id, 2)


def test_a_revision_can_be_pinned(database: Database) -> None:
    """An old revision stays available under its number; a number never given is no answer."""
    with database.write() as session:
        first, second = publish(session), publish(session)
        assert [best(session, revision=number) for number in (1, 2, 3)] == [first, second, None]
        assert [result.revision for result in queries.revisions(session, first.id)] == [2, 1]
        assert queries.revisions(session, "unknown") == []


def test_publishing_again_keeps_the_number(database: Database) -> None:
    """A call that is repeated after a crash is harmless."""
    with database.write() as session:
        first = publish(session)
        assert queries.publish_result(session, first.id).revision == 1
        assert publish(session).revision == 2
        with pytest.raises(KeyError):
            queries.publish_result(session, "unknown")


@pytest.mark.parametrize("evidence", [("modeled",), ("measured", "numeric"), ("measured", "checked")])
def test_a_result_without_numeric_and_checked_is_never_published(database: Database, evidence: tuple[str, ...]) -> None:
    """The refusal names what is missing, and the candidate stays one."""
    with database.write() as session:
        candidate = queries.add_result(session, new_result(evidence=evidence))
    with pytest.raises(NotPublishable, match="a revision also needs"), database.write() as session:
        queries.publish_result(session, candidate.id)
    with database.read() as session:
        stored = queries.result(session, candidate.id)
        assert stored is not None
        assert stored.revision is None


def test_each_problem_and_device_counts_its_own_revisions(database: Database) -> None:
    """C1, C2: another shape, dtype, layout or device shares neither numbers nor answers."""
    others: list[dict[str, Any]] = [
        {"n": 8192},
        {"dtype": "fp16"},
        {"layout": "TN"},
        {"device_name": "NVIDIA H100 PCIe"},
        {"arch": "sm_100a", "device_name": "NVIDIA B200"},
    ]
    with database.write() as session:
        mine = publish(session)
        assert [publish(session, **other).revision for other in others] == [1] * len(others)
        assert best(session, device_name="NVIDIA H200") is mine
        assert queries.best_exact(session, 4096, 4096, 4104, "bf16", "NT", arch="sm_90a") is None
        assert best(session, device_name="NVIDIA H999") is None


def test_by_architecture_alone_the_newest_revision_of_its_devices_answers(database: Database) -> None:
    """The revision numbers of two devices do not compare; their times of publication do."""
    with database.write() as session:
        publish(session)
        publish(session)
        newest = publish(session, device_name="NVIDIA H100 PCIe")
        found = best(session)
        assert found is newest
        assert newest.revision == 1


def test_an_answer_can_be_limited_to_an_environment(database: Database) -> None:
    """D7, C3: after a driver change the old revision is still there for who asks for it."""
    with database.write() as session:
        old = publish(session, environment_key="driver-570")
        new = publish(session, environment_key="driver-580")
        assert best(session) is new
        assert best(session, environment_key="driver-570") is old
        assert best(session, environment_key="driver-590") is None


def test_a_revision_number_cannot_stand_twice(database: Database) -> None:
    """The constraint behind the numbering."""
    with database.write() as session:
        publish(session)
        other = queries.add_result(session, new_result())
        other.revision = 1
        with pytest.raises(IntegrityError, match=r"(?i)unique"):
            session.flush()
        session.rollback()


def test_every_result_of_a_problem_is_listed_newest_first(database: Database) -> None:
    """Revisions and candidates, for the history of a shape."""
    with database.write() as session:
        stored = [publish(session), queries.add_result(session, new_result(evidence=("modeled",))), publish(session)]
        publish(session, m=64)
        listed = queries.results_exact(session, *SHAPE, device_name="NVIDIA H200")
        assert [result.id for result in listed] == [result.id for result in reversed(stored)]


def test_results_are_paged_and_filtered(database: Database) -> None:
    """Newest first, each page after the last result of the one before."""
    with database.write() as session:
        stored = [publish(session, m=m).id for m in (1, 2, 3)]
        stored.append(queries.add_result(session, new_result(evidence=("modeled",))).id)
        first = queries.results(session, limit=3)
        second = queries.results(session, limit=3, after=first[-1].id)
        assert [result.id for result in (*first, *second)] == stored[::-1]
        assert [result.id for result in queries.results(session, published=False)] == stored[3:]
        assert len(queries.results(session, published=True, arch="sm_90a", device_name="NVIDIA H200")) == 3
        assert queries.results(session, study_id="none") == []
        assert queries.results(session, after="unknown") == []


@pytest.mark.parametrize("evidence", ["modeled", "measured", "checked"])
@pytest.mark.parametrize("device_name", [None, "NVIDIA H200"])
def test_many_exact_questions_have_the_answers_of_single_ones(
    database: Database, evidence: str, device_name: str | None
) -> None:
    """Revisions, candidates of every level, two devices, other dtypes, and shapes without a result."""
    with database.write() as session:
        for m in (1, 2, 3, 4):
            publish(session, m=m, median_us=50.0)
            publish(session, m=m, median_us=49.0)
            queries.add_result(session, new_result(m=m + 2, evidence=("measured",)))
            queries.add_result(session, new_result(m=m + 3, evidence=("modeled",)))
            publish(session, m=m + 4, device_name="NVIDIA H100 80GB HBM3")
            publish(session, m=m + 7, dtype="fp16")
    shapes = [(m, 4096, 4096) for m in (*range(1, 700), 2)]
    asked: dict[str, Any] = {"arch": "sm_90a", "device_name": device_name, "evidence": evidence}
    with database.read() as session:
        many = queries.best_exact_many(session, shapes, "bf16", "NT", **asked)
        single = {shape: queries.best_exact(session, *shape, "bf16", "NT", **asked) for shape in shapes[:20]}
    expected = {shape: result.id for shape, result in single.items() if result is not None}
    assert {shape: row.id for shape, row in many.items()} == expected


def test_nearby_results_come_nearest_first_within_the_factor(database: Database) -> None:
    """Distance is by ratio: half as wide is as far as twice as wide."""
    with database.write() as session:
        for n, k in ((4096, 4096), (4096, 5120), (8192, 4096), (2048, 4096), (16384, 4096), (4096, 65536)):
            publish(session, n=n, k=k)
        publish(session, n=4096, dtype="fp16")
        publish(session, n=4096, arch="sm_100a", device_name="NVIDIA B200")
        found = queries.results_nearby(session, 4096, 4096, "bf16", "NT", arch="sm_90a", factor=2)
        shapes = [(result.n, result.k) for result in found]
        assert shapes[:2] == [(4096, 4096), (4096, 5120)]
        assert sorted(shapes[2:]) == [(2048, 4096), (8192, 4096)]
        wider = queries.results_nearby(session, 4096, 4096, "bf16", "NT", arch="sm_90a", factor=4, limit=3)
        assert len(wider) == 3


def test_nearby_results_can_be_limited_in_m_too(database: Database) -> None:
    """The nearest M comes first."""
    with database.write() as session:
        for m in (1, 100, 128, 4096):
            publish(session, m=m)
        found = queries.results_nearby(session, 4096, 4096, "bf16", "NT", device_name="NVIDIA H200", m=120)
        assert [result.m for result in found] == [128, 100]


def test_nearby_looks_at_the_current_revision_only_and_at_candidates_when_asked(database: Database) -> None:
    """Neither old revisions nor replaced candidates fill the list."""
    with database.write() as session:
        publish(session)
        newest = publish(session)
        for _ in range(2):
            candidate = queries.add_result(session, new_result(m=64, evidence=("modeled",)))
        found = queries.results_nearby(session, 4096, 4096, "bf16", "NT", arch="sm_90a")
        assert [result.id for result in found] == [newest.id]
        more = queries.results_nearby(session, 4096, 4096, "bf16", "NT", arch="sm_90a", evidence="modeled")
        assert {result.id for result in more} == {newest.id, candidate.id}


def test_a_family_of_shapes_is_listed_by_m(database: Database) -> None:
    """D6: what a dispatch table for fixed N and K is made of."""
    with database.write() as session:
        for m in (256, 16, 64):
            publish(session, m=m)
        publish(session, m=16, n=512)
        found = queries.results_for_nk(session, 4096, 4096, "bf16", "NT", arch="sm_90a", device_name="NVIDIA H200")
        assert [result.m for result in found] == [16, 64, 256]


def plans(database: Database, session: Session, ask: Any) -> list[str]:
    """How SQLite says that it runs the statements of `ask`."""
    seen: list[tuple[str, Any]] = []
    bind = session.get_bind()

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        seen.append((statement, parameters))

    event.listen(bind, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(bind, "before_cursor_execute", note)
    raw = session.connection().connection
    return [
        row[3]
        for statement, parameters in seen
        for row in raw.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
    ]


def test_the_named_questions_are_answered_from_an_index(database: Database) -> None:
    """GET /v1/best looks at the rows of its shape alone, the nearby search at current rows in the range of N."""
    with database.read() as session:
        session.execute(text("SELECT 1"))
        exact = plans(database, session, lambda: best(session, device_name="NVIDIA H200"))
        nearby = plans(
            database, session, lambda: queries.results_nearby(session, 4096, 4096, "bf16", "NT", arch="sm_90a")
        )
        many = plans(
            database,
            session,
            lambda: queries.best_exact_many(session, [(1, 8, 8)], "bf16", "NT", arch="sm_90a", device_name="GPU"),
        )
    for plan in (exact, many):
        assert any("m=? AND n=? AND k=? AND dtype=? AND layout=? AND arch=? AND device_name=?" in line for line in plan)
    covered = "COVERING INDEX ix_results_nearby (current=? AND dtype=? AND layout=? AND arch=? AND n>? AND n<?)"
    assert any(covered in line for line in nearby)
    assert not any(line.startswith("SCAN results") for line in (*exact, *nearby, *many))
