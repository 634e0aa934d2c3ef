"""Markdown that generated pages are made of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make docs-generated`; edit docs/generate.py instead. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(cell(value) for value in row)} |" for row in rows)]


def cell(value: object) -> str:
    """A value in one line, with bars that do not end the cell."""
    text = "" if value is None else str(value)
    return " ".join(text.replace("|", "\\|").split())


def code(text: object) -> str:
    """Text as code; nothing where there is none."""
    return f"`{text}`" if text not in (None, "") else ""


def field_lines(one: type) -> dict[str, str]:
    """`name: meaning` lines of the class docstrings, base class first."""
    found: dict[str, str] = {}
    for base in reversed(one.__mro__):
        text = re.sub(r"\n {8}\s*", " ", base.__doc__ or "")
        for line in text.splitlines():
            if match := re.match(r"\s*([a-z_0-9]+(?:, [a-z_0-9]+)*): (.+)", line):
                found |= dict.fromkeys(match[1].split(", "), match[2])
    return found
