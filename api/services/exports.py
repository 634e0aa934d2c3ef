"""Orders for bundles, and the way to their files."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from starlette.responses import FileResponse

from api.errors import BundleMissing, Conflict, UnverifiedResult
from api.services.lookup import found
from api.services.results import found_result, refuse_withdrawn
from api.views.exports import ExportView
from db import queries
from db.models import Export, Result, State

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.orm import Session

    from api.schemas import ExportIn

NEEDED_EVIDENCE = ("numeric", "checked")


def create(session: Session, body: ExportIn) -> ExportView:
    """Order a bundle. Raises NotFound, WithdrawnResult, UnverifiedResult."""
    identities = list(dict.fromkeys(body.results))
    for position, identity in enumerate(identities):
        result = found_result(session, identity, field=f"results[{position}]: ")
        refuse_withdrawn(result, field=f"results[{position}]: ")
        if not body.allow_unverified:
            _check_evidence(result, position)
    request = {"results": identities, "format": body.format, "allow_unverified": body.allow_unverified}
    return export_view(queries.create_export(session, request))


def _check_evidence(result: Result, position: int) -> None:
    missing = [word for word in NEEDED_EVIDENCE if word not in result.evidence]
    if missing:
        raise UnverifiedResult(
            f"results[{position}]: result {result.id} lacks {' and '.join(missing)}, it has "
            f"{', '.join(result.evidence) or 'no evidence'}",
            hint='add "allow_unverified": true to export it all the same; the manifest will say so',
        )


def show(session: Session, export_id: str) -> ExportView:
    """Raises NotFound."""
    return export_view(found_export(session, export_id))


def bundle(session: Session, export_id: str, exports_dir: Path) -> FileResponse:
    """The file of a finished export. Raises NotFound, Conflict, WithdrawnResult, BundleMissing."""
    export = found_export(session, export_id)
    if export.state == State.FAILED:
        raise Conflict(f"export {export_id} failed: {export.reason}", hint="mend the cause and order it again")
    if export.state != State.DONE:
        raise Conflict(f"export {export_id} is {export.state}", hint="ask again until its state is DONE")
    for identity in export.request["results"]:
        refuse_withdrawn(found_result(session, identity))
    path = _stored_file(export, exports_dir)
    headers = {"ETag": f'"{export.bundle_sha256}"'} if export.bundle_sha256 else None
    return FileResponse(path, media_type="application/zip", filename=_file_name(export), headers=headers)


def _file_name(export: Export) -> str | None:
    """A wheel has the name that was given to it; None before there is a file."""
    if export.bundle_path is None:
        return None
    own = PurePath(export.bundle_path).name
    return own if own.endswith(".whl") else f"gemms-{export.id[:8]}.zip"


def _stored_file(export: Export, exports_dir: Path) -> Path:
    """Where the tuner wrote the bundle. Links are resolved first: nothing outside the exports folder is ever served."""
    root = exports_dir.resolve()
    path = (root / (export.bundle_path or "")).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise BundleMissing(
            f"the bundle of export {export.id} is not in the exports folder any more", hint="order it again"
        )
    return path


def found_export(session: Session, export_id: str) -> Export:
    """Raises NotFound."""
    return found(queries.export, session, export_id, "export", hint="POST /v1/exports gives the id of a new one")


def export_view(export: Export) -> ExportView:
    """As the client sees it: a path of this service in place of the file's."""
    return ExportView(
        id=export.id,
        state=export.state,
        reason=export.reason,
        results=export.request["results"],
        format=export.request["format"],
        allow_unverified=export.request["allow_unverified"],
        bundle=f"/v1/exports/{export.id}/bundle" if export.state == State.DONE else None,
        file_name=_file_name(export),
        bundle_sha256=export.bundle_sha256,
        size_bytes=export.size_bytes,
        created_at=export.created_at,
        finished_at=export.finished_at,
    )
