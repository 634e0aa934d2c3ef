"""What tests of several folders share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.postgres import NoPostgres, PostgresServer, running

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each test that takes a database runs once on each of these.
BACKENDS = ("sqlite", pytest.param("postgres", marks=pytest.mark.postgres))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of our own."""
    try:
        with running() as server:
            yield server
    except NoPostgres as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """Name of a database with the newest schema and nothing in it; copying it is faster than making one a test."""
    from db.database import Database

    Database.open(postgres.create("empty")).close()
    return "empty"
