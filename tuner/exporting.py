"""Exports that were asked for: from a row of the database to a bundle in the folder of bundles."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from db import queries
from kernels.artifacts import ArtifactError, ArtifactStore
from tuner.export import ExportError, build_bundle
from tuner.records import State
from tuner.store import write

if TYPE_CHECKING:
    from pathlib import Path

    from db.database import Database


def run_export(
    database: Database, export_id: str, request: dict[str, Any], *, artifacts: ArtifactStore, exports_dir: Path
) -> None:
    """Build the bundle of a claimed export and end the export, DONE or FAILED with a reason."""
    path = exports_dir / f"{export_id}.zip"
    try:
        exports_dir.mkdir(parents=True, exist_ok=True)
        _build(database, request, artifacts, path)
    except (ExportError, ArtifactError) as error:
        _fail(database, export_id, str(error))
    except OSError as error:
        _fail(
            database, export_id, f"cannot write {path.name}: {error.strerror or error}; free some space and ask again"
        )
    else:
        data = path.read_bytes()
        write(
            database,
            lambda session: queries.finish_export(
                session,
                export_id,
                state=State.DONE.value,
                bundle_path=str(path),
                bundle_sha256=hashlib.sha256(data).hexdigest(),
                size_bytes=len(data),
            ),
        )


def _build(database: Database, request: dict[str, Any], artifacts: ArtifactStore, path: Path) -> None:
    with database.read() as session:
        found = [(result_id, queries.result(session, result_id)) for result_id in request["results"]]
    if missing := [result_id for result_id, row in found if row is None]:
        raise ExportError(f"there is no result {missing[0]}")
    rows = [row for _, row in found if row is not None]
    build_bundle(rows, artifacts, path, allow_unverified=bool(request.get("allow_unverified", False)))


def _fail(database: Database, export_id: str, reason: str) -> None:
    write(
        database,
        lambda session: queries.finish_export(session, export_id, state=State.FAILED.value, reason=reason),
    )
