"""From a template and its values to a response, and from an error to a page."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import RedirectResponse, Response

from api.pages import words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import Headers
    from starlette.types import Scope

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
LOGIN = "/login"

PAGE_HEADERS = {
    # Nothing from elsewhere, nothing inline, no eval; forms go to this service alone.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}


@cache
def static_version(name: str) -> str:
    """Start of the hash of a file of ours: in its address, so that a browser may keep the file for good."""
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]


def static_url(name: str) -> str:
    """Address of one of our files."""
    return f"/static/{name}?v={static_version(name)}"


def with_query(path: str, values: Mapping[str, Any] | None = None, **more: Any) -> str:
    """A path with query parameters; those without a value are left out."""
    given = {name: value for name, value in {**(values or {}), **more}.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= words.FILTERS
    made.globals |= {"static_url": static_url, "with_query": with_query}
    return made


TEMPLATES = _environment()


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    """A whole page, or a part of one where the template is a part."""
    text = TEMPLATES.get_template(template).render(values)
    return Response(text, status, PAGE_HEADERS, media_type="text/html")


def see(path: str) -> Response:
    """Where the browser goes on after a form."""
    return RedirectResponse(path, 303)


# ---------------------------------------------------------------------- errors


def wants_page(path: str, headers: Headers) -> bool:
    """Whether a person looks at the answer: a browser asks for HTML, and programs talk to /v1."""
    return "text/html" in headers.get("accept", "") and not path.startswith("/v1/")


def error_page(status: int, body: Mapping[str, Any]) -> Response:
    """An error as a page of its own."""
    return page("error.html", status=status, code=status, error=body)


def refusal_page(scope: Scope, refusal: Response) -> Response:
    """What was refused before any route saw it, for a person; without a token the way to bring one."""
    if refusal.status_code == 401:
        asked = scope["path"] + (
            f"?{scope['query_string'].decode('ascii', 'replace')}" if scope["query_string"] else ""
        )
        back = f"?next={quote(asked)}" if scope["method"] == "GET" and asked != "/" else ""
        return see(LOGIN + back)
    made = error_page(refusal.status_code, json.loads(bytes(refusal.body)))
    for name in ("retry-after", "allow"):
        if name in refusal.headers:
            made.headers[name] = refusal.headers[name]
    return made
