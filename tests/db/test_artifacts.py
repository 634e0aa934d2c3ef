"""Which modules may be removed from the artifact store, and which never."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from db import queries
from db.models import Artifact, utc_now
from tests.db.rows import CHECKED, new_result, new_study, report

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from db.database import Database

SHAPE = {"m": 4096, "n": 4096, "k": 4096}


def module(session: Session, name: str, *, size_bytes: int = 100, unused_days: int = 0) -> str:
    """A module in the store; gives its hash."""
    sha256 = name * 64
    row = queries.add_artifact(
        session,
        sha256=sha256,
        size_bytes=size_bytes,
        arch="sm_90a",
        sm_count=132,
        source_hash=sha256,
        config={},
        problem_key="4096x4096x4096:bf16:NT",
        toolchain="nvcc",
    )
    row.last_used_at = utc_now() - timedelta(days=unused_days)
    session.flush()
    return sha256


def study_of(session: Session, *modules: str, key: str = "a", state: str | None = "DONE", **changes: Any) -> str:
    """A study that built these modules, one a trial; gives its id."""
    job = queries.create_job(session, request={"key": key}, mode="measure", studies=[new_study(key, **changes)])
    (study,) = queries.studies_of_job(session, job.id)
    queries.claim_next_study(session, "tuner")
    for number, sha256 in enumerate(modules):
        report(session, study.id, number, artifact_sha256=sha256)
    if state is not None:
        queries.finish_study(session, study.id, state=state)
    return study.id


def test_losers_are_the_modules_that_no_result_has(database: Database) -> None:
    """The winner's stays, whether it is published or a candidate."""
    with database.write() as session:
        names = [module(session, name) for name in "abc"]
        study_id = study_of(session, *names)
        queries.add_result(session, new_result(artifact_sha256=names[0], evidence=("measured",)))
        assert sorted(queries.losers_of_study(session, study_id)) == names[1:]
        queries.note_removed(session, names[1:])
        assert queries.losers_of_study(session, study_id) == []
        assert sorted(queries.removed_artifacts(session)) == names[1:]


def test_nothing_is_lost_while_a_study_of_the_problem_is_at_work(database: Database) -> None:
    """It may have built the same bytes; when it ends, the losers of both go. Other problems do not matter."""
    with database.write() as session:
        first = study_of(session, module(session, "a"), key="a")
        second = study_of(session, module(session, "b"), key="b", state=None)
        assert queries.losers_of_study(session, second) == []  # it is not over
        assert queries.losers_of_study(session, first) == []
        other = study_of(session, module(session, "c"), key="c", m=64)
        assert queries.losers_of_study(session, other) == ["c" * 64]
        queries.finish_study(session, second, state="CANCELLED")
        assert sorted(queries.losers_of_study(session, second)) == ["a" * 64, "b" * 64]
        assert queries.losers_of_study(session, "unknown") == []


def test_over_the_limit_the_longest_unused_go_first(database: Database) -> None:
    """Just as many as it takes; one that was built or exported again counts as used."""
    with database.write() as session:
        for name, days in (("a", 1), ("b", 9), ("c", 5), ("d", 3)):
            module(session, name, unused_days=days)
        assert queries.artifacts_over(session, 400) == []
        assert queries.artifacts_over(session, 399) == ["b" * 64]
        assert queries.artifacts_over(session, 150) == ["b" * 64, "c" * 64, "d" * 64]
        queries.note_use(session, ["b" * 64])
        assert queries.artifacts_over(session, 399) == ["c" * 64]
        queries.note_removed(session, ["c" * 64, "d" * 64])
        assert queries.artifacts_over(session, 200) == []


def test_what_a_revision_or_a_bundle_names_never_goes(database: Database) -> None:
    """Nor what a study at work may need; the limit is passed rather than these removed."""
    with database.write() as session:
        for name in "abcde":
            module(session, name, unused_days=5)
        revision = queries.add_result(session, new_result(artifact_sha256="a" * 64, evidence=CHECKED))
        queries.publish_result(session, revision.id)
        queries.publish_result(session, queries.add_result(session, new_result(evidence=CHECKED)).id)  # a newer one
        candidate = queries.add_result(session, new_result(m=8, artifact_sha256="b" * 64, evidence=("measured",)))
        queries.create_export(session, {"results": [candidate.id], "format": "zip", "allow_unverified": True})
        queries.add_result(session, new_result(m=16, artifact_sha256="c" * 64, evidence=("measured",)))
        study_of(session, "d" * 64, state=None)
        assert queries.artifacts_over(session, 1) == ["c" * 64, "e" * 64]


def test_a_module_that_is_built_again_is_there_again(database: Database) -> None:
    """Its row no longer says that it was removed."""
    with database.write() as session:
        sha256 = module(session, "a", unused_days=9)
        queries.note_removed(session, [sha256])
        row = session.get(Artifact, sha256, populate_existing=True)
        assert row is not None
        assert row.removed_at is not None
        module(session, "a")
        session.refresh(row)
        assert row.removed_at is None
