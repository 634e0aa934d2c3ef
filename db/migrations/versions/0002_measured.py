"""What the clock saw besides the times: state and energy of the card, the noise of a final, coverage of the space.

Revision: 0002
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS: dict[str, tuple[tuple[str, Any], ...]] = {
    "studies": (("coverage", sa.JSON()),),
    "measurements": (("states", sa.JSON()), ("energy_mj", sa.JSON())),
    "results": (("noise", sa.Double()), ("aa_ratio", sa.JSON())),
}


def upgrade() -> None:
    """Add the columns; rows that are there already have none of it."""
    for table, columns in COLUMNS.items():
        for name, kind in columns:
            op.add_column(table, sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    """Drop the columns."""
    for table, columns in COLUMNS.items():
        for name, _ in columns:
            op.drop_column(table, name)
