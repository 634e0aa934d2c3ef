"""Kernels made of torch calls: right ones, and wrong ones that a referee must refuse."""

from __future__ import annotations

from typing import Any

import torch


def right(a: Any, b: Any, d: Any) -> None:
    """The product, by the library."""
    torch.matmul(a, b.t(), out=d)


def slow(a: Any, b: Any, d: Any) -> None:
    """The product, computed three times."""
    for _ in range(3):
        right(a, b, d)


def one_wrong_element(a: Any, b: Any, d: Any) -> None:
    """One element of plausible size: that of its neighbour."""
    right(a, b, d)
    d[-1, -1] = d[-1, -2]


def missing_k_block(a: Any, b: Any, d: Any) -> None:
    """The last row lacks the first 64 of K."""
    right(a, b, d)
    d[-1:] = torch.matmul(a[-1:, 64:], b[:, 64:].t())


def no_op(a: Any, b: Any, d: Any) -> None:
    """Writes nothing: what stood in D before must not pass."""


def adds_to_output(a: Any, b: Any, d: Any) -> None:
    """Reads its output, as an epilogue with the wrong beta does."""
    d.add_(torch.matmul(a, b.t()))


def unwritten_tail(a: Any, b: Any, d: Any) -> None:
    """Leaves the last row alone."""
    torch.matmul(a[:-1], b.t(), out=d[:-1])


def writes_past_the_end(a: Any, b: Any, d: Any) -> None:
    """Stores four elements after D."""
    right(a, b, d)
    d.as_strided((4,), (1,), d.storage_offset() + d.numel()).zero_()


def writes_before_the_start(a: Any, b: Any, d: Any) -> None:
    """Stores four elements before D."""
    right(a, b, d)
    d.as_strided((4,), (1,), d.storage_offset() - 4).zero_()


def overwrites_input(a: Any, b: Any, d: Any) -> None:
    """Scribbles on A after reading it."""
    right(a, b, d)
    a[0, 0] += 1.0


def rounds_sums_to_16_bits(a: Any, b: Any, d: Any) -> None:
    """Adds four parts of K in 16 bits, which is good enough for no exact check."""
    d.zero_()
    for part_a, part_b in zip(a.chunk(4, dim=1), b.chunk(4, dim=1), strict=True):
        d.add_(torch.matmul(part_a, part_b.t()))


def flushes_subnormal_inputs(a: Any, b: Any, d: Any) -> None:
    """Reads subnormal elements of A as zero."""
    right(torch.where(a.abs() < torch.finfo(a.dtype).smallest_normal, 0.0, a), b, d)


def flushes_subnormal_outputs(a: Any, b: Any, d: Any) -> None:
    """Writes zero where D is subnormal: shows in fp16 only."""
    right(a, b, d)
    d[d.abs() < torch.finfo(d.dtype).smallest_normal] = 0.0


def swallows_nan(a: Any, b: Any, d: Any) -> None:
    """Writes zero for NaN, as a ReLU made of max does."""
    right(a, b, d)
    d[d.isnan()] = 0.0


def saturates(a: Any, b: Any, d: Any) -> None:
    """Writes the largest number for an infinity, as a saturating conversion does."""
    right(a, b, d)
    d.clamp_(torch.finfo(d.dtype).min, torch.finfo(d.dtype).max)


def leaks_nan(a: Any, b: Any, d: Any) -> None:
    """A product with zero of what belongs to the neighbouring row: shows only where that is no number."""
    right(a, b, d)
    d[1:] += 0.0 * d[:-1].clone()


def leaves_rows_of_nan(a: Any, b: Any, d: Any) -> None:
    """Does not write the rows that are all NaN."""
    before = d.clone()
    right(a, b, d)
    rows = d.isnan().all(dim=1)
    d[rows] = before[rows]


class Flaky:
    """Right in the first launches, then one element differs by one unit in the last place now and then."""

    def __init__(self, first: int = 4) -> None:
        self._launches, self._first = 0, first

    def __call__(self, a: Any, b: Any, d: Any) -> None:
        right(a, b, d)
        self._launches += 1
        if self._launches > self._first and self._launches % 3 == 0:
            d.view(torch.int16)[0, 0] += 1


WRONG = {
    kernel.__name__: kernel
    for kernel in (
        one_wrong_element,
        missing_k_block,
        no_op,
        adds_to_output,
        unwritten_tail,
        writes_past_the_end,
        writes_before_the_start,
        overwrites_input,
        rounds_sums_to_16_bits,
        flushes_subnormal_inputs,
        swallows_nan,
        saturates,
        leaks_nan,
        leaves_rows_of_nan,
    )
}
