"""What a search began with: starting configs, and snapshots of what was learned from other studies.

Revision: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the column; studies that are there already began with nothing that was kept."""
    op.create_table(
        "snapshots",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("arch", sa.String(length=32), nullable=False),
        sa.Column("device_name", sa.String(length=128), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_snapshots")),
    )
    op.create_index("ix_snapshots_device_name_created_at", "snapshots", ["device_name", "created_at"])
    op.add_column("studies", sa.Column("search", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("studies", "search")
    op.drop_index("ix_snapshots_device_name_created_at", table_name="snapshots")
    op.drop_table("snapshots")
