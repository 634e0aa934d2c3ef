"""Whether a stored result still describes the device as it is today.

A result's environment key holds device name, SM count, driver major, CUDA, toolchain and source hash. All but the hash
are compared here, part by part, so that the answer can say what changed; the hash cannot change without a new build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from db.models import DeviceState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from db.models import Device

    Environment = Mapping[str, Any]

# Name in the environment, name for people. Only the major part of the driver's version counts.
_PARTS = (("sm_count", "SM count"), ("driver", "driver"), ("cuda", "CUDA"), ("toolchain", "toolchain"))


class Today:
    """What the devices reported. Of several with one name each that is not offline counts, else the one seen last."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = [device for device in devices if device.environment]
        self._known: dict[str, tuple[Environment, ...]] = {}

    def environments(self, name: str) -> tuple[Environment, ...]:
        """Of the devices of this name, the one seen last first; empty when none told anything."""
        if name not in self._known:
            named = [device for device in self._devices if device.name == name]
            named.sort(key=lambda device: (device.last_seen_at, device.uuid), reverse=True)
            online = [device for device in named if device.state != DeviceState.OFFLINE]
            self._known[name] = tuple(device.environment for device in online or named[:1])
        return self._known[name]

    def stale_reason(self, name: str, stored: Environment) -> str:
        """What changed on the device since, for people; empty when it is as it was, or when nobody knows."""
        reasons = [stale_reason(stored, environment) for environment in self.environments(name)]
        return reasons[0] if reasons and all(reasons) else ""

    def stale(self, made_in: Iterable[str]) -> tuple[str, ...]:
        """Those of these environments (`Result.made_in`) that no device has any more."""
        return tuple(sorted(text for text in made_in if self._is_stale(text)))

    def _is_stale(self, made_in: str) -> bool:
        stored = parts_of(made_in)
        return bool(stored) and bool(self.stale_reason(str(stored["gpu_name"]), stored))


def parts_of(made_in: str) -> dict[str, Any]:
    """The parts of an environment key, by their names in an environment; empty for text that is no key."""
    texts = made_in.split("|", 4)
    return dict(zip(("gpu_name", "sm_count", "driver", "cuda", "toolchain"), texts, strict=True)) if texts[4:] else {}


def stale_reason(stored: Environment, current: Environment) -> str:
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
