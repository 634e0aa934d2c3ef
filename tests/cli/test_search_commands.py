"""`landscape` and `replay` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tuner import synthetic
from tuner.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two made-up landscapes, and a home of its own."""
    monkeypatch.setenv("GEMM_TUNER_HOME", str(tmp_path / "home"))
    for shape in ("32x2560x5120", "512x4096x4096"):
        synthetic.write(tmp_path / "landscapes", shape, size=60)
    return tmp_path / "landscapes"


def test_list_says_what_was_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a landscape; with --json one document."""
    assert main(["landscape", "list", "--dir", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["landscapes"]
    assert [one["name"] for one in found] == ["h200-32x2560x5120-bf16", "h200-512x4096x4096-bf16"]
    assert all(one["configs"] == one["rows"] == 60 and one["synthetic"] for one in found)


def test_replay_writes_document_and_pictures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output holds the document alone; progress goes to standard error."""
    target, plots = tmp_path / "replay.json", tmp_path / "plots"
    command = ["replay", "--dir", str(folder), "--strategy", "random", "brute", "--seeds", "2", "--trials", "10"]
    assert main([*command, "--processes", "1", "--json", "-o", str(target), "--plots", str(plots)]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert content == json.loads(target.read_text())
    assert [one["name"] for one in content["strategies"]] == ["random", "brute"]
    assert "4 of 4" in printed.err
    assert {path.name for path in plots.iterdir()} == {"candidates.svg", "seconds.svg", "budgets.svg"}


def test_recorded_replay_is_printed_and_drawn_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its file alone; each picture is the one that the replay itself drew."""
    target, plots, again = tmp_path / "replay.json", tmp_path / "plots", tmp_path / "again.svg"
    command = ["replay", "--dir", str(folder), "--strategy", "random", "--seeds", "2", "--trials", "10"]
    assert main([*command, "--processes", "1", "--json", "-o", str(target), "--plots", str(plots)]) == 0
    made = capsys.readouterr().out
    for name in ("candidates", "seconds", "budgets"):
        assert main(["replay", "--from", str(target), "--json", "--picture", name, "--svg", str(again)]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(made)
        assert again.read_bytes() == (plots / f"{name}.svg").read_bytes()


def test_recorded_table_has_bars_and_no_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a file that is neither is refused with what writes one."""
    table, target = str(ROOT / "results" / "replay" / "table.json"), tmp_path / "out.svg"
    assert main(["replay", "--from", table, "--picture", "budgets", "--svg", str(target)]) == 0
    assert "Kernel Tuner, genetic_algorithm, 3 seeds" in target.read_text()
    target.unlink()
    assert main(["replay", "--from", table, "--svg", str(target)]) == 2
    assert "a table holds no curves" in capsys.readouterr().err
    assert not target.exists()
    for name in ("nowhere.json", str(ROOT / "results" / "h200" / "dev.json"), str(ROOT / "README.md")):
        assert main(["replay", "--from", name]) == 2
        assert name in capsys.readouterr().err


def test_export_gives_other_tuners_every_config(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T4 is read back with the same best; a cache file has a key for each config, and failures say that they are."""
    from tuner import t4
    from tuner.landscape import read_folder

    name, target = "h200-32x2560x5120-bf16", tmp_path / "out.json"
    best_us = read_folder(folder)[0].best_us
    assert main(["landscape", "export", name, str(target), "--dir", str(folder)]) == 0
    document = t4.read(target.read_text())
    assert len(document["results"]) == 60
    assert t4.best_config(document)[1] == pytest.approx(best_us)
    assert main(["landscape", "export", name, str(target), "--dir", str(folder), "--format", "kernel-tuner"]) == 0
    cache = json.loads(target.read_text())
    assert len(cache["cache"]) == 60
    times = [entry["time"] for entry in cache["cache"].values() if "__error__" not in entry]
    assert min(times) == pytest.approx(best_us / 1000)
    assert len(times) == 59
    for key, entry in cache["cache"].items():
        assert key == ",".join(str(entry[knob]) for knob in cache["tune_params_keys"])
        assert all(entry[knob] in values for knob, values in cache["tune_params"].items())
    assert main(["landscape", "export", "nothing", str(target), "--dir", str(folder)]) == 2
    assert "no landscape 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["replay", "--strategy", "magic"], "unknown sampler 'magic'"),
        (["replay", "--strategy", "tpe+luck"], "unknown source 'luck'"),
        (["landscape", "list"], "holds no landscapes"),
        (["landscape", "record", "64"], "is not a shape"),
        (["landscape", "record", "64x64x64", "--winners", "nothing.json"], "nothing.json cannot be read"),
    ],
)
def test_wrong_requests_are_one_line(
    command: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and what is wrong."""
    monkeypatch.setenv("GEMM_TUNER_HOME", str(tmp_path / "home"))
    assert main([*command, "--dir", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


# Tuned again after the landscape was recorded, with a config that its space did not hold; to be recorded anew.
BETTER_SINCE = {"128x9472x3584"}


def test_committed_landscapes_hold_every_published_winner(capsys: pytest.CaptureFixture[str]) -> None:
    """Each file under results/landscapes, against the recorded rows of its shape."""
    from tuner.cli.landscape import published_winners
    from tuner.landscape import read_folder

    winners = published_winners(ROOT / "results" / "h200" / "dev.json")
    for one in read_folder(ROOT / "results" / "landscapes"):
        assert len(one.configs) >= 400
        assert not one.synthetic
        missing = set(winners.get(one.problem, ())) - set(one.configs)
        assert bool(missing) is (one.problem.shape in BETTER_SINCE), f"{one.problem}: {missing}"
        assert all(
            row.session and (row.environment in one.environments or not row.samples_us) for row in one.rows.values()
        )
