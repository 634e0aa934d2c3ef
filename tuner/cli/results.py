"""`results import|export`: results as JSON lines, and studies in the T4 format of the auto-tuning community."""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db import queries
from db.database import Database
from db.models import BURST, evidence_level, utc_now
from db.queries import NewResult
from kernels.arch import arch_named
from kernels.config import config_from_dict
from kernels.devices import default_profile, profile_named
from kernels.errors import ConfigError, ProblemError
from kernels.problem import GemmProblem
from kernels.rules import violation
from search_space.request import PROTOCOL_KINDS
from tuner import t4
from tuner.cli.errors import UsageError
from tuner.cli.output import Output
from tuner.cli.remote import connected
from tuner.manifest import NEEDED_EVIDENCE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from db.models import Result
    from tuner.cli.settings import Settings

LINE_SCHEMA = 1
PAGE = 500
# Columns that mean something only in the database they come from.
LOCAL = {"study_id", "created_at"}
TEXTS = ("arch", "device_name", "environment_key")
NUMBERS = ("median_us", "modeled_us", "tflops", "max_rel_error")
OBJECTS = ("config", "environment", "baselines_us", "ratio")
LISTS = ("evidence", "interval_us", "tie_set", "checks")
MAX_NAME_CHARS = 128
MAX_KEY_CHARS = 255


def export_results(args: argparse.Namespace, settings: Settings) -> None:
    """Every result, oldest first, one JSON object a line; or, as T4, every trial of one study.

    Withdrawn ones stay here: where they were read they would be answers again.
    """
    if args.file == "-" and args.json:
        raise UsageError("--json and - both want standard output", hint="name a file, or leave --json out")
    if args.format == "t4":
        _export_t4(args, settings)
        return
    if args.study or args.url:
        raise UsageError("--study and --url are for --format t4", hint="all results of this home go into JSON lines")
    count = withdrawn = 0
    with Database.open(settings.database_url, create=False) as database, _writing(args.file) as file:
        for row in _all_results(database):
            if row.withdrawn_at is not None:
                withdrawn += 1
                continue
            file.write(json.dumps(_line(row), sort_keys=True) + "\n")
            count += 1
    left_out = f", without {withdrawn} that were withdrawn" if withdrawn else ""
    _say(args, {"file": args.file, "results": count, "withdrawn": withdrawn}, f"{args.file}: {count} results{left_out}")


def _export_t4(args: argparse.Namespace, settings: Settings) -> None:
    if not args.study:
        raise UsageError("T4 is about one study", hint="add --study ID; gemm-tuner show JOB lists the studies of a job")
    with connected(args, settings) as client:
        study = client.study(args.study)
        trials = client.trials(args.study)
    content = t4.document(study, trials)
    with _writing(args.file) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    _say(args, {"file": args.file, "trials": len(trials)}, f"{args.file}: {len(trials)} trials")


@contextmanager
def _writing(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdout
        return
    try:
        with Path(name).open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}") from error


def _say(args: argparse.Namespace, document: dict[str, Any], line: str) -> None:
    if args.file == "-":
        return
    output = Output(as_json=args.json)
    output.document(document)
    output.text(line)


def import_results(args: argparse.Namespace, settings: Settings) -> None:
    """Add results as candidates: their modules stay behind, and nothing is published on the word of a file.

    What a check found holds for the machine that ran it, so evidence beyond a measured time is left behind too.

    Everything is checked before the first is stored. A result that is here already is skipped.
    """
    try:
        text = Path(args.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {args.file}: {error}") from error
    wanted = _read_t4(args, text) if args.format == "t4" else _read_lines(args.file, text)
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
    """Oldest first, page by page, so that a file read back has the same newest ones."""
    after: str | None = None
    with database.read() as session:
        while rows := queries.results(session, limit=PAGE, after=after, oldest_first=True):
            yield from rows
            after = rows[-1].id
            session.expunge_all()  # a million of them would stay in memory


def _line(row: Result) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(NewResult) if field.name not in LOCAL}
    return {"schema": LINE_SCHEMA, "created_at": row.created_at.isoformat(), **values}


# ------------------------------------------------------------------------------------------------ JSON lines


def _read_lines(file: str, text: str) -> Sequence[NewResult]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [_read_line(file, number, line) for number, line in lines]


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
        return _checked(values)
    except (KeyError, TypeError, ValueError, ProblemError, ConfigError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
        raise UsageError(f"{place} {detail}") from error


def _checked(values: dict[str, Any]) -> NewResult:
    """Raises KeyError for a field that is missing, and what its own type raises for one that is wrong."""
    problem = GemmProblem(**{name: values[name] for name in ("m", "n", "k", "dtype", "layout")})
    config = config_from_dict(values["arch"], values["config"])
    _check_types(values)
    if broken := violation(problem, config, _sm_count(values)):
        raise ConfigError(f"the config cannot serve {problem}: {broken}")
    evidence_level(values["evidence"])
    if values.get("protocol", BURST) not in PROTOCOL_KINDS:
        raise ValueError(f"protocol = {values['protocol']!r}: use one of {', '.join(PROTOCOL_KINDS)}")
    values["evidence"] = [word for word in values["evidence"] if word not in NEEDED_EVIDENCE]
    created_at = datetime.fromisoformat(values.pop("created_at"))
    if created_at.tzinfo is None:
        raise ValueError(f"created_at = {created_at.isoformat()} has no time zone")
    return NewResult(**values, created_at=created_at)


def _check_types(values: dict[str, Any]) -> None:
    """What is stored as it stands must be what readers take it for. Raises TypeError, ValueError naming the field."""
    for names, kind in ((TEXTS, str), (OBJECTS, dict), (LISTS, list)):
        for name in names:
            if values.get(name) is not None and not isinstance(values[name], kind):
                raise TypeError(f"{name} must be {kind.__name__}, got {type(values[name]).__name__}")
    for name in NUMBERS:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite")
    if len(values["device_name"]) > MAX_NAME_CHARS or len(values.get("environment_key") or "") > MAX_KEY_CHARS:
        raise ValueError("device_name or environment_key is too long")


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


# ------------------------------------------------------------------------------------------------ T4


def _read_t4(args: argparse.Namespace, text: str) -> Sequence[NewResult]:
    """The best correct configuration of the file. Raises UsageError."""
    try:
        content = t4.read(text)
        config, time_us = t4.best_config(content)
        return [_from_t4(args, content.get("metadata"), config, time_us)]
    except t4.T4Error as error:
        raise UsageError(f"{args.file} {error}") from error
    except (TypeError, ValueError, KeyError, ProblemError, ConfigError) as error:
        raise UsageError(f"{args.file}: {error}") from error


def _from_t4(args: argparse.Namespace, metadata: Any, config: dict[str, Any], time_us: float) -> NewResult:
    """Where the file was written by another tuner, the command line says which problem and device it is about."""
    told = metadata if isinstance(metadata, dict) else {}
    if args.shape:
        problem = GemmProblem.parse(args.shape, dtype=args.dtype)
    elif isinstance(told.get("problem"), dict):
        problem = GemmProblem(**told["problem"])
    else:
        raise UsageError("the file does not say which problem it is about", hint="add --shape MxNxK, and --dtype")
    device = args.device or told.get("device")
    if not device:
        raise UsageError("the file does not say which device it is about", hint="add --device NAME")
    arch = told.get("arch") or profile_named(device).arch.name
    name = profile_named(device).name if args.device else device
    modeled = told.get("mode") == "model"
    return _checked(
        {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "dtype": problem.dtype.value,
            "layout": problem.layout.value,
            "arch": arch,
            "device_name": name,
            "config": config,
            # A file cannot show that a kernel was right: a time is all that is taken over.
            "evidence": ["modeled" if modeled else "measured"],
            "environment": told.get("environment") or {},
            ("modeled_us" if modeled else "median_us"): time_us,
            "created_at": utc_now().isoformat(),
        }
    )
