"""Devices, and what is known to fail on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, select

from db.database import ANSWERS, hold, note_change
from db.models import Device, DeviceState, Study, Trial, utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

# Faults of the candidate itself. OUT_OF_MEMORY and INVALID_TIMING may be the moment's fault, SPILLED and
# COMPILE_FAILED cost no GPU and are found again in seconds.
REMEMBERED_OUTCOMES = ("CRASHED", "TIMED_OUT", "WRONG_RESULT", "NONDETERMINISTIC", "CHECK_FAILED")
# The reason of a CRASHED whose workers were all ended from outside, a pattern of LIKE: no fault of the candidate.
LOST_WORKERS = "lost % workers on the GPU: %"
_FORGOTTEN = "forgotten: "  # begins the reason of a failure that no longer counts, see `forget_failures`


def upsert_device(
    session: Session,
    *,
    uuid: str,
    name: str,
    arch: str,
    sm_count: int,
    state: str = DeviceState.READY,
    reason: str = "",
    environment: dict[str, Any] | None = None,
) -> Device:
    """Note a GPU as it is now. Called by the tuner at start and at each change of state; returns the row.

    environment: where None, the stored one stays
    """
    hold(session, "devices")  # several tuners of one cluster note the same devices at the same time
    found = session.get(Device, uuid)
    before = None if found is None else _what_answers_depend_on(found)
    if found is None:
        found = Device(uuid=uuid, environment={})
        session.add(found)
    found.name = name
    found.arch = arch
    found.sm_count = sm_count
    found.state = state
    found.reason = reason
    found.last_seen_at = utc_now()
    if environment is not None:
        found.environment = environment
    if _what_answers_depend_on(found) != before:
        note_change(session, ANSWERS)
    session.flush()
    return found


def _what_answers_depend_on(device: Device) -> tuple[Any, ...]:
    """A heartbeat that brings a new temperature must not make readers forget what they know."""
    parts = (device.environment.get(name) for name in ("sm_count", "driver", "cuda", "toolchain"))
    return (device.name, device.arch, device.sm_count, device.state == DeviceState.OFFLINE, *parts)


def devices(session: Session) -> Sequence[Device]:
    """All GPUs ever seen, by name and uuid. Called by GET /v1/devices and `gemm-tuner devices`."""
    return session.scalars(_DEVICES).all()


# Built once: each GET /v1/best asks this, and building a statement costs more than running it.
_DEVICES = select(Device).order_by(Device.name, Device.uuid)


def device(session: Session, uuid: str) -> Device | None:
    """One GPU by its uuid, or None."""
    return session.get(Device, uuid)


def known_bad(session: Session, device_name: str, toolchain: str, source_hash: str) -> Trial | None:
    """The newest trial in which this very source failed on this device with this toolchain, or None.

    A trial that lost its workers is no failure of its source.
    Called by the tuner before a candidate goes to the GPU: its `outcome` and `reason` go into the KNOWN_BAD trial.
    """
    return session.scalar(_KNOWN_BAD, {"source_hash": source_hash, "toolchain": toolchain, "device_name": device_name})


# Built once: it is asked for each trial.
_KNOWN_BAD = (
    select(Trial)
    .join(Study, Trial.study_id == Study.id)
    .where(Trial.source_hash == bindparam("source_hash"), Trial.toolchain == bindparam("toolchain"))
    .where(Trial.outcome.in_(REMEMBERED_OUTCOMES), Study.device_name == bindparam("device_name"))
    .where(Trial.reason.not_like(LOST_WORKERS), ~Trial.reason.startswith(_FORGOTTEN))
    .order_by(Trial.finished_at.desc(), Trial.study_id, Trial.number)
    .limit(1)
)


def forget_failures(session: Session, study_id: str, number: int | None = None) -> list[int]:
    """Let sources that failed in a study run again; returns the numbers of its trials. Called by `db forget`.

    The trials keep their outcome, and their reason says that it no longer counts.

    number: of the one trial that is meant; None for all of the study
    """
    query = select(Trial).where(Trial.study_id == study_id, Trial.outcome.in_(REMEMBERED_OUTCOMES))
    query = query.where(~Trial.reason.startswith(_FORGOTTEN)).order_by(Trial.number)
    if number is not None:
        query = query.where(Trial.number == number)
    failed = session.scalars(query).all()
    for trial in failed:
        trial.reason = _FORGOTTEN + trial.reason
    session.flush()
    return [trial.number for trial in failed]
