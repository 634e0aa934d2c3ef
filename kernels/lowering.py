"""Template -> CUDA C++ and launch plan, through TVM. Needs neither a GPU nor a driver.

TVM generates a device kernel and a C++ host wrapper. We keep the kernel, and read grid, cluster, shared memory and
tensor maps out of the wrapper instead of stating them a second time: the template is their only source. The wrapper
itself is not compiled (see docs/decisions/0006).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.errors import CompileError
from kernels.ladder import Sm90StepConfig, Sm100StepConfig, StepConfig
from kernels.launch import (
    MAPPED_ROWS,
    OPERANDS,
    ROWS,
    STRIDES,
    WORKSPACE,
    LaunchPlan,
    Parameter,
    PointerPlan,
    RowsPlan,
    StridePlan,
    TensorMapPlan,
    WorkspacePlan,
)
from kernels.resources import launch_smem_bytes
from kernels.stream_k import workspace_of

if TYPE_CHECKING:
    from kernels.problem import GemmProblem
from kernels.tracing import light_frames

_AT_MOST_ROWS = re.compile(rf"\(\({MAPPED_ROWS}\) < \((\d+)\) \? \({MAPPED_ROWS}\) : \(\1\)\)")  # min(m, .)
# CUtensorMapDataType, cuda.h
_DATA_TYPES = {"CU_TENSOR_MAP_DATA_TYPE_FLOAT16": 6, "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": 9}


@dataclass(frozen=True, kw_only=True)
class LoweredKernel:
    """A kernel before the CUDA compiler.

    source: CUDA C++ of the device
    launch: how to launch it
    source_hash: sha256 over source and launch plan; equal hashes are one kernel
    trace_s: seconds to trace the template
    lower_s: seconds to lower and generate code
    """

    source: str
    launch: LaunchPlan
    source_hash: str
    trace_s: float
    lower_s: float


def build(problem: GemmProblem, config: GemmConfig, sm_count: int, **variant: Any) -> Any:
    """Trace the template of the config's architecture. `variant` passes a planted fault or delays through.

    Raises ConfigError for a config that cannot serve the problem.
    """
    if isinstance(config, StepConfig):
        return _build_step(problem, config)
    if isinstance(config, Sm90GemmConfig):
        from kernels.gemm_sm90 import build_gemm_sm90

        with light_frames():
            return build_gemm_sm90(problem, config, sm_count, **variant)
    assert isinstance(config, Sm100GemmConfig)
    from kernels.gemm_sm100 import build_gemm_sm100

    with light_frames():
        return build_gemm_sm100(problem, config, sm_count, **variant)


def _build_step(problem: GemmProblem, config: StepConfig) -> Any:
    """A simple kernel of the ladder."""
    if isinstance(config, Sm90StepConfig):
        from kernels.ladder_sm90 import build_step_sm90

        with light_frames():
            return build_step_sm90(problem, config)
    assert isinstance(config, Sm100StepConfig)
    from kernels.ladder_sm100 import build_step_sm100

    with light_frames():
        return build_step_sm100(problem, config)


def lower(problem: GemmProblem, config: GemmConfig, sm_count: int, **variant: Any) -> LoweredKernel:
    """Raises ConfigError for an illegal config and CompileError when TVM refuses the template."""
    import tvm

    _leave_compiling_to_us()
    started = time.perf_counter()
    function = build(problem, config, sm_count, **variant)
    traced = time.perf_counter()
    target = tvm.target.Target({"kind": "cuda", "arch": config.arch.name, "host": {"kind": "cuda_host"}})
    with target:
        module = tvm.compile(tvm.IRModule({"main": function}), target=target, tir_pipeline="tirx").mod
    source = str(module.imports[0].inspect_source("cuda"))
    launch = _launch_plan(source, str(module.inspect_source()))
    if isinstance(config, Sm100GemmConfig):
        launch = replace(launch, smem_bytes=max(launch.smem_bytes, launch_smem_bytes(config)))
    if isinstance(config, Sm90GemmConfig) and config.scheduler == "stream_k":
        launch = launch.with_workspace(workspace_of(problem, config, sm_count).size_bytes)
    digest = hashlib.sha256(source.encode())
    digest.update(json.dumps(asdict(launch), sort_keys=True).encode())
    return LoweredKernel(
        source=source,
        launch=launch,
        source_hash=digest.hexdigest(),
        trace_s=traced - started,
        lower_s=time.perf_counter() - traced,
    )


@functools.cache
def _leave_compiling_to_us() -> None:
    """Keep TVM from compiling the generated source too.

    Where a driver is present it would, for 1.8 s a kernel (H200 machine), and fail where it finds no CUDA headers. What
    the callback returns lies unread in a module that we drop; only its first bytes must look like a cubin.
    """
    import tvm_ffi

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", lambda *_: b"\x7fELF", override=True)


class _Wrapper:
    """The generated host wrapper, read as `name = expression` bindings."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.bindings = dict(
            re.findall(r"^\s*(?:auto|size_t|int32_t|CUtensorMap\*) (\w+) = (.+?);$", text, flags=re.MULTILINE)
        )

    def integer(self, expression: str) -> int:
        """Follow casts and bindings down to a literal."""
        text = expression.strip()
        while (cast := re.fullmatch(r"static_cast<\w+>\((.+)\)|\(\(\w+\)(.+)\)", text)) is not None:
            text = next(part for part in cast.groups() if part is not None).strip()
        if re.fullmatch(r"\d+", text):
            return int(text)
        if text not in self.bindings:
            raise CompileError(f"cannot read the generated host wrapper: {expression!r} is not a constant")
        return self.integer(self.bindings[text])

    def array(self, name: str) -> tuple[str, ...]:
        """Elements of a brace-initialised array, without casts."""
        match = re.search(rf"\b{name}\[\d+\] = {{(.*)}};", self.text)
        if match is None:
            raise CompileError(f"cannot read the generated host wrapper: array {name} is missing")
        names = (re.fullmatch(r"\s*(?:static_cast<\w+>\((\w+)\)|(\w+))\s*", part) for part in match[1].split(","))
        return tuple(self.followed(name[1] or name[2]) if name else "" for name in names)

    def followed(self, text: str) -> str:
        """What a name is bound to in the end; M of the call is bound to an argument."""
        while text != MAPPED_ROWS and text in self.bindings:
            text = self.bindings[text]
        return text

    def integers(self, name: str) -> tuple[int, ...]:
        """Elements of an array of constants."""
        return tuple(self.integer(part) for part in self.array(name))

    def pointer(self, expression: str) -> str:
        """The argument whose start an address expression is, or an empty text."""
        text = self.bindings.get(expression.strip(), expression)
        match = re.fullmatch(r"\(\(void\*\)\(\(char\*\)(\w+) \+ 0\)\)|(\w+)", text.strip())
        return next((part for part in match.groups() if part), "") if match else ""

    def operand(self, expression: str) -> str:
        """Which of A, B, D an address expression starts from."""
        name = self.pointer(expression)
        if name not in OPERANDS:
            raise CompileError(f"cannot read the generated host wrapper: {expression!r} is not the start of an operand")
        return name

    def one(self, pattern: str) -> re.Match[str]:
        match = re.search(pattern, self.text)
        if match is None:
            raise CompileError(f"cannot read the generated host wrapper: nothing matches {pattern!r}")
        return match


def _tensor_maps(wrapper: _Wrapper) -> dict[str, TensorMapPlan]:
    """Tensor maps by the name of the variable that holds them."""
    maps = {}
    for call in re.findall(r"cuTensorMapEncodeTiled\((.*)\);", wrapper.text):
        arguments = [part.strip() for part in call.split(", ")]
        if len(arguments) != 12:
            raise CompileError(f"cannot read the generated host wrapper: {len(arguments)} tensor-map arguments")
        holder, data_type, _rank, address, extents, strides, box, element_strides, *modes = arguments
        inner = re.fullmatch(r"static_cast<CUtensorMap\*>\((\w+)\)", holder)
        assert inner is not None
        maps[wrapper.bindings[inner[1]]] = TensorMapPlan(
            operand=wrapper.operand(address),
            data_type=_DATA_TYPES[data_type],
            extents=tuple(0 if part == MAPPED_ROWS else wrapper.integer(part) for part in wrapper.array(extents)),
            strides_bytes=wrapper.integers(strides),
            box=tuple(wrapper.integer(_AT_MOST_ROWS.sub(r"\1", part)) for part in wrapper.array(box)),
            element_strides=wrapper.integers(element_strides),
            interleave=wrapper.integer(modes[0]),
            swizzle=wrapper.integer(modes[1]),
            l2_promotion=wrapper.integer(modes[2]),
            oob_fill=wrapper.integer(modes[3]),
            rows_from_call=MAPPED_ROWS in wrapper.array(extents),
            short_box=any(_AT_MOST_ROWS.fullmatch(part) for part in wrapper.array(box)),
        )
    return maps


def _launch_plan(source: str, wrapper_text: str) -> LaunchPlan:
    wrapper = _Wrapper(wrapper_text)
    maps = _tensor_maps(wrapper)
    call = wrapper.one(r"tvm_cuda_host_launch\(::(\w+), &cuda_config, ([^)]*)\)")
    parameters: list[Parameter] = []
    for argument in call[2].split(", "):
        bound = wrapper.bindings[argument]
        if held := re.fullmatch(r"\*\((\w+)\)", bound):
            parameters.append(maps[held[1]])
        elif bound == ROWS:
            parameters.append(RowsPlan())
        elif bound in STRIDES:
            parameters.append(StridePlan(operand=STRIDES[bound]))
        elif wrapper.pointer(bound) == WORKSPACE:
            parameters.append(WorkspacePlan())
        else:
            parameters.append(PointerPlan(operand=wrapper.operand(bound)))
    symbol = call[1]
    if not re.search(rf"__global__ .*\b{symbol}\(", source):
        raise CompileError(f"the generated source has no kernel {symbol}")
    cluster = tuple(
        wrapper.integer(match[1])
        if (match := re.search(rf"clusterDim\.{axis} = (\w+);", wrapper.text)) is not None
        else 1
        for axis in "xyz"
    )
    return LaunchPlan(
        symbol=symbol,
        grid=wrapper.integer(wrapper.one(r"gridDim = dim3\((\w+), 1, 1\)")[1]),
        threads=wrapper.integer(wrapper.one(r"blockDim = dim3\((\w+), 1, 1\)")[1]),
        cluster=(cluster[0], cluster[1], cluster[2]),
        smem_bytes=wrapper.integer(wrapper.one(r"dynamicSmemBytes = (\w+);")[1]),
        parameters=tuple(parameters),
    )
