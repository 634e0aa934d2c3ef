"""A command line with its state in a temporary folder, and a real API process for what talks to a service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tuner.cli.main import main
from tuner.cli.remote import wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended: exit status, standard output, standard error."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document it must be."""
        return json.loads(self.out)

    @property
    def error_line(self) -> str:
        """Standard error as the one line it must be."""
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home of the command line under test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("GEMM_TUNER_HOME", str(folder))
    monkeypatch.delenv("GEMM_TUNER_DATABASE_URL", raising=False)
    return folder


@pytest.fixture
def cli(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command in this process."""

    def run(*arguments: str) -> Ran:
        status = main(arguments)
        captured = capsys.readouterr()
        return Ran(status=status, out=captured.out, err=captured.err)

    return run


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running API process without a tuner."""
    folder, port = tmp_path_factory.mktemp("api"), free_port()
    command = [sys.executable, "-m", "api", "--port", str(port), "--database-url", f"sqlite:///{folder / 'tuner.db'}"]
    command += ["--exports-dir", str(folder / "exports"), "--artifacts-dir", str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ)
    try:
        url = f"http://127.0.0.1:{port}"
        assert wait_until_ready(url, timeout_s=60), (folder / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(20)
