"""How a browser brings its token: once, into a cookie that scripts cannot read and other sites cannot send."""

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from api.access import COOKIE, MAX_TOKEN_CHARS
from api.deps import Db, Settings
from api.pages.replies import LOGIN, page, see
from api.pages.route import Form, PageRoute
from db import queries
from db.database import Database

router = APIRouter(route_class=PageRoute)


@router.get(LOGIN)
async def ask(settings: Settings, next: str = "/") -> Response:
    """The form."""
    return page("login.html", next=_own(next), problem="", needed=settings.needs_token)


@router.post(LOGIN)
async def bring(form: Form, db: Db, settings: Settings, request: Request) -> Response:
    """Keep a known token for as long as the browser runs."""
    token, following = form.get("token", "").strip(), _own(form.get("next", "/"))
    if not await run_in_threadpool(_is_known, db, token):
        problem = "This token is not known, was revoked or has expired."
        return page("login.html", status=401, next=following, problem=problem, needed=settings.needs_token)
    reply = see(following)
    secure = request.url.scheme == "https"
    reply.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
    return reply


@router.post("/logout")
async def leave() -> Response:
    """Forget the token."""
    reply = see(LOGIN)
    reply.delete_cookie(COOKIE, httponly=True, samesite="strict", path="/")
    return reply


def _is_known(db: Database, token: str) -> bool:
    if not token.isascii() or not 0 < len(token) <= MAX_TOKEN_CHARS:
        return False
    with db.read() as session:
        return queries.token_by_hash(session, queries.token_hash(token)) is not None


def _own(path: str) -> str:
    """A page of this service, whatever someone wrote into the address."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"
