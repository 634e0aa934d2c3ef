"""What NVML says about one card: facts, clocks, power, limits in force, other processes. No CUDA context is created.

Every question may go unanswered (an old driver, a container that hides things): then the answer is zero or empty, and
what depends on it is skipped. That NVML as a whole is missing is NvmlMissing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.records import CardState

if TYPE_CHECKING:
    from collections.abc import Callable

# Limits that slow a kernel down. The idle bit and clocks that somebody set on purpose are none of them.
POWER_CAP = 0x04
THROTTLE_REASONS: dict[int, str] = {
    POWER_CAP: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
CLAIM_ATTEMPTS, CLAIM_PAUSE_S = 10, 0.05  # a new context takes a moment to show
SAMPLE_SKEW_US = 200_000  # samples of one moment carry slightly different times
CORES_PER_SM = 128  # compute capabilities 9.0 and 10.0


class NvmlMissing(RuntimeError):
    """No usable NVML: the package or the driver library is not there, or the card is unknown to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """State of the card at one moment.

    sm_clock_mhz: SM clock
    memory_clock_mhz: memory clock
    power_w: power drawn
    temperature_c: temperature of the chip
    throttle_bits: limits in force, masked to those that slow a kernel down
    """

    sm_clock_mhz: float
    memory_clock_mhz: float
    power_w: float
    temperature_c: float
    throttle_bits: int

    def state(self) -> CardState:
        """For the record, with the limits by name."""
        return CardState(
            sm_clock_mhz=self.sm_clock_mhz,
            memory_clock_mhz=self.memory_clock_mhz,
            power_w=self.power_w,
            temperature_c=self.temperature_c,
            throttle_reasons=throttle_names(self.throttle_bits),
        )


def throttle_names(bits: int) -> tuple[str, ...]:
    """Names of the limits in force."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlMissing("nvidia-ml-py is not installed: install it to read clocks and limits") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlMissing(f"NVML does not start: {error}") from error
    return pynvml


def card_uuids() -> tuple[str, ...]:
    """UUIDs of all cards in NVML's order, which is that of the PCI bus. Raises NvmlMissing."""
    nvml = _nvml()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except nvml.NVMLError as error:
        raise NvmlMissing(f"NVML cannot list the cards: {error}") from error


class Card:
    """One card through NVML. Raises NvmlMissing."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._nvml = _nvml()
        self._own_pids: frozenset[int] = frozenset()
        self._busy: frozenset[int] = frozenset()
        self._newest_sample_us = 0
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            raise NvmlMissing(f"NVML does not know card {uuid}: {error}") from error

    def _ask[T](self, default: T, function: str, *arguments: Any, convert: Callable[[Any], T]) -> T:
        try:
            return convert(getattr(self._nvml, function)(self._handle, *arguments))
        except (self._nvml.NVMLError, AttributeError):
            return default

    # ------------------------------------------------------------------ facts

    def name(self) -> str:
        """As the driver prints it."""
        return self._ask("", "nvmlDeviceGetName", convert=str)

    def compute_capability(self) -> tuple[int, int]:
        """(0, 0) when unknown."""
        return self._ask(
            (0, 0), "nvmlDeviceGetCudaComputeCapability", convert=lambda pair: (int(pair[0]), int(pair[1]))
        )

    def sm_count(self) -> int:
        """Streaming multiprocessors, from the number of CUDA cores."""
        return self._ask(0, "nvmlDeviceGetNumGpuCores", convert=int) // CORES_PER_SM

    def memory_bytes(self) -> int:
        """Device memory."""
        return self._ask(0, "nvmlDeviceGetMemoryInfo", convert=lambda info: int(info.total))

    def max_sm_clock_mhz(self) -> int:
        """Highest SM clock that the card allows."""
        return self._ask(0, "nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM, convert=int)

    def bandwidth_bytes_per_s(self) -> float:
        """Peak of the device memory: highest memory clock, two transfers a clock, width of the bus."""
        clock_mhz = self._ask(0, "nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_MEM, convert=int)
        width_bits = self._ask(0, "nvmlDeviceGetMemoryBusWidth", convert=int)
        return clock_mhz * 1e6 * 2 * width_bits / 8

    def power_limit_w(self) -> float:
        """Power limit in force."""
        return self._ask(0.0, "nvmlDeviceGetEnforcedPowerLimit", convert=lambda milliwatt: milliwatt / 1000)

    def mig(self) -> bool:
        """Whether the card is cut into MIG slices."""
        return self._ask(False, "nvmlDeviceGetMigMode", convert=lambda modes: bool(modes[0]))

    def driver(self) -> str:
        """Driver version."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return ""

    # ------------------------------------------------------------------ state

    def throttle_bits(self) -> int:
        """Limits in force now, masked to those that slow a kernel down."""
        mask = sum(THROTTLE_REASONS)
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self._ask(-1, function, convert=int)
            if bits >= 0:
                return bits & mask
        return 0

    def read(self) -> Reading:
        """The state now."""
        return Reading(
            sm_clock_mhz=self._ask(0.0, "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM, convert=float),
            memory_clock_mhz=self._ask(0.0, "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM, convert=float),
            power_w=self._ask(0.0, "nvmlDeviceGetPowerUsage", convert=lambda milliwatt: milliwatt / 1000),
            temperature_c=self._ask(0.0, "nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU, convert=float),
            throttle_bits=self.throttle_bits(),
        )

    def energy_mj(self) -> float | None:
        """Energy drawn since the driver was loaded, in millijoules; None for a card that does not count it."""
        return self._ask(None, "nvmlDeviceGetTotalEnergyConsumption", convert=float)

    # ------------------------------------------------------------------ other processes

    def process_ids(self) -> frozenset[int]:
        """Processes with a context on the card, numbered as NVML sees them (in a container: from outside)."""
        return self._ask(
            frozenset(),
            "nvmlDeviceGetComputeRunningProcesses",
            convert=lambda found: frozenset(int(process.pid) for process in found),
        )

    def claim(self, before: frozenset[int], own_pid: int) -> None:
        """Learn which process is ours: called after our context was created, with the processes there were before."""
        for _ in range(CLAIM_ATTEMPTS):
            after = self.process_ids()
            self._own_pids = frozenset({own_pid}) if own_pid in after else after - before
            if self._own_pids:
                return
            time.sleep(CLAIM_PAUSE_S)

    def foreign_process(self) -> int | None:
        """A process that is not ours and uses the SMs, or None.

        One that merely holds a context (an idle notebook) disturbs nothing: where the driver tells the use of the SMs
        by process, only one with some counts; where it does not, any does. Where our own process could not be told
        from the others, nothing is said.
        """
        if not self._own_pids:
            return None
        others = self.process_ids() - self._own_pids
        if not others:
            return None
        busy = self._busy_processes()
        suspects = others if busy is None else others & busy
        return min(suspects, default=None)

    def _busy_processes(self) -> frozenset[int] | None:
        """Processes that used the SMs in the driver's newest sample; None where it takes none.

        The driver samples more slowly than rounds pass: until there is a newer sample, the last one stands.
        """
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._newest_sample_us)
        except self._nvml.NVMLError as error:
            nothing_new = (0, self._nvml.NVML_ERROR_NOT_FOUND)
            return self._busy if getattr(error, "value", None) in nothing_new else None
        except AttributeError:
            return None
        if samples:
            self._newest_sample_us = max(int(sample.timeStamp) for sample in samples)
            newest = [sample for sample in samples if int(sample.timeStamp) >= self._newest_sample_us - SAMPLE_SKEW_US]
            self._busy = frozenset(int(sample.pid) for sample in newest if sample.smUtil > 0)
        return self._busy
