"""The referee on the CPU: the same comparisons on tensors of the host. Needs torch, but no GPU."""

from __future__ import annotations

import math

import pytest

from kernels.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.gpu import planted  # noqa: E402
from tuner.gpu.inputs import GuardedOutput, make_cases, row_chunks  # noqa: E402
from tuner.gpu.referee import Referee, Verdict, compare, is_plausible  # noqa: E402
from tuner.records import Outcome  # noqa: E402


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to wait for on the host."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def referee(shape: str = "96x128x256", dtype: str = "bf16") -> Referee:
    """A referee on the host."""
    problem = GemmProblem.parse(shape, dtype=dtype)
    device = torch.device("cpu")
    cases = make_cases(problem, device, torch.Generator().manual_seed(0))
    return Referee(problem, cases, GuardedOutput(problem, device))


def verify(kernel: object, **problem: str) -> Verdict:
    """Verdict on a kernel with a few repeats."""
    return referee(**problem).verify(kernel, lambda phase, subject=None: None, repeats=6)  # type: ignore[arg-type]


def float32_product(a: object, b: object, d: object) -> None:
    """Accumulates in float32 in steps of 16, as a tensor core does, and rounds once."""
    total = torch.zeros(d.shape)  # type: ignore[attr-defined]
    for part_a, part_b in zip(a.split(16, dim=1), b.split(16, dim=1), strict=True):  # type: ignore[attr-defined]
        total += part_a.float() @ part_b.float().t()
    d.copy_(total)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["96x128x256", "33x72x1000", "1x512x256", "128x64x8"])
def test_right_kernel_passes_in_all_shapes(shape: str, dtype: str) -> None:
    """The bound must not refuse float32 accumulation in another order."""
    verdict = verify(float32_product, shape=shape, dtype=dtype)
    assert verdict.outcome is None, verdict.reason
    assert verdict.launches == 9
    assert verdict.max_rel_error == pytest.approx({"bf16": 1.65e-3, "fp16": 2.07e-4}[dtype], rel=0.1)


@pytest.mark.parametrize("name", sorted(planted.WRONG))
def test_wrong_kernel_is_refused(name: str) -> None:
    """B1, B3, B5: each planted fault, down to one element."""
    verdict = verify(planted.WRONG[name])
    assert verdict.outcome is Outcome.WRONG_RESULT
    assert verdict.reason


def test_reason_says_how_many_where_and_how_much() -> None:
    """A reason without numbers cannot be acted on."""
    reason = verify(planted.one_wrong_element).reason
    assert reason.startswith("1 of 12288 elements wrong, first at (95, 127), worst error")
    assert reason.endswith("inputs: normal")


def test_stray_write_says_where() -> None:
    """Bytes outside D belong to somebody else."""
    assert "4 elements after it, the nearest 0 elements away" in verify(planted.writes_past_the_end).reason
    assert "4 elements before it, the nearest 0 elements away" in verify(planted.writes_before_the_start).reason


def test_kernel_that_differs_between_launches_is_nondeterministic() -> None:
    """B2: one unit in the last place, in one element, now and then, is enough."""
    verdict = verify(planted.Flaky())
    assert verdict.outcome is Outcome.NONDETERMINISTIC
    assert verdict.reason.startswith("2 of 6 launches")


def test_check_after_timing_compares_with_the_verified_output() -> None:
    """A kernel that is right at first and wrong later is caught."""
    judge = referee()
    verdict = judge.verify(planted.right, lambda phase, subject=None: None, repeats=0)
    case, d = judge.cases[0], judge.output.d
    assert judge.verify_again(lambda: planted.right(case.a, case.b, d), verdict.bits).outcome is None
    wrong = judge.verify_again(lambda: planted.one_wrong_element(case.a, case.b, d), verdict.bits)
    assert wrong.outcome is Outcome.WRONG_RESULT
    assert "after timing" in wrong.reason
    nothing = judge.verify_again(lambda: None, verdict.bits)
    assert nothing.outcome is Outcome.WRONG_RESULT


def test_small_integers_allow_no_error_at_all() -> None:
    """Sums are exact, so one unit in the last place is a fault there, and within the bound elsewhere."""
    judge = referee()
    normal, integers, _ = judge.cases
    for case, wrong in ((normal, 0), (integers, 1)):
        float32_product(case.a, case.b, judge.output.d)
        assert compare(case, judge.output.d, judge.problem.dtype).wrong == 0
        judge.output.d.view(torch.int16)[5, 6] += 1
        assert compare(case, judge.output.d, judge.problem.dtype).wrong in (wrong, 1)
    assert integers.exact


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_large_magnitudes_stay_in_range_of_the_output_only(dtype: str) -> None:
    """D nearly fills the range: anything kept in 16 bits on the way overflows."""
    judge = referee(dtype=dtype)
    large = judge.cases[2]
    float32_product(large.a, large.b, judge.output.d)
    largest = float(judge.output.d.float().abs().max())
    assert math.isfinite(largest)
    assert largest > {"bf16": 2.0**100, "fp16": 2.0**13}[dtype]


def test_baseline_may_be_as_wrong_as_a_library_is() -> None:
    """A split-K that reduces in 16 bits is refused as a kernel, and counts as a baseline; garbage does not."""
    judge = referee(shape="64x64x4096")
    case = judge.cases[0]
    planted.rounds_sums_to_16_bits(case.a, case.b, judge.output.d)
    assert is_plausible(case, judge.output.d, judge.problem.dtype)
    planted.one_wrong_element(case.a, case.b, judge.output.d)
    assert not is_plausible(case, judge.output.d, judge.problem.dtype)


def test_chunked_comparison_sees_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Big outputs are compared in pieces; the place of a wrong element is that in the whole."""
    monkeypatch.setattr("tuner.gpu.inputs.CHUNK_ELEMENTS", 1000)
    assert [(rows.start, rows.stop) for rows in row_chunks(20, 128)] == [(0, 7), (7, 14), (14, 20)]
    verdict = verify(planted.one_wrong_element)
    assert "1 of 12288 elements wrong, first at (95, 127)" in verdict.reason
    assert verify(float32_product).outcome is None
