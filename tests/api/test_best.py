"""Asking for the best config: exact, nearest, default, or 404 with the request that would tune it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.direct import best_reply
from api.settings import ApiSettings
from kernels.config import config_from_dict
from kernels.devices import profile_named
from kernels.problem import GemmProblem
from kernels.rules import violation
from search_space.model import predict
from search_space.starting import starting_configs
from tests.api.conftest import H200_ENVIRONMENT, SM90_CONFIG, SM100_CONFIG, Service, set_settings

ASKED: dict[str, Any] = {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "device": "h200"}
MEMBERS = {
    "match",
    "problem",
    "tuned_for",
    "distance",
    "config",
    "evidence",
    "environment",
    "revision",
    "median_us",
    "tie_set",
    "ratio",
    "stale",
    "artifact_sha256",
}


def best(service: Service, **changes: Any) -> dict[str, Any]:
    """Ask, and expect an answer."""
    params = {name: value for name, value in (ASKED | changes).items() if value is not None}
    response = service.http.get("/v1/best", params=params)
    assert response.status_code == 200, response.text
    return response.json()


def missed(service: Service, **changes: Any) -> dict[str, Any]:
    """Ask, and expect that nothing answers."""
    response = service.http.get("/v1/best", params=ASKED | changes)
    assert response.status_code == 404, response.text
    return response.json()


def test_published_result_answers_its_own_shape_exactly(service: Service) -> None:
    """The body has every member of design.md, and the id that an export takes."""
    result_id = service.add_result()
    answer = best(service)
    assert set(answer) >= MEMBERS
    assert (answer["match"], answer["distance"], answer["revision"]) == ("exact", 0, 1)
    assert (
        answer["problem"] == answer["tuned_for"] == {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "layout": "NT"}
    )
    assert (answer["median_us"], answer["config"], answer["result_id"]) == (175.6, SM90_CONFIG, result_id)
    assert (answer["artifact_sha256"], answer["stale"]) == ("a" * 64, False)
    assert answer["environment"] == H200_ENVIRONMENT


@pytest.mark.parametrize("device", ["h200", "NVIDIA H200", "nvidia h200", "sm_90a"])
def test_device_is_asked_by_name_alias_or_architecture(service: Service, device: str) -> None:
    """People type all of these."""
    service.add_result()
    assert best(service, device=device)["device"] == "NVIDIA H200"


def test_device_is_asked_by_uuid_once_it_was_seen(service: Service) -> None:
    """The card's identity leads to its kind."""
    service.add_device()
    service.add_result()
    assert best(service, device="GPU-1")["match"] == "exact"


def test_result_of_another_device_or_dtype_never_answers(service: Service) -> None:
    """C1, C2: neither as exact nor as nearest."""
    service.add_result()
    for change in ({"device": "h100"}, {"device": "b200"}, {"dtype": "fp16"}):
        assert missed(service, **change)["error"] == "NoResult"


def test_another_shape_is_never_exact(service: Service) -> None:
    """C1: 4096 cubed was tuned, 4096x8192x8192 is asked: nearest, with the distance and the tuned shape."""
    service.add_result()
    answer = best(service, n=8192, k=8192)
    assert (answer["match"], answer["distance"]) == ("nearest", 2.0)
    assert answer["problem"]["n"] == 8192
    assert answer["tuned_for"]["n"] == 4096
    assert answer["artifact_sha256"] is None  # the module computes the tuned shape only


@pytest.mark.parametrize(
    ("change", "found"), [({"m": 8192}, True), ({"m": 8193}, False), ({"k": 2048}, True), ({"k": 2040}, False)]
)
def test_nearest_keeps_a_threshold_in_each_dimension(service: Service, change: dict[str, int], found: bool) -> None:
    """A factor of two by default; a little more is too far."""
    service.add_result()
    status = service.http.get("/v1/best", params=ASKED | change).status_code
    assert status == (200 if found else 404)


def test_threshold_of_nearest_is_a_setting(service: Service) -> None:
    """Half a power of two excludes a shape that is one power away."""
    service.add_result()
    set_settings(service, nearest_limit_log2=0.5)
    assert missed(service, m=8192)["error"] == "NoResult"


def test_nearest_of_several_shapes_is_the_one_with_the_least_distance(service: Service) -> None:
    """Distances of M, N and K add up."""
    service.add_result(m=4096)
    service.add_result(m=2560)
    assert best(service, m=3000)["tuned_for"]["m"] == 2560


def test_config_that_is_illegal_for_the_asked_shape_is_passed_over(service: Service) -> None:
    """B9: what is served can run; a stored config with too much shared memory or unknown knobs is no answer."""
    service.add_result(config=SM90_CONFIG | {"pipe_depth": 16})
    service.add_result(m=4000, config=SM90_CONFIG | {"warp_dance": 3})
    service.add_result(m=2100)
    assert best(service, m=4090)["tuned_for"]["m"] == 2100


def test_candidate_answers_only_when_less_evidence_is_asked_for(service: Service) -> None:
    """Without the wish, the answer is 404 and says which wish would do."""
    service.add_result(publish=False, evidence=("measured", "numeric"))
    answer = missed(service)
    assert "evidence=numeric" in answer["hint"]
    assert best(service, evidence="numeric")["revision"] is None
    assert best(service, evidence="modeled")["evidence"] == ["measured", "numeric"]


def test_modeled_candidate_answers_only_on_request(service: Service) -> None:
    """Either `evidence=modeled` or `allow_default=true` asks for it; the time is the model's."""
    service.add_result(
        publish=False,
        evidence=("modeled",),
        arch="sm_100a",
        device_name="NVIDIA B200",
        config=SM100_CONFIG,
        median_us=None,
        modeled_us=90.5,
        environment={},
    )
    assert missed(service, device="b200")["error"] == "NoResult"
    for wish in ({"evidence": "modeled"}, {"allow_default": "true"}):
        answer = best(service, device="b200", **wish)
        assert (answer["match"], answer["evidence"], answer["median_us"]) == ("exact", ["modeled"], 90.5)


def test_readers_keep_the_published_revision_beside_a_newer_candidate(service: Service) -> None:
    """F1: an answer changes only when a new revision is published."""
    service.add_result(median_us=180.0)
    service.add_result(publish=False, evidence=("measured",), median_us=100.0)
    assert (best(service)["median_us"], best(service, evidence="measured")["median_us"]) == (180.0, 180.0)
    service.add_result(median_us=170.0)
    assert (best(service)["median_us"], best(service)["revision"]) == (170.0, 2)


def test_old_revision_is_still_there_when_asked_for(service: Service) -> None:
    """C9: an answer can be asked for by its number; a number that does not exist is 404 and names the newest."""
    service.add_result(median_us=180.0)
    service.add_result(median_us=170.0)
    assert best(service, revision=1)["median_us"] == 180.0
    assert "the newest is 2" in missed(service, revision=3)["detail"]


def test_default_is_the_starting_config_that_the_model_expects_to_be_fastest(service: Service) -> None:
    """D1: legal for the shape, says `modeled`, and has neither revision nor module."""
    answer = best(service, m=77, n=1000, k=136, allow_default="true")
    assert (answer["match"], answer["evidence"], answer["tuned_for"]) == ("default", ["modeled"], None)
    assert (answer["revision"], answer["artifact_sha256"], answer["result_id"]) == (None, None, None)
    assert answer["median_us"] > 0
    config = config_from_dict("sm_90a", answer["config"])
    problem = GemmProblem(m=77, n=1000, k=136)
    profile = profile_named("h200")
    assert violation(problem, config, profile.sm_count) is None
    times_us = [predict(problem, start, profile).time_us for start in starting_configs(problem, profile)]
    assert answer["median_us"] == min(times_us) == predict(problem, config, profile).time_us


def test_tuned_answer_goes_before_the_default(service: Service) -> None:
    """Allowing a default does not ask for one."""
    service.add_result()
    assert best(service, allow_default="true")["match"] == "exact"
    assert best(service, m=4000, allow_default="true")["match"] == "nearest"


@pytest.mark.parametrize("device", ["h200", "sm_100a"])
def test_untuned_shape_is_404_with_the_request_that_would_tune_it(service: Service, device: str) -> None:
    """D1: posting `submit` as it stands is accepted."""
    answer = missed(service, device=device)
    assert answer["error"] == "NoResult"
    assert "4096x4096x4096 bf16" in answer["detail"]
    assert "/v1/jobs" in answer["hint"]
    assert service.http.post("/v1/jobs", json=answer["submit"]).status_code == 202


@pytest.mark.parametrize(
    ("today", "reason"),
    [
        ({"driver": "590.10"}, "driver was 580.82.07, is 590.10"),
        ({"cuda": "13.1"}, "CUDA was 13.0, is 13.1"),
        ({"toolchain": "nvcc 13.1.5"}, "toolchain was nvcc 13.0.88, is nvcc 13.1.5"),
        ({"driver": "580.99"}, ""),
        ({"driver": "", "cuda": None}, ""),
        ({"temperature_c": 80}, ""),
    ],
)
def test_stale_says_what_changed_on_the_device_since(service: Service, today: dict[str, Any], reason: str) -> None:
    """C3: only what the environment key holds counts, and what is not known is not held against the result."""
    service.add_result()
    service.add_device(H200_ENVIRONMENT | today)
    answer = best(service, allow_stale="true")
    assert (answer["stale"], answer["stale_reason"]) == (bool(reason), reason)
    assert service.http.get("/v1/best", params=ASKED).status_code == (404 if reason else 200)


@pytest.mark.parametrize(
    ("change", "error", "detail"),
    [
        ({"m": "0"}, "RequestError", "m: must be at least 1"),
        ({"m": "x"}, "RequestError", "m: must be an integer, got 'x'"),
        ({"m": "1.0"}, "RequestError", "m: must be an integer, got '1.0'"),
        ({"m": ""}, "RequestError", "m: must be an integer, got ''"),
        ({"k": "100", "device": "b200"}, "ProblemError", "k: k = 100 is not a multiple of 8"),
        ({"n": str(10**9)}, "ProblemError", "n: 4096x1000000000x4096 needs"),
        ({"dtype": "fp64"}, "ProblemError", "dtype: unknown dtype 'fp64'"),
        ({"layout": "NN"}, "ProblemError", "layout: unsupported layout 'NN'"),
        ({"device": "T4"}, "UnknownTarget", "device: unknown device or architecture 'T4'"),
        ({"evidence": "hearsay"}, "RequestError", "evidence: must be 'modeled', 'simulated'"),
        ({"allow_default": "perhaps"}, "RequestError", "allow_default: "),
        ({"revision": "0"}, "RequestError", "revision: must be at least 1"),
        ({"colour": "red"}, "RequestError", "colour: is not a field"),
    ],
)
def test_bad_question_is_refused_with_its_field(
    service: Service, change: dict[str, str], error: str, detail: str
) -> None:
    """D3: an unknown device is a clean refusal too."""
    response = service.http.get("/v1/best", params=ASKED | change)
    assert response.status_code == 422, response.text
    assert response.json()["error"] == error
    assert response.json()["detail"].startswith(detail)


def test_shape_and_device_are_required(service: Service) -> None:
    """All that is missing is named at once."""
    detail = service.http.get("/v1/best").json()["detail"]
    assert detail == "device: is required; m: is required; n: is required; k: is required"


def test_bulk_answers_in_the_order_of_the_shapes(service: Service) -> None:
    """One without an answer says why; `submit` tunes what is missing, each shape once."""
    service.add_result()
    shapes = [
        {"m": 1, "n": 64, "k": 64},
        ASKED | {"device": ...},
        {"m": 64, "n": 64, "k": 2147483647},
        {"m": 1, "n": 64, "k": 64},
    ]
    problems = [{name: value for name, value in shape.items() if value is not ...} for shape in shapes]
    response = service.http.post("/v1/best", json={"problems": problems, "device": "h200"})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [item["match"] for item in answer["items"]] == ["none", "exact", "none", "none"]
    assert [item.get("error") for item in answer["items"]] == ["NoResult", None, "ProblemError", "NoResult"]
    assert len(answer["submit"]["problems"]) == 1
    assert service.http.post("/v1/jobs", json=answer["submit"]).status_code == 202


@pytest.mark.parametrize("wish", [{}, {"evidence": "modeled"}, {"allow_default": True}])
def test_bulk_answers_are_those_of_single_questions(service: Service, wish: dict[str, Any]) -> None:
    """Exact, nearest, default and missing, with candidates, both dtypes and a shape asked twice."""
    service.add_device()
    for m in (64, 128, 4096):
        service.add_result(m=m)
    service.add_result(m=128, median_us=170.0)
    service.add_result(m=128, dtype="fp16", environment=H200_ENVIRONMENT | {"driver": "570.1"})
    service.add_result(m=256, publish=False, evidence=("measured",))
    service.add_result(m=512, config=SM90_CONFIG | {"pipe_depth": 16})
    asked = [{"m": m} for m in (64, 128, 100, 256, 300, 513, 1, 4096, 5000, 128)]
    asked += [{"m": m, "dtype": "fp16"} for m in (128, 130, 4096)] + [{"m": 64, "n": 512}]
    problems = [{"n": 4096, "k": 4096} | shape for shape in asked]
    items = service.http.post("/v1/best", json={"device": "h200", "problems": problems, **wish}).json()["items"]
    matches = set()
    for problem, item in zip(problems, items, strict=True):
        response = service.http.get("/v1/best", params={"device": "h200", **problem, **wish})
        matches.add(item["match"])
        if item["match"] == "none":
            assert (response.status_code, response.json()["error"]) == (404, item["error"])
        else:
            assert response.json() == item
    assert matches == {"exact", "nearest", "default" if wish.get("allow_default") else "none"}


def test_bulk_with_defaults_leaves_nothing_to_submit(service: Service) -> None:
    """Every legal shape has a default."""
    body = {"problems": [{"m": m, "n": 512, "k": 512} for m in (1, 64)], "device": "b200", "allow_default": True}
    answer = service.http.post("/v1/best", json=body).json()
    assert [item["match"] for item in answer["items"]] == ["default", "default"]
    assert answer["submit"] is None


def test_bulk_gives_at_most_256_defaults(service: Service) -> None:
    """Each is a ranking by the model; the limit and a way around are named."""
    body = {"problems": [{"m": 8, "n": 8, "k": 8}] * 257, "device": "h200", "allow_default": True}
    response = service.http.post("/v1/best", json=body)
    assert response.status_code == 422
    assert "at most 256 shapes" in response.json()["detail"]


@pytest.mark.parametrize("count", [0, 4097])
def test_bulk_takes_1_to_4096_shapes(service: Service, count: int) -> None:
    """The limit is named."""
    body = {"problems": [{"m": 8, "n": 8, "k": 8}] * count, "device": "h200"}
    response = service.http.post("/v1/best", json=body)
    assert response.status_code == 422
    assert response.json()["detail"].startswith("problems: ")


@pytest.mark.parametrize(
    "changes",
    [{}, {"m": 4000}, {"n": 9}, {"k": 0}, {"dtype": "fp8"}, {"device": "abacus"}, {"revision": 7}, {"unknown": 1}],
)
def test_answer_without_the_framework_is_the_one_of_the_route(service: Service, changes: dict[str, Any]) -> None:
    """Commands that work without a service ask this way: the same status, the same body."""
    service.add_result()
    params = {name: str(value) for name, value in (ASKED | changes).items()}
    reply = service.http.get("/v1/best", params=params)
    status, body = best_reply(
        service.db, ApiSettings(database_url="", exports_dir=Path(), artifacts_dir=Path()), params
    )
    assert (status, json.loads(body)) == (reply.status_code, reply.json())
