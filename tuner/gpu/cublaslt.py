"""Every result of the cublasLt heuristic as a kernel, through ctypes: torch only ever uses the first one.

cublasLt is column-major: the row-major D[M, N] = A[M, K] @ B[N, K]^T is, read that way, D^T[N, M] = B @ A^T with
B and A stored as K x N and K x M, so B is the first operand, transposed. Constants are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
import glob
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernels.problem import Dtype, GemmProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.gpu.referee import Kernel

COMPUTE_32F = 68
REAL_32F = 0
DATA_TYPE = {Dtype.FP16: 2, Dtype.BF16: 14}
DESC_TRANSA = 3
PREFERENCE_MAX_WORKSPACE = 1
ALGO_FIELDS = {  # attribute number and C type; ids of tiles and stages are those of the header's enums
    "id": (0, ctypes.c_uint32),
    "tile": (1, ctypes.c_uint32),
    "split_k": (2, ctypes.c_uint32),
    "reduction": (3, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32),
    "custom": (5, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "inner": (7, ctypes.c_uint16),
    "cluster": (8, ctypes.c_uint16),
}
WORKSPACE_LIMITS_MB = (64, 32, 1, 0)
RESULTS_A_LIST = 16


class CublasLtError(RuntimeError):
    """A call of cublasLt failed, or there is no such library."""


class _Result(ctypes.Structure):
    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, kw_only=True)
class LtAlgo:
    """One heuristic result.

    name: `lt3@32MB`: place in the first list that held it, and that list's workspace limit
    kernel: runs it
    facts: tile, stages, split-k and so on, workspace in bytes
    """

    name: str
    kernel: Kernel
    facts: dict[str, int]

    def text(self) -> str:
        """For the record: `lt3@32MB tile=20 stages=36 split_k=1 ...`."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.facts.items())])


class CublasLt:
    """One handle and one workspace. Raises CublasLtError."""

    def __init__(self) -> None:
        self._lib = _library()
        self._handle = ctypes.c_void_p()
        self._call("Create", ctypes.byref(self._handle))
        self._workspace = torch.empty(max(WORKSPACE_LIMITS_MB) << 20, dtype=torch.uint8, device="cuda")
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._lib.cublasLtGetVersion())

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._lib, f"cublasLt{function}")(*arguments)
        if status:
            raise CublasLtError(f"cublasLt{function} returned status {status}")

    def algos(self, problem: GemmProblem) -> list[LtAlgo]:
        """The heuristic lists of all workspace limits, merged; equal algorithms once. Raises CublasLtError."""
        plan = self._plan(problem)
        found: list[LtAlgo] = []
        seen: set[bytes] = set()
        for limit_mb in WORKSPACE_LIMITS_MB:
            for index, result in enumerate(self._heuristic(plan, limit_mb)):
                key = bytes(result.algo)
                if result.state or key in seen:
                    continue
                seen.add(key)
                found.append(
                    LtAlgo(
                        name=f"lt{index}@{limit_mb}MB",
                        kernel=self._kernel(plan, result),
                        facts=self._facts(result),
                    )
                )
        return found

    def _plan(self, problem: GemmProblem) -> _Plan:
        operation = ctypes.c_void_p()
        self._call("MatmulDescCreate", ctypes.byref(operation), COMPUTE_32F, REAL_32F)
        transpose = ctypes.c_int32(1)
        self._call("MatmulDescSetAttribute", operation, DESC_TRANSA, ctypes.byref(transpose), ctypes.c_size_t(4))
        kind = DATA_TYPE[problem.dtype]
        return _Plan(
            library=self._lib,
            operation=operation,
            first=self._layout(kind, problem.k, problem.n),
            second=self._layout(kind, problem.k, problem.m),
            result=self._layout(kind, problem.n, problem.m),
        )

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        extents = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._call("MatrixLayoutCreate", ctypes.byref(layout), kind, *extents)
        return layout

    def _heuristic(self, plan: _Plan, limit_mb: int) -> Sequence[_Result]:
        preference = ctypes.c_void_p()
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        try:
            limit = ctypes.c_uint64(limit_mb << 20)
            self._call(
                "MatmulPreferenceSetAttribute",
                preference,
                PREFERENCE_MAX_WORKSPACE,
                ctypes.byref(limit),
                ctypes.c_size_t(8),
            )
            results = (_Result * RESULTS_A_LIST)()
            count = ctypes.c_int()
            status = self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle,
                plan.operation,
                plan.first,
                plan.second,
                plan.result,
                plan.result,
                preference,
                RESULTS_A_LIST,
                results,
                ctypes.byref(count),
            )
        finally:
            self._lib.cublasLtMatmulPreferenceDestroy(preference)
        # A limit that no algorithm meets is an empty list, not an error.
        return [] if status else list(results[: count.value])

    def _facts(self, result: _Result) -> dict[str, int]:
        facts: dict[str, int] = {}
        written = ctypes.c_size_t()
        for name, (attribute, kind) in ALGO_FIELDS.items():
            value = kind(0)
            status = self._lib.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(result),
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(kind)),
                ctypes.byref(written),
            )
            if not status:
                facts[name] = int(value.value)
        facts["workspace_bytes"] = int(result.workspace_bytes)
        return facts

    def _kernel(self, plan: _Plan, result: _Result) -> Kernel:
        def kernel(a: Any, b: Any, d: Any) -> None:
            output = ctypes.c_void_p(d.data_ptr())
            self._call(
                "Matmul",
                self._handle,
                plan.operation,
                ctypes.byref(self._one),
                ctypes.c_void_p(b.data_ptr()),
                plan.first,
                ctypes.c_void_p(a.data_ptr()),
                plan.second,
                ctypes.byref(self._zero),
                output,
                plan.result,
                output,
                plan.result,
                ctypes.byref(result),  # begins with the algorithm
                ctypes.c_void_p(self._workspace.data_ptr()),
                ctypes.c_size_t(self._workspace.numel()),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )

        return kernel


@dataclass(kw_only=True)
class _Plan:
    """Descriptors of one problem; destroyed with the last kernel that uses them."""

    library: Any
    operation: ctypes.c_void_p
    first: ctypes.c_void_p
    second: ctypes.c_void_p
    result: ctypes.c_void_p

    def __del__(self) -> None:
        for layout in (self.first, self.second, self.result):
            self.library.cublasLtMatrixLayoutDestroy(layout)
        self.library.cublasLtMatmulDescDestroy(self.operation)


def _library() -> Any:
    """The library that torch uses: by its name when torch has loaded it, else from the wheels next to torch."""
    major = (torch.version.cuda or "13").partition(".")[0]
    name = f"libcublasLt.so.{major}"
    beside = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "*", "lib", name)
    for path in (name, *sorted(glob.glob(beside))):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CublasLtError(f"no {name} beside torch or on the library path")
