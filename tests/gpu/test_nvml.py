"""Telling other processes on the card from our own, with an invented NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.gpu import nvml
from tuner.gpu.nvml import Card, throttle_names


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
