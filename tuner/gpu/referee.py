"""Whether a kernel computes the right thing: every element, several inputs, repeated launches, nothing outside D.

A kernel is any callable `f(A, B, D)` that enqueues its work on the current stream.

The reference is a float32 product by torch with TF32 off: none of the candidates, and not the tensor-core library that
they are timed against. An element of D may differ from it by

    |d - ref| <= u |ref| (1 + 2^-7) + (8 + sqrt(K) / 4) 2^-23 |a_i| |b_j| + half the smallest subnormal

where u = 2^-8 (bf16) or 2^-11 (fp16) is the rounding of the output, a_i and b_j are the rows that meet in the element
and |.| is their Euclidean norm. The middle term is float32 accumulation on both sides, for terms of random sign. Let
s = |a_i| |b_j|. A partial sum of k terms is then about sqrt(k) s / K. Rounding to nearest adds K errors of at most
2^-24 of it each; they add up like a random walk to less than 2^-24 s, whatever K is. The 8 holds more than six standard
deviations of that for each side, and the alignment errors inside one tensor-core instruction. Tensor cores truncate the
accumulator towards zero, once for 16 terms: a drift of at most K / 16 times 2^-23 of the mean partial sum, which is
below 0.04 sqrt(K) 2^-23 s. The sqrt(K) / 4 holds that six times.

There are five pairs of inputs, all of them in every verdict (tuner.gpu.inputs.make_cases). Two of them are exact: sums
of integers below 2^24 have no rounding but that of the output, so one bit is a fault; in one of these all of A is
subnormal. Where A and B hold infinities and NaN, D must hold the very same ones: an element that meets a NaN, both
infinities, or an infinity and a zero, is NaN, and no other.

How sharp it is: an element without one of its k-blocks of 32 is off by about sqrt(32 / K) of its usual size, one taken
from another place by all of it. At K = 4096 that is 9 % and 100 %, where 0.4 % (bf16) is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernels.problem import Dtype, GemmProblem
from tuner.gpu.inputs import POISON_BITS, TORCH_DTYPE, Case, GuardedOutput, row_chunks
from tuner.gpu.jobs import Phase
from tuner.records import Outcome

if TYPE_CHECKING:
    from tuner.gpu.wire import Report

type Kernel = Callable[[Any, Any, Any], object]

UNIT_ROUNDOFF = {Dtype.BF16: 2.0**-8, Dtype.FP16: 2.0**-11}
HALF_SUBNORMAL = {Dtype.BF16: 2.0**-134, Dtype.FP16: 2.0**-25}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the referee found.

    outcome: None when all is right, else WRONG_RESULT or NONDETERMINISTIC
    reason: for people, empty when all is right
    max_rel_error: largest relative Frobenius error of the inputs whose products are rounded on the way
    launches: launches that were compared
    bits: verified output of the first inputs, as int16, for the check after timing
    """

    outcome: Outcome | None
    reason: str = ""
    max_rel_error: float | None = None
    launches: int = 0
    bits: Any = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output against its reference.

    wrong: elements outside the bound
    total: elements compared
    first: row and column of the first wrong one
    worst_error: largest |d - ref| of the wrong ones; infinite where d is NaN
    worst_allowed: bound at that element
    rel_error: |D - ref| / |ref|, Frobenius; infinite where an element is NaN or infinite
    """

    wrong: int
    total: int
    first: tuple[int, int] | None
    worst_error: float
    worst_allowed: float
    rel_error: float

    def text(self) -> str:
        """For people."""
        return (
            f"{self.wrong} of {self.total} elements wrong, first at {self.first}, "
            f"worst error {self.worst_error:.4g} where {self.worst_allowed:.4g} is allowed"
        )


# ---------------------------------------------------------------------- comparing


def compare(case: Case, d: Any, dtype: Dtype) -> Comparison:
    """Every element of D against the reference. NaN is wrong, but where the reference is NaN."""
    tally = _Tally()
    for rows in row_chunks(*d.shape):
        reference = case.reference.rows(rows)
        # Scaling by a power of two is exact, and keeps squares in range.
        error = (d[rows].float() * (1.0 / case.scale) - reference).abs_()
        allowed = _allowed(case, reference, rows, dtype)
        # Exact: the one legal result is the reference rounded to nearest, ties to even.
        bad = d[rows] != (reference * case.scale).to(d.dtype) if case.exact else ~(error <= allowed)
        if case.special:
            finite = reference.isfinite()
            wrong_special = ~finite & ~_same_special(d[rows], reference)
            bad = bad & finite | wrong_special
            error = error.masked_fill_(~finite, 0.0).masked_fill_(wrong_special, math.inf)
            allowed = allowed.masked_fill_(~finite, 0.0)
            reference = reference.masked_fill(~finite, 0.0)
        tally.add(rows.start, bad, error, allowed, reference)
    return tally.comparison(d.numel(), case.scale)


def _same_special(found: Any, reference: Any) -> Any:
    """Where the reference is not finite: whether D is NaN for NaN, and the same infinity for an infinity.

    Poison is NaN too, but one that no instruction makes of these inputs: left there, the element was not written.
    """
    written = found.view(torch.int16) != POISON_BITS
    return torch.where(reference.isnan(), found.isnan() & written, found.float() == reference)


class _Tally:
    """Sums up the chunks of one output."""

    def __init__(self) -> None:
        self._wrong = 0
        self._first: tuple[int, int] | None = None
        self._worst = self._allowed_there = 0.0
        self._error_square = self._reference_square = 0.0

    def add(self, start: int, bad: Any, error: Any, allowed: Any, reference: Any) -> None:
        """One chunk, whose first row is `start`."""
        self._error_square += float(error.square().sum(dtype=torch.float64))
        self._reference_square += float(reference.square().sum(dtype=torch.float64))
        if not (count := int(bad.sum())):
            return
        row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), bad.shape[1])
        self._first = self._first or (start + row, column)
        there = torch.where(bad, error.nan_to_num(nan=math.inf), -1.0).flatten().argmax()
        size = float(error.flatten()[there].nan_to_num(nan=math.inf))
        if size >= self._worst:
            self._worst, self._allowed_there = size, float(allowed.flatten()[there])
        self._wrong += count

    def comparison(self, total: int, scale: float) -> Comparison:
        """Of all chunks; `scale` undoes that of the case."""
        return Comparison(
            wrong=self._wrong,
            total=total,
            first=self._first,
            worst_error=self._worst * scale,
            worst_allowed=self._allowed_there * scale,
            rel_error=_relative(self._error_square, self._reference_square),
        )


def _relative(error_square: float, reference_square: float) -> float:
    if not math.isfinite(error_square):
        return math.inf
    return math.sqrt(error_square / reference_square) if reference_square > 0 else math.sqrt(error_square)


def _allowed(case: Case, reference: Any, rows: slice, dtype: Dtype) -> Any:
    if case.exact:
        rounded = (reference * case.scale).to(TORCH_DTYPE[dtype]).float() * (1.0 / case.scale)
        return (rounded - reference).abs_()
    k = case.a.shape[1]
    scale = case.reference.row_norms[rows, None] * case.reference.column_norms[None, :]
    accumulation = (8 + math.sqrt(k) / 4) * 2.0**-23
    return (
        reference.abs()
        .mul_(UNIT_ROUNDOFF[dtype] * (1 + 2.0**-7))
        .add_(scale, alpha=accumulation)
        .add_(HALF_SUBNORMAL[dtype] / case.scale)
    )


def is_plausible(case: Case, d: Any, dtype: Dtype) -> bool:
    """The looser check of a baseline: a library may reduce split-K in 16 bits, and dropping it would flatter us.

    Relative Frobenius error within two units of rounding, no element off by a quarter of the usual size of one.
    """
    found = compare(case, d, dtype)
    if not math.isfinite(found.rel_error) or found.rel_error > 2 * UNIT_ROUNDOFF[dtype]:
        return False
    usual = float(torch.sqrt(torch.mean(case.reference.row_norms**2) * torch.mean(case.reference.column_norms**2)))
    return found.worst_error <= 0.25 * usual / math.sqrt(case.a.shape[1])


# ---------------------------------------------------------------------- the verdict


class Referee:
    """Verifies kernels of one problem."""

    def __init__(self, problem: GemmProblem, cases: tuple[Case, ...], output: GuardedOutput) -> None:
        self.problem, self.cases, self.output = problem, cases, output

    def verify(self, kernel: Kernel, report: Report, *, repeats: int, subject: int | None = None) -> Verdict:
        """All cases, then `repeats` launches that must agree bit by bit. May raise what the kernel raises."""
        worst, bits = 0.0, None
        report(Phase.FIRST_LAUNCH, subject)
        for number, case in enumerate(self.cases):
            self._launch(kernel, case)
            torch.cuda.synchronize()
            if number == 0:
                report(Phase.VERIFY, subject)
            found = compare(case, self.output.d, self.problem.dtype)
            if not case.exact or found.wrong:
                worst = max(worst, found.rel_error)  # an exact case shows nothing but the rounding of the output
            reason = found.text() if found.wrong else case.overwritten() or self.output.damage()
            if reason:
                reason = f"{reason}; inputs: {case.name}"
                known = worst if math.isfinite(worst) else None  # NaN and infinity have no place in a record
                return Verdict(outcome=Outcome.WRONG_RESULT, reason=reason, max_rel_error=known)
            if number == 0:
                bits = self.output.bits.clone()
        launches = len(self.cases) + repeats
        if reason := self._repeat(kernel, repeats, bits):
            return Verdict(outcome=Outcome.NONDETERMINISTIC, reason=reason, max_rel_error=worst, launches=launches)
        if reason := self.output.damage():
            return Verdict(outcome=Outcome.WRONG_RESULT, reason=reason, max_rel_error=worst, launches=launches)
        return Verdict(outcome=None, max_rel_error=worst, launches=launches, bits=bits)

    def verify_again(self, launch: Callable[[], object], bits: Any) -> Verdict:
        """After timing: launch as the clock did, on the first case, and compare with the output verified before."""
        self.output.poison()
        launch()
        count = int(differing(self.output.bits, bits))
        case = self.cases[0]
        if count:
            found = compare(case, self.output.d, self.problem.dtype)
            if found.wrong:
                return Verdict(outcome=Outcome.WRONG_RESULT, reason=f"after timing: {found.text()}")
            reason = f"after timing: {count} of {found.total} elements differ from the output verified before"
            return Verdict(outcome=Outcome.NONDETERMINISTIC, reason=reason)
        if reason := self.output.damage() or case.overwritten():
            return Verdict(outcome=Outcome.WRONG_RESULT, reason=f"after timing: {reason}")
        return Verdict(outcome=None, launches=1)

    def _launch(self, kernel: Kernel, case: Case) -> None:
        self.output.poison()
        kernel(case.a, case.b, self.output.d)

    def _repeat(self, kernel: Kernel, repeats: int, bits: Any) -> str:
        case = self.cases[0]
        # Counted on the device: the host would otherwise wait after every launch.
        counts = []
        for _ in range(repeats):
            self._launch(kernel, case)
            counts.append(differing(self.output.bits, bits))
        others = [count for count in torch.stack(counts).tolist() if count] if counts else []
        if not others:
            return ""
        return (
            f"{len(others)} of {repeats} launches with equal inputs gave another result than the verified one; "
            f"up to {max(others)} of {self.output.bits.numel()} elements differ"
        )


def differing(bits: Any, expected: Any) -> Any:
    """How many elements of two outputs differ, counted on the device: nothing waits for it."""
    counts = [(bits[rows] != expected[rows]).sum() for rows in row_chunks(*bits.shape)]
    return torch.stack(counts).sum()
