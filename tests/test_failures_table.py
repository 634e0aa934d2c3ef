"""The tables of failures in docs/guides name a test for each id, and that test says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLES = [ROOT / "docs/guides" / name for name in ("failures.md", "failures-service.md")]
WANTED = {
    *("A1", "A2", "A3", "A4", "A6", "A7", "A9", "A10", "A11", "A14", "A15", "A17", "A19", "A21", "A23", "A24"),
    *("B1", "B2", "B3", "B5", "B6", "B7", "B9"),
    *("C1", "C2", "C3", "C5", "C7", "C8", "C9", "C11", "D1", "D2", "D3", "D6", "D7", "D8", "D10"),
    *("F1", "F4", "F5", "G1", "G4", "G6", "G7", "G8", "H1", "H2"),
    *("E1", "E2", "E3", "E4", "E6", "E7", "E9", "E10", "E12"),
}


def rows() -> dict[str, str]:
    """Last cell of each row, by id."""
    text = "\n".join(table.read_text() for table in TABLES)
    found = re.findall(r"^\| ([A-H]\d+) \|.*\|([^|]*)\|$", text, flags=re.MULTILINE)
    assert len(found) == len(dict(found)), "an id has two rows"
    return dict(found)


def test_every_id_has_a_test_or_a_reason() -> None:
    """A row may also say in words why a report does not apply; an empty one may not."""
    assert set(rows()) == WANTED
    assert all(cell.strip() for cell in rows().values())


def test_each_named_test_exists_and_its_docstring_has_the_id() -> None:
    """A test that is renamed, or no longer answers the report, is noticed here."""
    for name, cell in rows().items():
        for path, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell):
            tree = ast.parse((ROOT / path).read_text())
            found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
            assert found, f"{name}: {path} has no {function}"
            text = ast.get_docstring(found[0]) or ""
            assert re.search(rf"\b{name}\b", text), f"{name}: not in the docstring of {function}"
