"""Bodies of /v1/exports.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from datetime import datetime

from pydantic import BaseModel

from api.examples import ID_EXAMPLE, SHA_EXAMPLE, WHEN_EXAMPLE
from api.views.base import example


class ExportView(BaseModel):
    """An export and, once it is DONE, where to get its bundle."""

    model_config = example(
        {
            "id": ID_EXAMPLE,
            "state": "DONE",
            "reason": "",
            "results": [ID_EXAMPLE],
            "format": "zip",
            "allow_unverified": False,
            "bundle": f"/v1/exports/{ID_EXAMPLE}/bundle",
            "file_name": "gemms-5f0c6d2e.zip",
            "bundle_sha256": SHA_EXAMPLE,
            "size_bytes": 183204,
            "created_at": WHEN_EXAMPLE,
            "finished_at": WHEN_EXAMPLE,
        }
    )

    id: str
    state: str
    reason: str
    results: list[str]
    format: str
    allow_unverified: bool
    bundle: str | None
    """Path of the bundle on this service; null until the export is DONE."""
    file_name: str | None
    """Name to store it under: pip reads a wheel's version and platform from it."""
    bundle_sha256: str | None
    size_bytes: int | None
    created_at: datetime
    finished_at: datetime | None
