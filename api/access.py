"""Who may ask, how often, and under which name of this service: checked before anything of a request is read.

On the loopback address anyone on this machine may ask, but only under a loopback name: a web page that lets its own
name point to 127.0.0.1 is refused. Bound elsewhere, every route but /healthz and the pages' own files wants a bearer
token; a browser sends it as a cookie, which the page /login sets. What another web site lets a browser send is refused
where it would change anything.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from api.errors import error_response, unavailable_response
from api.pages.replies import refusal_page, wants_page
from db import queries
from db.errors import DatabaseError
from db.models import SCOPES

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from api.settings import ApiSettings
    from db.database import Database

OPEN_PATHS = frozenset({"/healthz", "/login"})  # for load balancers, which hold no token, and for who brings one
OPEN_FOLDER = "/static/"  # style sheet and scripts: the same for everybody
COOKIE = "gemm_tuner_token"
READS = ("GET", "HEAD", "OPTIONS")
QUESTIONS = frozenset({"/v1/best", "/submit/check", "/logout"})  # POST routes that change nothing for others
TOKEN_KEPT_S = 1.0  # a revoked token works for at most this long
MAX_TOKENS_KEPT = 1024
MAX_TOKEN_CHARS = 256
MAX_CLIENTS_KEPT = 10_000
MAX_TARGET_BYTES = 8192  # path and query string; the longest sensible one has a few hundred
BURST_S = 2.0  # a client that was quiet may send this many seconds' worth at once


def needed_scope(method: str, path: str) -> str:
    """What a token must allow for this request. Questions are reads whatever their method."""
    if method in READS or (method == "POST" and path in QUESTIONS):
        return "read"
    return "admin" if path == "/v1/pins" or path.endswith("/pin") else "submit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who a token belongs to, as last looked up.

    name: of the token, empty for one that is not known
    scope: what it allows, empty for one that is not known
    looked_s: when, on the monotonic clock
    """

    name: str
    scope: str
    looked_s: float


class Tokens:
    """Looks tokens up, at most once a second each. Used by the event loop alone."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Holder] = OrderedDict()

    async def holder(self, database: Database, token: str) -> Holder:
        """Raises DatabaseError."""
        digest = queries.token_hash(token)
        known = self._known.get(digest)
        if known is None or time.monotonic() - known.looked_s > TOKEN_KEPT_S:
            known = await run_in_threadpool(_look_up, database, digest)
            self._known[digest] = known
            self._known.move_to_end(digest)
            if len(self._known) > MAX_TOKENS_KEPT:
                self._known.popitem(last=False)
        return known


def _look_up(database: Database, digest: str) -> Holder:
    with database.read() as session:
        found = queries.token_by_hash(session, digest)
    return Holder(name=found.name if found else "", scope=found.scope if found else "", looked_s=time.monotonic())


class Rate:
    """A bucket of tokens for each client, refilled evenly. Used by the event loop alone."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._burst = per_s, max(1.0, per_s * BURST_S)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str, now_s: float) -> float:
        """0 where the client may go on, else the seconds until it may."""
        if self._per_s <= 0:
            return 0.0
        left, seen_s = self._left.get(client, (self._burst, now_s))
        left = min(self._burst, left + (now_s - seen_s) * self._per_s)
        allowed = left >= 1.0
        self._left[client] = (left - 1.0 if allowed else left), now_s
        self._left.move_to_end(client)
        if len(self._left) > MAX_CLIENTS_KEPT:
            self._left.popitem(last=False)  # the one that was quiet for longest has a full bucket anyway
        return 0.0 if allowed else (1.0 - left) / self._per_s


class AccessControl:
    """ASGI middleware. What it refuses has the shape of every error; whoever looks at a page gets it as a page."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self.app = app
        self._hosts = frozenset(name.lower() for name in settings.host_names)
        self._needs_token = settings.needs_token
        self._rate = Rate(settings.requests_per_s)
        self._tokens = Tokens()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass anything but HTTP through unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            refusal = await self._refusal(scope, headers)
        except DatabaseError as error:
            refusal = unavailable_response(error)
        if refusal is not None and wants_page(scope["path"], headers):
            refusal = refusal_page(scope, refusal)
        await (refusal or self.app)(scope, receive, send)

    async def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
            detail = f"path and query string are longer than {MAX_TARGET_BYTES} bytes"
            return error_response(414, "TargetTooLong", detail, "ask about many shapes with POST /v1/best")
        if self._hosts and (named := host_name(headers.get("host", ""))) not in self._hosts:
            detail = f"this service does not go by the name {named!a}"
            hint = "use the address that it listens on, or start it with --allowed-host NAME"
            return error_response(421, "WrongHost", detail, hint)
        if scope["method"] not in READS and is_foreign(headers):
            detail = "another web site asked for this change"
            return error_response(403, "ForeignSite", detail, "open the service's own page and do it there")
        client = scope["client"][0] if scope.get("client") else "unknown"
        if self._needs_token and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_FOLDER):
            # Counted by address until the token is known: guessing tokens is limited too.
            holder = await self._holder(scope, headers)
            if holder is None or not holder.name:
                return self._limited(client) or _unauthorized(given=holder is not None)
            client = f"token {holder.name}"
            scope["gemm_tuner_token"] = holder.name
            needed = needed_scope(scope["method"], scope["path"])
            if SCOPES.index(holder.scope) < SCOPES.index(needed):
                detail = f"token {holder.name!r} allows {holder.scope}, this needs {needed}"
                return error_response(403, "ScopeTooSmall", detail, "use a token with a larger scope")
        return self._limited(client)

    async def _holder(self, scope: Scope, headers: Headers) -> Holder | None:
        """None where the request carries no token."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        token = token.strip()
        if not token or len(token) > MAX_TOKEN_CHARS:
            return None
        return await self._tokens.holder(scope["app"].state.database, token)

    def _limited(self, client: str) -> Response | None:
        wait_s = self._rate.wait_s(client, time.monotonic())
        if not wait_s:
            return None
        headers = {"Retry-After": str(max(1, round(wait_s)))}
        detail, hint = "too many requests", "wait, and ask about many shapes with one POST /v1/best"
        return error_response(429, "TooManyRequests", detail, hint, headers=headers)


def host_name(host: str) -> str:
    """A Host header without its port, in lower case; IPv6 addresses without their brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_foreign(headers: Headers) -> bool:
    """Whether a browser says that a page of another site sent this request. Other clients say nothing."""
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _unauthorized(*, given: bool) -> Response:
    detail = "the bearer token is not known, was revoked or has expired" if given else "a bearer token is needed"
    hint = (
        "`gemm-tuner token create NAME` beside the service makes one; set GEMM_TUNER_TOKEN to it, or send it as "
        "Authorization: Bearer TOKEN"
    )
    return error_response(401, "TokenNeeded", detail, hint, headers={"WWW-Authenticate": "Bearer"})
