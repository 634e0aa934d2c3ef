"""Recorded rows as kernels to build again: what the soaks on a GPU start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.rules import violation
from tests.soak.published import published
from tests.soak.triton_peer import SHAPES, table

RECORDED = Path(__file__).resolve().parents[2] / "results" / "h200" / "dev.json"


def test_every_recorded_row_is_a_legal_config_of_today() -> None:
    """Knobs that came after a row was recorded have their defaults."""
    rows = published(RECORDED)
    assert len(rows) >= 72
    assert [violation(problem, config, 132) for problem, config in rows if violation(problem, config, 132)] == []


def test_shapes_of_the_peer_are_recorded_ones() -> None:
    """In the order that was asked for; an unknown one is named."""
    assert len(set(SHAPES)) == 20
    assert [problem.shape for problem, _ in published(RECORDED, SHAPES)] == list(SHAPES)
    with pytest.raises(SystemExit, match="has no row for 3x3x3"):
        published(RECORDED, ["3x3x3"])


def test_table_of_the_peer_names_both_times() -> None:
    """One line for each shape, and the mean."""
    times = {"ours": 10.0, "triton": 12.0, "torch": 11.0, "cublaslt_best": 10.5}
    row = {"shape": "1x2x3", "dtype": "bf16", "median_us": times, "over_triton": 1.2}
    lines = table({"rows": [row], "geometric_mean_over_triton": 1.2}).splitlines()
    assert lines[2] == "| 1x2x3 | bf16 | 10.00 | 12.00 | 11.00 | 10.50 | 1.200 |"
    assert lines[3].endswith("| **1.200** |")
