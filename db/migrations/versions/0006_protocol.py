"""The protocol of a result: one timed under sustained load never answers for one timed in bursts.

Revision: 0006
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_PLACE = ("m", "n", "k", "dtype", "layout", "arch", "device_name")
_BEFORE = ("current", "dtype", "layout", "arch", "n", "k", "m", "device_name", "revision", "evidence_level")
_AFTER = ("current", "dtype", "layout", "arch", "protocol", "n", "k", "m", "device_name", "revision", "evidence_level")
_UNIQUE, _INDEX = "uq_results_problem_revision", "ix_results_nearby"


def upgrade() -> None:
    """Results that are there already get the protocol of their study; those in bursts answer again."""
    op.drop_index(_INDEX, table_name="results")
    op.add_column("results", sa.Column("protocol", sa.String(length=16), nullable=False, server_default="burst"))
    with op.batch_alter_table("results") as batch:
        batch.alter_column("protocol", existing_type=sa.String(length=16), existing_nullable=False, server_default=None)
        batch.drop_constraint(_UNIQUE, type_="unique")
        batch.create_unique_constraint(_UNIQUE, [*_PLACE, "protocol", "revision"])
    connection = op.get_bind()
    for study, request in connection.execute(sa.text("SELECT id, request FROM studies WHERE mode = 'measure'")).all():
        kind = _kind(request)
        if kind != "burst":
            values = {"kind": kind, "study": study}
            connection.execute(sa.text("UPDATE results SET protocol = :kind WHERE study_id = :study"), values)
    _answer_again(connection)
    _create_partial(*_AFTER, "made_in", "pinned", "id")


def _kind(request: Any) -> str:
    values = json.loads(request) if isinstance(request, str) else request
    protocol = values.get("protocol") if isinstance(values, dict) else None
    return str(protocol.get("kind", "burst")) if isinstance(protocol, dict) else "burst"


def _answer_again(connection: sa.Connection) -> None:
    """Places whose current revision is another protocol's now: their newest one in bursts answers."""
    same = " AND ".join(f"other.{name} = results.{name}" for name in _PLACE)
    connection.execute(
        sa.text(
            f"UPDATE results SET current = {_true(connection)} WHERE protocol = 'burst' AND revision IS NOT NULL "
            f"AND NOT EXISTS (SELECT 1 FROM results AS other WHERE {same} AND other.protocol = 'burst' "
            "AND other.revision > results.revision) "
            f"AND EXISTS (SELECT 1 FROM results AS other WHERE {same} AND other.protocol <> 'burst') "
            f"AND NOT EXISTS (SELECT 1 FROM results AS other WHERE {same} AND other.protocol = 'burst' "
            f"AND other.revision IS NOT NULL AND other.current = {_true(connection)})"
        )
    )


def _true(connection: sa.Connection) -> str:
    return "true" if connection.dialect.name == "postgresql" else "1"


def _create_partial(*columns: str) -> None:
    op.create_index(
        _INDEX,
        "results",
        list(columns),
        sqlite_where=sa.text("current IS 1"),
        postgresql_where=sa.text("current IS true"),
    )


def downgrade() -> None:
    """Forget the protocol. Results of other protocols than bursts are candidates again: their numbers may be taken."""
    connection = op.get_bind()
    values = f"revision = NULL, pinned = NOT {_true(connection)}, published_at = NULL"
    connection.execute(sa.text(f"UPDATE results SET {values} WHERE protocol <> 'burst' AND revision IS NOT NULL"))
    op.drop_index(_INDEX, table_name="results")
    with op.batch_alter_table("results") as batch:
        batch.drop_constraint(_UNIQUE, type_="unique")
        batch.create_unique_constraint(_UNIQUE, [*_PLACE, "revision"])
        batch.drop_column("protocol")
    _create_partial(*_BEFORE, "made_in", "pinned", "id")
