"""The drivers' errors, turned into ours where a person can act on them."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from db.errors import DatabaseBusy, DatabaseError, NotOurDatabase, ReadOnlyDatabase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def translated(where: str, busy_timeout_s: float) -> Iterator[None]:
    """Raise our errors in place of the driver's; constraint violations pass as they are.

    where: the file or URL that the message names
    busy_timeout_s: how long a writer waited before it gave up
    """
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseBusy(f"{where}: every connection was in use for {busy_timeout_s:g} s: try again") from error
    except (DBAPIError, sqlite3.Error) as error:
        driver_error = error.orig if isinstance(error, DBAPIError) else error
        ours = _named(driver_error, where, busy_timeout_s)
        if ours is None:
            raise
        raise ours from error


def _named(error: BaseException | None, where: str, busy_timeout_s: float) -> DatabaseError | None:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return _SQLITE_ERRORS[code](where, busy_timeout_s) if code in _SQLITE_ERRORS else None
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate in ("55P03", "40P01"):  # lock_not_available, deadlock_detected
        return DatabaseBusy(f"{where} was locked by another writer for {busy_timeout_s:g} s: try again")
    if sqlstate == "25006":  # read_only_sql_transaction
        return ReadOnlyDatabase(f"{where} is read-only: connect to the primary server")
    if type(error).__name__ == "OperationalError":
        return DatabaseError(f"{where} cannot be used: {str(error).strip()}")
    return None


_SQLITE_ERRORS: dict[int, Callable[[str, float], DatabaseError]] = {
    sqlite3.SQLITE_BUSY: lambda where, wait_s: DatabaseBusy(
        f"{where} was locked by another writer for {wait_s:g} s: try again, or stop the other program"
    ),
    sqlite3.SQLITE_READONLY: lambda where, _: ReadOnlyDatabase(
        f"{where} is read-only: make it and its folder writable"
    ),
    sqlite3.SQLITE_NOTADB: lambda where, _: NotOurDatabase(f"{where} is not a SQLite database: name another file"),
    sqlite3.SQLITE_CORRUPT: lambda where, _: DatabaseError(f"{where} is damaged: restore a backup"),
    sqlite3.SQLITE_FULL: lambda where, _: DatabaseError(f"no space left on the disk of {where}: free some, then retry"),
    sqlite3.SQLITE_CANTOPEN: lambda where, _: DatabaseError(f"cannot open {where}: check the path and its permissions"),
    sqlite3.SQLITE_IOERR: lambda where, _: DatabaseError(f"the disk of {where} failed to read or write: check it"),
}
