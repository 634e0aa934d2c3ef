"""Data-sheet profiles of the GPUs we target: what the performance model and GPU-less compiling use.

A live device is read from the driver, never looked up here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.arch import SM_90A, SM_100A, Arch
from kernels.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """One GPU model.

    name: as `nvidia-smi` and the CUDA driver print it
    arch: code it runs
    sm_count: streaming multiprocessors
    clock_mhz: highest SM clock
    bandwidth_bytes_per_s: device memory bandwidth of the data sheet
    l2_bytes: L2 cache
    memory_bytes: device memory
    aliases: other spellings people type
    sources: where each number comes from
    """

    name: str
    arch: Arch
    sm_count: int
    clock_mhz: int
    bandwidth_bytes_per_s: float
    l2_bytes: int
    memory_bytes: int
    aliases: tuple[str, ...]
    sources: str

    @property
    def peak_flops(self) -> float:
        """Dense 16-bit FLOP/s of the tensor cores at the highest clock."""
        return self.sm_count * self.arch.mma_flops_per_clock * self.clock_mhz * 1e6


PROFILES: tuple[DeviceProfile, ...] = (
    DeviceProfile(
        name="NVIDIA H200",
        arch=SM_90A,
        sm_count=132,
        clock_mhz=1980,
        bandwidth_bytes_per_s=4.8e12,
        l2_bytes=50 * 2**20,
        memory_bytes=141 * 10**9,
        aliases=("h200",),
        sources="NVIDIA H200 data sheet (4.8 TB/s, 141 GB); clock and SM count as the driver reports them",
    ),
    DeviceProfile(
        name="NVIDIA H100 80GB HBM3",
        arch=SM_90A,
        sm_count=132,
        clock_mhz=1980,
        bandwidth_bytes_per_s=3.35e12,
        l2_bytes=50 * 2**20,
        memory_bytes=80 * 10**9,
        aliases=("h100", "h100-sxm"),
        sources="NVIDIA H100 data sheet, SXM column (3.35 TB/s, 80 GB); H100 white paper (132 SMs, 50 MB L2)",
    ),
    DeviceProfile(
        name="NVIDIA H100 PCIe",
        arch=SM_90A,
        sm_count=114,
        clock_mhz=1755,
        bandwidth_bytes_per_s=2.0e12,
        l2_bytes=50 * 2**20,
        memory_bytes=80 * 10**9,
        aliases=("h100-pcie",),
        sources="NVIDIA H100 data sheet, PCIe column (2 TB/s, 80 GB); H100 white paper (114 SMs, 50 MB L2)",
    ),
    DeviceProfile(
        name="NVIDIA B200",
        arch=SM_100A,
        sm_count=148,
        clock_mhz=1965,
        bandwidth_bytes_per_s=8.0e12,
        l2_bytes=126 * 2**20,
        memory_bytes=180 * 10**9,
        aliases=("b200",),
        sources="NVIDIA Blackwell architecture brief and DGX B200 data sheet (8 TB/s, 180 GB, 148 SMs, 126 MB L2)",
    ),
)

DEFAULT_PROFILE: dict[str, str] = {"sm_90a": "NVIDIA H200", "sm_100a": "NVIDIA B200"}


def invented_name(profile: DeviceProfile) -> str:
    """What the invented device of this profile is called, on which the engine `fake` tunes: `Fake H200`."""
    return "Fake " + profile.name.removeprefix("NVIDIA ").removeprefix("Fake ")


def profile_named(name: str) -> DeviceProfile:
    """Find a profile by name or alias, in any case. Raises ConfigError naming the devices there are.

    An invented device has the profile that it imitates, under its own name.
    """
    wanted = name.strip().lower()
    for profile in PROFILES:
        if wanted == profile.name.lower() or wanted in profile.aliases:
            return profile
        if wanted == invented_name(profile).lower():
            return replace(profile, name=invented_name(profile))
    known = ", ".join(profile.name for profile in PROFILES)
    raise ConfigError(f"unknown device {name!r}: known devices are {known}", knob="device")


def default_profile(arch: Arch) -> DeviceProfile:
    """The profile used when only an architecture is asked for."""
    return profile_named(DEFAULT_PROFILE[arch.name])
