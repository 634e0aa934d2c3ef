"""How routes document their errors."""

from typing import Any

from api.views import ErrorBody

_DESCRIPTIONS = {
    404: "There is nothing under this id.",
    409: "What is stored does not allow it.",
    410: "The file is gone.",
    413: "The body is larger than the limit.",
    422: "A field is wrong, or the problem cannot be served; the detail names the field or the rule.",
    500: "A fault of the service; only its log says more.",
    503: "The database cannot be reached or is busy; try again.",
}
_EXAMPLES = {
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
    """`responses=` of a route: what it can answer besides success; always 500 and 503, and 413 and 422 with a body.

    With parameters there is always a 422: FastAPI documents one of its own shape otherwise.

    json: whether success is JSON too. For another response class FastAPI would file the model under that class's media
        type, so the schema is referred to by name there; the JSON routes define it.
    """
    listed = {*statuses, 500, 503} | ({413, 422} if body else set()) | ({422} if statuses else set())
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
