"""What every response body has: an example, which OpenAPI shows and the tests read back; and the body of an error.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

Json = dict[str, Any]


def example(value: Json) -> ConfigDict:
    """Model settings with the body's example."""
    return ConfigDict(json_schema_extra={"examples": [value]}, use_attribute_docstrings=True)


class ErrorBody(BaseModel):
    """Every error."""

    model_config = example({"error": "NotFound", "detail": "no job 'abc'", "hint": "GET /v1/jobs lists the jobs"})

    error: str
    """Name of the error, for programs."""
    detail: str
    """What is wrong, for people."""
    hint: str
    """What to do about it; may be empty."""
