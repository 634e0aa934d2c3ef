"""A fresh database for each test, copied from one that the migrations made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from db.database import Database

if TYPE_CHECKING:
    from collections.abc import Iterator


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
def url(path: Path) -> str:
    """URL of an empty database."""
    return f"sqlite:///{path}"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """An open, empty database."""
    with Database.open(url, busy_timeout_s=10) as opened:
        yield opened
