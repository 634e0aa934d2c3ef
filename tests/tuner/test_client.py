"""The client, against a made-up transport: what it sends, what it gives back, and how it fails."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import tuner.client
from tuner.client import Client, ClientError, Event

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JOB = {"id": "j1", "state": "RUNNING", "studies": []}


def client_of(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> Client:
    """A client whose network is a function."""
    return Client("http://service/", transport=httpx.MockTransport(handler), **options)


def answering(*responses: httpx.Response | Exception) -> tuple[Client, list[httpx.Request]]:
    """A client that gets these answers in turn, and the requests it made."""
    waiting, requests = list(responses), []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return client_of(handler), requests


def stream(*events: tuple[str, str, dict[str, Any]]) -> httpx.Response:
    """An event stream as the service writes it."""
    lines = [": still here\n\n", *(f"id: {i}\nevent: {n}\ndata: {json.dumps(d)}\n\n" for n, i, d in events)]
    return httpx.Response(200, content="".join(lines), headers={"Content-Type": "text/event-stream"})


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnect at once."""
    monkeypatch.setattr(tuner.client, "RECONNECT_PAUSE_S", 0)


def test_submit_sends_the_body_with_token_and_idempotency_key() -> None:
    """The answer is the service's, as it came."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(202, json=JOB)

    body = {"problems": [{"m": 8, "n": 8, "k": 8}], "arch": "sm_90a"}
    with client_of(handler, token="secret") as client:
        assert client.submit_job(body, idempotency_key="once") == JOB
    assert (seen[0].method, seen[0].url.path) == ("POST", "/v1/jobs")
    assert json.loads(seen[0].content) == body
    assert seen[0].headers["Authorization"] == "Bearer secret"
    assert seen[0].headers["Idempotency-Key"] == "once"


def test_refusal_becomes_an_error_with_its_parts() -> None:
    """The 404 of `best` carries the request that would tune the shape."""
    body = {"error": "NoResult", "detail": "nothing is tuned", "hint": "POST submit", "submit": {"problems": []}}
    client, requests = answering(httpx.Response(404, json=body))
    with pytest.raises(ClientError) as caught:
        client.best(m=8, n=16, k=24, device="h200", evidence="modeled", allow_default=True)
    error = caught.value
    assert (error.status, error.error, error.detail, error.hint) == (404, "NoResult", "nothing is tuned", "POST submit")
    assert error.body["submit"] == {"problems": []}
    assert str(error) == "nothing is tuned (POST submit)"
    assert dict(requests[0].url.params) == {
        **{"m": "8", "n": "16", "k": "24", "dtype": "bf16", "layout": "NT", "device": "h200"},
        **{"evidence": "modeled", "allow_default": "true"},
    }


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        (httpx.ConnectError("connection refused"), "Unreachable"),
        (httpx.RemoteProtocolError("half an answer"), "Unreachable"),
        (httpx.ReadTimeout("timed out"), "Timeout"),
    ],
)
def test_broken_network_is_an_error_with_status_0_and_a_hint(failure: Exception, name: str) -> None:
    """The address is named."""
    client, _ = answering(failure)
    with pytest.raises(ClientError, match="http://service") as caught:
        client.health()
    assert (caught.value.status, caught.value.error) == (0, name)
    assert caught.value.hint


@pytest.mark.parametrize(
    "response", [httpx.Response(502, text="<html>"), httpx.Response(404, json=[1]), httpx.Response(200, text="hi")]
)
def test_answer_of_another_program_is_told_apart(response: httpx.Response) -> None:
    """A proxy's page, another service's JSON, a web page on that port."""
    client, _ = answering(response)
    with pytest.raises(ClientError) as caught:
        client.devices()
    assert caught.value.error == "NotOurService"


@pytest.mark.parametrize("address", ["nonsense", "ftp://host", "http://[bad", "http://host:99999999"])
def test_address_that_is_no_address_is_an_error_of_ours(address: str) -> None:
    """It may fail when the client is made or at the first call."""
    with pytest.raises(ClientError):
        Client(address).health()


@pytest.mark.parametrize("identity", ["../devices?x=1", ".", "..", "", "a/b", "%2e%2e", "a b", "x" * 65])
def test_text_that_is_no_id_asks_no_route(identity: str) -> None:
    """Slashes, dots and nothing at all would lead to another route."""
    client, requests = answering(httpx.Response(200, json=JOB))
    with pytest.raises(ClientError, match="nothing has the id") as caught:
        client.job(identity)
    assert (caught.value.status, requests) == (404, [])


def test_jobs_cancel_and_study_use_their_routes() -> None:
    """Method, path and parameters."""
    client, requests = answering(
        httpx.Response(200, json={"items": [JOB], "next": None}),
        httpx.Response(200, json=JOB),
        httpx.Response(200, json={"id": "s1"}),
    )
    assert client.jobs(state="DONE") == [JOB]
    assert client.cancel("j1") == JOB
    assert client.study("s1")["id"] == "s1"
    assert [(request.method, request.url.path) for request in requests] == [
        ("GET", "/v1/jobs"),
        ("DELETE", "/v1/jobs/j1"),
        ("GET", "/v1/studies/s1"),
    ]
    assert requests[0].url.params["state"] == "DONE"


def test_trials_are_read_to_the_last_page() -> None:
    """`next` of one page is `after` of the following."""
    client, requests = answering(
        httpx.Response(200, json={"items": [{"number": 0}, {"number": 1}], "next": 1}),
        httpx.Response(200, json={"items": [{"number": 2}], "next": None}),
    )
    assert [trial["number"] for trial in client.trials("s1", outcome="MEASURED")] == [0, 1, 2]
    assert "after" not in requests[0].url.params
    assert requests[1].url.params["after"] == "1"


@pytest.mark.usefixtures("no_pause")
def test_wait_resumes_a_broken_stream_after_the_last_event() -> None:
    """Each event is told once, and the finished job is returned."""
    done = JOB | {"state": "DONE"}
    client, requests = answering(
        stream(("trial", "1-0-0", {"number": 0})),
        httpx.Response(200, json=JOB),
        httpx.ConnectError("restarting"),
        stream(("trial", "2-0-1", {"number": 1}), ("end", "2-0-1-end", done)),
        httpx.Response(200, json=done),
    )
    told: list[Event] = []
    assert client.wait("j1", told.append) == done
    assert [(event.name, event.id) for event in told] == [("trial", "1-0-0"), ("trial", "2-0-1"), ("end", "2-0-1-end")]
    resumed = [request.headers.get("Last-Event-ID") for request in requests if request.url.path.endswith("/events")]
    assert resumed == [None, "1-0-0", "1-0-0"]


@pytest.mark.usefixtures("no_pause")
def test_wait_gives_up_when_its_time_is_over() -> None:
    """The job goes on; the hint says so."""
    client = client_of(lambda request: stream() if "events" in request.url.path else httpx.Response(200, json=JOB))
    with pytest.raises(ClientError, match="it goes on") as caught:
        client.wait("j1", timeout_s=0.01)
    assert caught.value.error == "WaitTimeout"


@pytest.mark.usefixtures("no_pause")
def test_wait_gives_up_on_a_service_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that a restart may take."""
    monkeypatch.setattr(tuner.client, "RECONNECT_S", -1.0)
    client, _ = answering(httpx.ConnectError("connection refused"))
    with pytest.raises(ClientError) as caught:
        client.wait("j1")
    assert caught.value.error == "Unreachable"


def test_error_of_the_callback_passes_through_wait() -> None:
    """A bug of the caller is not taken for a broken network."""

    def fail(event: Event) -> None:
        raise KeyError("median_us")

    client, _ = answering(stream(("trial", "1-0-0", {"number": 0})))
    with pytest.raises(KeyError, match="median_us"):
        client.wait("j1", fail)


def test_wait_for_a_failed_export_raises_its_reason() -> None:
    """It polls until the export has ended."""
    client, requests = answering(
        httpx.Response(200, json={"state": "RUNNING"}),
        httpx.Response(200, json={"state": "FAILED", "reason": "the artifact is gone"}),
    )
    with pytest.raises(ClientError, match="the artifact is gone"):
        client.wait_export("e1", poll_s=0)
    assert len(requests) == 2


def test_downloaded_bundle_is_whole_and_as_recorded(tmp_path: Path) -> None:
    """Its hash agrees with the one that the service stored."""
    data = b"PK" * 100
    client, _ = answering(
        httpx.Response(200, json={"bundle_sha256": hashlib.sha256(data).hexdigest()}), httpx.Response(200, content=data)
    )
    assert client.download_bundle("e1", tmp_path / "out.zip").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_changed_bundle_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    """Neither the file before nor a part of the new one is touched."""
    (tmp_path / "out.zip").write_bytes(b"old")
    client, _ = answering(
        httpx.Response(200, json={"bundle_sha256": "0" * 64}), httpx.Response(200, content=b"changed")
    )
    with pytest.raises(ClientError, match="download it again") as caught:
        client.download_bundle("e1", tmp_path / "out.zip")
    assert caught.value.error == "BundleCorrupt"
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out.zip", b"old")]


def test_refused_download_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The refusal's own words are kept."""
    refusal = {"error": "Conflict", "detail": "export e1 is QUEUED", "hint": "ask again"}
    client, _ = answering(httpx.Response(200, json={"bundle_sha256": None}), httpx.Response(409, json=refusal))
    with pytest.raises(ClientError, match="export e1 is QUEUED"):
        client.download_bundle("e1", tmp_path / "out.zip")
    assert list(tmp_path.iterdir()) == []


def test_client_needs_nothing_but_httpx() -> None:
    """F5: a laptop without CUDA, torch, FastAPI or SQLAlchemy can use it."""
    blocked = (
        "torch",
        "tvm",
        "optuna",
        "fastapi",
        "pydantic",
        "sqlalchemy",
        "numpy",
        "kernels",
        "search_space",
        "db",
        "api",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import tuner.client"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
