"""`db backup|restore|upgrade|forget`. These need the database itself, not a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from db import queries, schema
from db.backup import backup as copy_database
from db.backup import restore as restore_database
from db.database import Database
from tuner.cli.errors import WorkFailed
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


def forget(args: argparse.Namespace, settings: Settings) -> None:
    """Let kernels that failed in a study run again in later ones. Raises DatabaseError, WorkFailed for no failure."""
    with Database.open(settings.database_url, create=False) as database, database.write() as session:
        numbers = queries.forget_failures(session, args.study, args.trial)
    if not numbers:
        which = "" if args.trial is None else f"trial {args.trial} of "
        hint = "a KNOWN_BAD trial names the study and the trial that failed"
        raise WorkFailed(f"{which}study {args.study} has no failure that is remembered", hint=hint)
    output = Output(as_json=args.json)
    output.document({"study": args.study, "forgotten": numbers})
    output.text(f"forgotten: {len(numbers)} failures of study {args.study}; later studies try these kernels again")
