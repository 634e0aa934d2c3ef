"""Withdrawn results: published, and found to be bad by a later study.

Revision: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_INDEX = "ix_results_withdrawn_at"


def upgrade() -> None:
    """Add the columns; nothing that is there already is withdrawn."""
    op.add_column("results", sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("results", sa.Column("withdrawn_by", sa.String(length=32), nullable=True))
    op.add_column("results", sa.Column("withdrawn_reason", sa.Text(), nullable=True))
    op.create_index(
        _INDEX,
        "results",
        ["withdrawn_at"],
        sqlite_where=sa.text("withdrawn_at IS NOT NULL"),
        postgresql_where=sa.text("withdrawn_at IS NOT NULL"),
    )


def downgrade() -> None:
    """Drop them. What was withdrawn has no revision any more: a version that knows no better would hand it out."""
    op.execute("UPDATE results SET revision = NULL, published_at = NULL WHERE withdrawn_at IS NOT NULL")
    op.drop_index(_INDEX, table_name="results")
    for name in ("withdrawn_reason", "withdrawn_by", "withdrawn_at"):
        op.drop_column("results", name)
