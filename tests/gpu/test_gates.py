"""Planted bugs through the gates, with processes that launch nothing; and the guide's figures of the real run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernels.rules import violation
from tests.soak import certify
from tests.soak.gates import process, table
from tests.soak.gates import run as gates
from tests.soak.gates.builds import FIRST, SM_COUNT, TUNED, Plan, Row, rows_of, stress_plans
from tuner.gpu.memcheck import SanitizerReport
from tuner.gpu.soak import SoakReport
from tuner.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "h200" / "gates.json"
GUIDE = (ROOT / "docs" / "guides" / "trust.md").read_text(encoding="utf-8")


# What the modules of a bug do at the tuned size, and in its stress builds.
DOES = {
    "wrong_row": ("wrong", "wrong"),
    "epilogue_restart": ("clean", "wrong"),
    "illegal_address": ("crashes", "dies"),
    "expect_tx": ("hangs", "hangs"),
}


HEALTHY = Row(fault="", setup=FIRST)


class StubBuilds:
    """Compiles nothing: the path of a module says what it does."""

    def __init__(self, rows: list[Row], folder: str, processes: int) -> None:
        self.rows = rows

    def get(self, row: Row, plan: Plan) -> dict[str, Any]:
        """See Builds."""
        at_tuned, stressed = DOES.get(row.fault, ("clean", "clean"))
        # the race shows in every third stress build
        shows = at_tuned if plan.label == TUNED else stressed if plan.problem.k == 64 else "clean"
        rules = ["staging reuse"] if row.fault == "epilogue_restart" else []
        found = {"rules": rules, "findings": rules, "unjudged": [], "wall_s": 0.5}
        return {"path": shows, "sha256": "", "toolchain": "none", "structure": found}

    def job(self, row: Row, plan: Plan) -> dict[str, Any]:
        """See Builds."""
        return plan.job(self.get(row, plan), self.get(HEALTHY, plan))

    def close(self) -> None:
        """See Builds."""


@pytest.fixture(scope="module")
def stubbed() -> Iterator[pytest.MonkeyPatch]:
    """Nothing is compiled, nothing is launched."""
    soaked = SoakReport(verdict=Verdict.CLEAN, detail="10000 launches", gpu_s=2.0)
    report = SanitizerReport(ran=True, errors=0, version="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "STALL_S", 0.5)
        patch.setattr(gates, "GateProcess", partial(process.GateProcess, "tests.soak.gates.fake_child"))
        patch.setattr(gates, "Builds", StubBuilds)
        patch.setattr(gates, "soak", lambda job, stall_s: soaked)
        patch.setattr(gates, "sanitize", lambda tool, launches, timeout_s: report)
        yield patch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, stubbed: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run of four bugs, as stored."""
    folder = tmp_path_factory.mktemp("gates")
    gates.run(folder, faults=list(DOES), limit_s=100.0, processes=1)
    stored: dict[str, Any] = json.loads((folder / "gates.json").read_text())
    return stored


def test_each_bug_is_caught_by_the_gates_that_see_it_and_the_healthy_kernel_by_none(found: dict[str, Any]) -> None:
    """One hangs, one loses the context, one is wrong at once, one only in stress builds."""
    caught = {name: table.caught_by(row) for name, row in found["rows"].items()}
    assert caught == {
        "healthy": [],
        "wrong_row": ["comparison", "stress"],
        "epilogue_restart": ["stress", "structure"],
        "illegal_address": ["comparison", "stress"],
        "expect_tx": ["comparison"],
    }
    assert found["rows"]["expect_tx"]["stress"] == {"not_run": gates.HANGS}
    assert found["rows"]["expect_tx"]["memcheck"] == {"not_run": gates.HANGS}
    assert found["rows"]["epilogue_restart"]["soak"]["verdict"] == "clean"
    assert found["rows"]["illegal_address"]["stress"]["crashed"].startswith("the process ended with status 7")
    assert len(found["rows"]["healthy"]["stress"]["builds"]) == len(stress_plans(HEALTHY))
    assert found["cost"]["builds"][0]["build"] == TUNED


def test_table_has_a_row_for_each_bug_and_one_for_the_cost(found: dict[str, Any]) -> None:
    """In the order of the run."""
    lines = table.table(found).splitlines()
    assert [line.split(":")[0] for line in lines[2:-1]] == [f"| {name}" for name in found["rows"]]
    row = next(line for line in lines if line.startswith("| epilogue_restart"))
    builds = [plan for plan in stress_plans(Row(fault="epilogue_restart", setup=FIRST)) if plan.problem.k == 64]
    assert f"| - | - | {len(builds)} of 23 builds, up to 7 of 100 | staging reuse | - | - | - |" in row
    assert "| hangs | (not run) | (not run) |" in next(line for line in lines if line.startswith("| expect_tx"))
    assert lines[-1].startswith("| seconds, healthy kernel |")


def test_row_that_was_not_reached_says_so(found: dict[str, Any]) -> None:
    """A run that was cut still has a table."""
    cut = found | {"rows": found["rows"] | {"no_full_wait": {"meaning": "consumers do not wait for tma2mma"}}}
    assert table.table(cut).splitlines()[-2].count("(not run)") == len(table.GATES)
    assert table.caught_by(cut["rows"]["no_full_wait"]) == []


def test_run_that_was_cut_goes_on_where_it_stopped(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are complete are not built again."""
    asked: list[Row] = []
    monkeypatch.setattr(StubBuilds, "__init__", lambda self, rows, folder, processes: asked.extend(rows))
    cut = json.loads(json.dumps(found))
    del cut["rows"]["wrong_row"]["racecheck"]
    (tmp_path / "gates.json").write_text(json.dumps(cut))
    again = gates.run(tmp_path, faults=list(DOES), limit_s=100.0, processes=1)
    assert [row.name for row in asked] == ["wrong_row"]
    assert again["rows"]["wrong_row"]["racecheck"]["ran"]


def test_rows_stand_behind_the_healthy_kernel_of_their_setup() -> None:
    """Bugs of the template as it is, each once, in the setup that has the code they are planted in."""
    from kernels.gemm_sm90 import EVERY_FAULT

    rows = rows_of(EVERY_FAULT)
    assert {row.fault for row in rows if row.fault} == set(EVERY_FAULT)
    assert len({row.name for row in rows}) == len(rows)
    assert all(violation(row.setup.problem, row.setup.config, SM_COUNT) is None for row in rows)
    seen = []
    for row in rows:
        assert row.fault == "" or row.setup in seen, row.name
        seen.append(row.setup)


def test_guide_shows_the_recorded_run_or_says_that_there_is_none() -> None:
    """No figure stands in the guide that was not measured."""
    shown = GUIDE.split("<!-- gates:begin -->\n")[1].split("<!-- gates:end -->")[0]
    if not RECORDED.is_file():
        assert shown == "Not measured yet: `results/h200/gates.json` is missing.\n"
        return
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert shown == table.table(recorded)
    rows = recorded["rows"]
    assert recorded["environment"]["gpu_name"] == "NVIDIA H200"
    assert len(rows) >= 1 + 12
    for name, row in rows.items():
        assert bool(table.caught_by(row)) != name.startswith("healthy"), name
    race = table.caught_by(rows["epilogue_restart"])
    assert "comparison" not in race
    assert {"stress", "structure"} <= set(race)
    assert table.caught_by(rows["early_release"]) == ["structure"]  # the guide says so of both
    assert table.caught_by(rows["init_without_cluster_barrier"]) == ["structure", "soak"]


def test_guide_says_what_certifying_cost_in_the_recorded_run() -> None:
    """Seconds of each check, from the file."""
    recorded = json.loads((ROOT / "results" / "h200" / "certify.json").read_text(encoding="utf-8"))
    shown = GUIDE.split("<!-- certify:begin -->\n")[1].split("<!-- certify:end -->")[0]
    assert shown == certify.table(recorded)
    assert recorded["environment"]["gpu_name"] == "NVIDIA H200"
    assert all(row["certified"] for row in recorded["rows"])
    assert {check["name"] for check in recorded["rows"][0]["checks"]} == {"structure", "stress", "soak", "memcheck"}
