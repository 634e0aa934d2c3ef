"""Run by Alembic: migrate over the connection that `db.schema` hands in, inside its transaction."""

from __future__ import annotations

from alembic import context

from db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite cannot alter most of a table in place; batch mode copies it.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
