"""Requests are read once: a key or parameter that is given twice is refused, not decided by whoever reads it last.

No postponed annotations in this module: FastAPI reads them.
"""

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from api.errors import RepeatedKey

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRequest(Request):
    """A request whose JSON may name each key of an object once."""

    async def json(self) -> Any:
        """Called by FastAPI. Raises RepeatedKey, json.JSONDecodeError."""
        if not hasattr(self, "_json"):
            self._json = json.loads(await self.body(), object_pairs_hook=_once)
        return self._json


class StrictRoute(APIRoute):
    """Takes each query parameter once, and none that the route does not know."""

    def get_route_handler(self) -> Handler:
        """Called by FastAPI when the route is made."""
        usual = super().get_route_handler()
        parameters = bool(self.dependant.query_params) or "parameters" in (self.openapi_extra or {})

        async def handler(request: Request) -> Response:
            if request.scope["query_string"]:
                refuse_repeated(request)
                if not parameters:
                    raise RequestValidationError(
                        [{"type": "extra_forbidden", "loc": ("query", name)} for name in request.query_params]
                    )
            return await usual(StrictRequest(request.scope, request.receive))

        return handler


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RepeatedKey(_repeated([name for name, _ in pairs]), where="body")
    return made


def refuse_repeated(request: Request) -> None:
    """Raises RepeatedKey naming a query parameter that is given more than once."""
    names = [name for name, _ in request.query_params.multi_items()]
    if len(set(names)) < len(names):
        raise RepeatedKey(_repeated(names), where="query")


def _repeated(names: list[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def parsed_query[Query: BaseModel](request: Request, model: type[Query]) -> Query:
    """The query string as this model. Raises RequestValidationError naming what is wrong with which parameter."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        found = [{**one, "loc": ("query", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found) from error
