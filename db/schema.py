"""Schema revisions: which ones this version knows, and moving a database from one to another."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import inspect, text

from db.errors import NewerDatabase

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

# Listed here so that opening an up-to-date database costs no import of Alembic (0.3 s); a test compares it with the
# scripts of the migrations folder.
KNOWN_REVISIONS: tuple[str, ...] = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
HEAD = KNOWN_REVISIONS[-1]

# Alembic keeps the migration that runs in a module-level variable.
_alembic_lock = threading.Lock()


def current_revision(connection: Connection) -> str | None:
    """Revision that the database says it has, or None where it has no version table."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if revision is None else str(revision)


def require_known(revision: str | None, where: str) -> None:
    """Raises NewerDatabase for a revision that this version does not know."""
    if revision is not None and revision not in KNOWN_REVISIONS:
        raise NewerDatabase(
            f"{where} has schema revision {revision!r}, this version knows up to {HEAD!r}; it was left as it was: "
            "use the newer version that wrote it, or restore a backup made before the upgrade"
        )


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations up to `revision` in the transaction that the connection is in. The caller commits."""
    from alembic import command

    with _alembic_lock:
        command.upgrade(alembic_config(connection), revision)


def downgrade(connection: Connection, revision: str) -> None:
    """Run the migrations back to `revision` (`base`: no tables at all). The caller commits."""
    from alembic import command

    with _alembic_lock:
        command.downgrade(alembic_config(connection), revision)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's settings, made in memory: there is no alembic.ini to find or to lose."""
    from alembic.config import Config

    config = Config()
    # The config parser reads % as interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
