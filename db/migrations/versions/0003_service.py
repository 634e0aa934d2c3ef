"""Pins, environments of results, use of artifacts, tokens of the API, and what readers watch.

Revision: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NEARBY = ("current", "dtype", "layout", "arch", "n", "k", "m", "device_name", "revision", "evidence_level")


def upgrade() -> None:
    """Add tables and columns; results and artifacts that are there already get their values."""
    op.create_table(
        "changes",
        sa.Column("topic", sa.String(length=32), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("topic", name=op.f("pk_changes")),
    )
    op.execute("INSERT INTO changes (topic, number) VALUES ('answers', 0)")
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("scope IN ('read', 'submit', 'admin')", name=op.f("ck_tokens_scope")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("name", name=op.f("uq_tokens_name")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_tokens_token_hash")),
    )
    _upgrade_artifacts()
    _upgrade_results()


def _upgrade_artifacts() -> None:
    # Plain ADD COLUMN where it can be: SQLite then rewrites no row.
    op.add_column("artifacts", sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("artifacts", sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE artifacts SET last_used_at = created_at")
    with op.batch_alter_table("artifacts") as batch:
        batch.alter_column("last_used_at", existing_type=sa.DateTime(timezone=True), nullable=False)
    op.create_index("ix_artifacts_removed_at_last_used_at", "artifacts", ["removed_at", "last_used_at"])


def _upgrade_results() -> None:
    op.drop_index("ix_results_nearby", table_name="results")
    op.add_column("results", sa.Column("pinned", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("results", sa.Column("made_in", sa.String(length=255), nullable=False, server_default=""))
    # The key ends with "|" and the source hash.
    op.execute(
        "UPDATE results SET made_in = substr(environment_key, 1, length(environment_key) - length(source_hash) - 1) "
        "WHERE source_hash IS NOT NULL AND length(environment_key) > length(source_hash)"
    )
    with op.batch_alter_table("results") as batch:
        batch.alter_column("pinned", existing_type=sa.Boolean(), existing_nullable=False, server_default=None)
        batch.alter_column("made_in", existing_type=sa.String(length=255), existing_nullable=False, server_default=None)
    _create_partial("ix_results_nearby", *_NEARBY, "made_in", "pinned", "id")
    op.create_index("ix_results_artifact_sha256", "results", ["artifact_sha256"])


def _create_partial(name: str, *columns: str) -> None:
    """An index over current results alone."""
    op.create_index(
        name,
        "results",
        list(columns),
        sqlite_where=sa.text("current IS 1"),
        postgresql_where=sa.text("current IS true"),
    )


def downgrade() -> None:
    """Drop what was added. Pins are forgotten: the newest revision becomes the answer again."""
    op.drop_index("ix_results_artifact_sha256", table_name="results")
    op.drop_index("ix_results_nearby", table_name="results")
    op.execute(
        "UPDATE results SET current = NOT EXISTS ("
        "SELECT 1 FROM results AS newer WHERE newer.revision > results.revision "
        "AND newer.m = results.m AND newer.n = results.n AND newer.k = results.k AND newer.dtype = results.dtype "
        "AND newer.layout = results.layout AND newer.arch = results.arch "
        "AND newer.device_name = results.device_name) WHERE results.revision IS NOT NULL"
    )
    op.drop_column("results", "made_in")
    op.drop_column("results", "pinned")
    _create_partial("ix_results_nearby", *_NEARBY, "id")
    op.drop_index("ix_artifacts_removed_at_last_used_at", table_name="artifacts")
    op.drop_column("artifacts", "last_used_at")
    op.drop_column("artifacts", "removed_at")
    op.drop_table("tokens")
    op.drop_table("changes")
