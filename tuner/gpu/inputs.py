"""What a kernel is verified on: inputs, their float32 product, and an output buffer that shows stray writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernels.problem import Dtype, GemmProblem
from search_space.memory import CHUNK_ELEMENTS, MAX_MARGIN, keeps_references

if TYPE_CHECKING:
    from collections.abc import Iterator

TORCH_DTYPE = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
# A subnormal number is an integer of at most this size times two to this power.
MAX_SUBNORMAL = {Dtype.BF16: 2**7 - 1, Dtype.FP16: 2**10 - 1}
SUBNORMAL_EXPONENT = {Dtype.BF16: -133, Dtype.FP16: -24}

# NaN in both types, so that an element that nobody writes, or that is read before it is written, cannot pass. Not
# 0x7FFF, the one NaN that cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32 make: where D has to be NaN, poison still shows.
POISON_BITS = 0x7FA5
GUARD_BITS = -1  # 0xFFFF, another NaN: one that a kernel writes there shows
EXACT_LIMIT = 2**24  # integers below it are exact in float32, in whatever order they are added
SPECIAL_ROWS = 8  # rows of A, and of B, that hold infinities or NaN


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows of at most CHUNK_ELEMENTS elements, so that temporaries stay bounded."""
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def fingerprint(tensor: Any) -> int:
    """Sum of the bit patterns."""
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


class GuardedOutput:
    """D inside a larger buffer whose margins show whether anything outside D was written."""

    def __init__(self, problem: GemmProblem, device: Any) -> None:
        # Margins: one tile of rows too many is the likely mistake; a multiple of 128 elements keeps D 256-byte aligned.
        margin = min(max(2**15, 64 * problem.n), MAX_MARGIN) // 128 * 128
        size = problem.m * problem.n
        flat = torch.empty(2 * margin + size, dtype=torch.int16, device=device).fill_(GUARD_BITS)
        self._before, self._after = flat[:margin], flat[margin + size :]
        self.bits = flat[margin : margin + size].view(problem.m, problem.n)
        self.d = self.bits.view(TORCH_DTYPE[problem.dtype])

    def poison(self) -> None:
        """Fill D with NaN."""
        self.bits.fill_(POISON_BITS)

    def damage(self) -> str:
        """What was written outside D, or nothing. Restores the margins."""
        found = []
        for name, margin in (("before", self._before), ("after", self._after)):
            changed = margin != GUARD_BITS
            if count := int(changed.sum()):
                index = int(changed.nonzero()[0 if name == "after" else -1, 0])
                distance = index if name == "after" else len(margin) - 1 - index
                found.append(f"{count} elements {name} it, the nearest {distance} elements away")
                margin.fill_(GUARD_BITS)
        return "wrote outside D: " + "; ".join(found) if found else ""


class Reference:
    """The float32 product of one pair of inputs, row chunk by row chunk; kept where it fits."""

    def __init__(self, a: Any, b: Any, *, keep: bool) -> None:
        self.row_norms = torch.linalg.vector_norm(a, dim=1, dtype=torch.float32)
        self.column_norms = torch.linalg.vector_norm(b, dim=1, dtype=torch.float32)
        self._inputs = None if keep else (a, b)
        self._kept: Any = torch.cat([_product(a[rows], b) for rows in row_chunks(len(a), len(b))]) if keep else None

    def rows(self, rows: slice) -> Any:
        """float32, of the asked rows."""
        if self._inputs is None:
            return self._kept[rows]
        a, b = self._inputs
        return _product(a[rows], b)


def _product(a: Any, b: Any) -> Any:
    # B is cast in pieces: as a whole it may be as large as the device memory that is left.
    a = a.float()
    step = max(1, CHUNK_ELEMENTS // b.shape[1])
    return torch.cat([a @ part.float().t() for part in b.split(step)], dim=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair of inputs.

    name: says what is special about them
    a, b: inputs
    reference: float32 product of the inputs before scaling
    scale: power of two by which the true product is larger than the reference
    exact: whether the product has no rounding but that of the output, so that the bits must agree
    special: whether A and B hold infinities and NaN, so that D has to hold the same ones as the reference
    sums: fingerprints of a and b
    """

    name: str
    a: Any
    b: Any
    reference: Reference
    scale: float = 1.0
    exact: bool = False
    special: bool = False
    sums: tuple[int, int]

    def overwritten(self) -> str:
        """Which input was written to, or nothing."""
        now = (fingerprint(self.a), fingerprint(self.b))
        names = [name for name, old, new in zip("AB", self.sums, now, strict=True) if old != new]
        return f"input {' and '.join(names)} was overwritten" if names else ""


def make_cases(problem: GemmProblem, device: Any, generator: Any) -> tuple[Case, ...]:
    """Normal numbers, small integers, large magnitudes, subnormal inputs, infinities and NaN. Made once a problem."""
    draw = _Draw(problem, device, generator)
    a, b = draw.normal(problem.m), draw.normal(problem.n)
    reference = draw.reference(a, b)
    up_a, up_b = _large_exponents(problem, reference)
    return (
        _case("normal", a, b, reference),
        _small_integers(draw),
        _case("large magnitudes", a * 2.0**up_a, b * 2.0**up_b, reference, scale=2.0 ** (up_a + up_b)),
        _subnormal(draw),
        _inf_and_nan(draw, a, b),
    )


def _case(
    name: str, a: Any, b: Any, reference: Reference, *, scale: float = 1.0, exact: bool = False, special: bool = False
) -> Case:
    sums = (fingerprint(a), fingerprint(b))
    return Case(name=name, a=a, b=b, reference=reference, scale=scale, exact=exact, special=special, sums=sums)


class _Draw:
    """Random operands of one problem."""

    def __init__(self, problem: GemmProblem, device: Any, generator: Any) -> None:
        self.problem, self._device, self._generator = problem, device, generator
        self._dtype = TORCH_DTYPE[problem.dtype]
        self._keep = keeps_references(problem)

    def reference(self, a: Any, b: Any) -> Reference:
        """Their product, kept where those of all cases fit."""
        return Reference(a, b, keep=self._keep)

    def normal(self, rows: int) -> Any:
        """N(0, 1)."""
        shape = (rows, self.problem.k)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=self._generator)

    def integers(self, rows: int, top: int) -> Any:
        """-top ... top, as int16."""
        shape = (rows, self.problem.k)
        return torch.randint(-top, top + 1, shape, dtype=torch.int16, device=self._device, generator=self._generator)

    def places(self, count: int, limit: int) -> Any:
        """`count` different indices below `limit`."""
        return torch.randperm(limit, device=self._device, generator=self._generator)[:count]


def _small_integers(draw: _Draw) -> Case:
    problem, dtype = draw.problem, TORCH_DTYPE[draw.problem.dtype]
    top = 2 if 4 * problem.k < EXACT_LIMIT else 1
    a, b = draw.integers(problem.m, top).to(dtype), draw.integers(problem.n, top).to(dtype)
    return _case("small integers", a, b, draw.reference(a, b), exact=top * top * problem.k < EXACT_LIMIT)


def _subnormal(draw: _Draw) -> Case:
    """Every element of A is subnormal; in fp16 most of D is, too. The reference is the product of the integers.

    A kernel must keep them. Tensor cores do (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor
    cores", PeerJ Computer Science 7:e330, 2021; PTX leaves it open), and so does cvt.rn without .ftz, which rounds D.
    B is so large that products and sums lie in the normal range of float32: what a tensor core does with a subnormal
    float32 accumulator is not asked. So in bf16, which shares that range, no element of D is subnormal.
    """
    problem, dtype = draw.problem, TORCH_DTYPE[draw.problem.dtype]
    top = max(1, min(MAX_SUBNORMAL[problem.dtype], (EXACT_LIMIT - 1) // (2 * problem.k)))
    a, b = draw.integers(problem.m, top), draw.integers(problem.n, 2).to(dtype)
    up_b = 100
    if problem.dtype is Dtype.FP16:
        # Standard deviation of a sum: brings D near 2^-15, half of the least normal number.
        deviation = top * math.sqrt(2 / 3 * problem.k)
        up_b = round(-15 - SUBNORMAL_EXPONENT[problem.dtype] - math.log2(deviation))
    return _case(
        "subnormal",
        # The bits of a subnormal number are its sign and the integer.
        (a.abs() | (a < 0).to(torch.int16) << 15).view(dtype),
        b * 2.0**up_b,
        draw.reference(a.to(dtype), b),
        scale=2.0 ** (SUBNORMAL_EXPONENT[problem.dtype] + up_b),
        exact=2 * top * problem.k < EXACT_LIMIT,
    )


def _inf_and_nan(draw: _Draw, a: Any, b: Any) -> Case:
    """The normal numbers with an infinity or a NaN in a few rows of A and of B.

    Few rows and columns of D are affected, so the others show one that leaked.
    """
    a, b = a.clone(), b.clone()
    for operand in (a, b):
        rows = draw.places(min(SPECIAL_ROWS, len(operand) // 4), len(operand))
        for number, row in enumerate(rows.tolist()):
            column = int(draw.places(1, operand.shape[1]))
            operand[row, column] = (math.inf, math.nan, -math.inf)[number % 3]
    return _case("inf and NaN", a, b, draw.reference(a, b), special=True)


def _large_exponents(problem: GemmProblem, reference: Reference) -> tuple[int, int]:
    """Powers of two for A and B that bring D near the end of the range: a 16-bit intermediate would overflow."""
    if problem.dtype is Dtype.BF16:
        return 50, 50
    chunks = row_chunks(problem.m, problem.n)
    largest = max(float(reference.rows(rows).abs().max()) for rows in chunks)
    room = max(0, math.floor(math.log2(60000.0 / largest))) if largest > 0 else 0
    # An input is at most 6 or so; both halves stay far below 65504.
    return room // 2, room - room // 2
