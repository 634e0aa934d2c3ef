"""`token create|list|revoke`, and commands that send one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import ROOT, Ran, free_port
from tuner.cli.remote import wait_until_ready

if TYPE_CHECKING:
    from pathlib import Path

Cli = Callable[..., Ran]


def test_a_token_is_made_listed_and_revoked(cli: Cli) -> None:
    """It is printed once; the list shows whose it is and what it allows."""
    made = cli("token", "create", "ci", "--scope", "submit", "--days", "7", "--json").document
    assert made["token"].startswith("gt_")
    (listed,) = cli("token", "list", "--json").document
    assert (listed["name"], listed["scope"], listed["state"]) == ("ci", "submit", "valid")
    assert made["token"] not in cli("token", "list").out
    assert cli("token", "revoke", "ci").status == 0
    assert cli("token", "list", "--json").document[0]["state"] == "revoked"
    assert cli("token", "revoke", "ci").status == 0  # once more changes nothing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "two words"), "no name"),
        (("create", ""), "no name"),
        (("create", "ci", "--scope", "root"), "root"),
        (("create", "ci", "--days", "0"), "0"),
        (("revoke", "nobody"), "no token is named 'nobody'"),
    ],
)
def test_wrong_tokens_are_refused(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """Status 2 and one line."""
    ran = cli("token", *arguments)
    assert ran.status == 2
    assert words in ran.error_line


def test_a_name_is_used_once(cli: Cli) -> None:
    """Also after it was revoked: a log that names it must mean one token."""
    assert cli("token", "create", "ci").status == 0
    cli("token", "revoke", "ci")
    assert "choose another name" in cli("token", "create", "ci").error_line


def test_commands_send_the_token_of_the_environment(home: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a real service that listens on every address: 401 without, an answer with it."""
    token = cli("token", "create", "ci", "--json").document["token"]
    port = free_port()
    command = [sys.executable, "-m", "api", "--host", "0.0.0.0", "--port", str(port)]
    command += ["--database-url", f"sqlite:///{home / 'gemm-tuner.db'}"]
    command += ["--exports-dir", str(home / "exports"), "--artifacts-dir", str(home / "artifacts")]
    url = f"http://127.0.0.1:{port}"
    with (home / "api.log").open("wb") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            assert wait_until_ready(url, timeout_s=60), (home / "api.log").read_text()
            refused = cli("jobs", "--url", url)
            assert refused.status == 2
            assert "a bearer token is needed" in refused.error_line
            monkeypatch.setenv("GEMM_TUNER_TOKEN", token)
            assert cli("jobs", "--url", url, "--json").document == []
        finally:
            process.terminate()
            process.wait(20)
    log_text = (home / "api.log").read_text()
    assert '"token": "ci"' in log_text
    assert token not in log_text
