"""The OpenAPI document: every route explains itself, and its examples are true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from api import schemas, views
from api.app import create_app
from api.settings import ApiSettings

if TYPE_CHECKING:
    from pathlib import Path

ROUTES = {
    ("get", "/healthz"),
    ("get", "/metrics"),
    ("post", "/v1/jobs"),
    ("get", "/v1/jobs"),
    ("get", "/v1/jobs/{job_id}"),
    ("delete", "/v1/jobs/{job_id}"),
    ("get", "/v1/jobs/{job_id}/events"),
    ("get", "/v1/studies/{study_id}"),
    ("get", "/v1/studies/{study_id}/trials"),
    ("get", "/v1/best"),
    ("post", "/v1/best"),
    ("get", "/v1/dispatch"),
    ("get", "/v1/regressions"),
    ("get", "/v1/pins"),
    ("put", "/v1/pins"),
    ("get", "/v1/results/{result_id}/revisions"),
    ("get", "/v1/results"),
    ("get", "/v1/results/{result_id}"),
    ("post", "/v1/exports"),
    ("get", "/v1/exports/{export_id}"),
    ("get", "/v1/exports/{export_id}/bundle"),
    ("get", "/v1/devices"),
}
MODELS = [
    model
    for module in (schemas, views)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == module.__name__
]

BODIES = ("ErrorBody", "NoResultBody", "WithdrawnBody")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a fresh application."""
    folder: Path = tmp_path_factory.mktemp("openapi")
    app = create_app(ApiSettings(database_url=f"sqlite:///{folder / 'x.db'}", exports_dir=folder, artifacts_dir=folder))
    document = app.openapi()
    app.state.database.close()
    return document


def test_document_holds_exactly_the_routes_there_are(document: dict[str, Any]) -> None:
    """Routes of design.md that are not built yet are not promised."""
    assert {(method, path) for path, item in document["paths"].items() for method in item} == ROUTES


def test_every_route_has_a_summary_a_description_and_documented_errors(document: dict[str, Any]) -> None:
    """Each error is the one shape, with an example or a description; FastAPI's own 422 body appears nowhere."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["description"], where
            for status, response in operation["responses"].items():
                assert response["description"], f"{where} {status}"
                if int(status) < 400:
                    continue
                schema = response["content"]["application/json"]["schema"]
                assert schema["$ref"].rpartition("/")[2] in BODIES, f"{where} {status}"
            assert {"500", "503"} <= set(operation["responses"]), where
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_route_has_an_example(document: dict[str, Any]) -> None:
    """Of its body and of its answer, directly or in the schema that it refers to."""
    schemas_by_name = document["components"]["schemas"]

    def exemplified(content: dict[str, Any]) -> bool:
        for media in content.values():
            name = media.get("schema", {}).get("$ref", "").rpartition("/")[2]
            if "example" in media or schemas_by_name.get(name, {}).get("examples"):
                return True
        return content == {"application/zip": {"schema": {"type": "string"}}}

    for path, item in document["paths"].items():
        for method, operation in item.items():
            success = next(value for status, value in operation["responses"].items() if int(status) < 300)
            assert exemplified(success["content"]), f"{method} {path}: no example of the answer"
            if "requestBody" in operation:
                assert exemplified(operation["requestBody"]["content"]), f"{method} {path}: no example of the body"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_examples_are_valid_and_every_field_is_explained(model: type[BaseModel]) -> None:
    """An example that its own model refuses would mislead."""
    extra = model.model_config.get("json_schema_extra")
    for example in extra["examples"] if isinstance(extra, dict) else ():
        model.model_validate(example)
    assert model.__doc__


def test_request_models_refuse_unknown_fields_and_explain_theirs() -> None:
    """What people type is described field by field."""
    for model in MODELS:
        if issubclass(model, schemas.Strict):
            assert model.model_config["extra"] == "forbid"
            for name, field in model.model_fields.items():
                assert field.description, f"{model.__name__}.{name}"
