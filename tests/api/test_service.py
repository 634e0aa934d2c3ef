"""Health, metrics, devices, the envelope around each request, and the shape of every error."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from api.logs import JsonLines, request_id
from api.middleware import SECURITY_HEADERS
from api.services import best
from db.errors import DatabaseBusy
from tests.api.conftest import Service, job_body

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_health_says_version_and_database(service: Service) -> None:
    """For load balancers."""
    response = service.http.get("/healthz")
    assert response.status_code == 200
    assert response.json() | {"version": ""} == {"status": "ok", "version": "", "database": "ok"}


def test_health_is_503_without_a_database(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names no file of the server and says that trying again may help."""

    def refuse() -> Iterator[Any]:
        raise DatabaseBusy("/secret/place.db was locked by another writer for 10 s: try again")

    monkeypatch.setattr(service.db, "read", refuse)
    response = service.http.get("/healthz")
    assert response.status_code == 503
    assert response.json() == {"error": "Unavailable", "detail": "the database is busy", "hint": "try again"}
    assert response.headers["Retry-After"] == "1"


def test_unexpected_fault_is_500_without_a_traceback(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the log says what happened, with the request id that the client got."""

    def fail(*args: object) -> None:
        raise sqlite3.DataError("inner secret")

    monkeypatch.setattr(best, "answer", fail)
    with caplog.at_level(logging.INFO):
        response = service.http.get("/v1/best", params={"m": 8, "n": 8, "k": 8, "device": "h200"})
    assert response.status_code == 500
    assert response.json()["error"] == "InternalError"
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert response.headers["X-Request-ID"] in response.request.headers.get(
        "x-request-id", response.headers["X-Request-ID"]
    )
    record = next(record for record in caplog.records if record.message == "unhandled error")
    assert "inner secret" in JsonLines().format(record)


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/nowhere", 404, "NotFound"),
        ("GET", "/v1/nothing", 404, "NotFound"),
        ("GET", "/v1/jobs/", 404, "NotFound"),
        ("GET", "/docs", 404, "NotFound"),
        ("PUT", "/v1/jobs", 405, "MethodNotAllowed"),
        ("DELETE", "/v1/best", 405, "MethodNotAllowed"),
        ("GET", "/v1/exports", 405, "MethodNotAllowed"),
        ("PROPFIND", "/v1/jobs", 405, "MethodNotAllowed"),
    ],
)
def test_unknown_route_and_wrong_method_have_the_error_shape(
    service: Service, method: str, path: str, status: int, error: str
) -> None:
    """A hint says where to look."""
    response = service.http.request(method, path)
    assert response.status_code == status
    answer = response.json()
    assert set(answer) == {"error", "detail", "hint"}
    assert answer["error"] == error
    assert answer["hint"]


@pytest.mark.parametrize("path", ["/healthz", "/v1/jobs", "/nothing", "/v1/best"])
def test_every_answer_carries_security_headers_and_a_request_id(service: Service, path: str) -> None:
    """Errors too."""
    response = service.http.get(path)
    for name, value in SECURITY_HEADERS.items():
        assert response.headers[name] == value
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["X-Request-ID"])
    assert "server" not in response.headers


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2_Z", True), ("x" * 65, False), ("a b", False), ("a\tb", False)])
def test_request_id_of_the_client_is_kept_when_it_is_plain(service: Service, given: str, kept: bool) -> None:
    """So that a log of the caller can be joined with ours, and no one writes into ours."""
    response = service.http.get("/healthz", headers={"X-Request-ID": given})
    assert (response.headers["X-Request-ID"] == given) is kept


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/best", "/v1/exports"])
def test_body_over_the_limit_is_413(service: Service, path: str) -> None:
    """With an announced length, and in chunks."""
    large = b" " * (service.settings.max_body_bytes + 1)

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    for content in (large, chunks()):
        response = service.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"] == "BodyTooLarge"
        assert "1048576" in response.json()["detail"]


def test_body_just_under_the_limit_is_read(service: Service) -> None:
    """White space is legal JSON."""
    body = json.dumps(job_body()).encode()
    padded = body + b" " * (service.settings.max_body_bytes - len(body))
    response = service.http.post("/v1/jobs", content=padded, headers={"Content-Type": "application/json"})
    assert response.status_code == 202


def test_metrics_count_requests_by_route_and_what_waits(service: Service) -> None:
    """Labels hold route templates, never paths that were asked for."""
    job = service.submit()
    service.http.get(f"/v1/jobs/{job['id']}")
    service.http.get("/no/such/path")
    response = service.http.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = response.text
    assert re.search(
        r'gemm_tuner_http_requests_total\{method="GET",route="/v1/jobs/\{job_id\}",status="200"\} \d+', text
    )
    assert re.search(r'requests_total\{method="GET",route="unmatched",status="404"\} \d+', text)
    assert 'gemm_tuner_studies{state="QUEUED"} 1' in text
    assert 'gemm_tuner_jobs{state="QUEUED"} 1' in text
    assert "gemm_tuner_queue_length 1" in text
    assert job["id"] not in text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+-]+', line), line


def test_devices_lists_live_ones_and_profiles(service: Service) -> None:
    """What a request may name."""
    assert service.http.get("/v1/devices").json()["devices"] == []
    service.add_device()
    answer = service.http.get("/v1/devices").json()
    assert [(device["uuid"], device["name"], device["state"]) for device in answer["devices"]] == [
        ("GPU-1", "NVIDIA H200", "READY")
    ]
    assert {"NVIDIA H200", "NVIDIA B200"} <= {profile["name"] for profile in answer["profiles"]}


def test_log_line_is_one_json_object_with_the_request_id() -> None:
    """Fields given through `extra` are members; line breaks stay inside the object."""
    record = logging.makeLogRecord({"name": "api", "levelname": "INFO", "msg": "two\nlines", "status": 200})
    token = request_id.set("r-1")
    try:
        line = JsonLines().format(record)
    finally:
        request_id.reset(token)
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["message"], parsed["status"], parsed["request_id"]) == ("two\nlines", 200, "r-1")


def test_each_request_is_logged_with_route_status_and_duration(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """The query string, which may hold what people search for, is not."""
    with caplog.at_level(logging.INFO, logger="api.request"):
        service.http.get("/v1/jobs?limit=3")
        service.http.get("/healthz")  # its own line comes after the first request's
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert (line["message"], line["route"], line["status"]) == ("GET /v1/jobs 200", "/v1/jobs", 200)
    assert 0 < line["duration_ms"] < 60_000
