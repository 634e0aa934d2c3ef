"""The table of replays: cells that are kept, rows that need others, and what the Markdown says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from search_space import heuristics
from tests.tuner import synthetic
from tuner import replay_table
from tuner.replay import ReplayError, ReplayOptions
from tuner.replay_report import Plan
from tuner.replay_table import CELLS, make_table, markdown, rows, spearman

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPES = ("32x2560x5120", "512x4096x4096")
ROWS = ("random", "learned, nothing stored")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two made-up landscapes, three seeds."""
    for shape in SHAPES:
        synthetic.write(tmp_path / "landscapes", shape, size=40)
    return Plan(folder=tmp_path / "landscapes", strategies=(), seeds=2, options=ReplayOptions(trials=16, in_flight=4))


def _make(plan: Plan, folder: Path, only: tuple[str, ...] = ROWS) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    return make_table(plan, folder, processes=1, say=said.append, only=only), said


def test_table_goes_on_where_it_stopped(plan: Plan, tmp_path: Path) -> None:
    """Cells that are there are not made again, a line that was cut short is; the table is the same."""
    whole, said = _make(plan, tmp_path / "table")
    assert len(said) == len(ROWS) * len(SHAPES)
    again, said = _make(plan, tmp_path / "table")
    assert (again, said) == (whole, [])
    cells = tmp_path / "table" / CELLS
    cells.write_text(cells.read_text()[:-20])
    again, said = _make(plan, tmp_path / "table")
    assert (again, len(said)) == (whole, 1)
    again, said = _make(plan, tmp_path / "table")  # what was made since stands on a line of its own
    assert (again, said) == (whole, [])


def test_new_landscape_makes_again_what_knew_the_others(plan: Plan, tmp_path: Path) -> None:
    """Rows that use nothing of other landscapes keep their cells."""
    only = ("random", "learned")
    _make(plan, tmp_path / "table", only)
    synthetic.write(plan.folder, "64x1024x1024", size=40)
    for cached in (replay_table.arena_of, replay_table.complete.__globals__["_landscapes"]):
        cached.cache_clear()
    _, said = _make(plan, tmp_path / "table", only)
    made = [line.split(": ")[1] for line in said]
    assert sum("random on" in line for line in made) == 1
    assert sum("learned on" in line for line in made) == 3


def test_every_source_is_tried_alone_and_switched_off() -> None:
    """And every sampler without and with all of them."""
    strategies = [row.strategy for row in rows() if row.strategy is not None]
    for source in replay_table.SOURCES:
        rest = tuple(other for other in replay_table.SOURCES if other != source)
        assert any(one.sources == (source,) for one in strategies)
        assert any(one.sources == rest for one in strategies)
    for sampler in ("learned", "tpe", "gp", "cmaes", "random", "brute"):
        sources = [one.sources for one in strategies if one.sampler == sampler]
        assert {(), replay_table.SOURCES} <= set(sources)
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)


def test_row_without_its_package_is_left_out_and_says_why(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are made."""
    monkeypatch.setattr(heuristics, "_library", lambda: None)
    content, _ = _make(plan, tmp_path / "table", ("random", "heuristics alone"))
    assert content["missing"]["heuristics alone"] == "nvidia-matmul-heuristics is not installed"
    assert [row["name"] for row in content["rows"]] == ["random"]
    with pytest.raises(ReplayError, match="unknown row 'nonsense'"):
        _make(plan, tmp_path / "table", ("nonsense",))


def test_markdown_has_a_line_for_each_row_and_landscape(plan: Plan, tmp_path: Path) -> None:
    """With intervals, the exact random search, and rows that another tuner's script brought."""
    folder = tmp_path / "table"
    folder.mkdir()
    others = [
        {
            "row": "another tuner",
            "landscape": f"h200-{shape}-bf16",
            "seeds": 2,
            "shares": {"8": [0.5, 0.7], "16": [0.6, 0.8]},
            "wall_s": {},
            "trials": [16, 16],
            "scores": [0.1, 0.2],
        }
        for shape in SHAPES
    ]
    (folder / "kernel_tuner.json").write_text(json.dumps({"cells": others}))
    text = markdown(_make(plan, folder)[0])
    for name in (*ROWS, "another tuner", "random, expected exactly", *(f"h200-{shape}-bf16" for shape in SHAPES)):
        assert f"| {name} |" in text
    assert "| another tuner | 2 | 60.0 (50.0-70.0), 50.0 " in text


@pytest.mark.parametrize(
    ("change", "expected"), [(lambda x: x**3, 1.0), (lambda x: -x, -1.0), (lambda x: x // 2, 0.98)]
)
def test_rank_correlation_sees_order_alone(change: Callable[[Any], Any], expected: float) -> None:
    """Equal values share a rank."""
    values = np.arange(1.0, 9.0)
    assert spearman(values, change(values)) == pytest.approx(expected, abs=0.01)
