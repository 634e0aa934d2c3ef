"""Write the parts of the reference that the code itself knows: `make docs-generated`.

A test compares what this writes with the files in docs/reference.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.__main__ import parser as api_parser
from api.app import create_app
from api.settings import ApiSettings
from db.models import Base
from kernels.anatomy import anatomy_of
from kernels.config import CONFIG_CLASSES, GemmConfig
from kernels.errors import ConfigError
from kernels.rules import RULES
from search_space.space import choices
from search_space.starting import PRESETS, preset
from tuner.cli.parser import build_parser, commands_of
from tuner.settings import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs-generated`; edit docs/generate.py instead. -->"
SEED = 0
DRAWS = 5_000


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)]


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return " ".join(text.replace("|", "\\|").split())


def code(text: object) -> str:
    """Text as code; nothing where there is none."""
    return f"`{text}`" if text not in (None, "") else ""


# ---------------------------------------------------------------------- knobs


def knobs() -> str:
    """Every knob: what it means, its default and choices, and the rules that bind it."""
    lines = [
        "# Knobs",
        NOTE,
        "",
        "A config is one value for each knob of its architecture. *Choices* are what a study draws from; a rule may",
        "allow more, and `gemm-tuner explain CONFIG` says which rule an illegal config breaks. What each knob was",
        "measured to do stands in [the template](../explanation/template.md).",
        "",
    ]
    for arch in CONFIG_CLASSES:
        default = CONFIG_CLASSES[arch]()
        drawn = choices(arch)
        meaning = _field_lines(CONFIG_CLASSES[arch])
        rows = [
            (code(name), meaning.get(name, ""), code(getattr(default, name)), _ranges(drawn.get(name, ())))
            for name in CONFIG_CLASSES[arch].knobs()
        ]
        lines += [f"## {arch}", "", *table(("knob", "meaning", "default", "choices"), rows), ""]
        lines += [f"### Laws of {arch}", "", "Each with a case that it refuses, in the words of the rule.", ""]
        lines += [*table(("knobs", "refused"), _laws(arch)), ""]
    lines += ["## Presets", "", *table(("name", "config"), [(code(name), _preset(name)) for name in PRESETS]), ""]
    return "\n".join(lines)


def _preset(name: str) -> str:
    config = preset(name)
    return f"{config.arch.name}: " + ", ".join(f"{knob} {value}" for knob, value in config.to_dict().items())


def _field_lines(config_class: type[GemmConfig]) -> dict[str, str]:
    """`name: meaning` lines of the class docstrings, base class first."""
    found: dict[str, str] = {}
    for one in reversed(config_class.__mro__):
        text = re.sub(r"\n {8}\s*", " ", one.__doc__ or "")
        for line in text.splitlines():
            if match := re.match(r"\s*([a-z_0-9]+(?:, [a-z_0-9]+)*): (.+)", line):
                found |= dict.fromkeys(match[1].split(", "), match[2])
    return found


def _ranges(values: Sequence[Any]) -> str:
    """`2 to 16` for 2, 3, ... 16; steps are named."""
    if len(values) < 4 or not all(isinstance(value, int) for value in values):
        return ", ".join(map(str, values)) or "one value"
    parts, start = [], 0
    while start < len(values):
        end = start + 1
        step = values[end] - values[start] if end < len(values) else 0
        while end + 1 < len(values) and values[end + 1] - values[end] == step:
            end += 1
        if end - start < 3:
            parts.append(str(values[start]))
            start += 1
            continue
        parts.append(f"{values[start]} to {values[end]}" + (f" in steps of {step}" if step > 1 else ""))
        start = end + 1
    return ", ".join(parts)


def _laws(arch: str) -> list[tuple[str, str]]:
    """One refusal of each rule, found by trying configs near the legal ones; the search is the same each time."""
    rng, found = random.Random(SEED), dict[int, str]()
    values = {name: _widened(choices(arch).get(name, (getattr(CONFIG_CLASSES[arch](), name),))) for name in
              CONFIG_CLASSES[arch].knobs()}  # fmt: skip
    for _ in range(DRAWS):
        try:
            config = CONFIG_CLASSES[arch](**{name: rng.choice(some) for name, some in values.items()})
        except ConfigError:
            continue
        # In the order of the rules: a later one may count on those before it.
        broken = next(((place, reason) for place, rule in enumerate(RULES[arch]) if (reason := rule(config))), None)
        if broken:
            found.setdefault(*broken)
        if len(found) == len(RULES[arch]):
            break
    return [(", ".join(map(code, _named(arch, found[place]))), found[place]) for place in sorted(found)]


def _widened(values: Sequence[Any]) -> list[Any]:
    """The choices, and for numbers a little beyond them."""
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return [*values, max(numbers) + 1, max(numbers) * 2, min(numbers) + 1] if numbers else list(values)


def _named(arch: str, reason: str) -> list[str]:
    words = set(re.findall(r"[a-z_0-9]+", reason))
    shared = {"pipe_depth", "blk_m", "blk_n", "blk_k", "num_consumers", "epi_n", "epi_stages"}
    named = [name for name in CONFIG_CLASSES[arch].knobs() if name in words]
    return named or [name for name in CONFIG_CLASSES[arch].knobs() if name in shared]


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
    lines = [f"Body `{name}`: {_cell(schema.get('description', ''))}", ""]
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
        meaning = _field_lines(mapper.class_)
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
