"""The GPU of this process, opened with torch: facts, health, environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from kernels.arch import arch_of_capability
from tuner.engine.base import DeviceFacts
from tuner.gpu.inventory import live_profile
from tuner.gpu.nvml import Card, NvmlMissing, Reading, throttle_names
from tuner.records import Environment

if TYPE_CHECKING:
    from kernels.devices import DeviceProfile

RECORDED_PACKAGES = ("apache-tvm-ffi", "nvidia-ml-py", "triton")


class DeviceError(RuntimeError):
    """The GPU of this process cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class LiveDevice:
    """An opened GPU.

    uuid: identity of the card
    profile: limits and rates, read from the driver
    card: the card through NVML, None without NVML
    driver: driver version, empty when unknown
    cuda: CUDA version of the compiler of the modules, else that of torch
    toolchain: of the modules
    """

    uuid: str
    profile: DeviceProfile
    card: Card | None
    driver: str
    cuda: str
    toolchain: str

    @property
    def torch_device(self) -> Any:
        """The only visible device, or the one that is current."""
        return torch.device("cuda", torch.cuda.current_device())

    def facts(self) -> DeviceFacts:
        """For the parent."""
        return DeviceFacts(name=self.profile.name, uuid=self.uuid, profile=self.profile, environment=self.environment())

    def environment(self, readings: tuple[Reading, ...] = (), notes: tuple[tuple[str, str], ...] = ()) -> Environment:
        """The environment now, or under the load during which the readings were taken.

        notes: further entries for `packages`
        """
        if not readings and self.card is not None:
            readings = (self.card.read(),)
        throttle = 0
        for reading in readings:
            throttle |= reading.throttle_bits
        return Environment(
            gpu_name=self.profile.name,
            gpu_uuid=self.uuid,
            arch=self.profile.arch.name,
            sm_count=self.profile.sm_count,
            driver=self.driver,
            cuda=self.cuda,
            torch=str(torch.__version__),
            toolchain=self.toolchain,
            sm_clock_mhz=_median(reading.sm_clock_mhz for reading in readings),
            max_sm_clock_mhz=float(self.profile.clock_mhz),
            memory_clock_mhz=_median(reading.memory_clock_mhz for reading in readings),
            power_limit_w=self.card.power_limit_w() if self.card else 0.0,
            power_w=max((reading.power_w for reading in readings), default=0.0),
            temperature_c=max((reading.temperature_c for reading in readings), default=0.0),
            throttle_reasons=throttle_names(throttle),
            mig=self.card.mig() if self.card else False,
            python=platform.python_version(),
            packages=tuple(sorted((*_versions(), *notes))),
        )


def open_device(*, uuid: str = "", toolchain: str = "", cuda: str = "") -> LiveDevice:
    """Create the CUDA context on the first visible GPU. Raises DeviceError for one that no template serves."""
    if not torch.cuda.is_available():
        raise DeviceError("torch sees no CUDA device")
    card = _card(uuid)
    before = card.process_ids() if card else frozenset()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    if card is not None:
        card.claim(before, os.getpid())
    use_full_precision()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = arch_of_capability(properties.major, properties.minor)
    if arch is None:
        raise DeviceError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}: no template serves it"
        )
    profile = live_profile(
        name=str(properties.name),
        arch=arch,
        sm_count=int(properties.multi_processor_count),
        clock_mhz=card.max_sm_clock_mhz() if card else 0,
        bandwidth_bytes_per_s=card.bandwidth_bytes_per_s() if card else 0.0,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)),
        memory_bytes=int(properties.total_memory),
    )
    return LiveDevice(
        uuid=card.uuid if card else uuid or _torch_uuid(properties),
        profile=profile,
        card=card,
        driver=card.driver() if card else "",
        cuda=cuda or str(torch.version.cuda or ""),
        toolchain=toolchain,
    )


def use_full_precision() -> None:
    """Float32 products in float32: the reference must not go through TF32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves these switches about and says so at each use
        torch.set_float32_matmul_precision("highest")


def check_health() -> None:
    """A small product whose result is known exactly. Raises DeviceError, or whatever a broken context raises."""
    size = 256
    a = torch.arange(size, device="cuda", dtype=torch.float32).remainder(3).repeat(size, 1).to(torch.bfloat16)
    d = torch.matmul(a, torch.ones(size, size, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    expected = float(sum(index % 3 for index in range(size)))  # 255: exact in bfloat16
    if wrong := int((d != expected).sum()):
        raise DeviceError(f"health check: {wrong} of {size * size} elements of a known product are wrong")


def context_lost() -> bool:
    """Whether the CUDA context no longer works: an asynchronous fault poisons every later call of the process."""
    try:
        torch.cuda.synchronize()
        return float(torch.ones(8, device="cuda").sum()) != 8.0
    except RuntimeError:
        return True


def _card(uuid: str) -> Card | None:
    try:
        return Card(uuid or _torch_uuid(torch.cuda.get_device_properties(torch.cuda.current_device())))
    except NvmlMissing:
        return None


def _torch_uuid(properties: Any) -> str:
    uuid = str(getattr(properties, "uuid", ""))
    return uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in RECORDED_PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _median(values: Any) -> float:
    known = [value for value in values if value > 0]
    return float(median(known)) if known else 0.0
