"""Exports that were asked for: from a row of the database to a bundle in the folder of bundles."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from db import queries
from kernels.artifacts import ArtifactError, ArtifactStore
from tuner.export import ExportError, build_bundle
from tuner.records import State
from tuner.store import write
from tuner.wheel.build import build_wheel

if TYPE_CHECKING:
    from pathlib import Path

    from db.database import Database


def run_export(
    database: Database, export_id: str, request: dict[str, Any], *, artifacts: ArtifactStore, exports_dir: Path
) -> None:
    """Build the bundle of a claimed export and end the export, DONE or FAILED with a reason."""
    try:
        exports_dir.mkdir(parents=True, exist_ok=True)
        path = _build(database, export_id, request, artifacts, exports_dir)
        data = path.read_bytes()
    except (ExportError, ArtifactError) as error:
        _fail(database, export_id, str(error))
    except OSError as error:
        reason = f"cannot write the bundle: {error.strerror or error}; free some space and ask again"
        _fail(database, export_id, reason)
    else:
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


def _build(
    database: Database, export_id: str, request: dict[str, Any], artifacts: ArtifactStore, exports_dir: Path
) -> Path:
    """Write the file that was asked for. Raises ExportError, ArtifactError, OSError."""
    with database.read() as session:
        found = [(result_id, queries.result(session, result_id)) for result_id in request["results"]]
    if missing := [result_id for result_id, row in found if row is None]:
        raise ExportError(f"there is no result {missing[0]}")
    rows = [row for _, row in found if row is not None]
    with database.read() as session:
        for row in rows:
            stored = queries.artifact(session, row.artifact_sha256 or "")
            if stored is not None and stored.removed_at is not None:
                raise ExportError(f"the module of result {row.id} was removed to save space: tune its problem again")
    allow_unverified = bool(request.get("allow_unverified", False))
    if request.get("format") == "wheel":
        # pip reads a wheel's version and platform from its name, so it has a folder of its own.
        path = build_wheel(rows, artifacts, exports_dir / export_id, allow_unverified=allow_unverified)
    else:
        path = exports_dir / f"{export_id}.zip"
        build_bundle(rows, artifacts, path, allow_unverified=allow_unverified)
    used = [row.artifact_sha256 for row in rows if row.artifact_sha256]
    write(database, lambda session: queries.note_use(session, used))
    return path


def _fail(database: Database, export_id: str, reason: str) -> None:
    write(
        database,
        lambda session: queries.finish_export(session, export_id, state=State.FAILED.value, reason=reason),
    )
