"""`db` and `results`: copies that are whole or absent, and refusals that change nothing."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from db import queries
from db.database import Database
from db.models import utc_now
from db.queries import NewResult
from kernels.config import Sm90GemmConfig
from tests.db.rows import only_study, post_job, report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]


def url(home: Path) -> str:
    """The database of the command line under test."""
    return f"sqlite:///{home / 'gemm-tuner.db'}"


def store(home: Path, **changes: Any) -> None:
    """Put one result into the database."""
    values: dict[str, Any] = {
        "m": 64,
        "n": 128,
        "k": 256,
        "dtype": "bf16",
        "layout": "NT",
        "arch": "sm_90a",
        "device_name": "NVIDIA H200",
        "config": Sm90GemmConfig().to_dict(),
        "evidence": ["measured", "numeric", "checked"],
        "median_us": 5.5,
        "ratio": {"cublaslt_best": {"median": 1.1, "low": 1.0, "high": 1.2}},
    }
    home.mkdir(exist_ok=True)
    with Database.open(url(home)) as database, database.write() as session:
        queries.add_result(session, NewResult(**values | changes))


def stored(home: Path) -> list[tuple[int, float | None, int | None]]:
    """M, time and revision of every result."""
    with Database.open(url(home), create=False) as database, database.read() as session:
        return sorted((row.m, row.median_us, row.revision) for row in queries.results(session))


def test_backup_and_restore_bring_back_what_was_there(cli: Cli, home: Path, tmp_path: Path) -> None:
    """What was stored after the backup is gone after the restore, what was stored before is back."""
    store(home)
    copy = tmp_path / "copy.db"
    assert cli("db", "backup", str(copy), "--json").document["file"] == str(copy)
    store(home, m=128)
    assert cli("db", "restore", str(copy)).status == 0
    assert stored(home) == [(64, 5.5, None)]


def test_restore_into_an_empty_home_creates_the_database(cli: Cli, home: Path, tmp_path: Path) -> None:
    """A backup is enough to set up a new machine."""
    store(home)
    copy = tmp_path / "copy.db"
    cli("db", "backup", str(copy))
    shutil.rmtree(home)
    assert cli("db", "restore", str(copy)).status == 0
    assert stored(home) == [(64, 5.5, None)]


def test_backup_never_replaces_a_file(cli: Cli, home: Path, tmp_path: Path) -> None:
    """An older backup is not lost to a slip."""
    store(home)
    taken = tmp_path / "taken"
    taken.write_text("older backup")
    ran = cli("db", "backup", str(taken))
    assert ran.status == 2
    assert "exists" in ran.error_line
    assert taken.read_text() == "older backup"


def test_backup_without_a_database_is_refused(cli: Cli, tmp_path: Path) -> None:
    """There is nothing to copy, and none is created for it."""
    ran = cli("db", "backup", str(tmp_path / "copy.db"))
    assert ran.status == 2
    assert "does not exist" in ran.error_line


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty"])
def test_bad_backup_is_refused_and_the_database_stays(cli: Cli, home: Path, tmp_path: Path, damage: str) -> None:
    """Half a file, a file of something else and an empty one leave the database as it was."""
    store(home)
    copy = tmp_path / "copy.db"
    cli("db", "backup", str(copy))
    whole = copy.read_bytes()
    copy.write_bytes({"truncated": whole[: len(whole) // 2], "foreign": b"x" * 4096, "empty": b""}[damage])
    ran = cli("db", "restore", str(copy))
    assert ran.status == 2, ran.err
    assert str(copy) in ran.error_line
    assert stored(home) == [(64, 5.5, None)]


def test_upgrade_says_the_revision(cli: Cli, home: Path) -> None:
    """It may be run again at any time."""
    store(home)
    for _ in range(2):
        assert cli("db", "upgrade", "--json").document["revision"]


def test_forget_names_what_it_forgot_and_refuses_where_there_is_nothing(cli: Cli, home: Path) -> None:
    """A7: after trouble that was not the kernels' own, an operator lets them run again."""
    home.mkdir(exist_ok=True)
    with Database.open(url(home)) as database, database.write() as session:
        study_id = only_study(session, post_job(session, "a"))
        for number, outcome in enumerate(("CRASHED", "MEASURED", "WRONG_RESULT")):
            report(session, study_id, number, outcome=outcome, reason="why")
    assert cli("db", "forget", study_id, "--trial", "2", "--json").document["forgotten"] == [2]
    assert cli("db", "forget", study_id, "--json").document == {"study": study_id, "forgotten": [0]}
    ran = cli("db", "forget", study_id)
    assert ran.status == 1
    assert "no failure that is remembered" in ran.error_line
    assert cli("db", "forget", "nowhere", "--trial", "7").status == 1


def test_results_travel_as_json_lines_and_arrive_as_candidates(cli: Cli, home: Path, tmp_path: Path) -> None:
    """A published result is a candidate elsewhere: nothing is published on the word of a file."""
    store(home)
    store(home, m=128)
    with Database.open(url(home)) as database, database.write() as session:
        for row in queries.results(session):
            queries.publish_result(session, row.id)
    file = tmp_path / "results.jsonl"
    assert cli("results", "export", str(file), "--json").document["results"] == 2
    shutil.rmtree(home)
    assert cli("results", "import", str(file), "--json").document == {"file": str(file), "results": 2, "added": 2}
    assert stored(home) == [(64, 5.5, None), (128, 5.5, None)]
    with Database.open(url(home), create=False) as database, database.read() as session:
        assert [row.evidence for row in queries.results(session)] == [["measured"]] * 2, "checks hold where they ran"
    assert cli("best", "64x128x256", "--device", "h200", "--evidence", "numeric").status == 1


def test_withdrawn_results_do_not_travel(cli: Cli, home: Path, tmp_path: Path) -> None:
    """Where they were read, nothing would say that their kernel is bad."""
    store(home)
    store(home, m=128)
    with Database.open(url(home)) as database, database.write() as session:
        bad = next(row for row in queries.results(session) if row.m == 128)
        bad.withdrawn_at, bad.withdrawn_reason, bad.current = utc_now(), "WRONG_RESULT: 1 element", False
    file = tmp_path / "results.jsonl"
    assert cli("results", "export", str(file)).out.endswith("1 results, without 1 that were withdrawn\n")
    shutil.rmtree(home)
    assert cli("results", "import", str(file), "--json").document["added"] == 1
    assert stored(home) == [(64, 5.5, None)]


def test_importing_twice_adds_nothing(cli: Cli, home: Path, tmp_path: Path) -> None:
    """A result that is here already is skipped."""
    store(home)
    file = tmp_path / "results.jsonl"
    cli("results", "export", str(file))
    assert cli("results", "import", str(file), "--json").document["added"] == 0
    assert len(stored(home)) == 1


def test_export_to_standard_output_is_lines_and_nothing_else(cli: Cli, home: Path) -> None:
    """`-` pipes into other programs."""
    store(home)
    ran = cli("results", "export", "-")
    assert [json.loads(line)["m"] for line in ran.out.splitlines()] == [64]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("not json", "not JSON"),
        ("[1]", "schema 1"),
        ({"schema": 2}, "schema 1"),
        ({"surprise": 1}, "'surprise'"),
        ({"m": -4}, "m must be between 1"),
        ({"arch": "sm_80"}, "sm_80"),
        ({"config": {"pipe_depht": 3}}, "pipe_depht"),
        ({"config": {"pipe_depth": 16}}, "shared memory"),  # B6: legal once, perhaps; not by the rules of this version
        ({"created_at": "yesterday"}, "yesterday"),
        ({"dtype": None}, "lacks 'dtype'"),
    ],
)
def test_one_bad_line_stops_the_whole_import(
    cli: Cli, home: Path, tmp_path: Path, change: str | dict[str, Any], words: str
) -> None:
    """The line is named, and the good lines before it are not stored either."""
    store(home)
    file = tmp_path / "results.jsonl"
    cli("results", "export", str(file))
    good = file.read_text()
    if isinstance(change, dict):
        bad = {name: value for name, value in (json.loads(good) | change).items() if value is not None}
        change = json.dumps(bad)
    shutil.rmtree(home)
    file.write_text(good + change + "\n")
    ran = cli("results", "import", str(file))
    assert ran.status == 2
    assert "line 2" in ran.error_line
    assert words in ran.error_line
    assert not (home / "gemm-tuner.db").exists()
