"""Live devices and known profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.views import DeviceList, DeviceView, ProfileView
from db import queries
from kernels.devices import PROFILES

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from db.models import Device


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
    return DeviceView(
        uuid=device.uuid,
        name=device.name,
        arch=device.arch,
        sm_count=device.sm_count,
        state=device.state,
        reason=device.reason,
        environment=device.environment or None,
        last_seen_at=device.last_seen_at,
    )
