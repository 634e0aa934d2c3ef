"""Config -> CUDA source -> cubin -> module.

A module is a shared library: the launcher (compiled once for each toolchain) linked with a payload that holds the cubin
and its launch plan. It loads with apache-tvm-ffi alone and finds the driver at run time. What is measured is the very
file that is exported.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from kernels.artifacts import write_atomically
from kernels.config import Sm90GemmConfig
from kernels.errors import CompileError
from kernels.launch import OPERANDS, LaunchPlan, PointerPlan, RowsPlan, StridePlan, TensorMapPlan, WorkspacePlan
from kernels.lowering import lower
from kernels.prelude import light
from kernels.problem import Dtype, GemmProblem
from kernels.structure import structural_findings
from kernels.toolchain import Toolchain, find_toolchain

if TYPE_CHECKING:
    from kernels.config import GemmConfig

LAUNCHER_FOLDER = Path(__file__).parent / "launcher"
# ptxas optimises register use at its highest level: at the default (5) the same templates used up to 20 more registers
_PTXAS_FLAGS = "-v,--register-usage-level=10,--warn-on-local-memory-usage"
# Without it ptxas may spill to let more CTAs share an SM, where shared memory leaves room for one: 32 bytes at 56
# registers, a third of 65536 / 384 threads, with scheduler clc, two consumers and blk_k 128. None with it, at 61.
# Not on sm_90a: what was measured there was built without.
_PTXAS_FLAGS_OF = {"sm_100a": ",--minnctapersm=1"}
_LOG_TAIL_CHARS = 2000
_CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall")


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A module and what the compilers said about it.

    module: bytes of the shared library
    sha256: of `module`
    source_hash: of CUDA source and launch plan; equal hashes are one kernel
    arch: architecture it was compiled for
    sm_count: SMs its grid was laid out for
    registers: of one thread, as ptxas reports
    spill_bytes: register spills, stores and loads
    stack_bytes: stack frame
    warnings: ptxas performance warnings (C75xx), such as serialised wgmma
    trace_s, lower_s, cubin_s, link_s: seconds of each step
    toolchain: compilers and versions
    findings: broken structural rules; None when they were not checked
    unjudged: what the reader of the structural rules does not know, so that a clean list of findings says little
    """

    module: bytes
    sha256: str
    source_hash: str
    arch: str
    sm_count: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]
    trace_s: float
    lower_s: float
    cubin_s: float
    link_s: float
    toolchain: str
    findings: tuple[str, ...] | None = None
    unjudged: tuple[str, ...] = ()

    @property
    def compile_s(self) -> float:
        """Seconds from config to module."""
        return self.trace_s + self.lower_s + self.cubin_s + self.link_s


def compile_kernel(
    problem: GemmProblem,
    config: GemmConfig,
    sm_count: int,
    *,
    toolchain: Toolchain | None = None,
    cache: Path | None = None,
    check_structure: bool = False,
    **variant: Any,
) -> CompiledKernel:
    """Build the module of one config for one problem.

    sm_count: SMs of the target device
    cache: folder that keeps the compiled launcher between calls (default: the user's cache folder)
    check_structure: also follow the generated source through its barriers and note broken rules
    variant: planted fault or delays of the template, for tests and stress builds
    Raises ConfigError (illegal config), ToolchainError (no compiler), CompileError (a compiler refused).
    """
    toolchain = toolchain or find_toolchain()
    lowered = lower(problem, config, sm_count, **variant)
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-") as name:
        work = Path(name)
        started = time.perf_counter()
        cubin, log = compile_cubin(lowered.source, config.arch.name, toolchain, work)
        compiled = time.perf_counter()
        description = {
            "problem": {
                "m": problem.m,
                "n": problem.n,
                "k": problem.k,
                "dtype": problem.dtype,
                "layout": problem.layout,
            },
            "config": config.to_dict(),
            "arch": config.arch.name,
            "sm_count": sm_count,
            "source_hash": lowered.source_hash,
            "toolchain": toolchain.name,
        }
        if lowered.launch.dynamic_m:
            description["dynamic_m"] = True
        payload = _payload_source(cubin, description, lowered.launch, problem, config)
        module = _link_module(payload, toolchain, work, cache)
        linked = time.perf_counter()
    facts = ptxas_facts(log)
    found = structural_findings(lowered, problem, config) if check_structure else ()
    return CompiledKernel(
        module=module,
        sha256=hashlib.sha256(module).hexdigest(),
        source_hash=lowered.source_hash,
        arch=config.arch.name,
        sm_count=sm_count,
        registers=facts.registers,
        spill_bytes=facts.spill_bytes,
        stack_bytes=facts.stack_bytes,
        warnings=facts.warnings,
        trace_s=lowered.trace_s,
        lower_s=lowered.lower_s,
        cubin_s=compiled - started,
        link_s=linked - compiled,
        toolchain=toolchain.name,
        findings=tuple(one.text for one in found if not one.is_open) if check_structure else None,
        unjudged=tuple(one.text for one in found if one.is_open),
    )


def compile_variant(
    problem: GemmProblem,
    config: GemmConfig,
    sm_count: int,
    delays_ns: dict[str, int] | None = None,
    check_structure: bool = False,
) -> CompiledKernel:
    """`compile_kernel` by position, for the pool that sends jobs to its processes."""
    variant: dict[str, Any] = {"delays_ns": delays_ns} if delays_ns else {}
    return compile_kernel(problem, config, sm_count, check_structure=check_structure, **variant)


def warm_up() -> None:
    """Import TVM and lower a small kernel, so that the first compile of this process takes no longer than others."""
    lower(GemmProblem(m=128, n=128, k=64), Sm90GemmConfig(), 132)


def compile_cubin(source: str, arch: str, toolchain: Toolchain, work: Path) -> tuple[Path, str]:
    """CUDA C++ -> cubin in `work`; returns its path and the compiler's log. Raises CompileError."""
    quick = light(source)
    try:
        return _cubin(quick, arch, toolchain, work)
    except CompileError:
        if quick == source:
            raise
        return _cubin(source, arch, toolchain, work)  # it needs a header in full, or is wrong: then this error says how


def _cubin(source: str, arch: str, toolchain: Toolchain, work: Path) -> tuple[Path, str]:
    source_file, cubin = work / "kernel.cu", work / "kernel.cubin"
    source_file.write_text(source)
    # only the -gencode form: with the -arch shorthand some nvcc releases add a plain sm_90 pass that refuses wgmma
    code = f"arch=compute_{arch.removeprefix('sm_')},code={arch}"
    log = _run(
        [
            *(toolchain.nvcc, "-cubin", "-gencode", code, "-std=c++17", "-O3", "-w", "-ccbin", toolchain.cxx),
            *("-Xptxas", ptxas_flags(arch), source_file, "-o", cubin),
        ],
        what=f"nvcc for {arch}",
    )
    return cubin, log


def ptxas_flags(arch: str) -> str:
    """What ptxas is told for an architecture, separated by commas."""
    return _PTXAS_FLAGS + _PTXAS_FLAGS_OF.get(arch, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class PtxasFacts:
    """What `ptxas -v` reports: registers, spills and stack in bytes, performance warnings."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]


def ptxas_facts(log: str) -> PtxasFacts:
    """Read a ptxas log of one kernel. Raises CompileError when it has no register count."""

    def total(pattern: str) -> int:
        return sum(int(value) for value in re.findall(pattern, log))

    if (registers := re.search(r"Used (\d+) registers", log)) is None:
        raise CompileError("ptxas reported no register count", log_tail=log[-_LOG_TAIL_CHARS:])
    return PtxasFacts(
        registers=int(registers[1]),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        warnings=tuple(dict.fromkeys(re.findall(r"\(?C75\d\d\)?[^\n]*", log))),
    )


def launcher_object(toolchain: Toolchain, cache: Path | None = None) -> Path:
    """The launcher, compiled once for each toolchain and kept in `cache`. Raises CompileError."""
    folder = cache or Path(platformdirs.user_cache_dir("gemm-tuner"))
    digest = hashlib.sha256(toolchain.fingerprint.encode())
    for source in sorted(LAUNCHER_FOLDER.iterdir()):
        if source.suffix in (".cc", ".h"):
            digest.update(source.read_bytes())
    target = folder / f"launcher-{digest.hexdigest()[:24]}.o"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-") as work:
        built = Path(work) / "launcher.o"
        includes = [f"-I{folder}" for folder in (*toolchain.ffi_include, toolchain.cuda_include)]
        _run(
            [toolchain.cxx, *_CXX_FLAGS, *includes, "-c", LAUNCHER_FOLDER / "launcher.cc", "-o", built],
            what="the C++ compiler on the launcher",
        )
        write_atomically(target, built.read_bytes())
    return target


def _link_module(payload_text: str, toolchain: Toolchain, work: Path, cache: Path | None) -> bytes:
    payload, module = work / "payload.c", work / "module.so"
    payload.write_text(payload_text)
    _run(
        [
            *(toolchain.cxx, "-shared", "-fPIC", "-fvisibility=hidden", f"-I{LAUNCHER_FOLDER}", "-x", "c", payload),
            *("-x", "none", launcher_object(toolchain, cache), "-o", module),
            *(f"-L{toolchain.ffi_library}", "-ltvm_ffi", "-ldl", "-Wl,-s", "-Wl,--build-id=none"),
        ],
        what="linking the module",
    )
    return module.read_bytes()


def _payload_source(
    cubin: Path, description: dict[str, Any], launch: LaunchPlan, problem: GemmProblem, config: GemmConfig
) -> str:
    major, minor = config.arch.compute_capability
    parameters = ",\n    ".join(_parameter(parameter) for parameter in launch.parameters)
    return f"""\
#include "payload.h"
__asm__(".section .rodata\\n.balign 64\\ngemm_cubin:\\n.incbin \\"{cubin}\\"\\n.previous\\n");
extern const unsigned char gemm_cubin[] __attribute__((visibility("hidden")));
const struct GemmPayload gemm_payload = {{
  .description = {json.dumps(json.dumps(description, sort_keys=True))},
  .symbol = "{launch.symbol}",
  .cubin = gemm_cubin,
  .arch = "{config.arch.name}",
  .capability_major = {major}, .capability_minor = {minor},
  .m = {problem.m}, .n = {problem.n}, .k = {problem.k}, .dynamic_m = {int(launch.dynamic_m)},
  .is_bfloat16 = {int(problem.dtype is Dtype.BF16)},
  .grid = {launch.grid}, .threads = {launch.threads},
  .cluster = {{{", ".join(map(str, launch.cluster))}}},
  .smem_bytes = {launch.smem_bytes}, .workspace_bytes = {launch.workspace_bytes},
  .contiguous = {{{", ".join(str(int(launch.knows_stride_of(operand))) for operand in OPERANDS)}}},
  .alignment = {{{", ".join(str(launch.alignment_of(operand)) for operand in OPERANDS)}}},
  .parameter_count = {len(launch.parameters)},
  .parameters = {{
    {parameters}
  }},
}};
"""


def _parameter(parameter: Any) -> str:
    if isinstance(parameter, WorkspacePlan):
        return "{.kind = GEMM_WORKSPACE}"
    operand = OPERANDS.index(parameter.operand)
    if not isinstance(parameter, TensorMapPlan):
        kinds: dict[type, str] = {PointerPlan: "GEMM_POINTER", StridePlan: "GEMM_STRIDE", RowsPlan: "GEMM_ROWS"}
        return f"{{.kind = {kinds[type(parameter)]}, .operand = {operand}}}"

    def braces(values: tuple[int, ...]) -> str:
        return "{" + ", ".join(map(str, values)) + "}"

    return (
        f"{{.kind = GEMM_TENSOR_MAP, .operand = {operand}, .data_type = {parameter.data_type}, "
        f".rank = {len(parameter.extents)}, .extents = {braces(parameter.extents)}, "
        f".strides = {braces(parameter.strides_bytes)}, .box = {braces(parameter.box)}, "
        f".element_strides = {braces(parameter.element_strides)}, .interleave = {parameter.interleave}, "
        f".swizzle = {parameter.swizzle}, .l2_promotion = {parameter.l2_promotion}, .oob_fill = {parameter.oob_fill}, "
        f".rows_from_call = {int(parameter.rows_from_call)}, .short_box = {int(parameter.short_box)}}}"
    )


def _run(command: list[Any], *, what: str) -> str:
    """Run a compiler; return its output. Time limits are the caller's: it kills this whole process group."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode != 0:
        last = next((line for line in reversed(log.splitlines()) if line.strip()), f"exit status {done.returncode}")
        raise CompileError(f"{what} failed: {last.strip()[:300]}", log_tail=log[-_LOG_TAIL_CHARS:])
    return log
