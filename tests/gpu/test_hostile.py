"""The soak of hostile problems, without a GPU: what is refused, what is searched, what is called, and the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernels.config import Sm90GemmConfig
from kernels.devices import profile_named
from kernels.problem import GemmProblem
from kernels.rules import violation
from tests.soak.hostile import (
    ANY_ROWS,
    CONTIGUOUS,
    Search,
    calls_of,
    candidates,
    config_of,
    line_of,
    product_of,
    refusal,
    wrong,
)
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.faults import FaultKind, FaultPlan

if TYPE_CHECKING:
    from pathlib import Path


def row(m: int, n: int, k: int, *, dtype: str = "bf16", batch: int = 1, layout: str = CONTIGUOUS) -> dict[str, Any]:
    """As it stands in a file of rows."""
    return {"m": m, "n": n, "k": k, "dtype": dtype, "batch": batch, "layout": layout}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (row(255, 255, 1024, batch=128), "problem.batch"),
        (row(3, 100, 1000, layout="A is t().T of a [K,M] tensor (M contiguous)"), "layout"),
        (row(512, 1024, 64, dtype="fp8"), "dtype"),
        (row(1, 2**31, 2), "n"),
        (row(128, 128, 0), "k"),
    ],
)
def test_what_is_not_served_is_refused_by_the_name_of_its_field(asked: dict[str, Any], field: str) -> None:
    """A person who reads the message knows what to change."""
    assert refusal(asked).startswith(f"{field}: ")


@pytest.mark.parametrize("asked", [row(1000, 999, 1001), row(8388353, 2, 1), row(46341, 46341, 64), row(1, 1, 131072)])
def test_any_extent_is_taken_and_has_candidates(asked: dict[str, Any]) -> None:
    """M, N and K from 1 up, of any alignment."""
    problem = product_of(asked)
    assert refusal(asked) == ""
    assert problem is not None
    configs = candidates(problem)
    assert len(configs) > 10
    assert all(violation(problem, config, 132) is None for config in configs)


def test_batched_row_is_searched_without_its_batch() -> None:
    """M, N and K themselves are right."""
    problem = product_of(row(255, 255, 1024, batch=128))
    assert problem is not None
    assert problem.shape == "255x255x1024"


def test_search_races_the_candidates_and_takes_the_best_to_a_final(tmp_path: Path) -> None:
    """On an invented device: every candidate ran, and what is recorded is what a final measured."""
    profile = profile_named("h200")
    search = Search(tmp_path, limit_s=60.0)
    done = search.row(row(100, 64, 512), FakeEngine(profile, artifacts=search.store))
    found = done["search"]
    assert found["asked"] == len(candidates(GemmProblem(m=100, n=64, k=512)))
    assert found["failed"] == []
    assert found["outcome"] == "MEASURED"
    assert found["median_us"] > 0
    assert set(found["ratio"]) == {"torch", "cublaslt_best"}
    assert list(wrong({"rows": [done]})) == []


def test_search_names_what_failed(tmp_path: Path) -> None:
    """A problem none of whose candidates works is a complaint, with the reasons."""
    faults = FakeOptions(faults=FaultPlan(rates={FaultKind.NO_OP: 1.0}))
    search = Search(tmp_path, limit_s=60.0)
    done = search.row(row(100, 64, 512), FakeEngine(profile_named("h200"), options=faults, artifacts=search.store))
    assert len(done["search"]["failed"]) == done["search"]["asked"]
    assert all("WRONG_RESULT" in text for text in done["search"]["failed"])
    assert len(list(wrong({"rows": [done]}))) == 1


def test_rows_apart_and_empty_products_are_called_in_their_own_form() -> None:
    """A slice that starts between 16-byte boundaries goes through the path that takes any rows."""
    sliced = calls_of(row(2048, 128, 2400, layout="A has row stride 25272, storage offset 21940; B is contiguous"))
    assert sliced == {"kind": "rows apart", "stride": 25272, "offset": 21940}
    assert config_of(sliced, Sm90GemmConfig()) == ANY_ROWS
    padded = calls_of(row(4800, 24576, 1024, layout="A leading dimension 49344"))
    assert padded is not None
    assert config_of(padded, Sm90GemmConfig()) == Sm90GemmConfig()
    assert calls_of(row(0, 9, 7, batch=5)) == {"kind": "zero", "stride": 7, "offset": 0}
    assert calls_of(row(1000, 999, 1001)) is None


def test_line_shows_ratio_and_call_and_what_is_wrong_is_named() -> None:
    """A row that failed does not pass silently."""
    ratio = {"median": 1.25, "low": 1.2, "high": 1.3}
    search = {
        "outcome": "MEASURED", "median_us": 10.0, "ratio": {"cublaslt_best": ratio, "torch": ratio},
        "config": Sm90GemmConfig(blk_n=64).to_dict(),
    }  # fmt: skip
    done = {"row": row(2048, 128, 2400), "refusal": "", "search": search}
    done["call"] = {"kind": "rows apart", "right": True, "said": ""}
    assert line_of(done) == (
        "| 2048x128x2400 bf16 | 10.00 | 1.250 [1.200, 1.300] | 1.250 | blk_n=64 | rows apart: right |"
    )
    failed = done | {
        "call": {"kind": "rows apart", "right": False, "said": "relative error 1"},
        "search": {"failed": []},
    }
    taken = {"row": row(8, 8, 64, batch=4), "refusal": ""}
    assert list(wrong({"rows": [done]})) == []
    assert [text.partition(":")[0] for text in wrong({"rows": [failed, taken]})] == [
        "2048x128x2400", "2048x128x2400", "8x8x64"
    ]  # fmt: skip
