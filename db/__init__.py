"""Rows and named queries: what is stored, and every question asked of it. Imports none of the other packages."""

from __future__ import annotations

from db.database import Database
from db.errors import (
    DatabaseBusy,
    DatabaseError,
    IdempotencyConflict,
    MissingDatabase,
    NewerDatabase,
    NotLocalDatabase,
    NotOurDatabase,
    NotPublishable,
    OutdatedDatabase,
    ReadOnlyDatabase,
)

__all__ = [
    "Database",
    "DatabaseBusy",
    "DatabaseError",
    "IdempotencyConflict",
    "MissingDatabase",
    "NewerDatabase",
    "NotLocalDatabase",
    "NotOurDatabase",
    "NotPublishable",
    "OutdatedDatabase",
    "ReadOnlyDatabase",
]
