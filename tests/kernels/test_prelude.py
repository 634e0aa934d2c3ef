"""Sources without headers that they hardly use: same kernel, and nothing is lost where a header is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernels.compile import compile_cubin, ptxas_facts
from kernels.devices import profile_named
from kernels.lowering import lower
from kernels.prelude import light
from kernels.problem import Dtype, GemmProblem
from kernels.toolchain import find_toolchain
from search_space.starting import starting_configs

if TYPE_CHECKING:
    from pathlib import Path

PROBLEM = GemmProblem.parse("256x256x256")
HEADERS = ("cooperative_groups.h", "cuda/barrier", "cuda_bf16.h", "cuda_fp16.h")


def generated(device: str, dtype: Dtype) -> str:
    """Source of the first starting config."""
    profile = profile_named(device)
    problem = replace(PROBLEM, dtype=dtype)
    return lower(problem, starting_configs(problem, profile)[0], profile.sm_count).source


@pytest.mark.parametrize("dtype", list(Dtype))
def test_hopper_source_needs_none_of_the_slow_headers(dtype: Dtype) -> None:
    """It converts in PTX: its 16-bit type is storage."""
    source = generated("h200", dtype)
    assert [header for header in HEADERS if header in source]
    assert [header for header in HEADERS if header in light(source)] == []


def test_blackwell_source_keeps_the_header_that_converts() -> None:
    """Its epilogue calls __float22bfloat162_rn."""
    source = generated("b200", Dtype.BF16)
    assert "__float22bfloat162_rn" in source
    assert [header for header in HEADERS if header in light(source)] == ["cuda_bf16.h"]


def test_kernel_is_the_same_without_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same size of code, registers and spills."""
    source, toolchain = generated("h200", Dtype.BF16), find_toolchain()
    (tmp_path / "light").mkdir()
    cubin, log = compile_cubin(source, "sm_90a", toolchain, tmp_path / "light")
    monkeypatch.setattr("kernels.compile.light", lambda text: text)
    full, full_log = compile_cubin(source, "sm_90a", toolchain, tmp_path)
    assert ptxas_facts(log) == ptxas_facts(full_log)
    assert cubin.stat().st_size == full.stat().st_size


def test_source_that_needs_a_header_after_all_is_compiled_with_it(tmp_path: Path) -> None:
    """The stand-in has no arithmetic; the compile that fails for it is done again in full."""
    source = generated("h200", Dtype.BF16)
    start = source.index('extern "C"')
    helper = "__device__ float twice(nv_bfloat16 x) { return 2.0f * static_cast<float>(x); }\n"
    wanting = source[:start] + helper + source[start:]
    assert "cuda_bf16.h" not in light(wanting)
    cubin, log = compile_cubin(wanting, "sm_90a", find_toolchain(), tmp_path)
    assert cubin.is_file()
    assert ptxas_facts(log).registers > 0
