"""What a route asks for.

A route opens its transaction itself, `with db.read()` or `with db.write()` around one service call: one request, one
transaction, committed before the response starts. It is not a generator dependency: FastAPI would enter and leave that
in other threads of the pool than the route's, and with every thread waiting for SQLite's write lock, the request that
holds the lock would find none to run in.

No postponed annotations in this module: FastAPI reads them.
"""

from typing import Annotated

from fastapi import Depends, Header, Path, Request

from api.metrics import RequestMetrics
from api.services.kept import Kept as KeptAnswers
from api.settings import ApiSettings
from db.database import Database


# Async on purpose: FastAPI sends plain functions to the thread pool, for an attribute that is a wasted hop.
async def _database(request: Request) -> Database:
    database = request.app.state.database
    assert isinstance(database, Database)
    return database


async def _settings(request: Request) -> ApiSettings:
    settings = request.app.state.settings
    assert isinstance(settings, ApiSettings)
    return settings


async def _metrics(request: Request) -> RequestMetrics:
    metrics = request.app.state.metrics
    assert isinstance(metrics, RequestMetrics)
    return metrics


async def _kept(request: Request) -> KeptAnswers:
    kept = request.app.state.kept
    assert isinstance(kept, KeptAnswers)
    return kept


Db = Annotated[Database, Depends(_database)]
Settings = Annotated[ApiSettings, Depends(_settings)]
Metrics = Annotated[RequestMetrics, Depends(_metrics)]
Kept = Annotated[KeptAnswers, Depends(_kept)]

JobId = Annotated[str, Path(description="Id of a job.")]
StudyId = Annotated[str, Path(description="Id of a study.")]
ResultId = Annotated[str, Path(description="Id of a result.")]
ExportId = Annotated[str, Path(description="Id of an export.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="Any text chosen by the client. The same key with the same body gives the job of the first time.",
        min_length=1,
        max_length=255,
        pattern="^[!-~]+$",
    ),
]
LastEventId = Annotated[str | None, Header(description="Id of the last event that arrived; the stream goes on there.")]
