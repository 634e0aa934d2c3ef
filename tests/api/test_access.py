"""Who may ask: tokens and their scopes, names of the service, the rate, and requests that say a thing twice."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api.access import MAX_CLIENTS_KEPT, Rate, host_name, needed_scope
from api.app import create_app
from api.settings import ApiSettings, is_loopback
from db import queries
from db.models import utc_now
from tests.api.conftest import Service, job_body

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB = {"method": "POST", "url": "/v1/jobs", "json": job_body()}
PIN = {"method": "PUT", "url": "/v1/pins", "json": {"result": "0" * 32}}
BEST = {"method": "GET", "url": "/v1/best", "params": {"m": 8, "n": 8, "k": 8, "device": "h200"}}
BULK = {"method": "POST", "url": "/v1/best", "json": {"device": "h200", "problems": [{"m": 8, "n": 8, "k": 8}]}}


class Guarded:
    """An application as it is when others than this machine can reach it, asked without a network."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.app = create_app(
            ApiSettings(
                database_url=f"sqlite:///{folder / 'tuner.db'}",
                exports_dir=folder,
                artifacts_dir=folder,
                **{"host": "0.0.0.0", **settings},
            )
        )
        self._runner = asyncio.Runner()

    def token(self, name: str, scope: str, **options: Any) -> str:
        """A new token."""
        with self.app.state.database.write() as session:
            return queries.create_token(session, name, scope, **options)[1]

    def ask(self, token: str | None = None, *, host: str = "service.example", **request: Any) -> httpx.Response:
        """One request."""

        async def send() -> httpx.Response:
            headers = {"Host": host, **({"Authorization": f"Bearer {token}"} if token else {})}
            headers |= request.pop("headers", {})
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
                return await client.request(**request)

        return self._runner.run(send())

    def close(self) -> None:
        """End it."""
        self.app.state.database.close()
        self._runner.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A service that demands tokens, with an empty database."""
    made = Guarded(tmp_path)
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------ tokens


def test_without_a_token_only_health_answers(guarded: Guarded) -> None:
    """Everything else is 401 in the one shape and says how to get a token."""
    assert guarded.ask(method="GET", url="/healthz").status_code == 200
    for request in (JOB, PIN, BEST, BULK, {"method": "GET", "url": "/metrics"}, {"method": "GET", "url": "/nothing"}):
        response = guarded.ask(**request)
        assert response.status_code == 401, request
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["error"] == "TokenNeeded"
        assert "gemm-tuner token create" in response.json()["hint"]


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("read", {"best", "bulk", "list"}),
        ("submit", {"best", "bulk", "list", "job", "cancel", "export"}),
        ("admin", {"best", "bulk", "list", "job", "cancel", "export", "pin"}),
    ],
)
def test_a_scope_allows_what_the_ones_before_it_allow(guarded: Guarded, scope: str, allowed: set[str]) -> None:
    """What it does not allow is 403 and names both scopes; what it allows reaches the route."""
    requests: dict[str, dict[str, Any]] = {
        "best": BEST,
        "bulk": BULK,
        "list": {"method": "GET", "url": "/v1/jobs"},
        "job": JOB,
        "cancel": {"method": "DELETE", "url": f"/v1/jobs/{'0' * 32}"},
        "export": {"method": "POST", "url": "/v1/exports", "json": {"results": ["0" * 32]}},
        "pin": PIN,
    }
    token = guarded.token("ci", scope)
    answers = {name: guarded.ask(token, **request) for name, request in requests.items()}
    assert {name for name, answer in answers.items() if answer.status_code != 403} == allowed
    for name in set(requests) - allowed:
        assert answers[name].json()["detail"].startswith(f"token 'ci' allows {scope}, this needs ")
    assert all(answer.status_code != 401 for answer in answers.values())


def test_unknown_revoked_and_expired_tokens_are_refused(guarded: Guarded) -> None:
    """All in the same words: which of the three it is, is nobody's business."""
    old = guarded.token("old", "read", expires_at=utc_now() - timedelta(seconds=1))
    gone = guarded.token("gone", "read")
    with guarded.app.state.database.write() as session:
        queries.revoke_token(session, "gone")
    answers = [guarded.ask(token, **BEST) for token in (old, gone, "gt_guess", "x" * 300)]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.json()["detail"] for answer in answers[:3]}) == 1


def test_a_revoked_token_stops_working_within_a_second(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up again after that time, and not before."""
    now_s = [1000.0]
    monkeypatch.setattr("api.access.time.monotonic", lambda: now_s[0])
    token = guarded.token("ci", "read")
    assert guarded.ask(token, **BULK).status_code == 200
    with guarded.app.state.database.write() as session:
        queries.revoke_token(session, "ci")
    now_s[0] += 1.01
    assert guarded.ask(token, **BULK).status_code == 401


def test_the_database_holds_no_token(guarded: Guarded, tmp_path: Path) -> None:
    """Only its hash; the log names it."""
    token = guarded.token("ci", "admin")
    guarded.app.state.database.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.encode() not in stored
    assert queries.token_hash(token).encode() in stored
    assert len(token) >= 46  # 256 bits


def test_the_scheme_is_bearer_in_any_case(guarded: Guarded) -> None:
    """As RFC 9110 has it; other schemes are no token."""
    token = guarded.token("ci", "read")
    for scheme, status in (("bearer", 200), ("BEARER", 200), ("Basic", 401), ("", 401)):
        response = guarded.ask(headers={"Authorization": f"{scheme} {token}".strip()}, **BULK)
        assert response.status_code == status, scheme


def test_loopback_needs_no_token(service: Service) -> None:
    """The default of `serve`: whoever can log in on this machine may ask."""
    assert service.http.get("/v1/jobs").status_code == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", "")),
    ],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    """A name that is not known to be loopback needs tokens: nobody knows where it points."""
    assert is_loopback(host) is loopback


def test_a_question_is_a_read_whatever_its_method() -> None:
    """Bulk questions are POST because of their body."""
    assert needed_scope("POST", "/v1/best") == "read"
    assert needed_scope("GET", "/v1/pins") == "read"
    assert needed_scope("PUT", "/v1/pins") == "admin"
    assert needed_scope("POST", "/v1/unknown") == "submit"
    assert needed_scope("DELETE", "/v1/jobs/x") == "submit"


# ------------------------------------------------------------------------------------------------ names


def test_loopback_answers_to_its_own_names_only(service: Service) -> None:
    """A web page whose name points to 127.0.0.1 gets nothing: DNS rebinding."""
    for host in ("127.0.0.1", "127.0.0.1:1234", "localhost:8000", "[::1]:80", "LOCALHOST"):
        assert service.http.get("/healthz", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "0.0.0.0"):
        response = service.http.get("/v1/jobs", headers={"Host": host})
        assert (response.status_code, response.json()["error"]) == (421, "WrongHost")


def test_allowed_hosts_limit_the_names_elsewhere(tmp_path: Path) -> None:
    """Without them any name will do: the service cannot know what it is called."""
    made = Guarded(tmp_path, allowed_hosts=("tuner.example",))
    try:
        assert made.ask(method="GET", url="/healthz", host="tuner.example:8000").status_code == 200
        assert made.ask(method="GET", url="/healthz", host="other.example").status_code == 421
    finally:
        made.close()


@pytest.mark.parametrize(
    ("header", "name"), [("a.b:80", "a.b"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("A", "a"), ("", "")]
)
def test_host_header_is_split_from_its_port(header: str, name: str) -> None:
    """IPv6 addresses stand in brackets."""
    assert host_name(header) == name


# ------------------------------------------------------------------------------------------------ limits


def test_a_client_that_sends_too_much_is_429(tmp_path: Path) -> None:
    """Counted by token, and by address for whoever has none, so that guessing tokens is limited too."""
    made = Guarded(tmp_path, requests_per_s=2)
    try:
        token = made.token("ci", "read")
        other = made.token("other", "read")
        answers = [made.ask(token, **BULK) for _ in range(6)]
        assert [answer.status_code for answer in answers[:4]] == [200] * 4
        assert answers[-1].status_code == 429
        assert answers[-1].headers["Retry-After"] == "1"
        assert answers[-1].json()["error"] == "TooManyRequests"
        assert made.ask(other, **BULK).status_code == 200
        assert {made.ask("gt_guess", **BULK).status_code for _ in range(6)} == {401, 429}
    finally:
        made.close()


def test_rate_refills_evenly_and_forgets_the_longest_quiet_client() -> None:
    """A burst of two seconds' worth, then one request each time the rate allows one; memory is bounded."""
    rate = Rate(10.0)
    assert [rate.wait_s("a", 0.0) for _ in range(20)] == [0.0] * 20
    assert rate.wait_s("a", 0.0) == pytest.approx(0.1)
    assert rate.wait_s("a", 0.1) == 0.0
    assert rate.wait_s("a", 0.15) > 0.0
    for client in range(MAX_CLIENTS_KEPT + 5):
        rate.wait_s(str(client), 1.0)
    assert len(rate._left) == MAX_CLIENTS_KEPT
    assert Rate(0.0).wait_s("a", 0.0) == 0.0


def test_target_of_a_request_has_a_limit(service: Service) -> None:
    """414 in the one shape."""
    response = service.http.get("/v1/best", params={"device": "x" * 9000})
    assert (response.status_code, response.json()["error"]) == (414, "TargetTooLong")


# ------------------------------------------------------------------------------------------------ said twice


@pytest.mark.parametrize(
    ("path", "text", "key"),
    [
        ("/v1/jobs", '{"problems": [{"m": 8, "n": 8, "k": 8}], "arch": "sm_90a", "arch": "sm_100a"}', "arch"),
        ("/v1/jobs", '{"problems": [{"m": 8, "m": 16, "n": 8, "k": 8}], "arch": "sm_90a"}', "m"),
        ("/v1/best", '{"device": "h200", "device": "h200", "problems": [{"m": 8, "n": 8, "k": 8}]}', "device"),
        ("/v1/exports", '{"results": ["a"], "results": ["b"]}', "results"),
    ],
)
def test_a_key_that_stands_twice_in_a_body_is_refused(service: Service, path: str, text: str, key: str) -> None:
    """JSON parsers take the last or the first; which one would be a guess."""
    response = service.http.post(path, content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error"] == "RequestError"
    assert response.json()["detail"] == f"{key}: is given more than once"
    assert service.http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/v1/best?m=8&n=8&k=8&m=16&device=h200", "m"),
        ("/v1/jobs?limit=1&limit=2", "limit"),
        ("/v1/dispatch?n=8&k=8&device=h200&device=b200", "device"),
        (f"/v1/jobs/{'0' * 32}?a=1&a=2", "a"),
    ],
)
def test_a_parameter_that_stands_twice_is_refused(service: Service, path: str, key: str) -> None:
    """On every route."""
    response = service.http.get(path)
    assert response.status_code == 422
    assert response.json()["detail"] == f"{key}: is given more than once"


@pytest.mark.parametrize("path", ["/healthz?a=1", "/metrics?x", f"/v1/results/{'0' * 32}?colour=red", "/v1/devices?a="])
def test_a_route_without_parameters_takes_none(service: Service, path: str) -> None:
    """Unknown fields are refused there as everywhere."""
    response = service.http.get(path)
    if "=" in path and not path.endswith("="):
        assert response.status_code == 422
        assert "is not a field of this request" in response.json()["detail"]


def test_allow_names_every_method_of_a_path(service: Service) -> None:
    """RFC 9110: the header of a 405 lists all of them."""
    expected = {
        "/v1/jobs": "GET, POST",
        "/v1/best": "GET, POST",
        "/v1/pins": "GET, PUT",
        "/v1/exports": "POST",
        f"/v1/jobs/{'0' * 32}": "DELETE, GET",
    }
    for path, allowed in expected.items():
        response = service.http.request("PATCH", path)
        assert (response.status_code, response.headers["Allow"]) == (405, allowed)
        assert json.loads(response.text)["hint"] == f"allowed here: {allowed}"
