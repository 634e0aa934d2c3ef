"""The door: exit status, one-line errors, one JSON document, and the same words with and without --url."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import ROOT, Ran, free_port
from tuner.cli import main as main_module
from tuner.cli.parser import build_parser, commands_of

if TYPE_CHECKING:
    from pathlib import Path

Cli = Callable[..., Ran]

# Third-party packages that a base install does not have.
SERVER_PACKAGES = ("fastapi", "starlette", "uvicorn", "pydantic", "sqlalchemy", "alembic")
NOT_IN_BASE = ("tvm", "tvm_ffi", "torch", "optuna", *SERVER_PACKAGES)
BLOCKER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocked())
from tuner.cli.main import main
sys.exit(main({arguments!r}))
"""


def run_blocked(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process where the packages of the extras cannot be imported."""
    code = BLOCKER.format(blocked=set(NOT_IN_BASE), arguments=list(arguments))
    environ = os.environ | {"GEMM_TUNER_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_every_command_has_help_and_json() -> None:
    """Whatever can be typed explains itself and can answer programs."""
    commands = commands_of(build_parser())
    assert len(commands) >= 17
    for name, parser in commands.items():
        assert parser.description, name
        assert "--json" in parser.format_help(), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "COMMAND"),
        (("tune",), "MxNxK"),
        (("nonsense",), "nonsense"),
        (("tune", "1x2", "--arch", "sm_90a"), "MxNxK"),
        (("tune", "0x64x64", "--arch", "sm_90a"), "m must be between 1"),
        (("tune", "-5x64x64", "--arch", "sm_90a"), "m must be between 1"),
        (("tune", "64x64x64", "--dtype", "fp8", "--arch", "sm_90a"), "unknown dtype 'fp8'"),
        (("tune", "64x64x60", "--arch", "sm_100a", "--mode", "model"), "not a multiple of 8"),
        (("tune", "64x64x64", "--arch", "sm_80"), "sm_80"),
        (("tune", "64x64x64", "--device", "toaster"), "toaster"),
        (("tune", "64x64x64"), "no arch or device named"),
        (("tune", "64x64x64", "--arch", "sm_90a", "--trials", "0"), "trials"),
        (("tune", "64x64x64", "--arch", "sm_90a", "--wall-s", "-1"), "wall_s"),
        (("tune", "64x64x64", "--arch", "sm_90a", "--detach"), "--detach"),
        (("best", "64x64x64"), "no arch or device named"),
        (("best", "64x64x64", "--arch", "sm_90a", "--evidence", "rumour"), "evidence"),
        (("export", "no-such-result", "-o", "x.zip"), "no-such-result"),
        (("show", "no-such-job"), "no-such-job"),
        (("cancel", "no-such-job"), "no-such-job"),
        (("cancel", "."), "nothing has the id '.'"),
        (("cancel", ""), "nothing has the id ''"),
        (("show", "../jobs"), "no job and no study '../jobs'"),
        (("pin", "no-such-result"), "no-such-result"),
        (("revisions", "no-such-result"), "gemm-tuner results export"),
        (("dispatch", "4096", "--arch", "sm_90a"), "write NxK"),
        (("dispatch", "4096x7", "--arch", "sm_100a"), "k = 7 is not a multiple of 8"),
        (("regressions", "--device", "toaster"), "toaster"),
        (("job", "resume", "no-such-job"), "no-such-job"),
        (("explain", "step99"), "step99"),
        (("explain", '{"pipe_depht": 4}', "--arch", "sm_90a"), "unknown knob 'pipe_depht'"),
        (("explain", '{"pipe_depth": "four"}', "--arch", "sm_90a"), "pipe_depth must be int"),
        (("explain", "{", "--arch", "sm_90a"), "not JSON"),
        (("explain", '{"pipe_depth": 4}'), "--arch"),
        (("db", "restore", "missing.db"), "missing.db"),
        (("results", "import", "missing.jsonl"), "missing.jsonl"),
        (("serve", "--port", "99999"), "99999"),
        (("jobs", "--limit", "0"), "0"),
    ],
)
def test_wrong_request_ends_with_status_2_and_one_line(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """The line says what is wrong; nothing is printed on standard output."""
    ran = cli(*arguments)
    assert ran.status == 2, ran.err
    assert words in ran.error_line
    assert ran.out == ""


def test_error_with_json_is_one_document(cli: Cli) -> None:
    """A script that asked for JSON gets the error as JSON too, and the same line on standard error."""
    ran = cli("show", "no-such-job", "--json")
    assert ran.status == 2
    assert set(ran.document) == {"error", "detail", "hint"}
    assert ran.document["detail"] in ran.error_line


def test_unexpected_exception_is_one_line_and_its_traceback_is_in_the_log(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours never prints a traceback; the line says where it is."""

    def broken(self: object, *, limit: int) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("tuner.client.Client.jobs", broken)
    ran = cli("jobs")
    assert ran.status == 1
    log = home / "logs" / "gemm-tuner.log"
    assert "unexpected RuntimeError: two lines" in ran.error_line
    assert str(log) in ran.error_line
    assert "Traceback" in log.read_text()


def test_interrupt_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command with status 1 and no traceback."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_run", interrupted)
    ran = cli("jobs")
    assert (ran.status, ran.error_line) == (1, "gemm-tuner: interrupted")


def test_nothing_tuned_is_status_1_and_says_how_to_tune(cli: Cli) -> None:
    """A right question without an answer is not a wrong request."""
    ran = cli("best", "64x64x64", "--arch", "sm_90a")
    assert ran.status == 1
    assert "64x64x64" in ran.error_line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dispatch", "64x64", "--arch", "sm_90a"), "gemm-tuner tune Mx64x64"),
        (("export", "64x64x64", "--arch", "sm_90a", "-o", "x.zip"), "or add --allow-unverified"),
        (("export", "64x64x64", "--arch", "sm_90a", "-o", "x.zip", "--allow-unverified"), "gemm-tuner tune 64x64x64"),
    ],
)
def test_nothing_tuned_is_said_with_options_that_the_command_has(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    """Status 1, and no advice that belongs to another command."""
    ran = cli(*arguments)
    assert ran.status == 1
    assert words in ran.error_line
    assert "--evidence" not in ran.error_line
    assert "--allow-default" not in ran.error_line


def test_jobs_of_a_fresh_home_is_an_empty_list(cli: Cli) -> None:
    """The database is made on first use; --json prints a list and nothing else."""
    ran = cli("jobs", "--json")
    assert (ran.status, ran.document, ran.err) == (0, [], "")


def test_devices_lists_the_models_that_can_be_modeled(cli: Cli) -> None:
    """Without a GPU, the profiles are still there."""
    names = [profile["name"] for profile in cli("devices", "--json").document["profiles"]]
    assert {"NVIDIA H200", "NVIDIA B200"} <= set(names)
    assert "NVIDIA B200" in cli("devices").out


@pytest.mark.parametrize(
    "arguments", [("jobs",), ("devices",), ("show", "x"), ("best", "64x64x72", "--arch", "sm_90a")]
)
def test_with_url_and_without_give_the_same_answer(cli: Cli, api_url: str, arguments: tuple[str, ...]) -> None:
    """Embedded commands go through the same routes, so words and exit status agree."""
    here, there = cli(*arguments, "--json"), cli(*arguments, "--json", "--url", api_url)
    assert here.status == there.status
    assert here.document == there.document


def test_job_can_be_submitted_listed_shown_and_cancelled_through_a_service(cli: Cli, api_url: str) -> None:
    """The life of a job from another machine."""
    shape = ("64x128x64", "128x128x64")
    submitted = cli("tune", *shape, "--arch", "sm_90a", "--mode", "model", "--detach", "--json", "--url", api_url)
    assert submitted.status == 0, submitted.err
    job = submitted.document["id"]
    assert [study["state"] for study in submitted.document["studies"]] == ["QUEUED", "QUEUED"]
    assert job in cli("jobs", "--url", api_url).out
    assert "64x128x64 bf16" in cli("show", job, "--url", api_url).out
    study = submitted.document["studies"][0]["id"]
    assert cli("show", study, "--json", "--url", api_url).document["trials"] == []
    assert cli("cancel", job, "--json", "--url", api_url).document["state"] == "CANCELLED"


def test_service_that_is_not_there_is_one_line(cli: Cli) -> None:
    """An address where nothing listens is the work failing, not a wrong request."""
    ran = cli("jobs", "--url", f"http://127.0.0.1:{free_port()}")
    assert ran.status == 1
    assert "cannot reach" in ran.error_line
    assert "gemm-tuner serve" in ran.error_line


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("jobs", "--json"), 0),
        (("devices", "--json"), 0),
        (("show", "x", "--json"), 2),
        (("best", "64x64x64", "--arch", "sm_90a", "--json"), 1),
        (("tune", "64x64x64", "--arch", "sm_90a", "--mode", "model", "--detach", "--json"), 0),
    ],
)
def test_base_install_works_against_a_service(
    tmp_path: Path, api_url: str, arguments: tuple[str, ...], status: int
) -> None:
    """With httpx, rich and platformdirs alone, --url works: nothing of the extras is imported."""
    done = run_blocked(tmp_path, *arguments, "--url", api_url)
    assert done.returncode == status, done.stderr
    json.loads(done.stdout)
    assert "not installed" not in done.stderr


def test_base_install_without_url_says_what_to_install(tmp_path: Path) -> None:
    """The embedded way needs the extras; the line names them and the other way."""
    done = run_blocked(tmp_path, "jobs")
    assert done.returncode == 1
    assert "pip install 'gemm-tuner[" in done.stderr
    assert "--url" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("jobs",), ("db", "upgrade"), ("results", "export", "x.jsonl")])
def test_foreign_database_is_refused_and_left_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A SQLite file of another program stays byte for byte as it was."""
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = foreign.read_bytes()
    monkeypatch.setenv("GEMM_TUNER_DATABASE_URL", f"sqlite:///{foreign}")
    ran = cli(*command)
    assert ran.status == 2
    assert "another program" in ran.error_line
    assert foreign.read_bytes() == before


def test_home_that_is_a_file_is_refused(cli: Cli, home: Path) -> None:
    """GEMM_TUNER_HOME must be a folder."""
    home.write_text("not a folder")
    ran = cli("jobs")
    assert ran.status == 2
    assert "GEMM_TUNER_HOME" in ran.error_line


def test_fault_of_an_embedded_route_is_one_line(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service would log goes to the log file, not to the terminal."""

    def broken(*_: object) -> None:
        raise RuntimeError("broken route")

    monkeypatch.setattr("api.services.jobs.listing", broken)
    ran = cli("jobs")
    assert ran.status == 1
    assert "failed to answer" in ran.error_line
    assert "broken route" in (home / "logs" / "gemm-tuner.log").read_text()


def test_dots_and_empty_ids_lead_to_no_other_route(home: Path, cli: Cli, api_url: str) -> None:
    """An id that a URL would resolve must not cancel or show something else."""
    for identity in (".", "..", "", "a/b", "%2e", "a?b", "a#b"):
        for command in ("cancel", "show", "revisions", "pin", "unpin"):
            ran = cli(command, identity, "--url", api_url)
            assert (ran.status, ran.out) == (2, ""), (command, identity)


def test_refusals_speak_of_commands_not_of_routes(cli: Cli) -> None:
    """The routes behind a command are no business of who typed it."""
    for arguments in (
        ("best", "64x64x64", "--arch", "sm_90a"),
        ("cancel", "0" * 32),
        ("revisions", "0" * 32),
        ("export", "0" * 32, "-o", "x.zip"),
        ("tune", "64x64x64", "--arch", "sm_90a", "--mode", "model", "--trials", "0"),
        ("best", "64x64x64", "--device", "toaster"),
    ):
        ran = cli(*arguments)
        assert ran.status in (1, 2)
        for word in ("/v1/", "POST", "GET ", "openapi", "=true", "allow_"):
            assert word not in ran.error_line, ran.error_line
