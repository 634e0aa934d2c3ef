"""Write the parts of the reference that the code itself knows: `make docs-generated`.

A test compares what this writes with the files in docs/reference.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from api.__main__ import parser as api_parser
from api.app import create_app
from api.settings import ApiSettings
from db.models import Base
from docs.knobs import knobs
from docs.markdown import NOTE, cell, code, field_lines, table
from kernels.anatomy import anatomy_of
from search_space.starting import preset
from tuner.cli.parser import build_parser, commands_of
from tuner.settings import VARIABLES

REFERENCE = Path(__file__).parent / "reference"


# ---------------------------------------------------------------------- barriers


def barriers() -> str:
    """Roles and barriers of one config of each architecture."""
    lines = [
        "# Roles and barriers of two configs",
        NOTE,
        "",
        "What `gemm-tuner explain CONFIG` says of the third step of the ladder on each architecture. Why the barriers",
        "are as they are stands in [the barrier protocol](../explanation/barriers.md).",
        "",
    ]
    for name in ("h-step9", "step9"):
        config = preset(name)
        parts = anatomy_of(config)
        roles = [
            (one.name, one.scope, one.dispatch, ", ".join(one.waits), ", ".join(one.signals)) for one in parts.roles
        ]
        rings = [
            (code(one.name), one.kind, one.slots, one.arrivals, one.arrives, one.waits, one.protects)
            for one in parts.barriers
        ]
        lines += [f"## {name} ({config.arch.name})", ""]
        lines += [*table(("role", "scope", "dispatch", "waits on", "signals"), roles), ""]
        head = ("barrier", "kind", "slots", "arrivals", "who arrives", "who waits", "protects")
        lines += [*table(head, rings), ""]
    return "\n".join(lines)


# ---------------------------------------------------------------------- REST


def rest() -> str:
    """Every route with its parameters, body and statuses."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        app = create_app(
            ApiSettings(database_url=f"sqlite:///{home / 'docs.db'}", exports_dir=home, artifacts_dir=home)
        )
        document = app.openapi()
        app.state.database.close()
    lines = [
        "# REST",
        NOTE,
        "",
        "`/openapi.json` of a running service says the same for programs, with an example of each body. Errors are",
        '`{"error": NAME, "detail": TEXT, "hint": TEXT}`. A field that is not listed is refused.',
        "",
    ]
    for path, methods in sorted(document["paths"].items()):
        for method, route in methods.items():
            lines += [f"## {method.upper()} {path}", "", f"**{route['summary']}.** {route.get('description', '')}", ""]
            lines += _parameters(route) + _body(route, document) + _answers(route)
    return "\n".join(lines)


def _parameters(route: dict[str, Any]) -> list[str]:
    rows = [
        (
            code(one["name"]),
            one["in"],
            _type(one["schema"]),
            "yes" if one.get("required") else "",
            one.get("description"),
        )
        for one in route.get("parameters", ())
    ]
    return [*table(("parameter", "in", "type", "required", "meaning"), rows), ""] if rows else []


def _yes(is_so: object) -> str:
    return "yes" if is_so else ""


def _body(route: dict[str, Any], document: dict[str, Any]) -> list[str]:
    content = route.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return []
    return _fields(content["schema"]["$ref"].rpartition("/")[2], document, seen=set())


def _fields(name: str, document: dict[str, Any], seen: set[str]) -> list[str]:
    """The fields of a body, then those of the objects in it."""
    if name in seen:
        return []
    seen.add(name)
    schema = document["components"]["schemas"][name]
    if "properties" not in schema:
        return []
    required = schema.get("required", ())
    rows = [
        (code(field), _type(one), _yes(field in required), _default(one), one.get("description"))
        for field, one in schema["properties"].items()
    ]
    lines = [f"Body `{name}`: {cell(schema.get('description', ''))}", ""]
    lines += [*table(("field", "type", "required", "default", "meaning"), rows), ""]
    for below in dict.fromkeys(re.findall(r"#/components/schemas/(\w+)", str(schema["properties"]))):
        lines += _fields(below, document, seen)
    return lines


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return (
        ""
        if value is None or isinstance(value, dict)
        else code(str(value).lower() if isinstance(value, bool) else value)
    )


def _type(schema: dict[str, Any]) -> str:
    """Type and range in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    for several in ("anyOf", "allOf"):
        if several in schema:
            return " or ".join(_type(one) for one in schema[several])
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    limits = (
        "" if low is None and high is None else f" {low if low is not None else ''}..{high if high is not None else ''}"
    )
    return f"{schema.get('type', 'any')}{limits}"


def _answers(route: dict[str, Any]) -> list[str]:
    rows = [(status, one["description"]) for status, one in sorted(route["responses"].items())]
    return [*table(("status", "when"), rows), ""]


# ---------------------------------------------------------------------- command line, settings, database


def command_line() -> str:
    """Every command with its arguments."""
    lines = [
        "# Command line",
        NOTE,
        "",
        "`--json` prints one JSON document on standard output and nothing else there. Exit status: 0 done, 1 the work",
        "failed, 2 the request was wrong; an error is one line on standard error.",
        "",
    ]
    for name, parser in commands_of(build_parser()).items():
        lines += [f"## gemm-tuner {name}", "", f"{(parser.description or '').capitalize()}.", "", *_arguments(parser)]
    return "\n".join(lines)


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        shown = ", ".join(action.option_strings) or (action.metavar or action.dest)
        value = action.metavar if action.option_strings and action.nargs != 0 else None
        if action.option_strings and action.choices:
            value = "|".join(map(str, action.choices))
        text = (action.help or "").replace("%(default)s", str(action.default))
        rows.append((code(f"{shown} {value}" if value else shown), text))
    return [*table(("argument", "meaning"), rows), ""]


def settings() -> str:
    """Environment variables, and the options of the API alone."""
    lines = [
        "# Settings",
        NOTE,
        "",
        "Read once, when a command starts. Nothing else reads the environment.",
        "",
        *table(("variable", "default", "meaning"), [(code(name), default, text) for name, default, text in VARIABLES]),
        "",
        "## The API alone",
        "",
        "`gemm-tuner serve` starts it with the tuner. Where they run apart, as in containers: `python -m api`.",
        "",
        *_arguments(api_parser()),
    ]
    return "\n".join(lines)


def database() -> str:
    """Every table with its columns."""
    lines = [
        "# Database",
        NOTE,
        "",
        "SQLite or PostgreSQL. `gemm-tuner db upgrade` brings a database to the schema of this version; a newer one is",
        "left as it is. Ids are 32 hexadecimal digits, times are UTC.",
        "",
    ]
    for mapper in sorted(Base.registry.mappers, key=lambda mapper: mapper.local_table.name):
        meaning = field_lines(mapper.class_)
        first = (mapper.class_.__doc__ or "").strip().splitlines()[0]
        rows = [
            (
                code(column.name),
                _column_type(column),
                "" if not column.nullable else "yes",
                _links(column),
                meaning.get(column.name),
            )
            for column in mapper.local_table.columns
        ]
        lines += [f"## {mapper.local_table.name}", "", first, ""]
        lines += [*table(("column", "type", "may be null", "refers to", "meaning"), rows), ""]
    return "\n".join(lines)


def _column_type(column: Any) -> str:
    kind = "time" if type(column.type).__name__ == "UtcDateTime" else str(column.type).lower()
    return f"{kind}, key" if column.primary_key else kind


def _links(column: Any) -> str:
    return ", ".join(sorted(code(key.target_fullname) for key in column.foreign_keys))


PAGES = {
    "knobs.md": knobs,
    "barriers.md": barriers,
    "rest.md": rest,
    "command-line.md": command_line,
    "settings.md": settings,
    "database.md": database,
}


def generated() -> dict[str, str]:
    """Content of each generated file, by name."""
    return {name: make().rstrip() + "\n" for name, make in PAGES.items()}


def main() -> None:
    """Write the files."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in generated().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
