"""The soak's launches on the host: counting, comparing, stopping in time. Needs torch, but no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernels.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.gpu import planted  # noqa: E402
from tuner.gpu.inputs import GuardedOutput, make_cases  # noqa: E402
from tuner.gpu.soak_run import Lane, Soak, SoakFailure  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

PROBLEM = GemmProblem.parse("16x64x32")


class Clock:
    """Each look at it takes a fixed time."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def soaking(kernel: Callable[..., None], *, step_s: float = 1e-4) -> tuple[Soak, list[dict[str, Any]]]:
    """A soak of two lanes on the host, and what it says."""
    device, said = torch.device("cpu"), []
    case = make_cases(PROBLEM, device, torch.Generator().manual_seed(0))[0]
    expected = GuardedOutput(PROBLEM, device)
    planted.right(case.a, case.b, expected.d)
    lanes = tuple(Lane(kernel, case, GuardedOutput(PROBLEM, device), expected.bits) for _ in range(2))
    soak = Soak(lanes=lanes, synchronize=lambda: None, say=said.append, clock=Clock(step_s))  # type: ignore[arg-type]
    return soak, said


def once(soak: Soak, lane: int = 0) -> Callable[[], int]:
    """One launch on a lane."""

    def launch() -> int:
        soak.lanes[lane].launch()
        return 1

    return launch


def test_right_kernel_is_launched_as_often_as_asked() -> None:
    """The count is that of real launches, and the parent hears of them as they are made."""
    soak, said = soaking(planted.right)
    assert soak.way("alone", once(soak), wanted=300, limit_s=100.0) == 300
    assert [message["launches"] for message in said][-1] == 300
    assert len(said) >= 3


def test_time_limit_ends_the_launches_after_at_least_one() -> None:
    """No time at all still gives one launch."""
    soak, said = soaking(planted.right, step_s=5.0)
    assert soak.way("alone", once(soak), wanted=300, limit_s=1.0) == 1
    assert said[-1]["launches"] == 1


def test_one_bit_in_one_launch_of_many_is_found() -> None:
    """B2: the 200th launch differs in one element by one unit in the last place."""
    soak, _ = soaking(planted.Flaky(first=198))
    with pytest.raises(SoakFailure, match=r"launches gave another result; up to 1 of 1024 elements"):
        soak.way("alone", once(soak), wanted=300, limit_s=100.0)


def test_output_that_is_not_written_is_found() -> None:
    """Poison makes the result of the launch before useless."""
    soak, _ = soaking(planted.no_op)
    with pytest.raises(SoakFailure, match="up to 1024 of 1024"):
        soak.way("alone", once(soak), wanted=3, limit_s=100.0)


@pytest.mark.parametrize(
    ("kernel", "text"), [(planted.writes_past_the_end, "outside D"), (planted.overwrites_input, "A was overwritten")]
)
def test_damage_around_the_output_is_found(kernel: Callable[..., None], text: str) -> None:
    """Guard bands and inputs are looked at after each batch."""
    soak, _ = soaking(kernel)
    with pytest.raises(SoakFailure, match=text):
        soak.way("alone", once(soak), wanted=3, limit_s=100.0)


def test_wrong_launch_of_the_second_lane_is_found() -> None:
    """Two streams: each has its own output, and both count."""
    soak, _ = soaking(planted.no_op)
    with pytest.raises(SoakFailure):
        soak.way("on two streams", once(soak, lane=1), wanted=2, limit_s=100.0)
