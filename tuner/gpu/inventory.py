"""Which GPUs are here, found without creating a CUDA context: through NVML, else through nvidia-smi."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from kernels.arch import Arch, arch_of_capability
from kernels.devices import PROFILES, DeviceProfile, default_profile
from tuner.engine.base import DeviceFacts
from tuner.gpu.nvml import Card, NvmlMissing, card_uuids
from tuner.records import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMI_FIELDS = ("uuid", "name", "compute_cap", "driver_version", "clocks.max.sm", "power.limit")


def list_gpus(environ: Mapping[str, str] | None = None) -> tuple[DeviceFacts, ...]:
    """Facts of every visible GPU that a template serves; the position is the `device_index` of a GpuChild.

    Honours CUDA_VISIBLE_DEVICES of `environ` (default: this process). Cards stand in the order of the PCI bus. A GPU of
    another architecture is left out. No GPU, or no driver, is an empty tuple.
    """
    found = _by_nvml()
    if found is None:
        found = _by_nvidia_smi()
    wanted = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    kept = visible([facts.uuid if facts else "" for facts in found], wanted)
    return tuple(facts for index in kept if (facts := found[index]) is not None)


def visible(uuids: Sequence[str], wanted: str | None) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES names, in its order; like the driver, stop at the first unknown one."""
    if wanted is None:
        return list(range(len(uuids)))
    kept: list[int] = []
    for token in (part.strip() for part in wanted.split(",")):
        if token.isdecimal():
            index = int(token) if int(token) < len(uuids) else None
        else:
            index = next((i for i, uuid in enumerate(uuids) if token and uuid and uuid.startswith(token)), None)
        if index is None or index in kept:
            break
        kept.append(index)
    return kept


def live_profile(
    *,
    name: str,
    arch: Arch,
    sm_count: int,
    clock_mhz: int,
    bandwidth_bytes_per_s: float,
    l2_bytes: int,
    memory_bytes: int,
) -> DeviceProfile:
    """Profile of a live device. What the driver does not tell (zero) comes from the data sheet of its kind."""
    sheet = next((profile for profile in PROFILES if profile.name == name), default_profile(arch))
    return DeviceProfile(
        name=name or sheet.name,
        arch=arch,
        sm_count=sm_count or sheet.sm_count,
        clock_mhz=clock_mhz or sheet.clock_mhz,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s or sheet.bandwidth_bytes_per_s,
        l2_bytes=l2_bytes or sheet.l2_bytes,
        memory_bytes=memory_bytes or sheet.memory_bytes,
        aliases=sheet.aliases if name == sheet.name else (),
        sources="read from the driver; what it does not tell from the data sheet",
    )


def _by_nvml() -> list[DeviceFacts | None] | None:
    try:
        return [_facts_of_card(Card(uuid)) for uuid in card_uuids()]
    except NvmlMissing:
        return None


def _facts_of_card(card: Card) -> DeviceFacts | None:
    arch = arch_of_capability(*card.compute_capability())
    if arch is None:
        return None
    profile = live_profile(
        name=card.name(),
        arch=arch,
        sm_count=card.sm_count(),
        clock_mhz=card.max_sm_clock_mhz(),
        bandwidth_bytes_per_s=card.bandwidth_bytes_per_s(),
        l2_bytes=0,
        memory_bytes=card.memory_bytes(),
    )
    reading = card.read()
    environment = Environment(
        gpu_name=profile.name,
        gpu_uuid=card.uuid,
        arch=arch.name,
        sm_count=profile.sm_count,
        driver=card.driver(),
        max_sm_clock_mhz=float(profile.clock_mhz),
        power_limit_w=card.power_limit_w(),
        temperature_c=reading.temperature_c,
        mig=card.mig(),
    )
    return DeviceFacts(name=profile.name, uuid=card.uuid, profile=profile, environment=environment)


def _by_nvidia_smi() -> list[DeviceFacts | None]:
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [facts_of_smi_line(line) for line in done.stdout.splitlines() if line.strip()]


def facts_of_smi_line(line: str) -> DeviceFacts | None:
    """Facts of one line of the CSV that nvidia-smi prints for SMI_FIELDS; None for a GPU that no template serves."""
    values = [part.strip() for part in line.split(",")]
    if len(values) != len(SMI_FIELDS):
        return None
    row = dict(zip(SMI_FIELDS, values, strict=True))
    major, _, minor = row["compute_cap"].partition(".")
    arch = arch_of_capability(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
    if arch is None:
        return None
    profile = live_profile(
        name=row["name"],
        arch=arch,
        sm_count=0,
        clock_mhz=int(_number(row["clocks.max.sm"])),
        bandwidth_bytes_per_s=0.0,
        l2_bytes=0,
        memory_bytes=0,
    )
    environment = Environment(
        gpu_name=profile.name,
        gpu_uuid=row["uuid"],
        arch=arch.name,
        sm_count=profile.sm_count,
        driver=row["driver_version"],
        max_sm_clock_mhz=float(profile.clock_mhz),
        power_limit_w=_number(row["power.limit"]),
    )
    return DeviceFacts(name=profile.name, uuid=row["uuid"], profile=profile, environment=environment)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
