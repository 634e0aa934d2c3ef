"""What a command prints: one JSON document with --json, else text for people. Nothing else writes standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pictures.svg import Picture

UNLIMITED = 10_000  # columns


class Output:
    """Standard output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, document: Any) -> None:
        """The result for programs; printed only with --json. A command calls it once."""
        if self.as_json:
            json.dump(document, sys.stdout, indent=2, default=str)
            sys.stdout.write("\n")
            sys.stdout.flush()

    def text(self, line: str = "") -> None:
        """A line for people; dropped with --json."""
        if not self.as_json:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table for people; dropped with --json. Numbers are set right, a missing value is a dash."""
        if self.as_json:
            return
        from rich.console import Console
        from rich.table import Table

        cells = [[_cell(value) for value in row] for row in rows]
        # Off a terminal rich assumes 80 columns and would break ids and reasons that a person greps for.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else UNLIMITED)
        table = Table(title=title or None, title_justify="left")
        for index, column in enumerate(columns):
            numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=False)
        for row in cells:
            table.add_row(*row)
        console.print(table)

    def picture(self, picture: Picture, file: str) -> None:
        """Write a picture to a file and say where. Raises UsageError for a file that cannot be written."""
        try:
            picture.write(Path(file))
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from error
        self.text(f"picture: {file}")


def warn(line: str) -> None:
    """A remark for people that is not the result."""
    sys.stderr.write(line + "\n")


def short(identity: str | None) -> str:
    """The first characters of an id or hash, enough to tell them apart in a table."""
    return identity[:12] if identity else "-"


def microseconds(value: float | None) -> str:
    """`175.6`, with enough digits for short kernels."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text == "-"
    return True
