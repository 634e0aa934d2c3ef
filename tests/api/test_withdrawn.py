"""A published kernel that was found to be bad: no route hands it out, and each says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from db import queries
from kernels.config import Sm90GemmConfig
from tests.api.test_best import ASKED, best, missed

if TYPE_CHECKING:
    from tests.api.conftest import Service

BAD = "b" * 64
OTHER = Sm90GemmConfig(blk_n=128).to_dict()
REASON = "WRONG_RESULT: 1 of 16777216 elements is wrong"


def withdraw(service: Service) -> None:
    """Let a later study of the same problem find that the source is wrong."""
    job = service.submit(force=True)
    study_id = job["studies"][0]["id"]
    with service.db.write() as session:
        queries.record_environment(
            session, study_id, device_name="NVIDIA H200", environment={}, environment_key="later"
        )
        row = queries.save_trial(
            session,
            study_id,
            0,
            config={},
            config_key="bad",
            outcome="WRONG_RESULT",
            reason="1 of 16777216 elements is wrong",
            source_hash=BAD,
        )
        assert queries.withdraw_source(session, study_id, row)


@pytest.fixture
def bad(service: Service) -> str:
    """Id of a withdrawn result, the only one of its problem."""
    result_id = service.add_result(source_hash=BAD, artifact_sha256="c" * 64)
    withdraw(service)
    return result_id


def test_question_whose_answer_was_withdrawn_says_so(service: Service, bad: str) -> None:
    """No answer, the reason, and the job that would tune it anew; the nearest shape is not answered by it either."""
    body = missed(service)
    assert f"revision 1 was withdrawn: {REASON}" in body["detail"]
    assert [(one["result_id"], one["revision"], one["device"]) for one in body["withdrawn"]] == [
        (bad, 1, "NVIDIA H200")
    ]
    assert body["submit"]["problems"]
    assert missed(service, m=4000)["withdrawn"] == []
    bulk = service.http.post("/v1/best", json={"problems": [{"m": 4096, "n": 4096, "k": 4096}], "device": "h200"})
    assert [item["match"] for item in bulk.json()["items"]] == ["none"]
    table = service.http.get("/v1/dispatch", params={"n": 4096, "k": 4096, "device": "h200"})
    assert table.json()["ranges"] == []


def test_nearest_answer_has_no_config_that_was_found_bad_for_the_asked_shape(service: Service, bad: str) -> None:
    """The winner of the next shape is often the same config: there it may be right."""
    near = service.add_result(m=4224, source_hash="e" * 64)
    missed(service)
    assert best(service, m=4200)["result_id"] == near
    table = service.http.get("/v1/dispatch", params={"n": 4096, "k": 4096, "device": "h200"}).json()
    assert {one["best"]["result_id"] for one in table["ranges"]} == {near}
    assert [(one["m_min"], one["m_max"]) for one in table["gaps"]][-1] == (4096, 4096)
    far = service.add_result(m=5120, source_hash="f" * 64, config=OTHER)
    answer = best(service)
    assert (answer["match"], answer["result_id"]) == ("nearest", far)
    assert [one["result_id"] for one in answer["withdrawn"]] == [bad], "whoever asked before had this one"


def test_default_is_no_config_that_was_found_bad_for_the_shape(service: Service) -> None:
    """The heuristic's next choice stands in for it."""
    usual = best(service, allow_default=True)["config"]
    service.add_result(source_hash=BAD, config=usual)
    withdraw(service)
    found = best(service, allow_default=True)
    assert (found["match"], [one["revision"] for one in found["withdrawn"]]) == ("default", [1])
    assert found["config"] != usual


def test_revision_that_was_withdrawn_is_an_error_of_its_own(service: Service, bad: str) -> None:
    """410, which a client tells from a revision that never was."""
    response = service.http.get("/v1/best", params=ASKED | {"revision": 1})
    assert (response.status_code, response.json()["error"]) == (410, "WithdrawnResult")
    assert REASON in response.json()["detail"]
    assert response.json()["withdrawn"][0]["result_id"] == bad
    assert service.http.get("/v1/best", params=ASKED | {"revision": 2}).status_code == 404


def test_the_next_revision_answers_and_names_what_was_withdrawn(service: Service, bad: str) -> None:
    """Whoever still runs the old kernel learns of it with the next question."""
    service.add_result(source_hash="d" * 64)
    answer = best(service)
    assert answer["revision"] == 2
    assert [(one["revision"], one["result_id"]) for one in answer["withdrawn"]] == [(1, bad)]
    assert answer["withdrawn"][0]["reason"].startswith(REASON)


def test_withdrawal_reaches_answers_that_were_kept(service: Service) -> None:
    """Asked before and after."""
    service.add_result(source_hash=BAD)
    assert best(service)["withdrawn"] == []
    withdraw(service)
    missed(service)


def test_neither_bundle_nor_pin_takes_a_withdrawn_result(service: Service, bad: str) -> None:
    """Not even with allow_unverified."""
    for body in ({"results": [bad]}, {"results": [bad], "allow_unverified": True}):
        response = service.http.post("/v1/exports", json=body)
        assert (response.status_code, response.json()["error"]) == (410, "WithdrawnResult")
        assert response.json()["detail"].startswith(f"results[0]: result {bad} was withdrawn: {REASON}")
    pin = service.http.put("/v1/pins", json={"result": bad, "pinned": True})
    assert (pin.status_code, pin.json()["error"]) == (410, "WithdrawnResult")


def test_bundle_that_was_built_before_is_not_handed_out_any_more(service: Service) -> None:
    """It holds the module."""
    result_id = service.add_result(source_hash=BAD)
    order: dict[str, Any] = service.http.post("/v1/exports", json={"results": [result_id]}).json()
    with service.db.write() as session:
        queries.finish_export(session, order["id"], state="DONE", bundle_path="x.zip")
    withdraw(service)
    response = service.http.get(f"/v1/exports/{order['id']}/bundle")
    assert (response.status_code, response.json()["error"]) == (410, "WithdrawnResult")


def test_history_and_pages_show_it(service: Service, bad: str) -> None:
    """The result with its reason, the list of revisions, and its cell of the shape map."""
    result = service.http.get(f"/v1/results/{bad}").json()
    assert (result["revision"], result["current"]) == (1, False)
    assert result["withdrawn_at"]
    assert result["withdrawn_reason"].startswith(REASON)
    (item,) = service.http.get(f"/v1/results/{bad}/revisions").json()["items"]
    assert item["withdrawn_reason"] == result["withdrawn_reason"]
    page = service.http.get(f"/results/{bad}").text
    assert "do not use this kernel" in page
    assert REASON in page
    assert "Let this revision stay the answer" not in page
    shape_map = service.http.get("/map", params={"device": "NVIDIA H200"}).text
    assert f'<a href="/results/{bad}"' in shape_map
    assert ">withdrawn</a>" in shape_map


def test_finished_study_whose_winner_was_withdrawn_answers_no_new_job(service: Service) -> None:
    """The problem is tuned again without `force`."""
    first = service.submit()["studies"][0]["id"]
    service.finish(first)
    service.add_result(source_hash=BAD, study_id=first, trial_number=0)
    assert service.submit()["studies"][0]["id"] == first
    withdraw(service)
    assert service.submit()["studies"][0]["id"] != first
