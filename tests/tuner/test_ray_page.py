"""The figures of docs/guides/ray.md are those of the recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "ray.md").read_text()


def row(name: str) -> tuple[dict[str, Any], str]:
    """A report, and the rows of the table that cite it; a row "the same" belongs to the one above."""
    rows: list[str] = []
    for line in PAGE.splitlines():
        if f"(../../{name})" in line or (rows and line.endswith("| the same |")):
            rows.append(line)
        elif rows:
            break
    return json.loads((ROOT / name).read_text()), "\n".join(rows)


def kills(report: dict[str, Any]) -> list[str]:
    """Nothing is lost, and how much was killed."""
    assert not report["problems"]
    assert report["done"] == report["studies"]
    return [
        f"{report['studies']} studies of {report['trials'] // report['studies']} trials",
        f"{report['kills']['node']} nodes and {report['kills']['tuner']} tuners killed in {report['wall_s']:.0f} s",
        f"{report['studies_that_moved']} studies moved",
    ]


def cost(report: dict[str, Any]) -> list[str]:
    """Of a trial, and throughput."""
    cpu_ms, local_ms = report["ray_cpu_ms_a_trial"], report["local_cpu_ms_a_trial"]
    return [
        f"{report['trials']:,} instant trials",
        f"{report['added_wall_ms_a_trial']:.1f} ms of wall time added, {report['added_cpu_ms_a_trial']:.1f} ms",
        f"tuner {cpu_ms['tuner'] - local_ms:.1f}, bridge {cpu_ms['bridge']:.1f}, nodes {cpu_ms['workers']:.1f}",
        f"{report['trials_a_minute']:,} trials a minute",
    ]


def memory(report: dict[str, Any]) -> list[str]:
    """Growth as the run judges it."""
    grown = report["growth_last_over_second_quarter"]
    return [
        f"{report['trials']:,} instant trials in {report['studies']:,} studies",
        f"tuner {grown['tuner']:.1%}, bridge {grown['bridge']:.1%}".replace("%", " %"),
        f"{report['trials_a_minute']:,} trials a minute",
    ]


def two_gpus(report: dict[str, Any]) -> list[str]:
    """Throughput and winners."""
    return [
        f"{report['gain']} times the trials a second ({report['gain_of_wall_time']} of",
        f"agree on {report['winners_agree']} of {report['shapes']} shapes",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("results/soak/ray_kills.json", kills),
        ("results/host/ray_cost.json", cost),
        ("results/soak/ray_memory.json", memory),
        ("results/h200/two_gpus.json", two_gpus),
    ],
)
def test_figures_of_the_page_are_those_of_the_recorded_runs(name: str, expected: Any) -> None:
    """Each stands in the row that names the file."""
    report, text = row(name)
    missing = [figure for figure in expected(report) if figure not in text]
    assert not missing, text
