"""The style sheet and scripts of the pages."""

from fastapi import APIRouter, Request, Response

from api.errors import NotFound
from api.pages.replies import STATIC, static_version
from api.pages.route import PageRoute

router = APIRouter(route_class=PageRoute)

TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
FILES = {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in sorted(STATIC.iterdir())}
A_YEAR_S = 365 * 86_400


@router.get("/static/{name}")
async def static(name: str, request: Request, v: str | None = None) -> Response:
    """One file. Under an address with its hash it may be kept for good."""
    if name not in FILES:
        raise NotFound(f"no file {name!a}")
    content, media_type = FILES[name]
    version = static_version(name)
    headers = {"ETag": f'"{version}"', "Cache-Control": "no-cache"}
    if v == version:
        headers["Cache-Control"] = f"public, max-age={A_YEAR_S}, immutable"
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)
