"""Finding GPUs without creating a CUDA context."""

from __future__ import annotations

import pytest

from kernels.arch import SM_90A
from tuner.gpu import inventory
from tuner.gpu.inventory import facts_of_smi_line, live_profile, visible

UUIDS = ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bb", [1]),
        ("GPU-cccc,GPU-aaaa", [2, 0]),
        ("1,7,0", [1]),
        ("-1", []),
        ("0,0,1", [0]),
    ],
)
def test_visible_devices_are_read_like_the_driver_reads_them(wanted: str | None, indices: list[int]) -> None:
    """The list ends at the first entry that names no card."""
    assert visible(UUIDS, wanted) == indices


def test_line_of_nvidia_smi_becomes_facts_of_a_live_device() -> None:
    """Where NVML has no Python package, the tool of the driver tells enough."""
    facts = facts_of_smi_line("GPU-1234, NVIDIA H200, 9.0, 580.159.04, 1980, 700.00")
    assert facts is not None
    assert (facts.name, facts.uuid, facts.profile.arch.name) == ("NVIDIA H200", "GPU-1234", "sm_90a")
    assert facts.profile.sm_count == 132
    assert facts.environment is not None
    assert facts.environment.driver == "580.159.04"
    assert facts.environment.power_limit_w == 700.0


@pytest.mark.parametrize("line", ["GPU-1, NVIDIA A100, 8.0, 580.1, 1410, 400.00", "nonsense", "a, b, [N/A], d, e, f"])
def test_gpu_that_no_template_serves_is_left_out(line: str) -> None:
    """There is no kernel for it."""
    assert facts_of_smi_line(line) is None


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU is an ordinary case."""
    monkeypatch.setattr(inventory, "_by_nvml", lambda: None)
    monkeypatch.setenv("PATH", "")
    assert inventory.list_gpus() == ()


def test_live_values_go_before_the_data_sheet() -> None:
    """A live device is read, not looked up."""
    profile = live_profile(
        name="NVIDIA H200",
        arch=SM_90A,
        sm_count=66,
        clock_mhz=1500,
        bandwidth_bytes_per_s=0.0,
        l2_bytes=0,
        memory_bytes=70 * 10**9,
    )
    assert (profile.sm_count, profile.clock_mhz, profile.memory_bytes) == (66, 1500, 70 * 10**9)
    assert profile.bandwidth_bytes_per_s == 4.8e12
