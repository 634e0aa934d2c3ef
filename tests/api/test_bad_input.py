"""Requests that cannot be: each is 422 with the field, the rule and what to do, and stores nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Service, job_body

GOOD = {"m": 4096, "n": 4096, "k": 4096}

BAD_PROBLEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"m": 0}, "RequestError", "problems[0].m: must be at least 1, got 0"),
    ({"n": -8}, "RequestError", "problems[0].n: must be at least 1, got -8"),
    ({"k": 2**31}, "RequestError", "problems[0].k: must be at most 2147483647, got 2147483648"),
    ({"m": True}, "RequestError", "problems[0].m: must be an integer, got true"),
    ({"m": 1.0}, "RequestError", "problems[0].m: must be an integer, got 1.0"),
    ({"m": 1.5}, "RequestError", "problems[0].m: must be an integer, got 1.5"),
    ({"m": "4096"}, "RequestError", 'problems[0].m: must be an integer, got "4096"'),
    ({"m": None}, "RequestError", "problems[0].m: must be an integer, got null"),
    ({"m": [1]}, "RequestError", "problems[0].m: must be an integer, got [1]"),
    ({"m": ...}, "RequestError", "problems[0].m: is required"),
    ({"bias": True}, "RequestError", "problems[0].bias: is not a field of this request"),
    ({"weight": 0}, "RequestError", "problems[0].weight: must be greater than 0, got 0"),
    ({"weight": -1.5}, "RequestError", "problems[0].weight: must be greater than 0, got -1.5"),
    ({"weight": True}, "RequestError", "problems[0].weight: must be a number, got true"),
    ({"dtype": 16}, "RequestError", "problems[0].dtype: must be a string, got 16"),
    ({"dtype": "fp8"}, "ProblemError", "problems[0].dtype: unknown dtype 'fp8': use 'bf16' or 'fp16'"),
    ({"dtype": "\ud800"}, "RequestError", "problems[0].dtype: must be valid Unicode text"),
    ({"layout": "TN"}, "ProblemError", "problems[0].layout: unsupported layout 'TN'"),
    ({"k": 100, "arch": "sm_100a"}, "ProblemError", "problems[0].k: k = 100 is not a multiple of 8"),
    ({"n": 4100, "arch": "sm_100a"}, "ProblemError", "problems[0].n: n = 4100 is not a multiple of 8"),
    ({"m": 2_000_000_000}, "ProblemError", "problems[0].m: 2000000000x4096x4096 needs 32768033554432 bytes"),
    ({"arch": "sm_80"}, "UnknownTarget", "problems[0].arch: unknown arch 'sm_80'"),
    ({"device": "V100"}, "UnknownTarget", "problems[0].device: unknown device or architecture 'V100'"),
    ({"arch": "sm_90a", "device": "b200"}, "UnknownTarget", "problems[0].device: NVIDIA B200 is sm_100a, but"),
]

BAD_JOBS: list[tuple[dict[str, Any], str, str]] = [
    ({"problems": []}, "RequestError", "problems: must not be empty"),
    ({"problems": ...}, "RequestError", "problems: is required"),
    ({"problems": GOOD}, "RequestError", "problems: must be a list"),
    ({"problems": [7]}, "RequestError", "problems[0]: must be an object, got 7"),
    ({"problems": [GOOD] * 4097}, "RequestError", "problems: has more than the limit of 4096 entries"),
    ({"problems": [GOOD] * 10_000}, "RequestError", "problems: has more than the limit of 4096 entries"),
    ({"arch": ...}, "UnknownTarget", "arch: one of arch, device is required"),
    ({"arch": "sm_89"}, "UnknownTarget", "arch: unknown arch 'sm_89'"),
    ({"arch": ..., "device": "A100"}, "UnknownTarget", "device: unknown device or architecture 'A100'"),
    ({"device": "b200"}, "UnknownTarget", "device: NVIDIA B200 is sm_100a, but arch is sm_90a"),
    ({"mode": "guess"}, "RequestError", "mode: must be 'measure' or 'model', got \"guess\""),
    ({"effort": "max"}, "RequestError", "effort: must be 'quick', 'normal' or 'full', got \"max\""),
    ({"budget": {"trials": 0}}, "RequestError", "budget.trials: must be at least 1, got 0"),
    ({"budget": {"trials": 2.5}}, "RequestError", "budget.trials: must be an integer, got 2.5"),
    ({"budget": {"wall_s": 0}}, "RequestError", "budget.wall_s: must be greater than 0, got 0"),
    ({"budget": {"wall_s": 1e9}}, "RequestError", "budget.wall_s: must be at most 604800"),
    ({"budget": {"seconds": 5}}, "RequestError", "budget.seconds: is not a field of this request"),
    ({"budget": 40}, "RequestError", "budget: must be an object, got 40"),
    (
        {"protocol": {"kind": "steady"}},
        "RequestError",
        "protocol.kind: unknown protocol.kind 'steady': use one of burst",
    ),
    ({"protocol": {"rounds": 5}}, "RequestError", "protocol.rounds must be between 6 and 1000, got 5"),
    ({"protocol": {"rounds": 7.5}}, "RequestError", "protocol.rounds: must be an integer, got 7.5"),
    ({"protocol": {"kind": "sustained", "idle_gap_ms": 5.0}}, "RequestError", "protocol.idle_gap_ms must be 0 under"),
    ({"protocol": {"warmth": 3}}, "RequestError", "protocol.warmth: is not a field of this request"),
    ({"protocol": "sustained"}, "RequestError", 'protocol: must be an object, got "sustained"'),
    ({"seed": -1}, "RequestError", "seed: must be at least 0, got -1"),
    ({"seed": 2**63}, "RequestError", "seed: must be at most 9223372036854775807"),
    ({"seed": "0"}, "RequestError", 'seed: must be an integer, got "0"'),
    ({"force": "yes"}, "RequestError", 'force: must be true or false, got "yes"'),
    ({"force": 1}, "RequestError", "force: must be true or false, got 1"),
    ({"deadline": 5}, "RequestError", "deadline: is not a field of this request"),
]


def refused(service: Service, body: dict[str, Any], error: str, detail: str) -> None:
    """Post a job and check that it is refused as told and that nothing is stored."""
    # Encoded here: httpx itself refuses a lone surrogate.
    headers = {"Content-Type": "application/json"}
    response = service.http.post("/v1/jobs", content=json.dumps(body), headers=headers)
    assert response.status_code == 422, response.text
    answer = response.json()
    assert set(answer) == {"error", "detail", "hint"}
    assert answer["error"] == error
    assert detail in answer["detail"]
    assert answer["hint"]
    assert service.http.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(("change", "error", "detail"), BAD_PROBLEMS)
def test_bad_problem_is_refused_with_its_field_and_rule(
    service: Service, change: dict[str, Any], error: str, detail: str
) -> None:
    """The detail starts with the field's place in the body."""
    problem = {name: value for name, value in (GOOD | change).items() if value is not ...}
    refused(service, job_body(problems=[problem]), error, detail)


@pytest.mark.parametrize(("change", "error", "detail"), BAD_JOBS)
def test_bad_job_is_refused_with_its_field(service: Service, change: dict[str, Any], error: str, detail: str) -> None:
    """Unknown fields are refused like wrong ones."""
    refused(service, job_body(**change), error, detail)


def test_third_problem_is_named_by_its_place(service: Service) -> None:
    """One bad problem among good ones refuses the whole job."""
    bad = GOOD | {"k": 100, "arch": "sm_100a"}
    refused(service, job_body(problems=[GOOD, GOOD, bad]), "ProblemError", "problems[2].k: k = 100")


def test_a15_odd_shape_of_a_report_is_refused_up_front(service: Service) -> None:
    """A15: M=1000, N=1, K=512 has no Blackwell template; the answer says to pad N to 8."""
    body = job_body(problems=[{"m": 1000, "n": 1, "k": 512}], arch="sm_100a")
    refused(service, body, "ProblemError", "pad n to 8")


def test_several_wrong_fields_are_all_named(service: Service) -> None:
    """A person mends them in one go; past five, the rest is a number."""
    response = service.http.post("/v1/jobs", json=job_body(problems=[{"m": 0, "n": 0, "k": 0}] * 3))
    detail = response.json()["detail"]
    assert detail.startswith("problems[0].m: must be at least 1, got 0; problems[0].n: ")
    assert detail.endswith("; and 4 more")


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{not json", "application/json"),
        (b"", "application/json"),
        (b"null", "application/json"),
        (b'"text"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"problems": [{"m": ' + b"9" * 5000 + b"}]}", "application/json"),
        (b'{"problems": [{"m": 8, "n": 8, "k": 8, "weight": NaN}], "arch": "sm_90a"}', "application/json"),
        (b'{"problems": [{"m": 8, "n": 8, "k": 8, "weight": Infinity}], "arch": "sm_90a"}', "application/json"),
        (b'{"problems": [{"m": 8, "n": 8, "k": 8}], "arch": "sm_90a"}', "text/plain"),
        (b'{"problems": [{"m": 8, "n": 8, "k": 8}], "arch": "sm_90a"}', "application/x-www-form-urlencoded"),
    ],
)
def test_body_that_is_no_json_object_is_refused_in_the_same_shape(
    service: Service, content: bytes, content_type: str
) -> None:
    """Broken, empty, deeply nested or mislabelled: 400 or 422, never 500."""
    response = service.http.post("/v1/jobs", content=content, headers={"Content-Type": content_type})
    assert response.status_code in (400, 422), response.text
    assert set(response.json()) == {"error", "detail", "hint"}
    assert response.json()["hint"]


@pytest.mark.parametrize("key", ["", "x" * 256, "two words"])
def test_bad_idempotency_key_is_refused(service: Service, key: str) -> None:
    """The header is named."""
    response = service.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": key})
    assert response.status_code == 422
    assert "idempotency-key" in response.json()["detail"].lower()


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=501",
        "limit=ten",
        "limit=1.0",
        "limit=1_0",
        "after=xyz",
        "state=done",
        "colour=red",
        "limit=" + "9" * 5000,
    ],
)
def test_bad_query_of_a_list_is_refused_with_the_parameter(service: Service, query: str) -> None:
    """Unknown parameters are refused like unknown fields."""
    response = service.http.get(f"/v1/jobs?{query}")
    assert response.status_code == 422
    assert response.json()["detail"].startswith(query.partition("=")[0])
