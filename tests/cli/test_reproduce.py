"""`gemm-tuner reproduce` on invented devices: ids, files, everything; exit status and JSON."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tuner import recorded
from tuner.cli import watch
from tuner.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]

SHAPES = ("64x128x64", "128x128x64")
TUNE = ("--arch", "sm_90a", "--trials", "5", "--json")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with two published results, made once: each test works on a copy."""
    folder = tmp_path_factory.mktemp("tuned") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMM_TUNER_HOME", str(folder))
        patch.setenv("GEMM_TUNER_ENGINE", "fake")
        patch.setenv("GEMM_TUNER_FAKE_SCALE", "0")
        patch.delenv("GEMM_TUNER_DATABASE_URL", raising=False)
        patch.setattr(watch, "POLL_S", 0.05)
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(("tune", *SHAPES, *TUNE)) == 0
        yield folder


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented devices that take no time."""
    monkeypatch.setenv("GEMM_TUNER_ENGINE", "fake")
    monkeypatch.setenv("GEMM_TUNER_FAKE_SCALE", "0")
    monkeypatch.setattr(watch, "POLL_S", 0.05)


@pytest.fixture
def copied(tuned: Path, home: Path) -> Path:
    """The home of this test, with the two results."""
    shutil.copytree(tuned, home)
    return home


@pytest.mark.usefixtures("copied")
def test_published_result_is_reproduced_by_its_id(cli: Cli) -> None:
    """E10: the command that ships with a result, and its report."""
    best = cli("best", SHAPES[0], "--arch", "sm_90a", "--json").document
    ran = cli("reproduce", best["result_id"], "--json")
    assert ran.status == 0, ran.err
    document = ran.document
    (row,) = document["rows"]
    assert (document["reproduced"], document["of"], document["device"]) == (1, 1, "Fake H200")
    assert row["reproduced"]
    assert row["module"] == "stored"
    assert row["stored"]["ratio"] == best["ratio"]["cublaslt_best"]
    assert f"result {best['result_id']}: reproduced: the 95 % intervals overlap" in ran.err


@pytest.mark.usefixtures("copied")
def test_recorded_file_is_reproduced_row_by_row_and_a_false_row_fails_the_command(cli: Cli, tmp_path: Path) -> None:
    """Results of another day travel as a file; exit status 1 says that one does not hold."""
    target, report = tmp_path / "dev.json", tmp_path / "report.json"
    assert cli("results", "record", str(target)).status == 0
    content = recorded.read(target)
    assert all(len(row["samples_us"]) == 9 for row in content["rows"])
    good = cli("reproduce", str(target), "-o", str(report))
    assert good.status == 0, good.err
    assert "2 of 2 reproduced on Fake H200" in good.out
    assert json.loads(report.read_text())["reproduced"] == 2
    pairs = content["rows"][0]["baseline_samples_us"]
    pairs["cublaslt_best"] = [1.05 * sample for sample in pairs["cublaslt_best"]]
    recorded.write(target, content)
    bad = cli("reproduce", str(target))
    assert bad.status == 1
    assert "1 of 2 reproduced" in bad.out
    assert "dev.json 64x128x64 bf16: not reproduced: the medians differ by" in bad.err


@pytest.mark.usefixtures("copied")
def test_everything_that_is_published_can_be_reproduced_at_once(cli: Cli) -> None:
    """The newest revision of each problem, at most as many as asked."""
    assert cli("reproduce", "--all", "--json").document["of"] == 2
    assert cli("reproduce", "--all", "--limit", "1", "--json").document["of"] == 1


@pytest.mark.usefixtures("copied")
def test_machine_without_a_gpu_is_told_in_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is needed where the command runs."""
    target = tmp_path / "dev.json"
    cli("results", "record", str(target))
    monkeypatch.setenv("GEMM_TUNER_ENGINE", "local")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran = cli("reproduce", str(target))
    assert ran.status == 1
    assert "no sm_90a GPU on this machine to measure on (GPUs here: none)" in ran.error_line
    assert "run this where the tuner's GPU is" in ran.error_line


@pytest.mark.usefixtures("copied")
def test_modeled_result_is_refused(cli: Cli) -> None:
    """Nothing was measured, so nothing can be measured again."""
    modeled = cli("tune", SHAPES[0], *TUNE, "--mode", "model").document["results"][0]
    ran = cli("reproduce", modeled["id"])
    assert ran.status == 2
    assert "it was not measured" in ran.error_line


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "name results or files, or say --all"),
        (("--all", "0" * 32), 2, "name results or files, or say --all"),
        (("0" * 32,), 2, "no result"),
        (("no/such/file.json",), 2, "'no/such/file.json' is no result id and no file"),
        (("--all",), 1, "no published result to reproduce"),
        (("--all", "--limit", "0"), 2, "not a whole number above zero"),
    ],
)
def test_what_cannot_be_reproduced_is_one_line(cli: Cli, arguments: tuple[str, ...], status: int, message: str) -> None:
    """Exit status 2 for a wrong request, 1 when there is nothing yet."""
    ran = cli("reproduce", *arguments)
    assert ran.status == status
    assert message in ran.error_line


@pytest.mark.usefixtures("copied")
def test_tune_says_plainly_how_the_winner_compares_with_the_vendor_library(cli: Cli) -> None:
    """The ratio is part of the answer, and slower is called slower."""
    again = cli("tune", SHAPES[0], *TUNE[:-1])
    best = cli("best", SHAPES[0], "--arch", "sm_90a", "--json").document
    ratio = best["ratio"]["cublaslt_best"]
    word = "slower than" if ratio["high"] < 1 else "faster than" if ratio["low"] > 1 else "as fast as"
    assert best["verdict"].startswith(f"{word} cublaslt_best")
    assert f"{SHAPES[0]} bf16: {best['verdict']}; result {best['result_id']}" in again.out
