"""`serve`: the API and the tuner as child processes of one command."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import socket
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.cli.errors import UsageError
from tuner.cli.output import Output, warn
from tuner.cli.supervisor import ChildSpec, Supervisor

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tuner.cli.settings import Settings

READY_S = 60.0


def serve(args: argparse.Namespace, settings: Settings) -> int:
    """Run until SIGTERM or SIGINT. Raises UsageError for a port or a state in use, DatabaseError."""
    _check_port(args.host, args.port)
    settings.create()
    with _only_one(settings.home):
        return _serve(args, settings)


def _serve(args: argparse.Namespace, settings: Settings) -> int:
    _check_database(settings, args.host)
    output = Output(as_json=args.json)
    access = [part for name in args.allowed_host for part in ("--allowed-host", name)]
    if args.requests_per_s is not None:
        access += ["--requests-per-s", _checked_rate(args.requests_per_s)]
    specs = children(args.host, args.port, engine_arguments(args, settings), settings, access)
    supervisor = Supervisor(specs, report=warn)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    url = service_url(args.host, args.port)
    threading.Thread(target=_announce, args=(url, output, settings), daemon=True).start()
    return supervisor.run()


@contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Hold the state for this service: the children of two would mistake each other's signs of life for their own.

    The kernel gives the lock back when this process ends, however it ends. Raises UsageError.
    """
    with (home / "serve.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UsageError(
                f"the state in {home} is in use by another `gemm-tuner serve` (process {holder})",
                hint="stop it, or set GEMM_TUNER_HOME to another folder",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def tuner(args: argparse.Namespace, settings: Settings) -> int:
    """A tuner without an API: several of them may share one PostgreSQL. Run until SIGTERM or SIGINT."""
    engine = engine_arguments(args, settings)
    settings.create()
    supervisor = Supervisor([_tuner(engine, settings, settings.home / f"tuner-{os.getpid()}.ready")], report=warn)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    output = Output(as_json=args.json)
    output.text(f"tuning with the engine {engine[1]}  (state in {settings.home}; Ctrl-C stops)")
    output.document({"engine": engine[1], "home": str(settings.home)})
    return supervisor.run()


def engine_arguments(args: argparse.Namespace, settings: Settings) -> list[str]:
    """Arguments of the tuner process about its engine. Raises UsageError for a cluster without an address."""
    engine = args.engine or settings.tuner.engine
    if engine != "ray":
        return ["--engine", engine]
    address = args.ray_address or settings.tuner.ray_address
    if not address:
        raise UsageError("engine ray needs the head's address", hint="use --ray-address HOST:PORT")
    return ["--engine", engine, "--ray-address", address]


def _tuner(engine: Sequence[str], settings: Settings, ready: Path) -> ChildSpec:
    command = [sys.executable, "-m", "tuner.service", "--database-url", settings.database_url, *_folders(settings)]
    command += [*engine, "--ready-file", str(ready)]
    return ChildSpec(name="tuner", command=command, restart=True, ready=ready)


def _folders(settings: Settings) -> list[str]:
    return ["--artifacts-dir", str(settings.artifacts_dir), "--exports-dir", str(settings.exports_dir)]


def children(
    host: str, port: int, engine: Sequence[str], settings: Settings, access: Sequence[str] = ()
) -> tuple[ChildSpec, ...]:
    """The tuner, which is started again when it dies, and the API, without which there is no service.

    engine: arguments of the tuner about its engine
    access: arguments of the API about who may ask
    """
    database = ["--database-url", settings.database_url]
    folders = _folders(settings)
    api = [sys.executable, "-m", "api", "--host", host, "--port", str(port), *access, *database, *folders]
    return (
        # The API comes second: asked before the tuner has told which GPUs are here, a client would get modeled times.
        _tuner(engine, settings, settings.home / "tuner.ready"),
        ChildSpec(name="api", command=api, restart=False),
    )


def service_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a service bound to `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _check_port(host: str, port: int) -> None:
    """Find out now, with a line for people; the API would fail later and less clearly."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="stop what listens there, or choose another --port",
            ) from error


def _checked_rate(text: str) -> str:
    try:
        allowed = 0 <= float(text) < math.inf
    except ValueError:
        allowed = False
    if not allowed:
        raise UsageError(f"--requests-per-s {text!r}: use a number, 0 for any")
    return text


def _check_database(settings: Settings, host: str) -> None:
    """Create or upgrade it before two processes would both try; say how to make a token. Raises DatabaseError."""
    from api.settings import is_loopback
    from db import queries
    from db.database import Database

    with Database.open(settings.database_url) as database, database.read() as session:
        if not is_loopback(host) and not queries.tokens(session):
            warn(f"{host} can be reached from elsewhere, so requests need a token: gemm-tuner token create NAME")


def _announce(url: str, output: Output, settings: Settings) -> None:
    """Say when the service answers, for people and for scripts that wait for the line."""
    from tuner.cli.remote import wait_until_ready

    if not wait_until_ready(url, timeout_s=READY_S):
        warn(f"the API does not answer at {url} after {READY_S:g} s")
        return
    output.text(f"serving on {url}  (state in {settings.home}; Ctrl-C stops)")
    output.document({"url": url, "home": str(settings.home), "database_url": settings.database_url})
