"""`token create|list|revoke`: who may talk to a service that listens beyond this machine. Needs the database itself."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from db import queries
from db.database import Database
from tuner.cli.errors import UsageError
from tuner.cli.output import Output

if TYPE_CHECKING:
    import argparse

    from db.models import Token
    from tuner.cli.settings import Settings

# Names go into logs and headers.
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create(args: argparse.Namespace, settings: Settings) -> None:
    """Print a new token, once: only its hash is kept."""
    if NAME.fullmatch(args.name) is None:
        raise UsageError(f"{args.name!r} is no name: use letters, digits, '.', '_' and '-', at most 64")
    expires_at = None if args.days is None else datetime.now(UTC) + timedelta(days=args.days)
    settings.create()
    with Database.open(settings.database_url) as database, database.write() as session:
        row, token = queries.create_token(session, args.name, args.scope, expires_at=expires_at)
        document = {**_document(row), "token": token}
    output = Output(as_json=args.json)
    output.document(document)
    output.text(token)
    output.text(f"token {row.name} allows {row.scope}{_until(row)}; it is not shown again")


def listing(args: argparse.Namespace, settings: Settings) -> None:
    """Every token ever made, without the tokens themselves."""
    settings.create()
    with Database.open(settings.database_url) as database, database.read() as session:
        rows = [_document(row) for row in queries.tokens(session)]
    output = Output(as_json=args.json)
    output.document(rows)
    columns = ("name", "scope", "state", "created_at", "expires_at", "revoked_at")
    output.table("", columns, [[row[column] for column in columns] for row in rows])


def revoke(args: argparse.Namespace, settings: Settings) -> None:
    """Make a token useless; the service notices within a second."""
    settings.create()
    with Database.open(settings.database_url) as database, database.write() as session:
        row = queries.revoke_token(session, args.name)
        document = None if row is None else _document(row)
    if document is None:
        raise UsageError(f"no token is named {args.name!r}", hint="gemm-tuner token list shows them")
    output = Output(as_json=args.json)
    output.document(document)
    output.text(f"token {args.name} is revoked")


def _document(row: Token) -> dict[str, Any]:
    over = row.expires_at is not None and row.expires_at <= datetime.now(UTC)
    return {
        "name": row.name,
        "scope": row.scope,
        "state": "revoked" if row.revoked_at else "expired" if over else "valid",
        "created_at": row.created_at.isoformat(timespec="seconds"),
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(timespec="seconds"),
        "revoked_at": None if row.revoked_at is None else row.revoked_at.isoformat(timespec="seconds"),
    }


def _until(row: Token) -> str:
    return "" if row.expires_at is None else f" until {row.expires_at:%Y-%m-%d %H:%M} UTC"
