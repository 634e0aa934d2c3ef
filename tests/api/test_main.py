"""`python -m api` as a process: starting, refusing to start, stopping."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from api.__main__ import main, parse_settings

if TYPE_CHECKING:
    from pathlib import Path


def arguments(folder: Path, port: int, database: str = "tuner.db") -> list[str]:
    """A good command line."""
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--database-url", f"sqlite:///{folder / database}"),
        *("--exports-dir", str(folder), "--artifacts-dir", str(folder)),
    ]


def test_port_in_use_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is created."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(arguments(tmp_path, port)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "--port" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("192.0.2.1", 0), ("no such host", 0)])
def test_address_that_cannot_be_bound_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str, port: int
) -> None:
    """A wrong port, another machine's address, no address."""
    command = arguments(tmp_path, port)
    command[1] = host
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot listen on {host}:{port}: ")


def test_foreign_database_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file stays byte for byte what it was."""
    path = tmp_path / "foreign.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    connection.close()
    before = path.read_bytes()
    assert main(arguments(tmp_path, 0, "foreign.db")) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert path.read_bytes() == before


def test_command_line_needs_its_folders(capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing is named."""
    with pytest.raises(SystemExit) as exit_info:
        parse_settings(["--port", "1"])
    assert exit_info.value.code == 2
    assert "--database-url" in capsys.readouterr().err


def test_process_serves_and_stops_on_a_signal_though_a_stream_is_open(tmp_path: Path) -> None:
    """The log is JSON lines, the first of which has the port; the exit status is 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "api", *arguments(tmp_path, 0)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        assert first["message"] == "listening"
        with httpx.Client(base_url=f"http://127.0.0.1:{first['port']}", timeout=20) as http:
            body = {"problems": [{"m": 8, "n": 8, "k": 8}], "arch": "sm_90a"}
            job = http.post("/v1/jobs", json=body).json()
            with http.stream("GET", f"/v1/jobs/{job['id']}/events") as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("id: ")
                process.send_signal(signal.SIGTERM)
                list(lines)
        _, rest = process.communicate(timeout=10)
        assert process.returncode == 0
        assert all(json.loads(line) for line in rest.splitlines())
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
