"""Dispatch tables, revisions, pins, stale results and the regression report."""

from __future__ import annotations

from typing import Any

import pytest

from db.database import Database
from tests.api.conftest import H200_ENVIRONMENT, SM90_CONFIG, Service

NK = {"n": 4096, "k": 4096}
ASKED: dict[str, Any] = {"m": 4096, **NK, "dtype": "bf16", "device": "h200"}
OLD = H200_ENVIRONMENT | {"driver": "570.86.10"}


def get(service: Service, path: str, expected: int = 200, **params: Any) -> dict[str, Any]:
    """Ask, and expect this status."""
    response = service.http.get(path, params=params)
    assert response.status_code == expected, response.text
    return response.json()


def pin(service: Service, result: str, *, expected: int = 200, **body: Any) -> dict[str, Any]:
    """Pin, and expect this status."""
    response = service.http.put("/v1/pins", json={"result": result, **body})
    assert response.status_code == expected, response.text
    return response.json()


# ------------------------------------------------------------------------------------------------ dispatch


def dispatch(service: Service, **changes: Any) -> dict[str, Any]:
    """The table of the usual family."""
    return get(service, "/v1/dispatch", **(NK | {"device": "h200"} | changes))


def test_dispatch_gives_each_m_to_the_nearest_tuned_one(service: Service) -> None:
    """D6: the ranges of two neighbours meet in their geometric middle, and end a factor of two outside."""
    for m in (64, 100, 4096):
        service.add_result(m=m)
    service.add_result(m=80, n=512)
    table = dispatch(service)
    ranges = [(one["m_min"], one["m_max"], one["best"]["tuned_for"]["m"]) for one in table["ranges"]]
    assert ranges == [(32, 80, 64), (81, 200, 100), (2048, 8192, 4096)]
    assert table["gaps"] == [{"m_min": 1, "m_max": 31}, {"m_min": 201, "m_max": 2047}]
    assert (table["m_min"], table["m_max"]) == (1, 8192)
    assert [problem["m"] for problem in table["submit"]["problems"]] == [1, 31, 201, 2047]
    assert service.http.post("/v1/jobs", json=table["submit"]).status_code == 202


def test_dispatch_agrees_with_single_questions(service: Service) -> None:
    """D6: with one family of shapes stored, GET /v1/best gives the same result for each M."""
    for m in (16, 17, 100, 300):
        service.add_result(m=m, environment=OLD if m == 17 else H200_ENVIRONMENT)
    service.add_result(m=150, publish=False, evidence=("measured",))
    service.add_device()
    for wish in ({}, {"allow_stale": "true"}, {"evidence": "measured"}):
        table = dispatch(service, **wish)
        by_m: dict[int, str | None] = {}
        for one in table["ranges"]:
            by_m |= dict.fromkeys(range(one["m_min"], one["m_max"] + 1), one["best"]["result_id"])
        for m in (*range(1, 40), 41, 70, 71, 122, 123, 173, 174, 212, 213, 600, 601):
            response = service.http.get("/v1/best", params=ASKED | wish | {"m": m})
            assert by_m.get(m) == (response.json()["result_id"] if response.status_code == 200 else None), (m, wish)


def test_dispatch_can_be_limited_to_a_range_of_m(service: Service) -> None:
    """Ranges are cut to it, and what nothing answers in it is a gap."""
    for m in (64, 128):
        service.add_result(m=m)
    table = dispatch(service, m_min=70, m_max=1000)
    assert [(one["m_min"], one["m_max"]) for one in table["ranges"]] == [(70, 90), (91, 256)]
    assert table["gaps"] == [{"m_min": 257, "m_max": 1000}]


def test_dispatch_without_results_is_one_gap(service: Service) -> None:
    """Nothing tuned is no error: `submit` says what would fill it."""
    table = dispatch(service, m_max=64)
    assert (table["ranges"], table["gaps"]) == ([], [{"m_min": 1, "m_max": 64}])
    assert [problem["m"] for problem in table["submit"]["problems"]] == [1, 64]


def test_dispatch_leaves_out_configs_that_cannot_run(service: Service) -> None:
    """A stored config of a version with other knobs serves no M, not even its own."""
    service.add_result(m=64, config=SM90_CONFIG | {"warp_dance": 3})
    service.add_result(m=128)
    assert [one["best"]["tuned_for"]["m"] for one in dispatch(service)["ranges"]] == [128]


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"k": 7, "device": "b200"}, "k: k = 7 is not a multiple of 8"),
        ({"m_min": 9, "m_max": 8}, "query: m_max must be at least m_min, got 8 and 9"),
        ({"m_min": 0}, "m_min: must be at least 1"),
        ({"m": 5}, "m: is not a field of this request"),
        ({"device": "T4"}, "device: unknown device or architecture 'T4'"),
    ],
)
def test_bad_dispatch_question_is_refused_with_its_field(service: Service, change: dict[str, Any], detail: str) -> None:
    """D3: 422 that names the field."""
    body = get(service, "/v1/dispatch", 422, **(NK | {"device": "h200"} | change))
    assert body["detail"].startswith(detail), body


# ------------------------------------------------------------------------------------------------ revisions and pins


def test_revisions_of_a_result_are_listed_newest_first(service: Service) -> None:
    """C9: of its problem and device alone, page by page; the one that answers is marked."""
    ids = [service.add_result(median_us=200.0 - number) for number in range(3)]
    service.add_result(m=64)
    page = get(service, f"/v1/results/{ids[0]}/revisions", limit=2)
    assert [(one["revision"], one["current"]) for one in page["items"]] == [(3, True), (2, False)]
    rest = get(service, f"/v1/results/{ids[0]}/revisions", limit=2, after=page["next"])
    assert ([one["id"] for one in rest["items"]], rest["next"]) == ([ids[0]], None)
    assert get(service, f"/v1/results/{'0' * 32}/revisions", 404)["error"] == "NotFound"


def test_a_pinned_revision_stays_the_answer(service: Service) -> None:
    """C9, F1: newer revisions count on but do not answer, until the pin is taken away."""
    first = service.add_result(median_us=200.0)
    second = service.add_result(median_us=190.0)
    assert pin(service, first)["pinned"] is True
    assert get(service, "/v1/best", **ASKED)["result_id"] == first
    third = service.add_result(median_us=180.0)
    answer = get(service, "/v1/best", **ASKED)
    assert (answer["result_id"], answer["revision"], answer["pinned"]) == (first, 1, True)
    assert get(service, "/v1/best", **ASKED, revision=2)["result_id"] == second
    assert dispatch(service)["ranges"][0]["best"]["result_id"] == first
    assert [one["id"] for one in get(service, "/v1/pins")["items"]] == [first]
    pin(service, first)  # once more changes nothing
    assert pin(service, first, pinned=False)["pinned"] is False
    assert get(service, "/v1/best", **ASKED)["result_id"] == third
    assert get(service, "/v1/pins")["items"] == []


def test_only_published_results_can_be_pinned(service: Service) -> None:
    """A candidate is 409, an unknown id 404, and a field that is none 422."""
    candidate = service.add_result(publish=False)
    assert pin(service, candidate, expected=409)["error"] == "Conflict"
    assert pin(service, "0" * 32, expected=404)["detail"] == f"result: no result {'0' * 32!r}"
    assert "colour: is not a field" in pin(service, candidate, expected=422, colour="red")["detail"]


# ------------------------------------------------------------------------------------------------ stale results


def test_stale_result_is_no_answer_unless_asked_for(service: Service) -> None:
    """C3: the refusal says how to get it, and it then says what changed since."""
    service.add_result(environment=OLD)
    service.add_device()
    assert "allow_stale=true" in get(service, "/v1/best", 404, **ASKED)["hint"]
    answer = get(service, "/v1/best", **ASKED, allow_stale="true")
    assert (answer["stale"], answer["stale_reason"]) == (True, "driver was 570.86.10, is 580.82.07")


def test_a_fresh_neighbour_goes_before_a_stale_exact_result(service: Service) -> None:
    """C3: what is out of date is as good as absent, for nearest shapes and in bulk too."""
    service.add_result(environment=OLD)
    fresh = service.add_result(m=4000)
    service.add_device()
    answer = get(service, "/v1/best", **ASKED)
    assert (answer["match"], answer["result_id"]) == ("nearest", fresh)
    bulk = service.http.post("/v1/best", json={"device": "h200", "problems": [{"m": 4096, **NK}]})
    assert bulk.json()["items"] == [answer]


def test_a_pinned_or_named_revision_answers_although_it_is_stale(service: Service) -> None:
    """C9: whoever names a revision wants that one, and is told."""
    old = service.add_result(environment=OLD)
    service.add_device()
    assert get(service, "/v1/best", **ASKED, revision=1)["stale"] is True
    pin(service, old)
    answer = get(service, "/v1/best", **ASKED)
    assert (answer["result_id"], answer["stale"]) == (old, True)
    assert answer["stale_reason"].startswith("driver was 570")


def test_results_of_an_environment_can_be_asked_for(service: Service) -> None:
    """C3: by the key that a result shows, whole or without its source hash; older revisions answer too."""
    old = service.add_result(environment=OLD)
    service.add_result()
    service.add_device()
    key = get(service, f"/v1/results/{old}")["environment_key"]
    for environment in (key, key.rpartition("|")[0]):
        assert get(service, "/v1/best", **ASKED, environment=environment)["result_id"] == old
        listed = get(service, "/v1/results", environment=environment)["items"]
        assert [one["id"] for one in listed] == [old]
    assert "another environment" in get(service, "/v1/best", 404, **ASKED, environment="B300")["hint"]


def test_a_result_is_fresh_while_any_device_of_its_name_is_as_it_was(service: Service) -> None:
    """F1: two hosts with different drivers must not make an answer come and go with each heartbeat."""
    service.add_result(environment=OLD)
    service.add_device()
    service.add_device(OLD, uuid="GPU-2")
    service.add_device()
    assert get(service, "/v1/best", **ASKED)["stale"] is False
    service.add_device(OLD, uuid="GPU-2", state="OFFLINE")
    get(service, "/v1/best", 404, **ASKED)


# ------------------------------------------------------------------------------------------------ regressions


def test_regressions_set_answers_beside_the_environment_before(service: Service) -> None:
    """D7: slower, faster or same by their intervals, with what changed; pages go on after the last."""
    for m, now_us in ((64, 181.0), (128, 170.0), (256, 176.1)):
        service.add_result(m=m, environment=OLD, median_us=175.6, interval_us=(175.2, 176.0))
        interval = (now_us - 0.4, now_us + 0.4)
        service.add_result(m=m, median_us=now_us, interval_us=interval)
    service.add_result(m=512)
    report = get(service, "/v1/regressions", device="h200")
    verdicts = {one["problem"]["m"]: one["verdict"] for one in report["items"]}
    assert verdicts == {64: "slower", 128: "faster", 256: "same"}
    slower = get(service, "/v1/regressions", verdict="slower")["items"]
    assert [(one["problem"]["m"], one["change"]) for one in slower] == [(64, "driver was 570.86.10, is 580.82.07")]
    assert slower[0]["time_ratio"] == pytest.approx(181.0 / 175.6)
    assert (slower[0]["before"]["revision"], slower[0]["after"]["revision"]) == (1, 2)
    first = get(service, "/v1/regressions", limit=2)
    second = get(service, "/v1/regressions", limit=2, after=first["next"])
    assert len(first["items"]) == 2
    assert (len(second["items"]), second["next"]) == (1, None)
    assert get(service, "/v1/regressions", device="sm_100a")["items"] == []


def test_regressions_name_what_was_not_measured_again(service: Service) -> None:
    """D7: after a driver change the answers wait; posting `submit` measures them again."""
    service.add_result(environment=OLD)
    service.add_result(m=64)
    service.add_device()
    report = get(service, "/v1/regressions")
    assert (report["items"], report["stale"]) == ([], 1)
    problem = {"m": 4096, **NK, "dtype": "bf16", "layout": "NT", "device": "NVIDIA H200"}
    assert report["submit"] == {"problems": [problem]}
    assert service.http.post("/v1/jobs", json=report["submit"]).status_code == 202


# ------------------------------------------------------------------------------------------------ kept in memory


def test_answers_that_are_kept_change_with_each_publication_by_another_process(service: Service) -> None:
    """F1: the same question twice is answered from memory, and anew once another connection published or pinned."""
    for number in range(1, 4):
        with Database.open(service.settings.database_url) as other:
            writer = Service(http=service.http, db=other, settings=service.settings, app=None, url="")
            result_id = writer.add_result(median_us=200.0 - number)
        for _ in range(2):
            answer = get(service, "/v1/best", **ASKED)
            assert (answer["revision"], answer["result_id"]) == (number, result_id)


def test_a_kept_answer_is_given_only_for_the_same_question(service: Service) -> None:
    """Every parameter counts, and so does a setting of the service."""
    service.add_result()
    service.add_result(m=2048, publish=False, evidence=("measured",))
    for _ in range(2):
        assert get(service, "/v1/best", **ASKED)["match"] == "exact"
        assert get(service, "/v1/best", **(ASKED | {"m": 2048}))["match"] == "nearest"
        assert get(service, "/v1/best", **(ASKED | {"m": 2048}), evidence="measured")["match"] == "exact"
        assert get(service, "/v1/best", 404, **(ASKED | {"dtype": "fp16"}))["error"] == "NoResult"
