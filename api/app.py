"""The application: routes, error shape, envelope around each request."""

from __future__ import annotations

from contextlib import asynccontextmanager
from importlib import metadata
from typing import TYPE_CHECKING

from fastapi import FastAPI

from api.errors import install_error_handlers
from api.metrics import RequestMetrics
from api.middleware import RequestEnvelope
from api.routes import best, devices, exports, health, jobs, results, studies
from db.database import Database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from api.settings import ApiSettings

DESCRIPTION = """Tunes GEMM kernels, D[M,N] = A[M,K] @ B[N,K]^T, and tells which config is best for a shape and device.

Submit a job, follow its events, ask for the best config, export tuned kernels as modules that load offline.
Every error is `{"error": NAME, "detail": TEXT, "hint": TEXT}`."""


def version() -> str:
    """Version of the installed distribution, or `unknown` when run from a plain folder."""
    try:
        return metadata.version("gemm-tuner")
    except metadata.PackageNotFoundError:
        return "unknown"


def create_app(settings: ApiSettings) -> FastAPI:
    """Open the database and build the application, which closes it when it stops.

    Raises DatabaseError for a database that cannot be used.
    """
    database = Database.open(settings.database_url)

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
    app.state.stopping = False  # set when the process is told to stop: event streams end then
    install_error_handlers(app)
    app.add_middleware(RequestEnvelope, metrics=app.state.metrics, max_body_bytes=settings.max_body_bytes)
    for module in (health, jobs, studies, best, results, exports, devices):
        app.include_router(module.router)
    return app
