"""Keys of configs of any length: one knob more made them longer than 255 characters, which PostgreSQL refuses.

Revision: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_SHORT, _LONG = sa.String(length=255), sa.Text()


def upgrade() -> None:
    """SQLite takes any length in any text column, so its table stays as it is."""
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("trials", "config_key", existing_type=_SHORT, type_=_LONG, existing_nullable=False)


def downgrade() -> None:
    """The column stays wide: nothing that is stored may be cut, and an older version reads it all the same."""
