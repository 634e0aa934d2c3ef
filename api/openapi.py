"""How routes document their errors."""

from typing import Any

from pydantic import BaseModel

from api.views.base import ErrorBody

_DESCRIPTIONS = {
    401: "A bearer token is needed, or the one that was sent is not valid. Never on a loopback address.",
    403: "The token's scope does not reach.",
    429: "This client sends more requests than it may; Retry-After says when to go on.",
    404: "There is nothing under this id.",
    409: "What is stored does not allow it.",
    410: "The file is gone.",
    413: "The body is larger than the limit.",
    422: "A field is wrong, or the problem cannot be served; the detail names the field or the rule.",
    500: "A fault of the service; only its log says more.",
    503: "The database cannot be reached or is busy; try again.",
}
_EXAMPLES = {
    401: {"error": "TokenNeeded", "detail": "a bearer token is needed", "hint": "send Authorization: Bearer TOKEN"},
    403: {
        "error": "ScopeTooSmall",
        "detail": "token 'ci' allows read, this needs submit",
        "hint": "use a token with a larger scope",
    },
    429: {"error": "TooManyRequests", "detail": "too many requests", "hint": "wait"},
    404: {"error": "NotFound", "detail": "no job 'abc'", "hint": "GET /v1/jobs lists the jobs"},
    409: {"error": "Conflict", "detail": "export 5f0c is RUNNING", "hint": "ask again until its state is DONE"},
    410: {"error": "BundleMissing", "detail": "the bundle of export 5f0c is gone", "hint": "order it again"},
    413: {
        "error": "BodyTooLarge",
        "detail": "the request body is larger than 1048576 bytes",
        "hint": "split the request into several",
    },
    422: {
        "error": "ProblemError",
        "detail": "problems[0].k: k = 100 is not a multiple of 8: pad k to 104",
        "hint": "pad the operands with zeros",
    },
    500: {
        "error": "InternalError",
        "detail": "the service failed to answer",
        "hint": "report it with the X-Request-ID of this response",
    },
    503: {"error": "Unavailable", "detail": "the database was locked for 10 s", "hint": "try again"},
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int, body: bool = False, json: bool = True) -> Responses:
    """`responses=` of a route: what it can answer besides success.

    Always what a token or the rate may refuse, and 500 and 503; with a body also 413 and 422.

    With parameters there is always a 422: FastAPI documents one of its own shape otherwise.

    json: whether success is JSON too. For another response class FastAPI would file the model under that class's media
        type, so the schema is referred to by name there; the JSON routes define it.
    """
    listed = {*statuses, 401, 403, 429, 500, 503} | ({413, 422} if body else set()) | ({422} if statuses else set())
    reference = {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}
    model: dict[str, Any] = {"model": ErrorBody} if json else {}
    return {
        status: {
            **model,
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {**({} if json else reference), "example": _EXAMPLES[status]}},
        }
        for status in sorted(listed)
    }


def query_parameters(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra=` of a route that reads its query string itself: the model's fields as parameters."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return {
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": name in required,
                "schema": _resolved(field, schema.get("$defs", {})),
                "description": field.get("description", ""),
            }
            for name, field in schema["properties"].items()
        ]
    }


def _resolved(field: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its definitions written out: they would be looked for in the document."""
    if isinstance(field, list):
        return [_resolved(one, definitions) for one in field]
    if not isinstance(field, dict):
        return field
    if "$ref" in field:
        return _resolved(definitions[field["$ref"].rpartition("/")[2]], definitions)
    return {name: _resolved(value, definitions) for name, value in field.items()}
