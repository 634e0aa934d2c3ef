"""What a kernel is verified on: inputs, their float32 product, and an output buffer that shows stray writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernels.problem import Dtype, GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

TORCH_DTYPE = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}

POISON_BITS = 0x7FFF  # a NaN in both types: an element that nobody writes, or that is read before, cannot pass
GUARD_BITS = -1  # 0xFFFF, another NaN; 0x7FFF is the one that the hardware makes, so a NaN written there shows
CHUNK_ELEMENTS = 2**26
CACHED_REFERENCE_BYTES = 8 * 2**30


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
        margin = min(max(2**15, 64 * problem.n), 2**22) // 128 * 128
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
        self._a, self._b = a, b
        self.row_norms = torch.linalg.vector_norm(a, dim=1, dtype=torch.float32)
        self.column_norms = torch.linalg.vector_norm(b, dim=1, dtype=torch.float32)
        self._kept = torch.cat([self._product(rows) for rows in row_chunks(len(a), len(b))]) if keep else None

    def rows(self, rows: slice) -> Any:
        """float32, of the asked rows."""
        return self._product(rows) if self._kept is None else self._kept[rows]

    def _product(self, rows: slice) -> Any:
        # B is cast in pieces: as a whole it may be as large as the device memory that is left.
        a = self._a[rows].float()
        step = max(1, CHUNK_ELEMENTS // self._b.shape[1])
        return torch.cat([a @ part.float().t() for part in self._b.split(step)], dim=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair of inputs.

    name: says what is special about them
    a, b: inputs
    reference: float32 product of the inputs before scaling
    scale: power of two by which the true product is larger than the reference
    exact: whether the product has no rounding but that of the output, so that the bits must agree
    sums: fingerprints of a and b
    """

    name: str
    a: Any
    b: Any
    reference: Reference
    scale: float
    exact: bool
    sums: tuple[int, int]

    def overwritten(self) -> str:
        """Which input was written to, or nothing."""
        now = (fingerprint(self.a), fingerprint(self.b))
        names = [name for name, old, new in zip("AB", self.sums, now, strict=True) if old != new]
        return f"input {' and '.join(names)} was overwritten" if names else ""


def make_cases(problem: GemmProblem, device: Any, generator: Any) -> tuple[Case, ...]:
    """Normal numbers, small integers (exact), large magnitudes. Made once a problem."""
    dtype = TORCH_DTYPE[problem.dtype]
    keep = 2 * 4 * problem.m * problem.n <= CACHED_REFERENCE_BYTES

    def normal(rows: int) -> Any:
        return torch.empty(rows, problem.k, dtype=dtype, device=device).normal_(generator=generator)

    def integers(rows: int) -> Any:
        # Sums stay below 2^24, so float32 holds them exactly in whatever order they are added.
        top = 2 if 4 * problem.k < 2**24 else 1
        drawn = torch.randint(-top, top + 1, (rows, problem.k), dtype=torch.int8, device=device, generator=generator)
        return drawn.to(dtype)

    a, b = normal(problem.m), normal(problem.n)
    reference = Reference(a, b, keep=keep)
    up_a, up_b = _large_exponents(problem, reference)
    whole_a, whole_b = integers(problem.m), integers(problem.n)
    return (
        _case("normal", a, b, reference),
        _case("small integers", whole_a, whole_b, Reference(whole_a, whole_b, keep=keep), exact=True),
        _case("large magnitudes", a * 2.0**up_a, b * 2.0**up_b, reference, scale=2.0 ** (up_a + up_b)),
    )


def _case(name: str, a: Any, b: Any, reference: Reference, *, scale: float = 1.0, exact: bool = False) -> Case:
    sums = (fingerprint(a), fingerprint(b))
    return Case(name=name, a=a, b=b, reference=reference, scale=scale, exact=exact, sums=sums)


def _large_exponents(problem: GemmProblem, reference: Reference) -> tuple[int, int]:
    """Powers of two for A and B that bring D near the end of the range: a 16-bit intermediate would overflow."""
    if problem.dtype is Dtype.BF16:
        return 50, 50
    chunks = row_chunks(problem.m, problem.n)
    largest = max(float(reference.rows(rows).abs().max()) for rows in chunks)
    room = max(0, math.floor(math.log2(60000.0 / largest))) if largest > 0 else 0
    # An input is at most 6 or so; both halves stay far below 65504.
    return room // 2, room - room // 2
