"""GEMM kernels in Triton and a list of configs for each shape: a peer to be measured beside ours (triton_peer.py).

`persistent` loads and stores tiles through tensor descriptors (TMA), one program for each SM, the loop over tiles
flattened into the loop over K so that loads of the next tile run during the last products of this one. `split` loads
through pointers, so it takes any alignment, may cut K into parts, and may put N on the rows of the tensor core's tile,
which is what a small M wants. Imported only where triton is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernels.problem import GemmProblem

type Launch = Callable[[Any, Any, Any], None]

TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOST_PARTS = 32


@triton.jit
def _place(tile, rows, columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of a tile: down GROUP rows of tiles, then on to the next column, for the sake of L2."""
    first = tile // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = tile % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def persistent(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    a, b, d, m, n, k, PROGRAMS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of D."""
    rows, columns = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        row, column = _place(tile, rows, columns, GROUP)
        total = tl.zeros((BM, BN), tl.float32)
        for block in range(tl.cdiv(k, BK)):
            total = tl.dot(a.load([row * BM, block * BK]), b.load([column * BN, block * BK]).T, total)
        d.store([row * BM, column * BN], total.to(DTYPE))


@triton.jit
def split(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    a, b, d, partial, arrived, m, n, k, parts, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile and one part of K. The program that arrives last adds the parts of its tile in their order."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row, column = _place(tile, tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    at_m, at_n, at_k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    blocks = tl.cdiv(k, BK)
    share = tl.cdiv(blocks, parts)
    begin, end = part * share, tl.minimum(part * share + share, blocks)
    from_a = a + (at_m % m).to(tl.int64)[:, None] * k + (begin * BK + at_k)[None, :]
    from_b = b + (at_n % n).to(tl.int64)[:, None] * k + (begin * BK + at_k)[None, :]
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for block in range(begin, end):
        if WHOLE:
            block_a, block_b = tl.load(from_a), tl.load(from_b)
        else:
            inside = (block * BK + at_k)[None, :] < k
            block_a, block_b = tl.load(from_a, mask=inside, other=0.0), tl.load(from_b, mask=inside, other=0.0)
        total = tl.dot(block_b, block_a.T, total) if SWAP else tl.dot(block_a, block_b.T, total)
        from_a += BK
        from_b += BK
    if SWAP:
        total = total.T
    to_d = d + at_m.to(tl.int64)[:, None] * n + at_n[None, :]
    inside_d = (at_m[:, None] < m) & (at_n[None, :] < n)
    if parts == 1:
        tl.store(to_d, total.to(DTYPE), mask=inside_d)
    else:
        cell = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        mine = partial + tile.to(tl.int64) * parts * BM * BN
        tl.store(mine + part * BM * BN + cell, total, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them says so
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == parts - 1:
            tl.debug_barrier()
            whole = tl.zeros((BM, BN), tl.float32)
            for other in range(parts):
                whole += tl.load(mine + other * BM * BN + cell, cache_modifier=".cg")
            tl.store(to_d, whole.to(DTYPE), mask=inside_d)
            tl.atomic_xchg(arrived + tile, 0)  # for the next launch


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel is cut: tile of D and of K, warps, stages of the software pipeline, N on the tile's rows."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk} w{self.warps} s{self.stages}{' swap' if self.swap else ''}"

    def tiles(self, problem: GemmProblem) -> int:
        """Tiles of D."""
        return math.ceil(problem.m / self.bm) * math.ceil(problem.n / self.bn)

    def knobs(self, d: Any) -> dict[str, Any]:
        """What both kernels take."""
        blocks = {"BM": self.bm, "BN": self.bn, "BK": self.bk, "GROUP": 8, "DTYPE": TRITON_DTYPE[d.dtype]}
        return blocks | {"num_warps": self.warps, "num_stages": self.stages}


WIDE = (
    *(Form(128, 256, 64, 8, 3), Form(128, 256, 64, 8, 4), Form(128, 128, 64, 4, 4), Form(128, 128, 64, 8, 4)),
    Form(128, 128, 128, 8, 3),
)
MID = (Form(64, 128, 64, 4, 5), Form(64, 128, 128, 4, 4), Form(64, 256, 64, 4, 4), Form(64, 64, 128, 4, 5))
FEW = (Form(64, 64, 128, 4, 4), Form(128, 64, 64, 4, 5), Form(128, 128, 64, 8, 4))


def candidates(problem: GemmProblem, sm_count: int) -> Iterator[tuple[str, Launch]]:
    """Name and launcher of each config worth a try for a shape."""
    if problem.n % 8 == 0 and problem.k % 8 == 0:
        for form in MID if problem.m <= 64 else WIDE if problem.m > 512 else (*WIDE, *MID):
            if form.bn <= 2 * max(64, problem.n):
                yield f"persistent {form}", _persistent(problem, form, sm_count)
    for form in _narrow(problem.m) if problem.m <= 64 else FEW:
        most = max(1, min(MOST_PARTS, problem.k // (2 * form.bk)))
        for parts in sorted({max(1, min(most, round(waves * sm_count / form.tiles(problem)))) for waves in (1, 2)}):
            yield f"split {form} parts{parts}", _split(problem, form, parts)


def _narrow(m: int) -> tuple[Form, ...]:
    bm = max(16, 1 << (m - 1).bit_length())
    return (
        *(Form(bm, 64, 128, 4, 5), Form(bm, 128, 64, 4, 5), Form(bm, 32, 256, 4, 3)),
        *(Form(bm, 64, 128, 4, 5, True), Form(bm, 128, 64, 4, 6, True), Form(bm, 64, 256, 4, 3, True)),
    )


def _persistent(problem: GemmProblem, form: Form, sm_count: int) -> Launch:
    programs = min(sm_count, form.tiles(problem))

    def launch(a: Any, b: Any, d: Any) -> None:
        blocks = ((a, form.bm, form.bk), (b, form.bn, form.bk), (d, form.bm, form.bn))
        operands = [TensorDescriptor.from_tensor(operand, [rows, columns]) for operand, rows, columns in blocks]
        persistent[(programs,)](*operands, problem.m, problem.n, problem.k, programs, **form.knobs(d))

    return launch


def _split(problem: GemmProblem, form: Form, parts: int) -> Launch:
    tiles = form.tiles(problem)
    # of this config alone: all of its launches follow one another on one stream
    partial = torch.empty(tiles * parts * form.bm * form.bn if parts > 1 else 1, dtype=torch.float32, device="cuda")
    arrived = torch.zeros(tiles, dtype=torch.int32, device="cuda")

    def launch(a: Any, b: Any, d: Any) -> None:
        extents = (problem.m, problem.n, problem.k, parts)
        whole = problem.k % form.bk == 0
        split[(tiles, parts)](a, b, d, partial, arrived, *extents, SWAP=form.swap, WHOLE=whole, **form.knobs(d))

    return launch
