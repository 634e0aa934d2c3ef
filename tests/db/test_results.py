"""What is best for a problem: candidates, revisions, nearby shapes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError

from db import queries
from db.database import ANSWERS, Database
from db.errors import NotPublishable
from tests.db.rows import new_result, post_job, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

    from db.models import Result
    from db.queries import Shape

SHAPE = (4096, 4096, 4096, "bf16", "NT")


def which(**changes: Any) -> queries.Which:
    """Published results of the usual kind on an H200's architecture."""
    return queries.Which(**{"dtype": "bf16", "layout": "NT", "arch": "sm_90a", **changes})


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


def test_e6_a_result_of_one_protocol_never_answers_for_another(database: Database) -> None:
    """E6: each protocol counts its own revisions, has its own pin, and is asked for by name; bursts are the default."""
    with database.write() as session:
        burst = publish(session, median_us=20.0)
        sustained = publish(session, median_us=10.0, protocol="sustained")
        assert (burst.revision, sustained.revision) == (1, 1)
        queries.pin_result(session, sustained.id, pinned=True)
        assert publish(session, median_us=19.0).revision == 2
    with database.read() as session:
        assert best(session).median_us == 19.0  # type: ignore[union-attr]
        assert best(session, protocol="sustained").median_us == 10.0  # type: ignore[union-attr]
        shape = SHAPE[:3]
        for kind, found_us in (("burst", 19.0), ("sustained", 10.0)):
            answers = queries.best_exact_many(session, [shape], which(protocol=kind))
            assert [answer.median_us for answer in answers.values()] == [found_us]
            (near,) = nearby(session, shape, protocol=kind)
            assert queries.answers_by_id(session, [near.id])[near.id].protocol == kind


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
        many = queries.best_exact_many(session, shapes, which(device_name=device_name, evidence=evidence))
        single = {shape: queries.best_exact(session, *shape, "bf16", "NT", **asked) for shape in shapes[:20]}
    expected = {shape: result.id for shape, result in single.items() if result is not None}
    assert {shape: row.id for shape, row in many.items()} == expected


def nearby(session: Session, shape: Shape, factor: float = 2.0, limit: int = 32, **changes: Any) -> list[Any]:
    """Results near one shape."""
    return queries.nearby_many(session, [shape], which(**changes), factor=factor, limit=limit).get(shape, [])


def test_nearby_results_come_nearest_first_within_the_factor(database: Database) -> None:
    """Distance is by ratio: half as wide is as far as twice as wide."""
    with database.write() as session:
        for n, k in ((4096, 4096), (4096, 5120), (8192, 4096), (2048, 4096), (16384, 4096), (4096, 65536)):
            publish(session, n=n, k=k)
        publish(session, n=4096, dtype="fp16")
        publish(session, n=4096, arch="sm_100a", device_name="NVIDIA B200")
        found = [(row.n, row.k) for row in nearby(session, (4096, 4096, 4096))]
        assert found[:2] == [(4096, 4096), (4096, 5120)]
        assert sorted(found[2:]) == [(2048, 4096), (8192, 4096)]
        assert len(nearby(session, (4096, 4096, 4096), factor=4, limit=3)) == 3


def test_nearness_is_the_product_of_the_ratios(database: Database) -> None:
    """Its logarithm is the distance that an answer shows, so the order is that of the distance."""
    with database.write() as session:
        for shape in ((128, 4096, 4096), (100, 4096, 4096), (120, 4104, 4096), (240, 4096, 4096), (241, 4096, 4096)):
            publish(session, m=shape[0], n=shape[1], k=shape[2])
        found = nearby(session, (120, 4096, 4096))
    assert [(row.m, row.n) for row in found] == [(120, 4104), (128, 4096), (100, 4096), (240, 4096)]
    assert found[2].nearness == pytest.approx(1.2)


def test_nearby_of_many_shapes_is_nearby_of_each(database: Database) -> None:
    """Asked together or one by one; a shape with nothing near is left out, and the limit counts for each."""
    with database.write() as session:
        for m in (1, 100, 128, 4096):
            publish(session, m=m)
        shapes = [(120, 4096, 4096), (3000, 4096, 4096), (16, 4096, 4096), (120, 4096, 4096)]
        found = queries.nearby_many(session, shapes, which(), factor=2.0, limit=1)
        assert {shape: [row.m for row in rows] for shape, rows in found.items()} == {
            (120, 4096, 4096): [128],
            (3000, 4096, 4096): [4096],
        }
        assert [row.m for row in nearby(session, (120, 4096, 4096))] == [128, 100]


def test_nearby_looks_at_the_current_revision_only_and_at_candidates_when_asked(database: Database) -> None:
    """Neither old revisions nor replaced candidates fill the list; of equal shapes the revision comes first."""
    with database.write() as session:
        publish(session)
        newest = publish(session)
        for _ in range(2):
            candidate = queries.add_result(session, new_result(evidence=("modeled",)))
        assert [row.id for row in nearby(session, (4096, 4096, 4096))] == [newest.id]
        more = nearby(session, (4096, 4096, 4096), evidence="modeled")
        assert [row.id for row in more] == [newest.id, candidate.id]


def test_stale_environments_are_left_out_unless_pinned(database: Database) -> None:
    """C3: neither as exact nor as nearby; the environment is the key without the source hash."""
    shape = (4096, 4096, 4096)
    with database.write() as session:
        old = publish(session, environment_key="H200|132|570|13.0|nvcc 12|hash", source_hash="hash")
        assert queries.current_environments(session) == ["H200|132|570|13.0|nvcc 12"]
        stale = which(stale=["H200|132|570|13.0|nvcc 12"])
        assert queries.best_exact_many(session, [shape], stale) == {}
        assert queries.nearby_many(session, [shape], stale, factor=2.0, limit=9) == {}
        queries.pin_result(session, old.id, pinned=True)
        assert queries.best_exact_many(session, [shape], stale)[shape].id == old.id
        assert queries.nearby_many(session, [shape], stale, factor=2.0, limit=9)[shape][0].id == old.id


def test_results_of_an_environment_are_found_behind_newer_ones(database: Database) -> None:
    """C3: asked by the whole key or by the key without the source hash."""
    shape = (4096, 4096, 4096)
    with database.write() as session:
        old = publish(session, environment_key="driver-570|hash", source_hash="hash")
        publish(session, environment_key="driver-580|hash", source_hash="hash")
        for environment in ("driver-570", "driver-570|hash"):
            found = queries.best_exact_many(session, [shape], which(environment=environment))
            assert found[shape].id == old.id
        assert queries.best_exact_many(session, [shape], which(environment="driver-590")) == {}


def test_a_pinned_revision_stays_the_answer_until_it_is_let_go(database: Database) -> None:
    """C9: newer revisions count on, and the newest becomes the answer when the pin is taken away."""
    with database.write() as session:
        first, second = publish(session), publish(session)
        queries.pin_result(session, first.id, pinned=True)
        third = publish(session)
        found = best(session)
        assert (third.revision, third.current, found) == (3, False, first)
        assert queries.pinned_results(session) == [first]
        queries.pin_result(session, second.id, pinned=True)
        assert best(session) is second
        assert queries.pinned_results(session) == [second]
        queries.pin_result(session, first.id, pinned=False)  # has none any more
        assert best(session) is second
        queries.pin_result(session, second.id, pinned=False)
        assert best(session) is third
        assert [row.revision for row in queries.revisions(session, first.id) if row.current] == [3]


def test_only_a_published_revision_can_be_pinned(database: Database) -> None:
    """A candidate lacks evidence; an unknown id is nobody's."""
    with database.write() as session:
        candidate = queries.add_result(session, new_result())
        with pytest.raises(NotPublishable, match="only a published revision"):
            queries.pin_result(session, candidate.id, pinned=True)
        with pytest.raises(KeyError):
            queries.pin_result(session, "unknown", pinned=True)


def test_what_readers_keep_is_out_of_date_after_each_change_of_an_answer(database: Database, url: str) -> None:
    """F1: publishing, candidates, pins and a device's new driver count; heartbeats and undone work do not."""
    device: dict[str, Any] = {"uuid": "GPU-1", "name": "NVIDIA H200", "arch": "sm_90a", "sm_count": 132}
    with Database.open(url) as reader:
        numbers = [reader.change_number(ANSWERS)]

        def changed(work: Callable[[Session], Any]) -> bool:
            with suppress(RuntimeError), database.write() as session:
                work(session)
            numbers.append(reader.change_number(ANSWERS))
            assert database.change_number(ANSWERS) == numbers[-1]
            return numbers[-1] != numbers[-2]

        def undone(session: Session) -> None:
            publish(session)
            raise RuntimeError

        assert changed(publish)
        assert changed(lambda session: queries.add_result(session, new_result(evidence=("modeled",))))
        assert changed(lambda s: queries.pin_result(s, queries.results(s, published=True)[0].id, pinned=True))
        assert changed(lambda s: queries.upsert_device(s, **device, environment={"driver": "580", "power_w": 1}))
        assert not changed(lambda s: queries.upsert_device(s, **device, environment={"driver": "580", "power_w": 2}))
        assert not changed(lambda s: queries.upsert_device(s, **device, state="BUSY"))
        assert changed(lambda s: queries.upsert_device(s, **device, environment={"driver": "590"}))
        assert changed(lambda s: queries.upsert_device(s, **device, state="OFFLINE"))
        assert not changed(lambda session: post_job(session, "a"))
        assert not changed(undone)


def test_a_family_of_shapes_is_listed_by_m(database: Database) -> None:
    """D6: what a dispatch table for fixed N and K is made of; an M counts once."""
    with database.write() as session:
        for m in (256, 16, 64, 16):
            publish(session, m=m)
        publish(session, m=8, n=512)
        queries.add_result(session, new_result(m=32, evidence=("modeled",)))
        assert queries.tuned_m(session, 4096, 4096, which(device_name="NVIDIA H200")) == [16, 64, 256]
        assert queries.tuned_m(session, 4096, 4096, which(evidence="modeled")) == [16, 32, 64, 256]
    assert queries.tuned_m(database, 4096, 512, which()) == []


def test_a_revision_is_set_beside_the_one_of_the_environment_before(database: Database) -> None:
    """D7: the newest that was made elsewhere, however many came in between; a problem without one is left out."""
    with database.write() as session:
        for number, environment in enumerate(("a", "b", "b", "c", "c")):
            last = publish(session, environment_key=environment, median_us=100.0 + number)
        publish(session, m=64, environment_key="c")
        publish(session, m=64, environment_key="c")
        ((after, before),) = queries.changed_environments(session, arch="sm_90a", device_name="NVIDIA H200")
        assert (after.id, after.revision, before.revision, before.median_us) == (last.id, 5, 3, 102.0)
        assert queries.changed_environments(session, after=last.id) == []
        assert queries.changed_environments(session, arch="sm_100a") == []
        found = queries.answers_made_in(session, ["c", "x"], device_name="NVIDIA H200")
        assert [(row.m, row.device_name) for row in found] == [(64, "NVIDIA H200"), (4096, "NVIDIA H200")]
        assert queries.answers_made_in(session, ["a", "b"]) == []


def test_revisions_are_paged_by_number(database: Database) -> None:
    """Newest first, each page below the last number of the one before."""
    with database.write() as session:
        first, *_ = [publish(session) for _ in range(5)]
        assert [row.revision for row in queries.revisions(session, first.id, limit=2)] == [5, 4]
        assert [row.revision for row in queries.revisions(session, first.id, limit=9, below=4)] == [3, 2, 1]


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


def test_the_named_questions_are_answered_from_an_index(sqlite_database: Database) -> None:
    """GET /v1/best looks at the rows of its shape alone, the nearby search at current rows in the range of N."""
    with sqlite_database.read() as session:
        session.execute(text("SELECT 1"))
        exact = plans(sqlite_database, session, lambda: best(session, device_name="NVIDIA H200"))
        near = plans(sqlite_database, session, lambda: nearby(session, (1, 8, 8)))
        some = which(device_name="GPU", stale=["old"])
        many = plans(sqlite_database, session, lambda: queries.best_exact_many(session, [(1, 8, 8)], some))
    for plan in (exact, many):
        found = (
            "ix_results_nearby (current=? AND dtype=? AND layout=? AND arch=? AND protocol=? "
            "AND n=? AND k=? AND m=? AND device_name=?"
        )
        assert any(found in line for line in plan), plan
    key = "current=? AND dtype=? AND layout=? AND arch=? AND protocol=? AND n>? AND n<?"
    covered = f"COVERING INDEX ix_results_nearby ({key})"
    assert any(covered in line for line in near)
    assert not any(line.startswith("SCAN results") for line in (*exact, *near, *many))
