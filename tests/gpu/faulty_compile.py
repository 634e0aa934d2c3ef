"""A compile function that plants real faults, chosen by blk_n."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernels.compile import CompiledKernel, compile_kernel

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem

# blk_n -> fault of the Hopper template, or of the compiler
FAULTS = {48: "arrive_count", 32: "illegal_address", 80: "wrong_row", 96: "compiler crash"}


def compile_variant(
    problem: GemmProblem,
    config: GemmConfig,
    sm_count: int,
    delays_ns: dict[str, int] | None = None,
    check_structure: bool = False,
) -> CompiledKernel:
    """See kernels.compile.compile_variant."""
    fault = FAULTS.get(config.blk_n, "")
    if fault == "compiler crash":
        os.abort()
    return compile_kernel(
        problem, config, sm_count, check_structure=check_structure, fault=fault, delays_ns=delays_ns or None
    )
