"""The event stream of a job: order, resume, end."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from db import queries
from tests.api.conftest import SM90_CONFIG, Service, set_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

Event = tuple[str, str, dict[str, Any]]


def events_of(response: httpx.Response) -> Iterator[Event]:
    """Name, id and data of each event."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield fields["event"], fields["id"], json.loads(fields["data"])
            fields = {}


def follow(service: Service, job_id: str, last_id: str | None = None) -> list[Event]:
    """Read a stream to its end."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return list(events_of(response))


def trial_numbers(events: list[Event]) -> list[int]:
    """Numbers of the trials among the events."""
    return [data["number"] for name, _, data in events if name == "trial"]


def finished_job(service: Service, trials: int) -> tuple[str, str]:
    """A job of one study that has ended; its id and the study's."""
    job = service.submit()
    study_id = job["studies"][0]["id"]
    service.save_trials(study_id, trials)
    service.finish(study_id)
    return job["id"], study_id


def test_stream_tells_every_trial_and_ends_with_the_job(service: Service) -> None:
    """Trials in order, each with its study; then the job as it is; then the end."""
    job_id, study_id = finished_job(service, 3)
    events = follow(service, job_id)
    assert [name for name, _, _ in events] == ["trial", "trial", "trial", "job", "end"]
    assert trial_numbers(events) == [0, 1, 2]
    assert events[0][2]["study_id"] == study_id
    assert events[0][2]["config"] == SM90_CONFIG
    assert events[-1][2]["state"] == "DONE"
    assert events[-1][2]["counts"] == {"MEASURED": 3}
    assert len({identity for _, identity, _ in events if identity}) >= 4


@pytest.mark.parametrize("read", [1, 2, 3])
def test_stream_resumes_after_the_last_event_that_arrived(service: Service, read: int) -> None:
    """Nothing is lost and nothing comes twice."""
    job_id, _ = finished_job(service, 4)
    events = follow(service, job_id)
    resumed = follow(service, job_id, events[read - 1][1])
    assert trial_numbers(resumed) == list(range(read, 4))
    assert resumed[-1][0] == "end"


def test_stream_goes_on_while_the_tuner_works(service: Service) -> None:
    """Each trial arrives after it was saved and before the job ends."""
    job = service.submit()
    study_id = job["studies"][0]["id"]
    with service.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        events = events_of(response)
        assert next(events)[0] == "job"
        service.save_trials(study_id, 1)
        name, _, data = next(events)
        assert (name, data["number"], data["outcome"]) == ("trial", 0, "MEASURED")
        service.save_trials(study_id, 1, first=1)
        service.finish(study_id)
        rest = list(events)
    assert trial_numbers(rest) == [1]
    assert rest[-1][0] == "end"


def test_trial_saved_late_is_told_all_the_same(service: Service) -> None:
    """Several trials are in flight: one may be saved after another that finished later."""
    job = service.submit()
    study_id = job["studies"][0]["id"]
    with service.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        events = events_of(response)
        service.save_trials(study_id, 1, first=5)
        late = next(event for event in events if event[0] == "trial")
        with service.db.read() as session:
            moment = queries.trials_of_study(session, study_id)[0].finished_at
        with service.db.write() as session:
            queries.save_trial(
                session,
                study_id,
                4,
                config={},
                config_key="4",
                outcome="CRASHED",
                finished_at=moment.replace(year=moment.year - 1),
            )
        early = next(event for event in events if event[0] == "trial")
        service.finish(study_id)
        assert [name for name, _, _ in events][-1] == "end"
    assert (late[2]["number"], early[2]["number"]) == (5, 4)
    assert early[1] >= late[1]  # the place to resume never moves back


def test_stream_that_was_read_to_its_end_is_not_told_again(service: Service) -> None:
    """204 stops a browser from asking for ever."""
    job_id, _ = finished_job(service, 1)
    last_id = follow(service, job_id)[-1][1]
    response = service.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": last_id})
    assert (response.status_code, response.content) == (204, b"")


@pytest.mark.parametrize("last_id", ["7", "x-1-1", "1-2-3-4", "-1-0-0", "9" * 30 + "-0-0"])
def test_foreign_last_event_id_is_refused(service: Service, last_id: str) -> None:
    """It names the header."""
    job = service.submit()
    response = service.http.get(f"/v1/jobs/{job['id']}/events", headers={"Last-Event-ID": last_id})
    assert response.status_code == 422
    assert response.json()["detail"].startswith("Last-Event-ID: ")


def test_silent_stream_sends_heartbeats(service: Service) -> None:
    """Comments keep proxies from closing it."""
    set_settings(service, events_heartbeat_s=0.05)
    job = service.submit()
    with service.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        assert any(line.startswith(":") for line in response.iter_lines())


def test_stream_ends_without_end_event_when_the_service_stops(service: Service) -> None:
    """The client comes back to the next process with the id it has."""
    job = service.submit()
    with service.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        events = events_of(response)
        assert next(events)[0] == "job"
        service.app.state.stopping = True
        try:
            started_s = time.monotonic()
            assert list(events) == []
            assert time.monotonic() - started_s < 5
        finally:
            service.app.state.stopping = False
