"""Whether a stored result still describes the device as it is today.

A result's environment key holds device name, SM count, driver major, CUDA, toolchain and source hash. All but the hash
are compared here, part by part, so that the answer can say what changed; the hash cannot change without a new build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from db.models import Device

# Name in the environment, name for people. Only the major part of the driver's version counts.
_PARTS = (("sm_count", "SM count"), ("driver", "driver"), ("cuda", "CUDA"), ("toolchain", "toolchain"))


def latest_environment(devices: Sequence[Device], name: str) -> Mapping[str, Any]:
    """What the device that was seen last under this name reported; empty when none was, or when it told nothing."""
    seen = [device for device in devices if device.name == name and device.environment]
    return max(seen, key=lambda device: (device.last_seen_at, device.uuid)).environment if seen else {}


class Today:
    """`latest_environment` by device name, each worked out once: thousands of answers are about one device."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._known: dict[str, Mapping[str, Any]] = {}

    def environment(self, name: str) -> Mapping[str, Any]:
        """Of the device that was seen last under this name; empty when none was, or when it told nothing."""
        if name not in self._known:
            self._known[name] = latest_environment(self._devices, name)
        return self._known[name]


def stale_reason(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What changed since, for people; empty when nothing did. A part that either side does not know counts as equal."""
    changes = []
    for name, label in _PARTS:
        before, now = stored.get(name), current.get(name)
        if before and now and before != now and _significant(name, before) != _significant(name, now):
            changes.append(f"{label} was {before}, is {now}")
    return "; ".join(changes)


def _significant(name: str, value: object) -> str:
    text = str(value)
    return text.partition(".")[0] if name == "driver" else text
