"""Submitting, listing, looking at and cancelling jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from api.schemas import SamplerName
from api.services.jobs import time_left_s
from db import queries
from search_space.request import TuneRequest
from search_space.samplers import SAMPLERS, WORTH_A_TRIAL
from tests.api.conftest import H200_ENVIRONMENT, Service, job_body


def test_submitted_job_is_queued_with_one_study_a_problem(service: Service) -> None:
    """The answer has the id, the state and the studies of design.md, and nothing else."""
    problems = [{"m": 512, "n": 512, "k": 512, "dtype": "bf16", "layout": "NT", "weight": 1}, {"m": 1, "n": 8, "k": 8}]
    response = service.http.post("/v1/jobs", json=job_body(problems=problems))
    assert response.status_code == 202
    job = response.json()
    assert set(job) == {"id", "state", "studies"}
    assert job["state"] == "QUEUED"
    assert [set(study) for study in job["studies"]] == [{"id", "state"}, {"id", "state"}]
    assert response.headers["Location"] == f"/v1/jobs/{job['id']}"


def test_whole_body_of_design_is_stored_as_the_study_request(service: Service) -> None:
    """Budget, seed, mode, arch and problem reach the request that the tuner reads back."""
    job = service.submit(
        problems=[{"m": 512, "n": 512, "k": 512, "dtype": "fp16", "layout": "NT", "weight": 2}],
        arch="sm_100a",
        device=None,
        mode="model",
        effort="quick",
        budget={"trials": 7, "wall_s": 33},
        seed=5,
        force=False,
    )
    study = service.study(job["studies"][0]["id"])
    request = study.request
    assert request["problem"] == {"m": 512, "n": 512, "k": 512, "dtype": "fp16", "layout": "NT"}
    assert (request["arch"], request["device"], request["mode"]) == ("sm_100a", None, "model")
    assert request["budget"] == {"trials": 7, "wall_s": 33.0}
    assert (request["seed"], study.seed, study.mode) == (5, 5, "model")


@pytest.mark.parametrize(("effort", "trials"), [("quick", 16), ("normal", 40), ("full", 200)])
def test_effort_sets_the_budget_that_the_body_leaves_out(service: Service, effort: str, trials: int) -> None:
    """A budget with seconds only takes its trials from the effort."""
    job = service.submit(effort=effort, budget={"wall_s": 12.5})
    assert service.study(job["studies"][0]["id"]).request["budget"] == {"trials": trials, "wall_s": 12.5}


def test_protocol_is_stored_with_the_study_and_keeps_its_results_apart(service: Service) -> None:
    """A finished study under `burst` does not answer a request for `sustained`."""
    burst = service.http.post("/v1/jobs", json=job_body()).json()["studies"][0]["id"]
    service.save_trials(burst, 1)
    service.finish(burst)
    body = job_body(protocol={"kind": "sustained", "rounds": 7})
    sustained = service.http.post("/v1/jobs", json=body).json()["studies"][0]["id"]
    assert sustained != burst
    protocol = service.http.get(f"/v1/studies/{sustained}").json()["request"]["protocol"]
    assert (protocol["kind"], protocol["rounds"], protocol["idle_gap_ms"]) == ("sustained", 7, 0.0)
    assert protocol["warm_up_s"] > 0
    assert service.http.get(f"/v1/studies/{burst}").json()["request"]["protocol"]["kind"] == "burst"


def test_equal_problems_of_a_job_share_one_study_and_add_their_weights(service: Service) -> None:
    """`bf16` and `bfloat16` are one dtype, so the two problems are one."""
    problem = {"m": 512, "n": 512, "k": 512}
    job = service.submit(problems=[problem | {"weight": 1.5}, problem | {"dtype": "bfloat16", "weight": 2}])
    assert len(job["studies"]) == 1
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert [study["weight"] for study in shown["studies"]] == [3.5]


def test_largest_job_is_taken_and_shown_in_the_order_of_its_problems(service: Service) -> None:
    """4,096 problems, posted and shown: one study each."""
    problems = [{"m": m, "n": 64, "k": 64} for m in range(1, 4097)]
    job = service.submit(problems=problems)
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert [study["problem"]["m"] for study in shown["studies"]] == list(range(1, 4097))
    assert [study["id"] for study in shown["studies"]] == [study["id"] for study in job["studies"]]
    assert shown["states"] == {"QUEUED": 4096}


def test_problem_overrides_the_architecture_of_its_job(service: Service) -> None:
    """One job covers both architectures; a problem's own arch also puts the job's device aside."""
    problems = [{"m": 64, "n": 64, "k": 64}, {"m": 64, "n": 64, "k": 64, "arch": "sm_100a"}]
    job = service.submit(problems=problems, arch=None, device="h200")
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert [(study["arch"], study["device"]) for study in shown["studies"]] == [
        ("sm_90a", "NVIDIA H200"),
        ("sm_100a", None),
    ]


def test_every_problem_may_name_its_own_target(service: Service) -> None:
    """The job itself then needs neither arch nor device."""
    job = service.submit(problems=[{"m": 8, "n": 8, "k": 8, "device": "B200"}], arch=...)
    assert service.study(job["studies"][0]["id"]).arch == "sm_100a"


def test_same_request_again_is_answered_by_the_finished_study(service: Service) -> None:
    """C5: the second job is DONE at once and holds the first job's study."""
    first = service.submit()
    study_id = first["studies"][0]["id"]
    service.save_trials(study_id, 3)
    service.finish(study_id)
    second = service.submit()
    assert second["state"] == "DONE"
    assert second["studies"] == [{"id": study_id, "state": "DONE"}]


def test_forced_job_is_tuned_again(service: Service) -> None:
    """`force` makes a new study although a finished one has the same key."""
    study_id = service.submit()["studies"][0]["id"]
    service.finish(study_id)
    again = service.submit(force=True)
    assert again["state"] == "QUEUED"
    assert again["studies"][0]["id"] != study_id


@pytest.mark.parametrize(
    ("today", "reused"),
    [({}, True), ({"driver": "580.95.05"}, True), ({"driver": "590.1"}, False), ({"cuda": "13.1"}, False)],
)
def test_finished_study_answers_only_while_its_environment_holds(
    service: Service, today: dict[str, Any], reused: bool
) -> None:
    """A minor driver update keeps the study; a new major version or another CUDA does not."""
    service.add_device(H200_ENVIRONMENT)
    study_id = service.submit()["studies"][0]["id"]
    with service.db.write() as session:
        queries.record_environment(
            session, study_id, device_name="NVIDIA H200", environment=H200_ENVIRONMENT, environment_key="then"
        )
    service.finish(study_id)
    service.add_device(H200_ENVIRONMENT | today)
    assert (service.submit()["studies"][0]["id"] == study_id) is reused


def test_another_shape_is_never_answered_by_a_finished_study(service: Service) -> None:
    """C1, C2: M, N, K and dtype are all part of the key."""
    service.finish(service.submit()["studies"][0]["id"])
    for change in ({"n": 8192}, {"k": 8192}, {"m": 4095}, {"dtype": "fp16"}):
        job = service.submit(problems=[{"m": 4096, "n": 4096, "k": 4096} | change])
        assert job["state"] == "QUEUED", change


def test_idempotency_key_gives_the_same_job_again(service: Service) -> None:
    """A client that lost the first answer may send the request again."""
    answers = [
        service.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k-1"}).json() for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert len(service.http.get("/v1/jobs").json()["items"]) == 1


def test_idempotency_key_of_another_body_is_a_conflict(service: Service) -> None:
    """Nothing is stored for the second body."""
    service.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k-1"})
    response = service.http.post("/v1/jobs", json=job_body(seed=1), headers={"Idempotency-Key": "k-1"})
    assert response.status_code == 409
    assert response.json()["error"] == "IdempotencyConflict"
    assert len(service.http.get("/v1/jobs").json()["items"]) == 1


def test_job_shows_counts_by_outcome_and_the_best_of_each_study(service: Service) -> None:
    """The best is the fastest trial so far."""
    job = service.submit()
    service.save_trials(job["studies"][0]["id"], 3)
    shown = service.http.get(f"/v1/jobs/{job['id']}").json()
    assert shown["counts"] == {"MEASURED": 3}
    assert shown["states"] == {"QUEUED": 1}
    study = shown["studies"][0]
    assert (study["best_trial"], study["best_us"]) == (2, 198.0)
    assert study["problem"] == {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "layout": "NT"}


def test_jobs_are_paged_newest_first(service: Service) -> None:
    """Following `next` gives every job once."""
    ids = [service.submit(seed=seed)["id"] for seed in range(5)]
    seen, after = [], None
    while True:
        params = {"limit": 2} | ({"after": after} if after else {})
        page = service.http.get("/v1/jobs", params=params).json()
        seen += [job["id"] for job in page["items"]]
        if (after := page["next"]) is None:
            break
    assert seen == ids[::-1]


def test_jobs_are_filtered_by_state(service: Service) -> None:
    """Only jobs in that state come back."""
    done, queued = service.submit(seed=1), service.submit(seed=2)
    service.finish(done["studies"][0]["id"])
    ids = [job["id"] for job in service.http.get("/v1/jobs", params={"state": "QUEUED"}).json()["items"]]
    assert ids == [queued["id"]]
    assert service.http.get("/v1/jobs", params={"state": "WAITING"}).status_code == 422


def test_cancelled_queued_job_ends_at_once(service: Service) -> None:
    """Nothing had run, so nothing is kept."""
    job = service.submit()
    answer = service.http.delete(f"/v1/jobs/{job['id']}")
    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["cancel_requested"]) == ("CANCELLED", True)


def test_cancel_tells_a_running_study_to_stop(service: Service) -> None:
    """A24: the tuner sees the wish; the trials so far stay."""
    job = service.submit()
    with service.db.write() as session:
        queries.claim_next_study(session, "tuner-1")
    service.save_trials(job["studies"][0]["id"], 2)
    answer = service.http.delete(f"/v1/jobs/{job['id']}").json()
    assert (answer["state"], answer["counts"]) == ("RUNNING", {"MEASURED": 2})
    assert service.study(job["studies"][0]["id"]).cancel_requested


def test_cancel_of_a_finished_job_changes_nothing(service: Service) -> None:
    """DELETE twice is as good as once."""
    job = service.submit()
    service.finish(job["studies"][0]["id"])
    answer = service.http.delete(f"/v1/jobs/{job['id']}").json()
    assert (answer["state"], answer["cancel_requested"]) == ("DONE", False)


@pytest.mark.parametrize("identity", ["0" * 32, "nope", "%00", "..%2f..%2fetc%2fpasswd", "a" * 500, "%ff"])
def test_unknown_job_is_404_whatever_its_id_looks_like(service: Service, identity: str) -> None:
    """No text of a path reaches the database or a traceback."""
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        response = service.http.request(method, f"/v1/jobs/{identity}{path}")
        assert response.status_code == 404
        assert set(response.json()) == {"error", "detail", "hint"}


def test_study_shows_its_best_trial_and_pages_its_trials(service: Service) -> None:
    """Trials come in number order, filtered by outcome where asked."""
    study_id = service.submit()["studies"][0]["id"]
    service.save_trials(study_id, 4)
    with service.db.write() as session:
        queries.save_trial(
            session, study_id, 4, config={}, config_key="x", outcome="REJECTED", reason="needs 240000 B, has 232448 B"
        )
    study = service.http.get(f"/v1/studies/{study_id}").json()
    assert study["best"]["number"] == 3
    assert study["best"]["ratio"] == {"cublaslt_best": 0.93}
    assert study["counts"] == {"MEASURED": 4, "REJECTED": 1}
    page = service.http.get(f"/v1/studies/{study_id}/trials", params={"limit": 3}).json()
    assert ([trial["number"] for trial in page["items"]], page["next"]) == ([0, 1, 2], 2)
    rest = service.http.get(f"/v1/studies/{study_id}/trials", params={"limit": 3, "after": 2}).json()
    assert ([trial["number"] for trial in rest["items"]], rest["next"]) == ([3, 4], None)
    rejected = service.http.get(f"/v1/studies/{study_id}/trials", params={"outcome": "REJECTED"}).json()
    assert [trial["reason"] for trial in rejected["items"]] == ["needs 240000 B, has 232448 B"]
    assert service.http.get(f"/v1/studies/{'0' * 32}").status_code == 404
    assert service.http.get(f"/v1/studies/{'0' * 32}/trials").status_code == 404


def test_jobs_with_a_higher_priority_are_begun_first(service: Service) -> None:
    """Among equals the older one; the job shows what was asked."""
    ids = [
        service.submit(problems=[{"m": m, "n": 64, "k": 64}], priority=p)["id"] for m, p in ((8, 0), (16, 5), (24, 5))
    ]
    with service.db.write() as session:
        claimed = [queries.claim_next_study(session, "tuner") for _ in ids]
    assert [study.m for study in claimed if study is not None] == [16, 24, 8]
    assert service.http.get(f"/v1/jobs/{ids[1]}").json()["priority"] == 5
    response = service.http.post("/v1/jobs", json=job_body(priority=1001))
    assert "priority: must be at most 1000" in response.json()["detail"]


def test_jobs_are_listed_by_mode(service: Service) -> None:
    """Beside the state."""
    model = service.submit(mode="model")["id"]
    service.submit()
    assert [job["id"] for job in service.http.get("/v1/jobs", params={"mode": "model"}).json()["items"]] == [model]
    assert service.http.get("/v1/jobs", params={"mode": "guess"}).status_code == 422


def test_time_left_comes_from_the_pace_so_far() -> None:
    """A running study by its own pace, waiting ones by the others', no more than the budget of time; null at first."""
    now = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)

    def study(state: str, measured: int = 0, began_s: float = 0.0, took_s: float | None = None) -> Any:
        started = now - timedelta(seconds=began_s) if state != "QUEUED" else None
        finished = None if took_s is None or started is None else started + timedelta(seconds=took_s)
        counts = {"MEASURED": measured, "REJECTED": 7}
        return SimpleNamespace(state=state, counts=counts, started_at=started, finished_at=finished)

    def left(*studies: Any, **budget: float) -> float | None:
        return time_left_s({"effort": "quick", "budget": {"trials": 10, "wall_s": 600.0, **budget}}, studies, now)

    assert left(study("QUEUED")) is None
    assert left(study("RUNNING")) is None
    assert left(study("RUNNING", 4, 20.0)) == 30.0
    assert left(study("RUNNING", 4, 20.0), wall_s=25.0) == 5.0
    assert left(study("RUNNING", 4, 20.0), study("QUEUED"), study("QUEUED")) == 30.0 + 2 * 50.0
    assert left(study("DONE", 10, 100.0, 40.0), study("QUEUED")) == 40.0
    assert left(study("DONE", 10, 100.0, 40.0)) == 0.0


def test_sampler_and_early_stop_reach_the_study(service: Service) -> None:
    """Named ones as named; without a word the default, which stops early unless a number of trials was asked for."""
    problem = {"m": 512, "n": 512, "k": 512}

    def request(**fields: Any) -> Any:
        return service.study(service.submit(problems=[problem], **fields)["studies"][0]["id"]).request

    assert (request(sampler="cmaes")["sampler"], "stop_gain" in request(sampler="cmaes")) == ("cmaes", False)
    assert request(sampler="learned")["stop_gain"] == WORTH_A_TRIAL
    assert "stop_gain" not in request(sampler="learned", budget={"trials": 12})
    assert request(sampler="learned", budget={"trials": 12}, stop_early=True)["stop_gain"] == WORTH_A_TRIAL
    assert "stop_gain" not in request(sampler="learned", stop_early=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampler": "magic"}, "'learned', 'tpe', 'gp', 'cmaes', 'random' or 'brute'"),
        ({"sampler": "tpe", "stop_early": True}, "does not tell what it expects to gain"),
    ],
)
def test_impossible_sampler_is_refused_with_what_can_be_used(
    service: Service, fields: dict[str, Any], words: str
) -> None:
    """422, and the field is named."""
    answer = service.http.post("/v1/jobs", json=job_body(**fields))
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    assert answer.json()["detail"].startswith(f"{next(reversed(fields))}: ")


def test_problem_that_matters_more_may_go_on_for_a_smaller_gain(service: Service) -> None:
    """All studies of a job end at the same weight times gain; one of almost no weight is searched all the same."""
    problems = [{"m": m, "n": 512, "k": 512, "weight": weight} for m, weight in ((64, 3.0), (128, 1.0), (256, 0.001))]
    job = service.submit(problems=problems, sampler="learned")
    gains = [service.study(study["id"]).request["stop_gain"] for study in job["studies"]]
    mean = sum(problem["weight"] for problem in problems) / 3
    assert gains[:2] == [pytest.approx(WORTH_A_TRIAL * mean / 3, rel=0.1), pytest.approx(WORTH_A_TRIAL * mean, rel=0.1)]
    assert gains[2] == 4 * WORTH_A_TRIAL


def test_names_of_samplers_are_those_of_the_search() -> None:
    """The schema lists them for OpenAPI."""
    assert tuple(SamplerName) == SAMPLERS


def test_device_that_the_service_lists_is_taken_back_by_its_name(service: Service) -> None:
    """The engine `fake` announces invented devices: jobs and questions name them as the list does."""
    with service.db.write() as session:
        queries.upsert_device(
            session, uuid="GPU-f", name="Fake H200", arch="sm_90a", sm_count=132, environment={"sm_count": 132}
        )
    names = [device["name"] for device in service.http.get("/v1/devices").json()["devices"]]
    assert names == ["Fake H200"]
    job = service.submit(arch=None, device="Fake H200")
    study = service.study(job["studies"][0]["id"])
    assert (study.device_name, TuneRequest.from_dict(study.request).device) == ("Fake H200", "Fake H200")
    service.add_result(device_name="Fake H200")
    asked = {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "device": "fake h200"}
    assert service.http.get("/v1/best", params=asked).json()["device"] == "Fake H200"
