"""What every request gets: an id, a size limit, security headers, one log line, one count, and no traceback."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from api.errors import BodyTooLarge, error_response, too_large_response
from api.logs import request_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from api.metrics import RequestMetrics

log = logging.getLogger("api.request")

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
UNMATCHED = "unmatched"  # one label for every path without a route: scanners must not fill the metrics
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class _Reply:
    """What is known of the response so far; status 0 until it starts."""

    status: int = 0


class RequestEnvelope:
    """ASGI middleware around the whole application. Plain ASGI: a BaseHTTPMiddleware costs a task a request."""

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics, max_body_bytes: int) -> None:
        self.app = app
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass anything but HTTP through unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        identity = given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(identity)
        started_s, reply = time.perf_counter(), _Reply()
        sending = self._decorated(send, reply, identity)
        try:
            announced = headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > self.max_body_bytes:
                await too_large_response(self.max_body_bytes)(scope, receive, sending)
            else:
                await self._guarded(scope, self._limited(receive, reply), sending, reply)
        finally:
            self._record(scope, reply.status, time.perf_counter() - started_s)
            request_id.reset(token)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send, reply: _Reply) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:  # the edge of the process: a fault of ours must still be answered, and only the log sees why
            log.exception("unhandled error")
            if reply.status:
                raise  # headers are out: only closing the connection tells the client that the body is cut short
            detail, hint = "the service failed to answer", "report it with the X-Request-ID of this response"
            await error_response(500, "InternalError", detail, hint)(scope, receive, send)

    def _limited(self, receive: Receive, reply: _Reply) -> Receive:
        """Refuse a body that came in chunks, without an announced length, and passes the limit."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen <= self.max_body_bytes:
                return message
            if reply.status:  # nobody reads the body any more: hang up on whoever keeps sending it
                return {"type": "http.disconnect"}
            raise BodyTooLarge(self.max_body_bytes)

        return limited

    def _decorated(self, send: Send, reply: _Reply, identity: str) -> Send:
        async def decorated(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers["X-Request-ID"] = identity
            await send(message)

        return decorated

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        if not route.endswith("/events"):  # a stream lasts as long as its job: its time says nothing of the service
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.observe(method=method, route=route, status=status, duration_s=duration_s)
        log.info(
            "%s %s %d",
            scope["method"],
            scope["path"],
            status,
            extra={
                "route": route,
                "status": status,
                "duration_ms": round(duration_s * 1e3, 3),
                **({"token": scope["gemm_tuner_token"]} if "gemm_tuner_token" in scope else {}),
            },
        )
