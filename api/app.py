"""The application: routes, error shape, envelope around each request."""

from __future__ import annotations

from contextlib import asynccontextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from api.access import AccessControl
from api.errors import install_error_handlers
from api.metrics import RequestMetrics
from api.middleware import RequestEnvelope
from api.pages.routers import PAGES
from api.routes import best, devices, dispatch, exports, health, jobs, pins, regressions, results, studies
from api.services.kept import Kept
from db.database import Database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from api.settings import ApiSettings

MODULES = (best, health, jobs, studies, dispatch, results, pins, regressions, exports, devices)
DESCRIPTION = """Tunes GEMM kernels, D[M,N] = A[M,K] @ B[N,K]^T, and tells which config is best for a shape and device.

Submit a job, follow its events, ask for the best config, export tuned kernels as modules that load offline.
Every error is `{"error": NAME, "detail": TEXT, "hint": TEXT}`."""


def version() -> str:
    """Version of the installed distribution, or `unknown` when run from a plain folder."""
    try:
        return metadata.version("gemm-tuner")
    except metadata.PackageNotFoundError:
        return "unknown"


def create_app(settings: ApiSettings, database: Database | None = None) -> FastAPI:
    """Build the application on a database, which it closes when it stops; default: the one of the settings.

    Raises DatabaseError for a database that cannot be used.
    """
    database = database or Database.open(settings.database_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        database.close()

    # The documentation pages of FastAPI load scripts from a content network; this service must work offline.
    app = FastAPI(
        title="gemm-tuner",
        redirect_slashes=False,
        version=version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.database = database
    app.state.metrics = RequestMetrics()
    app.state.kept = Kept()
    app.state.stopping = False  # set when the process is told to stop: event streams end then
    install_error_handlers(app)
    app.add_middleware(AccessControl, settings=settings)
    app.add_middleware(RequestEnvelope, metrics=app.state.metrics, max_body_bytes=settings.max_body_bytes)
    for module in MODULES + PAGES:
        app.include_router(module.router)
    app.state.methods_of = _methods_of
    _document_tokens(app)
    return app


def _methods_of(path: str) -> tuple[str, ...]:
    """Every method that is served under a path."""
    routes = (route for module in MODULES + PAGES for route in module.router.routes if isinstance(route, APIRoute))
    return tuple(sorted({method for route in routes if route.path_regex.match(path) for method in route.methods or ()}))


def _document_tokens(app: FastAPI) -> None:
    """Say in the document that a token may be needed: FastAPI says so only where its own dependencies look at one."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        document = usual()
        bearer = {"type": "http", "scheme": "bearer", "description": "Needed unless the service is bound to loopback."}
        document["components"]["securitySchemes"] = {"bearer": bearer}
        document["security"] = [{}, {"bearer": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
