"""Working without a service: the same routes on the same database, called inside this process."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from queue import Queue
from typing import TYPE_CHECKING

import httpx

from api.direct import best_reply
from api.settings import ApiSettings
from db import queries
from db.database import Database
from db.models import FINAL_STATES, State
from kernels.artifacts import ArtifactStore
from tuner.cli.errors import UsageError, WorkFailed
from tuner.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastapi import FastAPI

    from tuner.cli.settings import Settings

BASE_URL = "http://localhost"
RESUMABLE = (State.PARTIAL, State.CANCELLED, State.FAILED)


class InProcess(httpx.BaseTransport):
    """Hands requests to an application in this process. Bodies are passed whole, so event streams are not for it."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._asgi = httpx.ASGITransport(app)
        # One loop for all requests: the application's thread pool belongs to the loop that it was first used in.
        self._runner = asyncio.Runner()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Called by httpx."""
        return self._runner.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        response = await self._asgi.handle_async_request(request)
        body = await response.aread()
        return httpx.Response(response.status_code, headers=response.headers, content=body)

    def close(self) -> None:
        """Close the application and with it the database."""
        self._app.state.database.close()
        self._runner.close()


class Embedded(httpx.BaseTransport):
    """The service inside this process. The question asked most is answered without building the application."""

    def __init__(self, settings: ApiSettings) -> None:
        """Raises DatabaseError."""
        self._settings, self._database = settings, Database.open(settings.database_url)
        self._routes: InProcess | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Called by httpx."""
        if request.method == "GET" and request.url.path == "/v1/best":
            status, body = best_reply(self._database, self._settings, request.url.params)
            return httpx.Response(status, headers={"Content-Type": "application/json"}, content=body)
        if self._routes is None:
            from api.app import create_app

            self._routes = InProcess(create_app(self._settings, self._database))
        return self._routes.handle_request(request)

    def close(self) -> None:
        """Close the database."""
        self._database.close() if self._routes is None else self._routes.close()


@contextmanager
def embedded_client(settings: Settings) -> Iterator[Client]:
    """A client of this machine's own database. Raises UsageError, DatabaseError."""
    settings.create()
    transport = Embedded(
        ApiSettings(
            database_url=settings.database_url,
            exports_dir=settings.exports_dir,
            artifacts_dir=settings.artifacts_dir,
        )
    )
    with Client(BASE_URL, transport=transport) as client:
        yield client


def requeue(settings: Settings, job_id: str) -> int:
    """Queue the studies of a job that ended early again; returns how many. Raises UsageError, DatabaseError."""
    settings.create()
    with Database.open(settings.database_url) as database, database.write() as session:
        job = queries.job(session, job_id)
        if job is None:
            raise UsageError(f"no job {job_id!r}", hint="gemm-tuner jobs lists the jobs")
        unfinished = {study.id: study for study in queries.studies_of_job(session, job_id) if study.state in RESUMABLE}
        if not unfinished and job.state in FINAL_STATES:
            raise UsageError(f"job {job_id} is {job.state}: nothing of it is left to do")
        for study in unfinished.values():
            study.state, study.reason = State.QUEUED, ""
            study.cancel_requested, study.finished_at = False, None
        job.cancel_requested = False
        queries.refresh_job_state(session, job_id)
    return len(unfinished)


@contextmanager
def tuning(settings: Settings) -> Iterator[Callable[[], None]]:
    """The tuner, in a thread of this process for as long as the block runs.

    Yields a function that raises WorkFailed once the tuner cannot go on: whoever waits for a job has to ask it.
    """
    from tuner.engines import engines_of
    from tuner.service import run_service

    stop, broken = threading.Event(), Queue[Exception]()

    def work() -> None:
        try:
            run_service(settings.tuner, engines_of, stop)
        except Exception as error:  # the boundary of the thread: the waiting side raises it
            broken.put(error)

    def check() -> None:
        if not broken.empty():
            error = broken.get()
            raise WorkFailed(f"the tuner stopped: {error or type(error).__name__}") from error

    thread = threading.Thread(target=work, name="tuner")
    thread.start()
    try:
        yield check
    finally:
        stop.set()
        thread.join()


def build_export(settings: Settings, export_id: str) -> None:
    """Write the bundle of an export here and now. A tuner that also claims it writes the same bytes."""
    from tuner.exporting import run_export

    with Database.open(settings.database_url) as database:
        with database.read() as session:
            export = queries.export(session, export_id)
        assert export is not None  # it was ordered in this process
        run_export(
            database,
            export_id,
            export.request,
            artifacts=ArtifactStore(settings.artifacts_dir),
            exports_dir=settings.exports_dir,
        )
