"""What compiling a config tells: registers, spills, machine instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem

Json = dict[str, Any]


def compiled_facts(problem: GemmProblem, config: GemmConfig, sm_count: int) -> Json:
    """Compile a config and say what became of it. Raises CompileError and ToolchainError."""
    from kernels.compile import compile_kernel

    kernel = compile_kernel(problem, config, sm_count, check_structure=True)
    return facts_of(kernel) | {"findings": list(kernel.findings or ())}


def facts_of(kernel: CompiledKernel) -> Json:
    """Registers, spills and instruction counts of a compiled kernel."""
    return {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "stack_bytes": kernel.stack_bytes,
        "warnings": list(kernel.warnings),
        "module_bytes": len(kernel.module),
        "compile_s": kernel.compile_s,
        "source_hash": kernel.source_hash,
        "artifact_sha256": kernel.sha256,
        "toolchain": kernel.toolchain,
    } | instruction_facts(lambda: kernel.module)


def instruction_facts(module: Callable[[], bytes]) -> Json:
    """Counts of the telling machine instructions of a module, or why there are none."""
    from kernels.sass import embedded_cubin, find_nvdisasm, instruction_counts, telling
    from kernels.toolchain import find_toolchain

    try:
        counts = instruction_counts(embedded_cubin(module()), find_nvdisasm(find_toolchain()))
    except (ToolchainError, ValueError) as error:
        return {"sass": None, "sass_missing": str(error)}
    return {"sass": telling(counts), "sass_missing": ""}
