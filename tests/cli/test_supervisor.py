"""`serve`: children are restarted, stopped together, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from queue import Queue
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import ROOT, Ran, free_port
from tuner.cli.errors import UsageError
from tuner.cli.remote import wait_until_ready
from tuner.cli.serve import _only_one, service_url
from tuner.cli.supervisor import Backoff, ChildSpec, Supervisor
from tuner.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAIT = "import signal; signal.pause()"
QUICK = Backoff(first_s=0.05, longest_s=0.1)


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs this code."""
    return [sys.executable, "-S", "-c", code, *arguments]


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> bool:
    """Wait until the process has ended: it is not ours, so there is no event to wait for."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_child_that_dies_is_started_again_until_stopped() -> None:
    """Each death is reported with its exit status; stop ends the other child and returns 0."""
    deaths: Queue[str] = Queue()
    specs = [
        ChildSpec(name="steady", command=python(WAIT), restart=False),
        ChildSpec(name="shaky", command=python("import sys; sys.exit(3)"), restart=True),
    ]
    supervisor = Supervisor(specs, backoff=QUICK, report=deaths.put)

    def stop_after_three() -> None:
        for _ in range(3):
            deaths.get(timeout=30)
        supervisor.stop()

    watcher = threading.Thread(target=stop_after_three)
    watcher.start()
    assert supervisor.run() == 0
    watcher.join(30)
    assert not any(alive(pid) for pid in supervisor.pids.values())


def test_end_of_a_child_that_is_not_restarted_stops_the_rest() -> None:
    """Without the API there is no service: the exit status says so, and the tuner does not go on alone."""
    lines: list[str] = []
    specs = [
        ChildSpec(name="tuner", command=python(WAIT), restart=True),
        ChildSpec(name="api", command=python("import sys; sys.exit(2)"), restart=False),
    ]
    supervisor = Supervisor(specs, backoff=QUICK, report=lines.append)
    assert supervisor.run() == 1
    assert lines == ["api ended (exit status 2): stopping"]
    assert not alive(supervisor.pids["tuner"])


def test_child_that_ignores_the_signal_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """A hung compiler below a hung tuner must not outlive the service."""
    note = tmp_path / "pid"
    code = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an ignored signal stays ignored across exec
grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(grandchild.pid))
os.rename(sys.argv[1] + ".part", sys.argv[1])
signal.pause()
"""
    supervisor = Supervisor(
        [ChildSpec(name="hung", command=python(code, str(note)), restart=True)], backoff=QUICK, grace_s=0.3
    )

    def stop_when_started() -> None:
        while not note.exists():
            time.sleep(0.02)
        supervisor.stop()

    watcher = threading.Thread(target=stop_when_started)
    watcher.start()
    assert supervisor.run() == 0
    watcher.join(30)
    assert not alive(supervisor.pids["hung"])
    assert wait_gone(int(note.read_text()))


def test_pause_doubles_with_each_quick_death_up_to_a_limit() -> None:
    """A tuner that cannot start must not spin."""
    backoff = Backoff(first_s=0.5, longest_s=4.0)
    assert [backoff.pause_s(deaths) for deaths in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_port_in_use_is_status_2_and_one_line(cli: Callable[..., Ran]) -> None:
    """Nothing is started on a port that something else holds."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ran = cli("serve", "--port", str(port))
    assert ran.status == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ran.error_line
    assert "--port" in ran.error_line


def test_address_for_clients_is_one_they_can_reach() -> None:
    """A service bound to every address is reached through loopback."""
    assert service_url("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert service_url("::", 8000) == "http://[::1]:8000"
    assert service_url("10.1.2.3", 80) == "http://10.1.2.3:80"


@pytest.mark.slow
def test_two_services_on_one_state_are_told_apart(cli: Callable[..., Ran], home: Path) -> None:
    """The second says who has it, before anything is started; when the first has gone there is nothing in the way."""
    home.mkdir()
    with _only_one(home):
        ran = cli("serve", "--port", str(free_port()))
        assert ran.status == 2
        assert f"the state in {home} is in use by another `gemm-tuner serve` (process {os.getpid()})" in ran.error_line
        with pytest.raises(UsageError), _only_one(home):
            pass
    with _only_one(home):
        pass


def test_of_two_services_started_in_the_same_moment_one_lives(tmp_path: Path) -> None:
    """Same state and same port: the other ends with a line that says what is wrong."""
    port = free_port()
    command = [sys.executable, "-m", "tuner.cli.main", "serve", "--port", str(port), "--engine", "fake"]
    environ = {**os.environ, "GEMM_TUNER_HOME": str(tmp_path), "GEMM_TUNER_FAKE_SCALE": "0"}
    both = [
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        assert wait_until_ready(service_url("127.0.0.1", port), timeout_s=120)
        (second,) = (process for process in both if process.poll() is not None)
        assert second.stderr is not None
        assert "is in use by another `gemm-tuner serve`" in second.stderr.read()
        assert second.returncode == 2
        (first,) = (process for process in both if process.poll() is None)
        assert second.pid != first.pid
    finally:
        for process in both:
            process.terminate()
        for process in both:
            process.wait(30)
            assert process.stderr is not None
            process.stderr.close()


def test_serve_answers_survives_a_killed_tuner_and_stops_on_sigterm(tmp_path: Path) -> None:
    """The real service: up, tuner killed and replaced while the API answers, down with status 0 and nothing left."""
    port, log = free_port(), tmp_path / "log"
    environ = os.environ | {"GEMM_TUNER_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "tuner.cli.main", "serve", "--port", str(port), "--engine", "fake"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        assert wait_until_ready(url, timeout_s=60), log.read_text()
        tuner, api = child_running(process.pid, "tuner.service"), child_running(process.pid, "api")
        os.kill(tuner, signal.SIGKILL)
        replacement = tuner
        deadline = time.monotonic() + 30
        while replacement == tuner and time.monotonic() < deadline:
            time.sleep(0.1)
            replacement = child_running(process.pid, "tuner.service", wait_s=10)
        assert replacement != tuner
        with Client(url) as client:
            assert client.health()["status"] == "ok"
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
        assert not any(alive(pid) for pid in (replacement, api))
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def child_running(parent: int, module: str, *, wait_s: float = 10.0) -> int:
    """Process id of the child that runs this module."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as file:
            for pid in map(int, file.read().split()):
                with open(f"/proc/{pid}/cmdline", "rb") as line:
                    if f"-m\0{module}\0".encode() in line.read() and alive(pid):
                        return pid
        time.sleep(0.05)
    raise AssertionError(f"no child runs {module}")
