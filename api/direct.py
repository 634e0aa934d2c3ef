"""GET /v1/best inside this process, without the framework: importing that takes longer than looking the answer up.

The bodies are those of the route, errors too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from api.errors import ApiError, error_response, unavailable_response, validation_response
from api.schemas import BestQuery
from api.services import best
from api.services.kept import Kept
from db.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from api.settings import ApiSettings
    from db.database import Database


def best_reply(database: Database, settings: ApiSettings, parameters: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body of the answer to one question."""
    try:
        query = BestQuery.model_validate(dict(parameters))
        return 200, best.looked_up(database, query, Kept(), settings.nearest_limit_log2)[1]
    except ValidationError as error:
        reply = validation_response([{**one, "loc": ("query", *one["loc"])} for one in error.errors()])
    except ApiError as error:
        reply = error_response(error.status, type(error).__name__, error.detail, error.hint, extra=error.extra)
    except DatabaseError as error:
        reply = unavailable_response(error)
    return reply.status_code, bytes(reply.body)
