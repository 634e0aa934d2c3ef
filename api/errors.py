"""Every error that leaves the service has one shape: {"error": NAME, "detail": TEXT, "hint": TEXT}.

ApiError                    status  when
  x RequestError            422     a field has a wrong type or range, is missing or unknown
  x ProblemError            422     no template can serve the problem: the rule it breaks
  x UnknownTarget           422     no such arch or device
  x NotFound                404     no such job, study, result, export or route
  x NoResult                404     nothing tuned answers the question; carries the request that would tune it
  x RepeatedKey             422     a JSON key or a query parameter is given twice
  x Conflict                409     what is stored does not allow it (key used for another body, export not ready)
  x UnverifiedResult        409     an export of a result that lacks evidence
  x WithdrawnResult         410     the result was published, and its kernel was found to be bad
  x BundleMissing           410     the bundle's file is gone
  x BodyTooLarge            413     the request body is over the limit

What the store raises becomes 409 IdempotencyConflict or 503 Unavailable; a fault of ours is 500 InternalError.
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from db.errors import DatabaseBusy, DatabaseError, IdempotencyConflict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fastapi import FastAPI, Request

log = logging.getLogger("api")

MAX_FIELDS_NAMED = 5
MAX_VALUE_CHARS = 60
BUSY_RETRY_S = 1


class ApiError(Exception):
    """An answer that is not the one asked for. The class name is the error's name.

    detail: what is wrong, with the values in it
    hint: what to do about it
    extra: more members of the body, for programs
    """

    status = 500

    def __init__(self, detail: str, *, hint: str = "", extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint
        self.extra = dict(extra or {})


class RequestError(ApiError):
    """The request itself is malformed."""

    status = 422


class ProblemError(ApiError):
    """No template can serve the problem."""

    status = 422


class UnknownTarget(ApiError):
    """The architecture or device is not one that can be tuned for."""

    status = 422


class NotFound(ApiError):
    """There is nothing under this name."""

    status = 404


class NoResult(ApiError):
    """Nothing stored answers the question."""

    status = 404


class Conflict(ApiError):
    """What is stored does not allow the request."""

    status = 409


class UnverifiedResult(ApiError):
    """The result lacks the evidence that a published kernel has."""

    status = 409


class WithdrawnResult(ApiError):
    """The result's kernel was found to be bad after it was published: nothing hands it out any more."""

    status = 410


class BundleMissing(ApiError):
    """The export is done, but its file is not where it was written."""

    status = 410


class BodyTooLarge(HTTPException):
    """The body passes the limit. An HTTPException: FastAPI turns others that are raised while reading into 400."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413)
        self.limit_bytes = limit_bytes


class RepeatedKey(HTTPException):
    """A key of the body or a query parameter stands twice. An HTTPException for the same reason."""

    def __init__(self, name: str, *, where: str) -> None:
        super().__init__(422)
        self.name = name
        self.where = where


def error_response(
    status: int,
    error: str,
    detail: str,
    hint: str = "",
    *,
    extra: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The one shape. Written as ASCII: a detail may quote text that UTF-8 cannot carry (lone surrogates)."""
    body = json.dumps({"error": error, "detail": detail, "hint": hint, **(extra or {})})
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def too_large_response(limit_bytes: int) -> Response:
    """413 with the limit."""
    detail, hint = f"the request body is larger than {limit_bytes} bytes", "split the request into several"
    return error_response(413, "BodyTooLarge", detail, hint, headers={"Connection": "close"})


def unavailable_response(error: DatabaseError) -> Response:
    """503. What went wrong names files of the server: that is for the log, except that waiting helps."""
    log.error("database error: %s", error)
    busy = isinstance(error, DatabaseBusy)
    detail = "the database is busy" if busy else "the database cannot be used"
    hint = "try again" if busy else "see the service's log, or run `gemm-tuner doctor` beside it"
    return error_response(503, "Unavailable", detail, hint, headers={"Retry-After": str(BUSY_RETRY_S)})


def field_path(location: Sequence[int | str]) -> str:
    """`("body", "problems", 0, "m")` as people write it: `problems[0].m`."""
    path = ""
    for part in location[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or str(location[0])


def _shown(value: object) -> str:
    """The offending value as JSON writes it, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# Messages of pydantic's error types, in our words; a type that is not here keeps pydantic's own.
_MESSAGES: dict[str, Callable[[Mapping[str, Any], object], str]] = {
    "missing": lambda ctx, value: "is required",
    "extra_forbidden": lambda ctx, value: "is not a field of this request",
    "int_type": lambda ctx, value: f"must be an integer, got {_shown(value)}",
    "int_parsing": lambda ctx, value: f"must be an integer, got {_shown(value)}",
    "int_from_float": lambda ctx, value: f"must be an integer, got {_shown(value)}",
    "float_type": lambda ctx, value: f"must be a number, got {_shown(value)}",
    "finite_number": lambda ctx, value: "must be a finite number",
    "bool_type": lambda ctx, value: f"must be true or false, got {_shown(value)}",
    "string_type": lambda ctx, value: f"must be a string, got {_shown(value)}",
    "string_unicode": lambda ctx, value: "must be valid Unicode text",
    "string_too_long": lambda ctx, value: f"must have at most {ctx['max_length']} characters",
    "string_too_short": lambda ctx, value: f"must have at least {ctx['min_length']} characters",
    "list_type": lambda ctx, value: "must be a list",
    "model_attributes_type": lambda ctx, value: f"must be an object, got {_shown(value)}",
    "greater_than": lambda ctx, value: f"must be greater than {_number(ctx['gt'])}, got {_shown(value)}",
    "greater_than_equal": lambda ctx, value: f"must be at least {_number(ctx['ge'])}, got {_shown(value)}",
    "less_than_equal": lambda ctx, value: f"must be at most {_number(ctx['le'])}, got {_shown(value)}",
    "literal_error": lambda ctx, value: f"must be {ctx['expected']}, got {_shown(value)}",
    "enum": lambda ctx, value: f"must be {ctx['expected']}, got {_shown(value)}",
    "too_long": lambda ctx, value: f"has more than the limit of {ctx['max_length']} entries",
    "too_short": lambda ctx, value: "must not be empty",
    "json_invalid": lambda ctx, value: f"is not JSON: {ctx['error']}",
    "value_error": lambda ctx, value: str(ctx["error"]),
}

_HINTS: dict[str, str] = {
    "extra_forbidden": "remove it, or correct its spelling; /openapi.json lists the fields",
    "too_long": "split the request into several",
    "json_invalid": "send a JSON document with Content-Type: application/json",
}


def _one_message(error: Mapping[str, Any]) -> str:
    """One entry of pydantic's list as `field: what is wrong`."""
    location, kind = tuple(error["loc"]), error["type"]
    if kind == "json_invalid":
        location = ("body",)
    make = _MESSAGES.get(kind)
    message = make(error.get("ctx", {}), error.get("input")) if make else str(error["msg"])
    return f"{field_path(location)}: {message}"


def validation_messages(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """`field: what is wrong` for every wrong field, up to five of them."""
    messages = [_one_message(error) for error in errors[:MAX_FIELDS_NAMED]]
    if len(errors) > MAX_FIELDS_NAMED:
        messages.append(f"and {len(errors) - MAX_FIELDS_NAMED} more")
    return messages


def validation_response(errors: Sequence[Mapping[str, Any]]) -> Response:
    """422 that names every wrong field, up to five of them."""
    messages = validation_messages(errors)
    hint = next((_HINTS[error["type"]] for error in errors if error["type"] in _HINTS), "")
    if not hint and any(error["loc"] == ("body",) for error in errors):
        hint = _HINTS["json_invalid"]
    return error_response(422, "RequestError", "; ".join(messages), hint or "see /openapi.json for types and ranges")


def http_error_response(request: Request, error: HTTPException) -> Response:
    """Errors that the framework raises: no such route, wrong method, unreadable body, body too large."""
    if isinstance(error, BodyTooLarge):
        return too_large_response(error.limit_bytes)
    if isinstance(error, RepeatedKey):
        what = "a key of the body" if error.where == "body" else "a query parameter"
        detail = f"{error.name[:MAX_VALUE_CHARS]}: is given more than once"
        return error_response(422, "RequestError", detail, f"name {what} once: which one counts would be a guess")
    method, path = request.method, request.url.path
    detail, hint = str(error.detail), ""
    name = HTTPStatus(error.status_code).phrase.title().replace(" ", "")
    if error.status_code == 404:
        detail, hint = f"no route {path!a}", "see /openapi.json for the routes"
    elif error.status_code == 405:
        # The framework names the methods of the first route with this path; there may be several.
        allowed = ", ".join(request.app.state.methods_of(path))
        detail, hint = f"{method} is not served by {path!a}", f"allowed here: {allowed}"
        return error_response(405, name, detail, hint, headers={"Allow": allowed})
    elif (
        error.status_code == 400
    ):  # the framework could not read the body at all: for us a malformed request like others
        hint = "send a JSON document with Content-Type: application/json"
        return error_response(422, "RequestError", "body: cannot be read as JSON", hint)
    return error_response(error.status_code, name, detail, hint, headers=error.headers)


def install_error_handlers(app: FastAPI) -> None:
    """Map exceptions to the one shape. What is not mapped here is a 500, made by `api.middleware`."""
    from fastapi.exceptions import RequestValidationError  # here: most of what uses this module needs no framework

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error.status, type(error).__name__, error.detail, error.hint, extra=error.extra)

    async def database_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DatabaseError)
        if isinstance(error, IdempotencyConflict):
            return error_response(409, "IdempotencyConflict", str(error), "send the same body again, or a new key")
        return unavailable_response(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_response(error.errors())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_error_response(request, error)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(DatabaseError, database_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
