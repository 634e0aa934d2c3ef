"""What all routes of pages share: errors come as pages, and forms are read once.

No postponed annotations in this module: FastAPI reads them.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from api.errors import (
    ApiError,
    RepeatedKey,
    RequestError,
    error_response,
    http_error_response,
    unavailable_response,
    validation_response,
)
from api.pages.replies import error_page
from api.strict import StrictRoute
from db.errors import DatabaseError

MAX_FIELDS = 64
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(StrictRoute):
    """A route whose errors are pages."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Pages are for people: the document for programs does not list them.
        super().__init__(*args, **{**options, "include_in_schema": False, "response_model": None})

    def get_route_handler(self) -> Handler:
        """Called by FastAPI when the route is made."""
        usual = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await usual(request)
            except ApiError as error:
                found = error_response(error.status, type(error).__name__, error.detail, error.hint)
            except RequestValidationError as error:
                found = validation_response(error.errors())
            except HTTPException as error:
                found = http_error_response(request, error)
            except DatabaseError as error:
                found = unavailable_response(error)
            return error_page(found.status_code, json.loads(bytes(found.body)))

        return handler


async def _form(request: Request) -> dict[str, str]:
    """Raises RequestError for what no browser sends, RepeatedKey for a field that is given twice."""
    try:
        text = (await request.body()).decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise RequestError(f"body: is no form: {error}", hint="send the form of the page itself") from error
    fields: dict[str, str] = {}
    for name, value in pairs:
        if name in fields:
            raise RepeatedKey(name, where="body")
        fields[name] = value
    return fields


Form = Annotated[dict[str, str], Depends(_form)]
