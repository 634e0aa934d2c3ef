"""The Blackwell template, compiled without a GPU: knobs, presets, refusals, and what the CUDA text must contain."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from kernels.compile import compile_kernel
from kernels.config import Sm100GemmConfig
from kernels.errors import ConfigError
from kernels.gemm_sm100 import FAULTS, build_gemm_sm100
from kernels.lowering import LoweredKernel, lower
from kernels.problem import Dtype, GemmProblem
from kernels.resources import ONE_CTA_SMEM_BYTES, launch_smem_bytes, resources_of
from search_space.starting import preset
from tests.soak.compile_random import is_clean, run

if TYPE_CHECKING:
    from kernels.config import GemmConfig

B200_SMS = 148
SQUARE = GemmProblem(m=8192, n=8192, k=4096)
BASE = Sm100GemmConfig(num_consumers=1, epi_n=32)
# Knob by knob, a value that differs from BASE and is legal with the rest of it.
OTHER_VALUES: dict[str, Any] = {
    "pipe_depth": 3,
    "cta_group": 1,
    "num_consumers": 2,
    "blk_m": 64,
    "blk_n": 64,
    "blk_k": 32,
    "l2_group_size": 4,
    "raster": "n",
    "epi_n": 64,
    "epi_stages": 2,
    "acc_stages": 2,
    "swap_ab": True,
    "split_k": 2,
    "scheduler": "clc",
}
ONE_CTA_KNOBS = ("blk_m", "split_k")  # 64 rows, and parts of K, exist with one CTA only


@cache
def _lowered(config: GemmConfig, problem: GemmProblem = SQUARE, **variant: Any) -> LoweredKernel:
    return lower(problem, config, B200_SMS, **variant)


@pytest.mark.parametrize(("name", "dtype"), [("step7", Dtype.FP16), ("step8", Dtype.BF16), ("step9", Dtype.FP16)])
def test_steps_of_the_ladder_compile_without_spills(name: str, dtype: Dtype) -> None:
    """Registers stay within the estimate that the rules use, too."""
    config = preset(name)
    kernel = compile_kernel(GemmProblem(m=4096, n=4096, k=4096, dtype=dtype), config, B200_SMS)
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ())
    assert 0 < kernel.registers <= resources_of(config).registers


def test_kernel_does_not_spill_to_share_its_sm() -> None:
    """Shared memory lets one CTA onto an SM; left alone, ptxas spilled 32 bytes here so that three might fit."""
    config = Sm100GemmConfig(
        pipe_depth=2, cta_group=2, num_consumers=2, blk_n=128, blk_k=128, l2_group_size=1, raster="m-serpentine",
        epi_n=16, epi_stages=4, acc_stages=1, scheduler="clc",
    )  # fmt: skip
    kernel = compile_kernel(GemmProblem(m=16384, n=1536, k=7168, dtype=Dtype.FP16), config, B200_SMS)
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ())


def test_every_knob_of_the_config_is_tried() -> None:
    """A new knob has to say here which other value changes the kernel."""
    assert set(OTHER_VALUES) == set(Sm100GemmConfig.knobs())


@pytest.mark.parametrize("knob", OTHER_VALUES)
def test_every_knob_changes_the_generated_source(knob: str) -> None:
    """A knob that the template does not read would multiply the space for nothing."""
    base = replace(BASE, cta_group=1) if knob in ONE_CTA_KNOBS else BASE
    assert _lowered(replace(base, **{knob: OTHER_VALUES[knob]})).source_hash != _lowered(base).source_hash


def test_the_four_rasters_are_four_kernels() -> None:
    """On a grid with several groups both ways."""
    hashes = {
        raster: _lowered(replace(BASE, raster=raster)).source_hash
        for raster in ("m", "n", "m-serpentine", "n-serpentine")
    }
    assert len(set(hashes.values())) == 4, hashes


def test_groups_larger_than_the_grid_are_one_kernel() -> None:
    """Equal order, equal source: such configs are measured once."""
    small = GemmProblem(m=1024, n=1024, k=512)
    assert len({_lowered(replace(BASE, l2_group_size=size), small).source_hash for size in (4, 8, 32)}) == 1


def test_launch_follows_the_config() -> None:
    """One persistent cluster per pair of SMs, never more than there are tiles; the device symbol is gemm_kernel."""
    config = Sm100GemmConfig()
    launch = _lowered(config).launch
    assert launch.symbol == "gemm_kernel"
    assert (launch.grid, launch.cluster, launch.threads) == (B200_SMS, (2, 1, 1), config.threads)
    assert launch.smem_bytes == resources_of(config).smem_bytes
    assert _lowered(config, GemmProblem(m=600, n=256, k=64)).launch.grid == 4


def test_cluster_launch_control_has_a_cluster_for_each_tile() -> None:
    """The hardware launches what finds room; the others' tiles are taken over. The source knows no SM count."""
    config = Sm100GemmConfig(scheduler="clc")
    assert _lowered(config).launch.grid == 2 * 16 * 32
    assert "clusterlaunchcontrol.try_cancel" in _lowered(config).source
    assert "clusterlaunchcontrol" not in _lowered(Sm100GemmConfig()).source
    assert lower(SQUARE, config, 100).source_hash == _lowered(config).source_hash


def test_ctas_that_wait_for_another_ctas_tensor_memory_have_their_sm_alone() -> None:
    """More than half of its shared memory, for pairs, parts of K and launch control; a lone CTA may share."""
    small = Sm100GemmConfig(num_consumers=1, blk_n=32, blk_k=32, epi_n=16, pipe_depth=2)
    lone = replace(small, cta_group=1)
    for config in (small, replace(lone, split_k=2), replace(lone, scheduler="clc")):
        assert resources_of(config).smem_bytes < ONE_CTA_SMEM_BYTES
        assert _lowered(config).launch.smem_bytes == launch_smem_bytes(config) == ONE_CTA_SMEM_BYTES
    assert 2 * (ONE_CTA_SMEM_BYTES + 1024) > 228 * 1024 >= 2 * (ONE_CTA_SMEM_BYTES - 128 + 1024)
    assert _lowered(lone).launch.smem_bytes == resources_of(lone).smem_bytes


def test_an_odd_sm_count_leaves_one_sm_idle_with_a_cta_pair() -> None:
    """147 SMs hold 73 pairs."""
    assert lower(SQUARE, Sm100GemmConfig(), 147).launch.grid == 146
    assert lower(SQUARE, Sm100GemmConfig(cta_group=1, num_consumers=1), 147).launch.grid == 147


@pytest.mark.parametrize("shape", ["1x4096x4096", "1x8x8", "3x8x8", "4097x264x200"])
def test_ragged_and_tiny_problems_have_a_kernel(shape: str) -> None:
    """M = 1 is a matrix-vector product, whose A has a dimension of one element."""
    for config in (Sm100GemmConfig(), Sm100GemmConfig(cta_group=1, blk_m=64, blk_k=128, pipe_depth=2)):
        launch = _lowered(config, GemmProblem.parse(shape)).launch
        assert [len(parameter.extents) for parameter in launch.parameters] == [2, 2, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("knobs", "problem", "sm_count", "said"),
    [
        ({"pipe_depth": 5}, SQUARE, 148, r"279552 B of shared memory .* has 232448 B"),
        ({"acc_stages": 2}, SQUARE, 148, r"1024 tensor-memory columns, sm_100a has 512"),
        ({"blk_m": 64}, SQUARE, 148, r"blk_m = 64: cta_group 2 takes 128"),
        ({"blk_n": 144}, SQUARE, 148, r"= 288: a multiple of 32 up to 256"),
        ({"blk_n": 80, "epi_n": 64, "num_consumers": 1}, SQUARE, 148, r"epi_n = 64 must divide .* 160"),
        ({"blk_k": 40}, SQUARE, 148, r"blk_k = 40: sm_100a takes 16, 32"),
        (
            {"cta_group": 1, "split_k": 2, "scheduler": "clc", "epi_n": 32},
            SQUARE,
            148,
            r"clc with split_k = 2.*= static",
        ),
        ({}, GemmProblem(m=64, n=64, k=12), 148, r"k = 12 is not a multiple of 8.*pad k to 16"),
        ({}, GemmProblem(m=64, n=36, k=64), 148, r"n = 36 is not a multiple of 8.*pad n to 40"),
        ({}, SQUARE, 1, r"cluster of 2 CTAs needs 2 SMs, the device has 1"),
    ],
)
def test_illegal_configs_are_refused_with_numbers(
    knobs: dict[str, Any], problem: GemmProblem, sm_count: int, said: str
) -> None:
    """TVM would lower most of these without a word."""
    with pytest.raises(ConfigError, match=said):
        build_gemm_sm100(problem, Sm100GemmConfig(**knobs), sm_count)


def test_random_legal_configs_compile_without_spills() -> None:
    """12 here, hundreds in the soak test."""
    rows = run("sm_100a", count=12, seed=20, processes=2)
    assert [row for row in rows if not is_clean(row)] == []


# ---------------------------------------------------------------------- planted faults


def test_an_unknown_fault_is_refused() -> None:
    """A misspelt fault must not test the healthy template."""
    with pytest.raises(ValueError, match=r"unknown fault 'no_such'.*dealloc_two_warps"):
        build_gemm_sm100(SQUARE, BASE, B200_SMS, fault="no_such")


@pytest.mark.parametrize("fault", ["stale_accumulator", "same_b_half"])
def test_faults_that_no_structural_rule_names_change_the_source(fault: str) -> None:
    """The others are found in the source by the rules, which they could not be if they changed nothing."""
    assert fault in FAULTS
    assert _lowered(BASE, fault=fault).source_hash != _lowered(BASE).source_hash


def _kernel_calls(source: str) -> str:
    """The body of the kernel, as the names of the device functions that it calls, in order."""
    body = source[source.rindex("__global__") :]
    return " ".join(re.findall(r"tvm_builtin_(\w+)\(", body))


def _accumulator_reads_are_fenced(source: str) -> bool:
    """The checkers do not see this one: a tcgen05 fence between the wait on mma2ld and the first tcgen05.ld."""
    before = _kernel_calls(source).split("tcgen05_ld_ld")[0]
    return "fence__after_thread_sync" in before[before.rindex("mbarrier_wait") :]


def _stores_are_fenced(source: str) -> bool:
    """A proxy fence and a barrier between filling a staging buffer and the TMA store of it."""
    before = _kernel_calls(source).split("ptx_cp_async_bulk_tensor_s2g")[0]
    return re.search(r"fence_proxy_proxy_async\S* cuda_warpgroup_sync$", before.rstrip()) is not None


def _accumulator_is_released_after_its_reads(source: str) -> bool:
    """The last tcgen05.ld has completed before the thread arrives on ld2mma, and the stores come later."""
    after = _kernel_calls(source).split("tcgen05_ld_ld")[1]
    order = [
        after.index(name) for name in ("wait__ld", "fence__before_thread_sync", "mbarrier_arrive", "st_vec_shared")
    ]
    return order == sorted(order)


@pytest.mark.parametrize(
    ("holds", "fault"),
    [
        (_accumulator_reads_are_fenced, "no_after_fence"),
        (_stores_are_fenced, "no_proxy_fence"),
        (_stores_are_fenced, "no_staging_sync"),
        (_accumulator_is_released_after_its_reads, "early_release"),
    ],
)
def test_order_of_the_epilogue_holds_and_a_planted_fault_breaks_it(holds: Any, fault: str) -> None:
    """Read from the generated CUDA text, for one CTA and for a pair."""
    for config in (preset("step7"), preset("step9")):
        assert holds(_lowered(config).source)
        assert not holds(_lowered(config, fault=fault).source)
