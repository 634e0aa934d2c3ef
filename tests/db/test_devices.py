"""Devices, artifacts and exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import IntegrityError

from db import queries

if TYPE_CHECKING:
    from db.database import Database

H200: dict[str, Any] = {"uuid": "GPU-1", "name": "NVIDIA H200", "arch": "sm_90a", "sm_count": 132}


def test_a_device_is_stored_once_and_kept_up_to_date(database: Database) -> None:
    """State and reason change with each report; the environment stays where a report has none."""
    with database.write() as session:
        queries.upsert_device(session, **H200, environment={"driver": "580"})
        first_seen = queries.devices(session)[0].last_seen_at
        queries.upsert_device(session, **H200, state="SET_ASIDE", reason="3 failed health checks")
        queries.upsert_device(session, uuid="GPU-0", name="NVIDIA B200", arch="sm_100a", sm_count=148)
    with database.read() as session:
        b200, h200 = queries.devices(session)
        assert (b200.name, h200.state, h200.reason) == ("NVIDIA B200", "SET_ASIDE", "3 failed health checks")
        assert h200.environment == {"driver": "580"}
        assert h200.last_seen_at >= first_seen
        found = queries.device(session, "GPU-1")
        assert found is h200
    with pytest.raises(IntegrityError, match="ck_devices_state"), database.write() as session:
        queries.upsert_device(session, **H200, state="ASLEEP")


def test_an_artifact_is_noted_once(database: Database) -> None:
    """The same bytes built twice are the same artifact."""
    built: dict[str, Any] = {
        "sha256": "0" * 64,
        "size_bytes": 3 * 2**31,
        "arch": "sm_90a",
        "sm_count": 132,
        "source_hash": "1" * 64,
        "config": {"blk_m": 128},
        "problem_key": "4096x4096x4096:bf16:NT",
        "toolchain": "nvcc 13.0.88",
    }
    with database.write() as session:
        queries.add_artifact(session, **built, registers=168)
        again = queries.add_artifact(session, **built, registers=255)
        assert (again.registers, again.size_bytes) == (168, 3 * 2**31)
        assert queries.artifact(session, "0" * 64) is again
        assert queries.artifact(session, "f" * 64) is None


def test_exports_are_claimed_oldest_first_and_end_with_their_file(database: Database) -> None:
    """Each is claimed once; its bundle is named by its hash."""
    with database.write() as session:
        first, second = (queries.create_export(session, {"results": [name]}) for name in ("a", "b"))
        claimed = [queries.claim_next_export(session, "tuner") for _ in range(3)]
        assert [export and export.id for export in claimed] == [first.id, second.id, None]
        done = queries.finish_export(
            session, first.id, state="DONE", bundle_path="a.zip", bundle_sha256="2" * 64, size_bytes=12
        )
        assert (done.state, done.bundle_path, done.size_bytes, done.owner) == ("DONE", "a.zip", 12, None)
        failed = queries.finish_export(session, second.id, state="FAILED", reason="artifact is gone")
        assert (failed.state, failed.reason) == ("FAILED", "artifact is gone")
        with pytest.raises(ValueError, match="'PARTIAL' does not end an export"):
            queries.finish_export(session, first.id, state="PARTIAL")
        with pytest.raises(KeyError):
            queries.finish_export(session, "unknown", state="DONE")
