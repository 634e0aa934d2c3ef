"""`python -m api`: serve the application until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from api.app import create_app
from api.logs import configure_logging
from api.settings import ApiSettings, is_loopback
from db.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from fastapi import FastAPI

BACKLOG = 2048
RATE_ELSEWHERE = 100.0  # requests a second of one client, where others than this machine may ask
WRONG_REQUEST = 2  # exit status

log = logging.getLogger("api")


class ApiServer(uvicorn.Server):
    """A server that lets event streams end when it is told to stop; it would wait for them otherwise."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.api = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGTERM and SIGINT."""
        self.api.state.stopping = True
        super().handle_exit(sig, frame)


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m api`."""
    parser = argparse.ArgumentParser(prog="python -m api", description="Serve the tuning service's HTTP API.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="TCP port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--database-url", required=True, help="SQLAlchemy URL, for example sqlite:////data/tuner.db")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name that requests may call the service by; may be repeated (default: any, on loopback its own)",
    )
    parser.add_argument(
        "--requests-per-s",
        type=_rate,
        metavar="N",
        help="requests a second that one client may send, 0 for any (default: any on a loopback address, else 100)",
    )
    parser.add_argument("--exports-dir", required=True, type=Path, help="folder of the bundles")
    parser.add_argument("--artifacts-dir", required=True, type=Path, help="folder of the artifact store")
    return parser


def parse_settings(arguments: Sequence[str] | None = None) -> ApiSettings:
    """Read the command line. Exits with status 2 for a wrong one."""
    options = parser().parse_args(arguments)
    per_s = options.requests_per_s
    return ApiSettings(
        host=options.host,
        port=options.port,
        allowed_hosts=tuple(options.allowed_host),
        requests_per_s=(0.0 if is_loopback(options.host) else RATE_ELSEWHERE) if per_s is None else per_s,
        database_url=options.database_url,
        exports_dir=options.exports_dir,
        artifacts_dir=options.artifacts_dir,
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests: use 0 or more")
    return rate


def listen(host: str, port: int) -> socket.socket:
    """Listen before anything else starts, so that a port in use is one clear line. Raises OSError, OverflowError."""
    if not 0 <= port < 1 << 16:
        raise OverflowError("a port is a number from 0 to 65535")  # getaddrinfo would take it modulo 65536
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )[0]
    # With the protocol named: asyncio turns Nagle's algorithm off only then, and each answer took 40 ms more without.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # From here on requests wait in the backlog; and Linux lets two sockets bind one address until one listens.
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def server_of(app: FastAPI, settings: ApiSettings) -> ApiServer:
    """The server, with its logs and headers left to the application."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    return ApiServer(app, config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 1 when the server failed, 2 when it could not start as asked."""
    settings = parse_settings(arguments)
    try:
        listener = listen(settings.host, settings.port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        print(
            f"error: cannot listen on {settings.host}:{settings.port}: {reason}; "
            "stop what uses the port, or choose another with --port",
            file=sys.stderr,
        )
        return WRONG_REQUEST
    with listener:
        try:
            app = create_app(settings)
        except DatabaseError as error:
            print(f"error: {error}", file=sys.stderr)
            return WRONG_REQUEST
        configure_logging()
        host, port = listener.getsockname()[:2]
        log.info("listening", extra={"host": host, "port": port, "needs_token": settings.needs_token})
        server = server_of(app, settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn has its own handlers while it runs, and raises the signal again when it is done: with the default
            # action, a shutdown in good order would end as a death by signal.
            signal.signal(number, lambda *_: None)
        # What was built up to here lives as long as the process: a collection need not look at it while requests wait.
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])
        return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
