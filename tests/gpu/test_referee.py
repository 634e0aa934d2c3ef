"""The referee on the CPU: the same comparisons on tensors of the host. Needs torch, but no GPU."""

from __future__ import annotations

import math

import pytest

from kernels.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.gpu import planted  # noqa: E402
from tuner.gpu import inputs  # noqa: E402
from tuner.gpu.inputs import POISON_BITS, GuardedOutput, make_cases, row_chunks  # noqa: E402
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
    assert verdict.launches == 5 + 6
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
    normal, integers = judge.cases[:2]
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


INPUTS_THAT_SHOW_IT = {
    "flushes_subnormal_inputs": "subnormal",
    "swallows_nan": "inf and NaN",
    "saturates": "inf and NaN",
    "leaks_nan": "inf and NaN",
    "leaves_rows_of_nan": "inf and NaN",
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", INPUTS_THAT_SHOW_IT)
def test_fault_that_ordinary_numbers_hide_shows_on_special_inputs(name: str, dtype: str) -> None:
    """B1: right for normal numbers, integers and large magnitudes; the other inputs are there for these."""
    verdict = verify(planted.WRONG[name], dtype=dtype)
    assert verdict.outcome is Outcome.WRONG_RESULT
    assert verdict.reason.endswith(f"inputs: {INPUTS_THAT_SHOW_IT[name]}")


def test_subnormal_results_are_rounded_not_flushed() -> None:
    """fp16: most of D is subnormal; a flush to zero is refused, rounding to nearest even passes bit for bit."""
    judge = referee(dtype="fp16")
    case = judge.cases[3]
    float32_product(case.a, case.b, judge.output.d)
    tiny = torch.finfo(torch.float16).smallest_normal
    assert case.exact
    assert float((judge.output.d.abs() < tiny).float().mean()) > 0.5
    assert len(judge.output.d.unique()) > 100
    assert verify(planted.flushes_subnormal_outputs, dtype="fp16").reason.endswith("inputs: subnormal")


@pytest.mark.parametrize(("dtype", "top"), [("bf16", 2.0**-126), ("fp16", 2.0**-14)])
def test_subnormal_inputs_are_subnormal_and_their_products_are_not(dtype: str, top: float) -> None:
    """Flushing the inputs must be all that can go wrong."""
    case = referee(dtype=dtype).cases[3]
    assert 0 < float(case.a.abs().max().double()) < top
    assert len(case.a.unique()) > 100
    assert float(case.b[case.b != 0].abs().min().double()) * float(case.a[case.a != 0].abs().min().double()) > 2.0**-126


def test_infinities_and_nan_touch_few_rows_and_columns() -> None:
    """The rest of D is compared as ever; what is not finite is there in three kinds."""
    judge = referee()
    case = judge.cases[4]
    float32_product(case.a, case.b, judge.output.d)
    d = judge.output.d
    assert bool(d.isnan().any())
    assert bool((d == math.inf).any())
    assert bool((d == -math.inf).any())
    assert float(d.isfinite().float().mean()) > 0.8
    assert case.special


def test_one_row_of_a_stays_finite() -> None:
    """M = 1: a NaN in the only row of A would make all of D NaN and prove nothing."""
    case = referee(shape="1x512x256").cases[4]
    assert bool(case.a.isfinite().all())
    assert not bool(case.b.isfinite().all())


def test_nan_of_a_legal_result_is_told_from_poison() -> None:
    """Poison is NaN as well, with bits that no conversion makes: where it is left, nothing was written."""
    judge = referee()
    case = judge.cases[4]
    judge.output.poison()
    assert bool(judge.output.d.isnan().all())
    assert compare(case, judge.output.d, judge.problem.dtype).wrong == judge.output.d.numel()
    float32_product(case.a, case.b, judge.output.d)
    assert compare(case, judge.output.d, judge.problem.dtype).wrong == 0
    place = tuple(judge.output.d.isnan().nonzero()[0].tolist())
    judge.output.bits[place] = POISON_BITS
    found = compare(case, judge.output.d, judge.problem.dtype)
    assert (found.wrong, found.first) == (1, place)


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
    monkeypatch.setattr(inputs, "CHUNK_ELEMENTS", 1000)
    assert [(rows.start, rows.stop) for rows in row_chunks(20, 128)] == [(0, 7), (7, 14), (14, 20)]
    verdict = verify(planted.one_wrong_element)
    assert "1 of 12288 elements wrong, first at (95, 127)" in verdict.reason
    assert verify(float32_product).outcome is None
