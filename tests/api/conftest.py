"""One real server on loopback for the whole run; each test gets a fresh database behind it."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api.__main__ import listen, server_of
from api.app import create_app
from api.settings import ApiSettings
from db import queries
from db.database import Database
from db.models import new_id
from db.queries import NewResult
from tests.conftest import BACKENDS
from tuner.records import Environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from db.models import Result, Study
    from tests.postgres import PostgresServer

H200_ENVIRONMENT = {
    "gpu_name": "NVIDIA H200",
    "sm_count": 132,
    "driver": "580.82.07",
    "cuda": "13.0",
    "toolchain": "nvcc 13.0.88",
}
SM90_CONFIG = {"pipe_depth": 4, "cta_group": 2, "num_consumers": 2, "blk_m": 64, "blk_n": 256, "blk_k": 64}
SM100_CONFIG = {"pipe_depth": 4, "cta_group": 2, "num_consumers": 2, "blk_m": 128, "blk_n": 128, "blk_k": 64}
EVERYTHING = ("measured", "numeric", "checked")


@dataclass(frozen=True, kw_only=True)
class Service:
    """What a test works with.

    http: client of the running server
    db: the database behind it, as the tuner would write it
    settings: what the server runs with
    app: the application
    url: address of the server
    """

    http: httpx.Client
    db: Database
    settings: ApiSettings
    app: Any
    url: str

    def submit(self, **changes: Any) -> dict[str, Any]:
        """Post a good job, changed as told, and return its answer."""
        response = self.http.post("/v1/jobs", json=job_body(**changes))
        assert response.status_code == 202, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def add_result(self, *, publish: bool = True, **changes: Any) -> str:
        """Store a result for 4096x4096x4096 bf16 on an H200, changed as told; returns its id."""
        with self.db.write() as session:
            result = queries.add_result(session, new_result(**changes))
            if publish:
                queries.publish_result(session, result.id)
            return result.id

    def add_device(
        self, environment: dict[str, Any] | None = None, *, uuid: str = "GPU-1", state: str = "READY"
    ) -> None:
        """Announce an H200."""
        with self.db.write() as session:
            queries.upsert_device(
                session,
                uuid=uuid,
                state=state,
                name="NVIDIA H200",
                arch="sm_90a",
                sm_count=132,
                environment=environment or H200_ENVIRONMENT,
            )

    def save_trials(self, study_id: str, count: int, first: int = 0) -> None:
        """Let the study have finished trials, each a little faster than the one before."""
        for number in range(first, first + count):
            with self.db.write() as session:
                queries.save_trial(
                    session,
                    study_id,
                    number,
                    config=SM90_CONFIG,
                    config_key=f"config-{number}",
                    outcome="MEASURED",
                    evidence=("measured", "numeric"),
                    median_us=200.0 - number,
                    ratio={"cublaslt_best": 0.9 + number / 100},
                )

    def finish(self, study_id: str, state: str = "DONE") -> None:
        """End the study as the tuner does."""
        with self.db.write() as session:
            queries.finish_study(session, study_id, state=state)

    def study(self, study_id: str) -> Study:
        """The row itself."""
        with self.db.read() as session:
            found = queries.study(session, study_id)
        assert found is not None
        return found

    def result(self, result_id: str) -> Result:
        """The row itself."""
        with self.db.read() as session:
            found = queries.result(session, result_id)
        assert found is not None
        return found


def job_body(**changes: Any) -> dict[str, Any]:
    """Body of a good job."""
    body: dict[str, Any] = {"problems": [{"m": 4096, "n": 4096, "k": 4096}], "arch": "sm_90a"}
    return {name: value for name, value in (body | changes).items() if value is not ...}


def new_result(**changes: Any) -> NewResult:
    """A good result of an H200."""
    fields: dict[str, Any] = {
        "m": 4096,
        "n": 4096,
        "k": 4096,
        "dtype": "bf16",
        "layout": "NT",
        "arch": "sm_90a",
        "device_name": "NVIDIA H200",
        "config": SM90_CONFIG,
        "evidence": EVERYTHING,
        "environment": H200_ENVIRONMENT,
        "median_us": 175.6,
        "ratio": {"cublaslt_best": 1.01},
        "artifact_sha256": "a" * 64,
        "source_hash": "b" * 64,
    }
    fields |= changes
    return NewResult(**{"environment_key": environment_key(fields), **fields})


def environment_key(fields: dict[str, Any]) -> str:
    """The key that the tuner gives the result."""
    known = {"gpu_name": fields["device_name"], "arch": fields["arch"], "sm_count": 0} | fields["environment"]
    return Environment.from_dict(known).key(fields["source_hash"])


@pytest.fixture(scope="session")
def blank_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables and nothing in them; copying it is faster than making one a test."""
    path = tmp_path_factory.mktemp("blank") / "blank.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory, blank_database: Path) -> Iterator[tuple[Any, str]]:
    """The application, served by a thread, and its address."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(blank_database, folder / "server.db")
    settings = ApiSettings(
        database_url=f"sqlite:///{folder / 'server.db'}", exports_dir=folder, artifacts_dir=folder, port=0
    )
    app = create_app(settings)
    listener = listen(settings.host, settings.port)
    server = server_of(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # The listener is bound, so the first request waits in its backlog until the server is up.
    yield app, url
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def http(running: tuple[Any, str]) -> Iterator[httpx.Client]:
    """One client for all tests: making one loads the machine's certificates, which takes longer than most tests."""
    with httpx.Client(base_url=running[1], timeout=20) as client:
        yield client


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, blank_database: Path, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{shutil.copy(blank_database, tmp_path / 'tuner.db')}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"api_{new_id()[:12]}"
    yield server.create(name, template=request.getfixturevalue("postgres_template"))
    server.drop(name)


@pytest.fixture
def service(running: tuple[Any, str], http: httpx.Client, database_url: str, tmp_path: Path) -> Iterator[Service]:
    """The running server with an empty database and empty folders."""
    app, url = running
    settings = ApiSettings(
        database_url=database_url,
        exports_dir=tmp_path / "exports",
        artifacts_dir=tmp_path / "artifacts",
        events_poll_s=0.02,
    )
    settings.exports_dir.mkdir()
    before = app.state.database, app.state.settings
    with Database.open(settings.database_url) as db:
        app.state.database, app.state.settings = db, settings
        try:
            yield Service(http=http, db=db, settings=settings, app=app, url=url)
        finally:
            app.state.database, app.state.settings = before


def set_settings(service: Service, **changes: Any) -> None:
    """Change settings of the running server until the test ends."""
    service.app.state.settings = replace(service.app.state.settings, **changes)
