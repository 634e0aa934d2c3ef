"""`results record` and `results table`: what docs and tests read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from db import queries
from db.database import Database
from db.queries import NewResult
from kernels.config import Sm90GemmConfig
from search_space.request import Budget, TuneRequest
from tests.soak.studies import new_study
from tests.tuner.support import PROBLEM
from tuner import recorded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]


def publish(home: Path, *, m: int = 64, ratio: float = 1.1) -> None:
    """Put a published result of a finished study into the database."""
    home.mkdir(exist_ok=True)
    request = TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=4), seed=m)
    ratios = {name: {"median": ratio, "low": ratio - 0.01, "high": ratio + 0.01} for name in ("torch", "cublaslt_best")}
    with Database.open(f"sqlite:///{home / 'gemm-tuner.db'}") as database, database.write() as session:
        job = queries.create_job(session, request={}, mode="measure", studies=[new_study(request)])
        study = queries.studies_of_job(session, job.id)[0]
        stored = queries.add_result(
            session,
            NewResult(
                m=m,
                n=128,
                k=256,
                dtype="bf16",
                layout="NT",
                arch="sm_90a",
                device_name="NVIDIA H200",
                study_id=study.id,
                config=Sm90GemmConfig().to_dict(),
                evidence=["measured", "numeric", "checked"],
                environment={"gpu_name": "NVIDIA H200"},
                median_us=5.5,
                interval_us=[5.4, 5.6],
                baselines_us={"torch": 6.0, "cublaslt_best": 6.0},
                ratio=ratios,
                checks=[{"name": "stress", "verdict": "clean", "detail": "", "tool": ""}],
                tflops=1.0,
                trials=4,
            ),
        )
        queries.publish_result(session, stored.id)


def test_recorded_file_holds_each_published_result_with_its_environment(cli: Cli, home: Path, tmp_path: Path) -> None:
    """One row a problem, in the layout that docs and tests read."""
    publish(home)
    target = tmp_path / "dev.json"
    ran = cli("results", "record", str(target), "--json")
    assert (ran.status, ran.document["rows"]) == (0, 1)
    content = json.loads(target.read_text())
    (row,) = content["rows"]
    assert content["protocol"]["kind"] == "burst"
    assert (row["m"], row["n"], row["k"], row["dtype"]) == (64, 128, 256, "bf16")
    assert row["ratio"] == {"torch": 1.1, "cublaslt_best": 1.1}
    assert row["environment"] == {"gpu_name": "NVIDIA H200"}
    assert row["checks"][0]["verdict"] == "clean"
    assert row["baselines_us"] == {"torch": 6.0, "cublaslt_best": 6.0, "triton": None}


def test_recording_again_keeps_the_rows_of_other_problems(cli: Cli, home: Path, tmp_path: Path) -> None:
    """A campaign spans days: rows of problems that are not in this database stay; newer revisions replace old ones."""
    target = tmp_path / "dev.json"
    publish(home)
    cli("results", "record", str(target))
    content = recorded.read(target)
    elsewhere = dict(content["rows"][0], m=1)
    recorded.write(target, dict(content, rows=[elsewhere, *content["rows"]]))
    publish(home, ratio=1.2)
    assert cli("results", "record", str(target)).status == 0
    rows = recorded.read(target)["rows"]
    assert [(row["m"], row["revision"], row["ratio"]["torch"]) for row in rows] == [(1, 1, 1.1), (64, 2, 1.2)]


def test_nothing_published_is_said_and_no_file_is_written(cli: Cli, home: Path, tmp_path: Path) -> None:
    """Exit status 1: the request was right, there is only nothing yet."""
    del home
    ran = cli("results", "record", str(tmp_path / "dev.json"))
    assert ran.status == 1
    assert "no published result" in ran.error_line
    assert not (tmp_path / "dev.json").exists()


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"schema": 9, "rows": []}', '{"schema": 1, "rows": [[1]]}'])
def test_foreign_file_is_refused_and_left_alone(cli: Cli, home: Path, tmp_path: Path, text: str) -> None:
    """Neither `record` nor `table` touches a file that is not one of ours."""
    publish(home)
    target = tmp_path / "file.json"
    target.write_text(text)
    for command in ("record", "table"):
        ran = cli("results", command, str(target))
        assert ran.status == 2
        assert str(target) in ran.error_line
    assert target.read_text() == text


def test_groups_of_rows_have_their_means_and_checks() -> None:
    """By shape, and by what makes one kernel another piece of code."""
    checks = [{"name": "memcheck", "verdict": "clean"}, {"name": "soak", "detail": "10000 launches in a fresh process"}]
    row: dict[str, Any] = {"m": 8, "n": 64, "k": 64, "dtype": "bf16", "checks": checks}
    row |= {"config": {"schedule": "cooperative", "swap_ab": True, "split_k": 2, "cta_group": 1}}
    other = {"m": 4096, "n": 65, "checks": [], "config": {"schedule": "pingpong", "cta_group": 2, "share": "B"}}
    rows = [row | {"ratio": {"torch": 4.0, "cublaslt_best": value}} for value in (1.0, 4.0)]
    rows.append(row | other | {"ratio": {"torch": 1.0, "cublaslt_best": 0.5}})
    by_class = recorded.summary({"rows": rows}, "class").splitlines()
    assert by_class[2] == "| M up to 16 | 2 | 4.000 | 2.000 | 1.000 | 4.000 | 2 | 2 |"
    assert by_class[3] == "| N no multiple of 8 | 1 | 1.000 | 0.500 | 0.500 | 0.500 | 0 | 0 |"
    by_path = recorded.summary({"rows": rows}, "path").splitlines()
    assert by_path[2].startswith("| cooperative, swap_ab, split_k | 2 |")
    assert by_path[3].startswith("| pingpong, pair shares B, any N | 1 |")


def test_table_shows_each_row_and_the_geometric_mean() -> None:
    """The mean of 1 and 4 is 2."""
    row: dict[str, Any] = {
        "m": 1, "n": 2, "k": 3, "dtype": "bf16", "median_us": 1.0, "tflops": 7.0, "trials": 40,
        "baselines_us": {"torch": 4.0, "cublaslt_best": 1.0}, "evidence": ["measured"],
    }  # fmt: skip
    rows = [row | {"ratio": {"torch": value, "cublaslt_best": 1.0}} for value in (1.0, 4.0)]
    lines = recorded.table({"rows": rows}).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| 1x2x3 | bf16 | 1.00 | 7 | 4.00 | 1.00 | 1.000 | 1.000 | measured | 40 |")
    assert "geometric mean of 2" in lines[-1]
    assert "**2.000** | **1.000**" in lines[-1]
