"""From the words of a request (an architecture, a device name, an alias) to what can be tuned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from api.errors import UnknownTarget
from kernels.arch import ARCHES, Arch
from kernels.devices import PROFILES, DeviceProfile, default_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.models import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a problem shall run.

    arch: architecture
    device: device name, None for any device of the architecture
    profile: data-sheet profile of the device or, for an architecture, its usual device; None for a device without one
    sm_count: streaming multiprocessors of the device, or of the architecture's usual one
    """

    arch: Arch
    device: str | None
    profile: DeviceProfile | None
    sm_count: int

    def __str__(self) -> str:
        return self.device or self.arch.name


class Targets:
    """All that requests may name: the architectures, the profiles, and the devices that a tuner has announced."""

    def __init__(self, live: Sequence[Device]) -> None:
        self._live = live

    def named(self, text: str, *, field: str = "device") -> Target:
        """A device, an alias of one, or an architecture. Raises UnknownTarget naming what there is."""
        wanted = text.strip().lower()
        if wanted in ARCHES:
            return self.any_of(ARCHES[wanted])
        profile = next((p for p in PROFILES if wanted == p.name.lower() or wanted in p.aliases), None)
        for device in self._live:
            same = profile is not None and device.name == profile.name
            if same or wanted in (device.name.lower(), device.uuid.lower()):
                known = next((p for p in PROFILES if p.name == device.name), None)
                return Target(arch=ARCHES[device.arch], device=device.name, profile=known, sm_count=device.sm_count)
        if profile is not None:
            return Target(arch=profile.arch, device=profile.name, profile=profile, sm_count=profile.sm_count)
        raise self._unknown(text, field)

    def any_of(self, arch: Arch) -> Target:
        """Any device of an architecture; its usual one stands for it in arithmetic."""
        profile = default_profile(arch)
        return Target(arch=arch, device=None, profile=profile, sm_count=profile.sm_count)

    def chosen(self, arch: str | None, device: str | None, *, prefix: str = "") -> Target:
        """What a job asks for with its two fields. Raises UnknownTarget when they are unknown or contradict."""
        if arch is not None and arch not in ARCHES:
            raise UnknownTarget(f"{prefix}arch: unknown arch {arch!a}", hint=f"use one of {', '.join(ARCHES)}")
        if device is None:
            if arch is None:
                raise UnknownTarget(
                    f"{prefix}arch: one of arch, device is required",
                    hint=f'add "arch": one of {", ".join(ARCHES)}, or "device": a name that GET /v1/devices lists',
                )
            return self.any_of(ARCHES[arch])
        target = self.named(device, field=f"{prefix}device")
        if arch is not None and arch != target.arch.name:
            raise UnknownTarget(
                f"{prefix}device: {target} is {target.arch.name}, but arch is {arch}",
                hint="leave arch out, or name a device of that architecture",
            )
        return target

    def _unknown(self, text: str, field: str) -> UnknownTarget:
        names = dict.fromkeys([*(device.name for device in self._live), *(profile.name for profile in PROFILES)])
        return UnknownTarget(
            f"{field}: unknown device or architecture {text!a}",
            hint=f"known are {', '.join(names)}, and the architectures {', '.join(ARCHES)}",
        )
