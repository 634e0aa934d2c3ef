"""Leases of the tuner processes that share a database.

Revision: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "owners",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_owners")),
    )


def downgrade() -> None:
    """Drop it: tuners that run then recover by file locks alone."""
    op.drop_table("owners")
