"""The GEMM that a person asks for: D[M, N] = A[M, K] @ B[N, K]^T, row-major, 16-bit in and out, float32 accumulate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kernels.errors import ProblemError

ELEMENT_BYTES = 2
FLOAT_BYTES = 4  # an accumulator
MAX_EXTENT = 2**31 - 1  # TMA coordinates and the tile scheduler are 32-bit signed


class Dtype(StrEnum):
    """Element type of A, B and D."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def long_name(self) -> str:
        """Name used by TVM, torch and numpy: `bfloat16` or `float16`."""
        return {"bf16": "bfloat16", "fp16": "float16"}[self.value]

    @classmethod
    def parse(cls, text: str) -> Dtype:
        """Accept `bf16`, `bfloat16`, `fp16`, `float16`, `half`. Raises ProblemError for anything else."""
        alias = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(text, text)
        try:
            return cls(alias)
        except ValueError:
            raise ProblemError(f"unknown dtype {text!r}: use 'bf16' or 'fp16'", field="dtype") from None


class Layout(StrEnum):
    """Storage of the operands. NT: A is (M, K) and B is (N, K), both with K contiguous."""

    NT = "NT"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Raises ProblemError for a layout that no template serves."""
        try:
            return cls(text)
        except ValueError:
            raise ProblemError(
                f"unsupported layout {text!r}: only 'NT' (A[M,K], B[N,K], K contiguous) is served", field="layout"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmProblem:
    """One GEMM to tune. Raises ProblemError when no GEMM can have these values.

    m: rows of A and D
    n: rows of B, columns of D
    k: columns of A and B
    dtype: element type of A, B and D
    layout: storage of A and B
    """

    m: int
    n: int
    k: int
    dtype: Dtype = Dtype.BF16
    layout: Layout = Layout.NT

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ProblemError(f"{name} must be an integer, got {value!r}", field=name)
            if not 1 <= value <= MAX_EXTENT:
                raise ProblemError(f"{name} must be between 1 and {MAX_EXTENT}, got {value}", field=name)
        object.__setattr__(self, "dtype", Dtype.parse(self.dtype))
        object.__setattr__(self, "layout", Layout.parse(self.layout))

    @classmethod
    def parse(cls, text: str, *, dtype: str = "bf16", layout: str = "NT") -> GemmProblem:
        """Read `MxNxK` as people type it on the command line. Raises ProblemError."""
        match = re.fullmatch(r"(-?[0-9]{1,19})[xX](-?[0-9]{1,19})[xX](-?[0-9]{1,19})", text.strip())
        if match is None:
            raise ProblemError(f"{text[:60]!r} is not a shape: write MxNxK, for example 4096x4096x4096", field="shape")
        m, n, k = (int(part) for part in match.groups())
        return cls(m=m, n=n, k=k, dtype=Dtype.parse(dtype), layout=Layout.parse(layout))

    @property
    def shape(self) -> str:
        """`MxNxK`."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def key(self) -> str:
        """Everything that makes two problems equal, as one string."""
        return f"{self.shape}:{self.dtype}:{self.layout}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * self.m * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """Bytes of traffic when A and B are read once and D is written once; also the size of the data."""
        return ELEMENT_BYTES * (self.m * self.k + self.n * self.k + self.m * self.n)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"
