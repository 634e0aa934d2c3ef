"""`show --plots`: pictures of what a study found out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from tuner.cli import watch
from tuner.search.importance import importances

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]


@pytest.fixture
def study(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    """Id of a study of 16 trials on an invented device."""
    monkeypatch.setenv("GEMM_TUNER_ENGINE", "fake")
    monkeypatch.setenv("GEMM_TUNER_FAKE_SCALE", "0")
    monkeypatch.setattr(watch, "POLL_S", 0.05)
    ran = cli("tune", "512x1024x1024", "--arch", "sm_90a", "--trials", "16", "--sampler", "random", "--json")
    assert ran.status == 0, ran.err
    return str(ran.document["studies"][0]["id"])


def test_pictures_show_every_knob_that_varied(cli: Cli, study: str, tmp_path: Path) -> None:
    """Bars, slices, pairs and coverage, each well-formed, with the numbers of the study."""
    ran = cli("show", study, "--plots", str(tmp_path / "plots"))
    assert ran.status == 0, ran.err
    found = {path.name: path.read_text() for path in (tmp_path / "plots").iterdir()}
    assert {"importance.svg", "slices.svg", "pairs.svg", "coverage.svg"} <= set(found)
    for text in found.values():
        ElementTree.fromstring(text)
    document = cli("show", study, "--json").document
    timed = [trial for trial in document["trials"] if trial["median_us"] is not None]
    assert f"from {len(timed)} timed trials" in found["importance.svg"]
    assert f"{document['coverage']['askable']:,} configs were asked" in found["coverage.svg"]
    best = min(trial["median_us"] for trial in timed)
    assert f"{best:.2f}" in found["pairs.svg"]


def test_job_gets_a_folder_for_each_study(cli: Cli, study: str, tmp_path: Path) -> None:
    """Named by the problem."""
    (job,) = json.loads(cli("jobs", "--json").out)
    assert cli("show", job["id"], "--plots", str(tmp_path / "all")).status == 0
    assert [path.name for path in (tmp_path / "all").iterdir()] == [f"512x1024x1024-bf16-{study[:8]}"]


def test_folder_that_cannot_be_written_is_one_line(cli: Cli, study: str, tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "taken").write_text("")
    ran = cli("show", study, "--plots", str(tmp_path / "taken"))
    assert (ran.status, ran.err.count("\n")) == (2, 1)


def test_importance_is_with_the_knob_that_decides() -> None:
    """One knob makes the time, one does nothing, one never changes."""
    trials = [({"deep": d, "idle": i, "fixed": 1}, float(d)) for d in (1, 2, 4, 8) for i in ("a", "b") for _ in "xyz"]
    _, shares = importances(trials)
    assert set(shares) == {"deep", "idle"}
    assert shares["deep"] > 0.9
    assert importances([({"deep": 1}, 0.0), ({"deep": 1}, 1.0)])[1] == {}
