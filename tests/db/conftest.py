"""A fresh database for each test, copied from one that the migrations made: a SQLite file, and one of PostgreSQL.

Tests that take `path` are about SQLite files. Those that take `url` or `database` run on both.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from db.database import Database
from db.models import new_id
from tests.conftest import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database with the newest schema, closed."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    """File of an empty database that nothing has open."""
    return Path(shutil.copy(template, tmp_path / "tuner.db"))


@pytest.fixture
def sqlite_url(path: Path) -> str:
    """URL of an empty SQLite database."""
    return f"sqlite:///{path}"


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_url")
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"test_{new_id()[:12]}"
    yield server.create(name, template=request.getfixturevalue("postgres_template"))
    server.drop(name)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """An open, empty database."""
    with Database.open(url, busy_timeout_s=10) as opened:
        yield opened


@pytest.fixture
def sqlite_database(sqlite_url: str) -> Iterator[Database]:
    """An open, empty SQLite database."""
    with Database.open(sqlite_url, busy_timeout_s=10) as opened:
        yield opened
