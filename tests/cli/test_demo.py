"""The demo, shortened: one real candidate for each architecture, through a real service."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import ROOT
from tuner.cli.demo import PROBLEMS, Row, Wanted, _load
from tuner.cli.errors import WorkFailed
from tuner.client import Client, ClientError

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


def test_failed_demo_keeps_its_state_and_says_where(
    cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's log explains a failure; it must not vanish with the temporary folder."""

    def failing(*_: object, **__: object) -> None:
        raise WorkFailed("no candidate worked")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tuner.cli.demo.service", lambda home: nullcontext("http://127.0.0.1:1"))
    monkeypatch.setattr("tuner.cli.demo._run", failing)
    ran = cli("demo")
    assert ran.status == 1
    (kept,) = tmp_path.glob("gemm-tuner-demo-*")
    assert "no candidate worked" in ran.error_line
    assert str(kept) in ran.error_line


def row(wanted: Wanted, evidence: list[str]) -> Row:
    """A row with this evidence."""
    from pathlib import Path as AnyPath

    return Row(wanted=wanted, study={}, best={"evidence": evidence}, module=AnyPath("x.so"))  # type: ignore[typeddict-item]


@pytest.mark.slow
def test_service_of_a_killed_demo_ends_with_it(tmp_path: Path) -> None:
    """Even a demo that cannot clean up after itself leaves no process on a port."""
    code = (
        "import os, signal, sys; from pathlib import Path; from tuner.cli.demo import service\n"
        "with service(Path(sys.argv[1])) as url:\n"
        "    print(url, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    url = done.stdout.strip()
    assert url, done.stderr
    deadline = time.monotonic() + 30
    with Client(url, timeout_s=2.0) as client:
        while time.monotonic() < deadline:
            try:
                client.health()
            except ClientError:
                return
            time.sleep(0.2)
    pytest.fail("the service still answers")


@pytest.mark.parametrize(("also", "refused"), [("torch", False), ("kernels", True)])
def test_loading_needs_nothing_of_ours(
    also: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apache-tvm-ffi itself imports torch where it is installed; a module that needs our packages is no export."""
    (tmp_path / f"{also}.py").touch()
    (tmp_path / "tvm_ffi.py").write_text(f"import {also}\ndef load_module(path):\n    return {{'gemm': print}}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkFailed, match=r"kernels") if refused else nullcontext():
        _load(tmp_path / "any.so")
