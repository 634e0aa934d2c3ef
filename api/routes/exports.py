"""Bundles of prebuilt modules."""

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

from api.deps import Db, ExportId, Settings
from api.openapi import Responses, errors
from api.schemas import ExportIn
from api.services import exports
from api.strict import StrictRoute
from api.views.exports import ExportView

router = APIRouter(prefix="/v1/exports", tags=["exports"], route_class=StrictRoute)

BUNDLE: Responses = {
    200: {"description": "The bundle.", "content": {"application/zip": {"schema": {"type": "string"}}}}
}


@router.post("", status_code=202, responses=errors(404, 409, 410, body=True), summary="Order a bundle")
def create(body: ExportIn, db: Db, response: Response) -> ExportView:
    """One zip or wheel with the modules of these results. Results without `numeric` and `checked` need
    `allow_unverified`.
    """
    with db.write() as session:
        export = exports.create(session, body)
    response.headers["Location"] = f"/v1/exports/{export.id}"
    return export


@router.get("/{export_id}", responses=errors(404), summary="State of an export")
def show(export_id: ExportId, db: Db) -> ExportView:
    """QUEUED, RUNNING, DONE or FAILED with the reason."""
    with db.read() as session:
        return exports.show(session, export_id)


@router.get(
    "/{export_id}/bundle",
    responses=BUNDLE | errors(404, 409, 410, json=False),
    response_class=FileResponse,
    summary="Download a bundle",
)
def bundle(export_id: ExportId, db: Db, settings: Settings) -> Response:
    """The file itself, once the export is DONE. A wheel must keep its `file_name`: pip reads it."""
    with db.read() as session:
        return exports.bundle(session, export_id, settings.exports_dir)
