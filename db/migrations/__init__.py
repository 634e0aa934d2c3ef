"""Alembic migrations, run by `db.schema`."""
