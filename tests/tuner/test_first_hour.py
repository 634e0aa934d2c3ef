"""`make b200` and `make h200`, dry: on invented cards, stopped and resumed, with a kernel that fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kernels.devices import profile_named
from search_space.request import Budget
from tests.soak import first_hour
from tests.soak.first_hour import FirstHour, OtherDeviceError, report
from tuner.engine.fake import FakeEngine, FakeOptions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few trials: the invented card is no faster at searching."""
    monkeypatch.setattr(first_hour, "TUNE_BUDGET", Budget(trials=3))


def engine(name: str) -> FakeEngine:
    """An invented card that finishes at once."""
    return FakeEngine(profile_named(name), options=FakeOptions())


def hour(name: str, out: Path, wall_s: float = 600.0) -> tuple[FirstHour, list[str]]:
    """A run and what it says."""
    said: list[str] = []
    return FirstHour(engine(name), out, "command", said.append, wall_s), said


@pytest.mark.parametrize("name", ["b200", "h200"])
def test_first_hour_does_everything_once_and_resumes(name: str, tmp_path: Path) -> None:
    """Presets, 20 configs, ladder, a tuned shape, and the model held against each; a second run does nothing again."""
    out = tmp_path / "first_hour.json"
    stopped, said = hour(name, out, wall_s=-1.0)
    assert not stopped.run()
    assert said == []
    first, said = hour(name, out)
    assert first.run(), first.content["report"]["failures"]
    kinds = [row["kind"] for row in first.content["done"].values()]
    assert [kinds.count(kind) for kind in ("preset", "correctness", "ladder", "tuned")] == [3, 20, 1, 1]
    rows = first.content["report"]["rows"]
    assert len(rows) == 3 + 20 + 3 + 1
    assert all(row["modeled_over_measured"] > 0 for row in rows)
    again, said = hour(name, out)
    assert again.run()
    assert said == []
    assert json.loads(out.read_text())["done"] == first.content["done"]


def test_file_of_another_card_is_not_overwritten(tmp_path: Path) -> None:
    """Times of two cards in one file would be worth nothing."""
    out = tmp_path / "first_hour.json"
    hour("h200", out, wall_s=-1.0)[0].run()
    with pytest.raises(OtherDeviceError, match=r"name another file"):
        hour("b200", out)


def test_report_names_what_failed_and_where_the_model_is_off() -> None:
    """A kernel that hung is a failure of its row; the model is compared where there are two times."""
    right = {"kind": "preset", "shape": "8x8x8", "modeled_us": 2.0, "median_us": 1.0}
    hung = {"kind": "correctness", "shape": "9x8x8", "modeled_us": 1.0, "median_us": None}
    done = {
        "a": right | {"outcome": "MEASURED", "reason": ""},
        "b": hung | {"outcome": "TIMED_OUT", "reason": "30 s"},
    }
    found = report(done, profile_name="B200")
    assert found["further off than 15 %"] == ["preset 8x8x8"]
    assert found["failures"] == ["b: TIMED_OUT: 30 s"]
    assert [row["what"] for row in found["rows"]] == ["preset 8x8x8"]
