"""What people are answered after a study has failed, or its tuner was killed."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from api.services.devices import LONGEST_SILENCE
from db import queries
from db.models import Device
from tuner.engine.fake import FakeOptions
from tuner.engine.faults import FaultKind, FaultPlan
from tuner.engines import FakeEngines
from tuner.service import run_service
from tuner.settings import Settings

if TYPE_CHECKING:
    from tests.api.conftest import Service


def test_a14_device_whose_tuner_was_killed_is_offline_within_half_a_minute(service: Service) -> None:
    """A14: a tuner that was killed cannot say that its GPU is free; its silence does."""
    service.add_device()
    with service.db.write() as session:
        device = session.get(Device, "GPU-1")
        assert device is not None
        device.state = "BUSY"
        device.last_seen_at = datetime.now(UTC) - LONGEST_SILENCE - timedelta(seconds=5)
    (shown,) = service.http.get("/v1/devices").json()["devices"]
    assert shown["state"] == "OFFLINE"
    assert shown["reason"] == "its tuner has not been heard of for 35 s"
    service.add_device()
    (shown,) = service.http.get("/v1/devices").json()["devices"]
    assert (shown["state"], shown["reason"]) == ("READY", "")


def test_a23_default_config_is_still_served_after_every_candidate_ran_out_of_memory(service: Service) -> None:
    """A23: the job fails with its reason, the service answers on."""
    problem = {"m": 64, "n": 7168, "k": 4096, "dtype": "bf16"}
    job = service.submit(problems=[problem], arch="sm_90a", mode="measure", budget={"trials": 4})
    settings = Settings(
        database_url=service.settings.database_url,
        artifacts_dir=service.settings.artifacts_dir,
        exports_dir=service.settings.exports_dir,
        engine="fake",
    )
    full = FakeOptions(faults=FaultPlan(rates={FaultKind.OUT_OF_MEMORY: 1.0}))
    run_service(settings, lambda made: FakeEngines(made, full), threading.Event(), until_idle=True)
    with service.db.read() as session:
        (study,) = queries.studies_of_job(session, job["id"])
    assert study.state == "FAILED"
    assert "OUT_OF_MEMORY" in study.reason
    asked = {"m": 64, "n": 7168, "k": 4096, "dtype": "bf16", "device": "sm_90a"}
    assert service.http.get("/v1/best", params=asked).status_code == 404
    answer = service.http.get("/v1/best", params={**asked, "allow_default": True})
    assert answer.status_code == 200
    assert answer.json()["match"] == "default"
    assert answer.json()["evidence"] == ["modeled"]
