"""Answers that are written out by the route itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel


def json_reply(view: BaseModel, *, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The view as the response, for routes that are asked often or answer much.

    A view that a route returns goes to another thread, to be validated again: 0.4 ms for the smallest one. The route
    names the view as its `response_model`, for the documentation.
    """
    return Response(view.model_dump_json(), status_code, headers, media_type="application/json")


def json_bytes(body: bytes) -> Response:
    """A body that is JSON already."""
    return Response(body, media_type="application/json")
