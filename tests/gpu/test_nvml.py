"""Telling other processes on the card from our own, with an invented NVML."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.tuner.support import PROFILE, request, told, tune
from tuner.engine.fake import FakeEngine
from tuner.gpu import nvml
from tuner.gpu.inventory import _facts_of_card
from tuner.gpu.nvml import Card, throttle_names
from tuner.records import CardState

if TYPE_CHECKING:
    from tuner.engine.base import DeviceFacts


class FakeError(Exception):
    """As NVML's, with a status."""

    def __init__(self, value: int) -> None:
        super().__init__(f"status {value}")
        self.value = value


class FakeNvml:
    """Knows one card. `processes` and `samples` are what it answers; None is 'not supported'."""

    NVMLError = FakeError
    NVML_ERROR_NOT_FOUND = 6
    NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.processes: list[int] = []
        self.samples: list[tuple[int, int, int]] | None = []
        self.reasons = 0
        self.clock_mhz = 1980

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self.clock_mhz

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.processes]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:
        if self.samples is None:
            raise FakeError(3)
        new = [sample for sample in self.samples if sample[0] > since]
        if not new:
            raise FakeError(self.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(timeStamp=at, pid=pid, smUtil=use) for at, pid, use in new]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The invented NVML, in place of the real one."""
    made = FakeNvml()
    monkeypatch.setattr(nvml, "_nvml", lambda: made)
    monkeypatch.setattr(nvml, "CLAIM_PAUSE_S", 0.0)
    return made


def claimed(fake: FakeNvml, *, before: list[int], own: int) -> Card:
    """A card on which our process has just created its context."""
    card = Card("GPU-1")
    fake.processes = [*before, own]
    card.claim(frozenset(before), own_pid=own)
    return card


def test_own_process_is_not_foreign(fake: FakeNvml) -> None:
    """We use the card ourselves."""
    card = claimed(fake, before=[], own=10)
    fake.samples = [(1_000_000, 10, 90)]
    assert card.foreign_process() is None


def test_own_process_is_known_by_its_arrival_where_numbers_differ(fake: FakeNvml) -> None:
    """In a container, NVML numbers processes as the host does."""
    card = Card("GPU-1")
    fake.processes = [500, 777]
    card.claim(frozenset({500}), own_pid=10)
    fake.samples = [(1_000_000, 777, 90), (1_000_000, 500, 0)]
    assert card.foreign_process() is None


def test_busy_process_is_foreign_and_an_idle_one_is_not(fake: FakeNvml) -> None:
    """E4: an idle notebook with a context disturbs nothing; one that computes does."""
    card = claimed(fake, before=[99], own=10)
    fake.samples = [(1_000_000, 99, 0)]
    assert card.foreign_process() is None
    fake.samples = [(2_000_000, 99, 35)]
    assert card.foreign_process() == 99
    assert card.foreign_process() == 99, "stands until there is a newer sample"
    fake.samples = [(3_000_000, 99, 0)]
    assert card.foreign_process() is None


def test_any_other_process_is_foreign_where_use_is_not_told(fake: FakeNvml) -> None:
    """Without the driver's word, the careful answer."""
    card = claimed(fake, before=[99], own=10)
    fake.samples = None
    assert card.foreign_process() == 99


def test_nothing_is_said_where_our_own_process_is_unknown(fake: FakeNvml) -> None:
    """Otherwise every round would be discarded because of ourselves."""
    card = Card("GPU-1")
    fake.processes = [99]
    card.claim(frozenset({99}), own_pid=10)
    fake.samples = None
    assert card.foreign_process() is None


def test_only_limits_that_slow_a_kernel_down_count(fake: FakeNvml) -> None:
    """Idle (1), clocks set on purpose (2) and sync boost (0x10) are none."""
    fake.reasons = 0x1 | 0x2 | 0x4 | 0x10 | 0x40
    bits = Card("GPU-1").throttle_bits()
    assert throttle_names(bits) == ("sw_power_cap", "hw_thermal_slowdown")


def test_e9_throttled_card_has_the_profile_of_a_cool_one(fake: FakeNvml) -> None:
    """E9: what checks and the model prune by is the highest clock that the card allows, never the one of the moment."""
    cool = _facts_of_card(Card("GPU-1"))
    fake.clock_mhz, fake.reasons = 345, 0x20 | 0x40
    hot = _facts_of_card(Card("GPU-1"))
    assert cool is not None
    assert hot is not None
    assert Card("GPU-1").read().sm_clock_mhz == 345
    assert hot.profile == cool.profile
    assert hot.profile.clock_mhz == 1980


def test_e9_study_on_a_throttled_card_asks_and_rejects_the_same_configs() -> None:
    """E9: 39 instead of 108 TFLOP/s at the moment is no reason to prune anything."""

    class Throttled(FakeEngine):
        """Its environment says that it runs at 345 MHz under a thermal limit."""

        @property
        def device(self) -> DeviceFacts:
            """See Engine."""
            facts = super().device
            assert facts.environment is not None
            hot = replace(facts.environment, sm_clock_mhz=345.0, throttle_reasons=("hw_thermal_slowdown",))
            return replace(facts, environment=hot)

    assert told(tune(request(20), Throttled(PROFILE))) == told(tune(request(20)))


def test_energy_is_read_where_the_card_counts_it(fake: FakeNvml) -> None:
    """None, not zero, for a card that does not."""
    assert Card("GPU-1").energy_mj() is None
    fake.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 123_456  # type: ignore[attr-defined]
    assert Card("GPU-1").energy_mj() == 123_456


def test_reading_becomes_a_record_with_the_limits_by_name(fake: FakeNvml) -> None:
    """E2: what is stored with each round."""
    fake.reasons = 0x4
    assert Card("GPU-1").read().state() == CardState(
        sm_clock_mhz=1980, memory_clock_mhz=1980, throttle_reasons=("sw_power_cap",)
    )
