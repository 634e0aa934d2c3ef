"""The demo, shortened: one real candidate for each architecture, through a real service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tuner.cli.demo import PROBLEMS, Row, Wanted, _load
from tuner.cli.errors import WorkFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Ran


@pytest.mark.slow
def test_demo_exports_and_loads_one_kernel_for_each_architecture(cli: Callable[..., Ran]) -> None:
    """Posted over REST, really compiled, exported in one bundle, each module loaded in a fresh process."""
    ran = cli("demo", "--trials", "1", "--json")
    assert ran.status == 0, ran.err
    rows = ran.document["rows"]
    assert [row["arch"] for row in rows] == ["sm_100a", "sm_90a"]
    assert all(row["compiled"] >= 1 for row in rows)
    assert all(row["best"]["match"] == "exact" for row in rows)
    for row in rows:
        if "measured" not in row["best"]["evidence"]:
            assert row["verdict"] == "modeled, not checked"


def test_demo_asks_for_the_two_problems_it_promises() -> None:
    """README names them."""
    assert [(str(wanted.problem), wanted.arch) for wanted in PROBLEMS] == [
        ("4096x4096x4096 bf16", "sm_100a"),
        ("64x7168x4096 bf16", "sm_90a"),
    ]


def test_verdict_of_a_modeled_row_is_plain() -> None:
    """No wording could be taken for a measurement."""
    (wanted, _) = PROBLEMS
    assert row(wanted, ["modeled"]).verdict == "modeled, not checked"
    assert row(wanted, ["measured", "numeric"]).verdict == "measured, numeric"


def test_module_that_does_not_load_fails_the_demo(tmp_path: Path) -> None:
    """What the loader says is part of the line."""
    module = tmp_path / "broken.so"
    module.write_bytes(b"not a library")
    with pytest.raises(WorkFailed, match=r"broken\.so does not load: "):
        _load(module)


def row(wanted: Wanted, evidence: list[str]) -> Row:
    """A row with this evidence."""
    from pathlib import Path as AnyPath

    return Row(wanted=wanted, study={}, best={"evidence": evidence}, module=AnyPath("x.so"))  # type: ignore[typeddict-item]
