"""A PostgreSQL server of our own, for as long as the tests run: on a socket in a temporary folder, not on a network."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, text

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 60.0
SUPERUSER = "gemm"
# A test's database need not outlive a power cut.
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=300")


class NoPostgres(RuntimeError):
    """There is no PostgreSQL server program on this machine."""


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server.

    socket_dir: folder of its socket
    """

    socket_dir: Path

    def url(self, name: str) -> str:
        """URL of one of its databases."""
        return f"postgresql+psycopg://{SUPERUSER}@/{name}?host={self.socket_dir}"

    def create(self, name: str, *, template: str = "template0") -> str:
        """Make a database, as a copy of another one that nobody has open; gives its URL."""
        self._run(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, name: str) -> None:
        """Remove a database, whoever is connected."""
        self._run(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _run(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()


def program(name: str) -> str:
    """Path of a program of the server. Raises NoPostgres."""
    if found := shutil.which(name):
        return found
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    if not installed:
        raise NoPostgres(f"no {name} found: install PostgreSQL (Debian and Ubuntu: apt-get install postgresql)")
    return str(installed[-1])


@contextmanager
def running() -> Iterator[PostgresServer]:
    """A server with no databases of ours. Raises NoPostgres."""
    initdb, postgres = program("initdb"), program("postgres")
    folder = Path(tempfile.mkdtemp(prefix="gemm-pg-"))
    user = _plain_user()
    try:
        if user is not None:
            os.chown(folder, user, -1)
        data = folder / "data"
        options = ("--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", "--username", SUPERUSER)
        subprocess.run([initdb, *options, "-D", data], user=user, check=True, capture_output=True, timeout=START_S)
        settings = [part for setting in FAST for part in ("-c", setting)]
        where = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen([postgres, "-D", data, *where, *settings], user=user, stdout=log, stderr=log)
        try:
            _wait(server, folder)
            yield PostgresServer(folder)
        finally:
            server.send_signal(2)  # SIGINT: a fast shutdown, which hangs up on whoever is connected
            server.wait(START_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plain_user() -> int | None:
    """The server refuses to run as root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    raise NoPostgres("PostgreSQL does not run as root, and there is no user to run it as")


def _wait(server: subprocess.Popen[bytes], folder: Path) -> None:
    engine = create_engine(PostgresServer(folder).url("postgres"))
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                with engine.connect():
                    return
            except Exception as error:  # whatever the driver raises while the server starts
                if server.poll() is not None or time.monotonic() > deadline:
                    raise NoPostgres(f"the server did not start: {(folder / 'log').read_text()[-800:]}") from error
                time.sleep(0.1)
    finally:
        engine.dispose()
