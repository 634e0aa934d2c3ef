"""Live devices and known profiles."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from api.views.devices import DeviceList, DeviceView, ProfileView
from db import queries
from db.models import DeviceState
from kernels.devices import PROFILES

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from db.models import Device


# A tuner notes its devices every 5 s. One that was killed cannot say that they are free.
LONGEST_SILENCE = timedelta(seconds=30)


def listing(session: Session) -> DeviceList:
    """Everything that a request may name."""
    return DeviceList(
        devices=[_device_view(device) for device in queries.devices(session)],
        profiles=[
            ProfileView(
                name=profile.name,
                arch=profile.arch.name,
                aliases=list(profile.aliases),
                sm_count=profile.sm_count,
                memory_bytes=profile.memory_bytes,
            )
            for profile in PROFILES
        ],
    )


def _device_view(device: Device) -> DeviceView:
    state, reason = device.state, device.reason
    silence = datetime.now(UTC) - device.last_seen_at if device.last_seen_at else timedelta()
    if state in (DeviceState.READY, DeviceState.BUSY) and silence > LONGEST_SILENCE:
        state, reason = DeviceState.OFFLINE, f"its tuner has not been heard of for {silence.total_seconds():.0f} s"
    return DeviceView(
        uuid=device.uuid,
        name=device.name,
        arch=device.arch,
        sm_count=device.sm_count,
        state=state,
        reason=reason,
        environment=device.environment or None,
        last_seen_at=device.last_seen_at,
    )
