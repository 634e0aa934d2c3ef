"""The migrations and the models describe the same schema, and lead both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, text

from db import schema
from db.models import Base, new_id
from tests.conftest import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

OLD_RESULT = """
INSERT INTO results (id, m, n, k, dtype, layout, arch, device_name, revision, current, config, evidence, evidence_level,
                     environment, environment_key, source_hash, tie_set, checks, trials, created_at)
VALUES (:id, 64, 64, 64, 'bf16', 'NT', 'sm_90a', 'H200', :revision, :current, '{}', '[]', 4,
        '{}', 'H200|132|580|hash', 'hash', '[]', '[]', 1, '2026-01-01 00:00:00')
"""


OLD_STUDY = """
INSERT INTO studies (id, study_key, m, n, k, dtype, layout, arch, mode, request, seed, state, reason, cancel_requested,
                     counts, created_at)
VALUES (:id, :id, 64, 64, 64, 'bf16', 'NT', 'sm_90a', 'measure', :request, 0, 'DONE', '', false, '{}',
        '2026-01-01 00:00:00')
"""


@pytest.fixture(params=BACKENDS)
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A connection to a database without tables."""
    name = f"migrated_{new_id()[:12]}"
    server = request.getfixturevalue("postgres") if request.param == "postgres" else None
    engine = create_engine(server.create(name) if server else "sqlite://")
    with engine.connect() as opened:
        yield opened
    engine.dispose()
    if server:
        server.drop(name)


def checks(connection: Connection) -> set[tuple[str, str | None, str]]:
    """Every CHECK constraint: its table, its name, its text."""
    inspector = inspect(connection)
    return {
        (table, check["name"], check["sqltext"])
        for table in inspector.get_table_names()
        for check in inspector.get_check_constraints(table)
    }


def test_the_migrations_make_exactly_the_tables_of_the_models(connection: Connection) -> None:
    """Alembic's own comparison finds tables, columns, types, indexes, unique and foreign keys equal."""
    schema.upgrade(connection)
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    assert compare_metadata(context, Base.metadata) == []


def test_the_migrations_make_the_check_constraints_of_the_models(connection: Connection) -> None:
    """Alembic does not compare these, so they are compared by their text."""
    schema.upgrade(connection)
    migrated = checks(connection)
    schema.downgrade(connection, "base")
    Base.metadata.create_all(connection)
    assert migrated == checks(connection)
    assert len(migrated) >= 8


def test_going_back_to_the_start_leaves_no_table_and_forward_again_works(connection: Connection) -> None:
    """Downgrade undoes upgrade."""
    schema.upgrade(connection)
    tables = set(inspect(connection).get_table_names())
    assert set(Base.metadata.tables) == tables - {"alembic_version"}
    schema.downgrade(connection, "base")
    assert inspect(connection).get_table_names() == ["alembic_version"]
    assert schema.current_revision(connection) is None
    schema.upgrade(connection)
    assert set(inspect(connection).get_table_names()) == tables


def test_each_revision_can_be_undone_and_redone(connection: Connection) -> None:
    """Step by step, both ways."""
    for revision in schema.KNOWN_REVISIONS:
        schema.upgrade(connection, revision)
        schema.downgrade(connection, "-1")
        schema.upgrade(connection, revision)
        assert schema.current_revision(connection) == revision


def test_the_listed_revisions_are_the_scripts_there_are() -> None:
    """KNOWN_REVISIONS spares opening a database the import of Alembic; it must not fall behind."""
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    in_order = [script.revision for script in scripts.walk_revisions()][::-1]
    assert tuple(in_order) == schema.KNOWN_REVISIONS


def test_results_of_the_first_version_get_their_environment_and_stay_the_answer(connection: Connection) -> None:
    """C8: the key loses its source hash, nothing is pinned, and the way back makes the newest the answer again."""
    schema.upgrade(connection, "0001")
    for revision, current in ((1, False), (2, True)):
        connection.execute(text(OLD_RESULT), {"id": f"{revision:032}", "revision": revision, "current": current})
    schema.upgrade(connection)
    rows = connection.execute(text("SELECT revision, made_in, pinned, current FROM results ORDER BY revision")).all()
    assert [tuple(row) for row in rows] == [(1, "H200|132|580", False, False), (2, "H200|132|580", False, True)]
    connection.execute(text("UPDATE results SET pinned = (revision = 1), current = (revision = 1)"))
    schema.downgrade(connection, "0001")
    rows = connection.execute(text("SELECT revision, current FROM results ORDER BY revision")).all()
    assert [tuple(row) for row in rows] == [(1, False), (2, True)]
    schema.upgrade(connection)
    assert connection.scalar(text("SELECT number FROM changes WHERE topic = 'answers'")) == 0


def test_results_of_sustained_load_leave_their_place_to_those_in_bursts(connection: Connection) -> None:
    """Before protocols had revisions of their own, the newest of any protocol was the answer."""
    schema.upgrade(connection, "0002")
    for number, kind in ((1, "burst"), (2, "sustained")):
        study = {"id": f"{number:032}", "request": f'{{"protocol": {{"kind": "{kind}"}}}}'}
        connection.execute(text(OLD_STUDY), study)
        values = {"id": study["id"], "revision": number, "current": number == 2}
        connection.execute(text(OLD_RESULT), values)
        connection.execute(text("UPDATE results SET study_id = :id WHERE id = :id"), {"id": study["id"]})
    schema.upgrade(connection)
    found = text("SELECT revision, protocol, current FROM results ORDER BY revision")
    rows = [(revision, kind, bool(current)) for revision, kind, current in connection.execute(found)]
    assert rows == [(1, "burst", True), (2, "sustained", True)]
    schema.downgrade(connection, "0005")
    found = text("SELECT id, revision FROM results ORDER BY id")
    assert [tuple(row) for row in connection.execute(found)] == [(f"{1:032}", 1), (f"{2:032}", None)]
