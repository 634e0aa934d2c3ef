"""`db backup|restore|upgrade`. These need the database itself, not a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from db import schema
from db.backup import backup as copy_database
from db.backup import restore as restore_database
from db.database import Database
from tuner.cli.output import Output

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings


def shown_url(url: str) -> str:
    """The database's address without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "a malformed URL"


def backup(args: argparse.Namespace, settings: Settings) -> None:
    """Copy the database to a new file while others use it. Raises DatabaseError."""
    target = Path(args.file)
    with Database.open(settings.database_url, create=False, migrate=False) as database:
        size_bytes = copy_database(database, target)
    output = Output(as_json=args.json)
    output.document({"file": str(target), "size_bytes": size_bytes})
    output.text(f"{target}: {size_bytes} bytes")


def restore(args: argparse.Namespace, settings: Settings) -> None:
    """Replace the database by a backup; what is there stays unless the whole backup is good. Raises DatabaseError."""
    settings.create()
    restore_database(Path(args.file), settings.database_url)
    Database.open(settings.database_url).close()  # an older backup is brought to this version's schema
    output = Output(as_json=args.json)
    place = shown_url(settings.database_url)
    output.document({"file": args.file, "database": place})
    output.text(f"{place} restored from {args.file}")


def upgrade(args: argparse.Namespace, settings: Settings) -> None:
    """Bring the schema to this version; nothing happens when it is there already."""
    Database.open(settings.database_url, create=False).close()
    output = Output(as_json=args.json)
    document = {"database": shown_url(settings.database_url), "revision": schema.HEAD}
    output.document(document)
    output.text(f"{document['database']} is at schema revision {schema.HEAD}")
