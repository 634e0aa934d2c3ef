"""`db backup|restore|upgrade` and `results import|export`. These need the database itself, not a service."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db import queries, schema
from db.backup import backup as copy_database
from db.backup import restore as restore_database
from db.database import Database
from db.queries import NewResult
from kernels.arch import arch_named
from kernels.config import config_from_dict
from kernels.devices import default_profile
from kernels.errors import ConfigError, ProblemError
from kernels.problem import GemmProblem
from kernels.rules import violation
from tuner.cli.errors import UsageError
from tuner.cli.output import Output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from db.models import Result
    from tuner.cli.settings import Settings

LINE_SCHEMA = 1
PAGE = 500
# Columns that mean something only in the database they come from.
LOCAL = {"study_id", "created_at"}


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


def export_results(args: argparse.Namespace, settings: Settings) -> None:
    """Every result, oldest first, one JSON object a line."""
    if args.file == "-" and args.json:
        raise UsageError("--json and - both want standard output", hint="name a file, or leave --json out")
    with Database.open(settings.database_url, create=False) as database:
        rows = list(_all_results(database))
    text = "".join(json.dumps(_line(row), sort_keys=True) + "\n" for row in reversed(rows))
    if args.file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(args.file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {args.file}: {error.strerror}") from error
    output = Output(as_json=args.json)
    output.document({"file": args.file, "results": len(rows)})
    output.text(f"{args.file}: {len(rows)} results")


def import_results(args: argparse.Namespace, settings: Settings) -> None:
    """Add results as candidates: their modules stay behind, and nothing is published on the word of a file.

    All lines are checked before the first is stored. A result that is here already is skipped.
    """
    try:
        text = Path(args.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {args.file}: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    wanted = [_read_line(args.file, number, line) for number, line in lines]
    added = 0
    settings.create()
    with Database.open(settings.database_url) as database, database.write() as session:
        for new in wanted:
            known = queries.results_exact(session, new.m, new.n, new.k, new.dtype, new.layout)
            if not any(_same(row, new) for row in known):
                queries.add_result(session, new)
                added += 1
    output = Output(as_json=args.json)
    output.document({"file": args.file, "results": len(wanted), "added": added})
    output.text(f"{args.file}: {added} of {len(wanted)} results added as candidates")


def _all_results(database: Database) -> Iterator[Result]:
    """Newest first, page by page."""
    after: str | None = None
    with database.read() as session:
        while rows := queries.results(session, limit=PAGE, after=after):
            yield from rows
            after = rows[-1].id


def _line(row: Result) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(NewResult) if field.name not in LOCAL}
    return {"schema": LINE_SCHEMA, "created_at": row.created_at.isoformat(), **values}


def _read_line(file: str, number: int, line: str) -> NewResult:
    """Raises UsageError naming the line and what is wrong with it."""
    place = f"{file}, line {number}"
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.pop("schema", None) != LINE_SCHEMA:
        raise UsageError(f"{place} is not a result of schema {LINE_SCHEMA}")
    known = {field.name for field in fields(NewResult)} - {"study_id"}
    if unknown := sorted(set(values) - known):
        raise UsageError(f"{place} has an unknown field {unknown[0]!r}")
    try:
        problem = GemmProblem(**{name: values[name] for name in ("m", "n", "k", "dtype", "layout")})
        config = config_from_dict(values["arch"], values["config"])
        if broken := violation(problem, config, _sm_count(values)):
            raise ConfigError(f"the config cannot serve {problem}: {broken}")
        created_at = datetime.fromisoformat(values.pop("created_at"))
        return NewResult(**values, created_at=created_at)
    except (KeyError, TypeError, ValueError, ProblemError, ConfigError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
        raise UsageError(f"{place} {detail}") from error


def _sm_count(values: dict[str, Any]) -> int:
    """SMs of the device of the result: as recorded, else of the data sheet."""
    recorded = (values.get("environment") or {}).get("sm_count")
    return recorded if isinstance(recorded, int) else default_profile(arch_named(values["arch"])).sm_count


def _same(row: Result, new: NewResult) -> bool:
    return (row.arch, row.device_name, row.config, row.median_us, row.source_hash) == (
        new.arch,
        new.device_name,
        new.config,
        new.median_us,
        new.source_hash,
    )
