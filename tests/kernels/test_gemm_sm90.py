"""The Hopper template, its lowering and its modules, without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tvm_ffi

from kernels.artifacts import ArtifactStore
from kernels.compile import CompiledKernel, compile_cubin, compile_kernel, ptxas_facts
from kernels.config import Sm90GemmConfig
from kernels.errors import CompileError, ConfigError
from kernels.launch import PointerPlan, RowsPlan, StridePlan, TensorMapPlan
from kernels.lowering import LoweredKernel, lower
from kernels.problem import GemmProblem
from kernels.stress import stress_builds
from kernels.toolchain import find_toolchain
from tests.soak.compile_random import is_clean, run

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

BIG = GemmProblem.parse("2048x2048x512")
RAGGED = GemmProblem.parse("1000x1096x1032", dtype="fp16")
BASE = Sm90GemmConfig(cta_group=2, blk_n=128, pipe_depth=4, epi_n=32, epi_stages=2, l2_group_size=2)


@cache
def lowered(problem: GemmProblem, config: Sm90GemmConfig, fault: str = "") -> LoweredKernel:
    """Lowering takes a second; tests share it."""
    return lower(problem, config, 132, fault=fault)


@pytest.fixture(scope="module")
def module() -> CompiledKernel:
    """One module of a small ragged problem."""
    return compile_kernel(RAGGED, BASE, 132)


@pytest.fixture(scope="module")
def module_path(module: CompiledKernel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module as a file."""
    path = tmp_path_factory.mktemp("module") / "gemm.so"
    path.write_bytes(module.module)
    return path


@pytest.mark.parametrize(
    "change",
    [{"pipe_depth": 3}, {"cta_group": 1}, {"num_consumers": 1}, {"blk_m": 128}, {"blk_n": 64}, {"blk_k": 32},
     {"l2_group_size": 4}, {"raster": "n"}, {"raster": "m-serpentine"}, {"raster": "n-serpentine"}, {"epi_n": 64},
     {"epi_stages": 3}, {"share": "A"}, {"cta_group": 1, "split_k": 2}, {"scheduler": "stream_k"},
     {"swap_ab": True, "epi_n": 8, "epi_stages": 1}],
    ids=lambda change: "-".join(f"{name}-{value}" for name, value in change.items()),
)  # fmt: skip
def test_every_knob_changes_the_kernel(change: dict[str, Any]) -> None:
    """A knob that changes nothing would be searched for nothing."""
    assert lowered(BIG, replace(BASE, **change)).source_hash != lowered(BIG, BASE).source_hash


def test_random_legal_configs_compile_without_spills() -> None:
    """12 here, 200 in `make verify-compile`."""
    rows = run("sm_90a", count=12, seed=20, processes=2)
    assert [row for row in rows if not is_clean(row)] == []


def test_same_config_gives_the_same_source_hash() -> None:
    """The hash decides what is measured once, so it must not depend on the run."""
    assert lower(BIG, BASE, 132).source_hash == lowered(BIG, BASE).source_hash


def test_launch_plan_is_what_config_and_problem_imply() -> None:
    """Grid, cluster, shared memory and tensor maps are read from TVM's wrapper: check them against arithmetic."""
    launch = lowered(RAGGED, BASE).launch
    assert launch.symbol == "gemm_kernel"
    assert (launch.threads, launch.cluster, launch.grid) == (384, (2, 1, 1), 2 * 4 * 9)
    assert launch.smem_bytes == 1024 + 4 * 64 * (128 + 128) * 2 + 2 * 2 * 64 * 32 * 2
    a, b, d = launch.parameters
    assert isinstance(a, TensorMapPlan)
    assert isinstance(b, TensorMapPlan)
    assert isinstance(d, TensorMapPlan)
    assert (a.operand, a.extents, a.strides_bytes, a.box) == ("A", (1032, 1000), (2064,), (64, 128))
    assert (b.operand, b.extents, b.strides_bytes, b.box) == ("B", (1032, 1096), (2064,), (64, 64))
    assert (d.operand, d.extents, d.strides_bytes, d.box) == ("D", (1096, 1000), (2192,), (32, 64))


def test_short_matrix_gets_a_short_box() -> None:
    """A box partly outside of the matrix is slow: 21.96 us against 16.75 us at M = 16 (H200)."""
    config = Sm90GemmConfig(num_consumers=1, blk_n=64, blk_k=128, pipe_depth=6)
    a = lowered(GemmProblem.parse("13x1024x1024"), config).launch.parameters[0]
    assert isinstance(a, TensorMapPlan)
    assert a.box == (64, 13)


def test_swapped_operands_store_through_the_address_of_d() -> None:
    """Weights fill 64-row tiles, A comes in a box of its own rows, and D is no tensor map."""
    config = Sm90GemmConfig(swap_ab=True, num_consumers=1, blk_n=8, blk_k=128, epi_n=8, epi_stages=1, pipe_depth=10)
    launch = lowered(GemmProblem.parse("5x7168x4096"), config).launch
    maps = {plan.operand: plan.box for plan in launch.parameters if isinstance(plan, TensorMapPlan)}
    assert maps == {"A": (64, 5), "B": (64, 64)}
    assert [plan.operand for plan in launch.parameters if isinstance(plan, PointerPlan)] == ["D"]
    assert launch.grid == 7168 // 64
    assert launch.smem_bytes == 1024 + 10 * 2 * 128 * (64 + 8)
    assert [plan.operand for plan in launch.parameters if isinstance(plan, StridePlan)] == ["D"]
    assert [launch.knows_stride_of(operand) for operand in "ABD"] == [False, False, False]
    assert [launch.alignment_of(operand) for operand in "ABD"] == [16, 16, 16]


def test_rows_of_any_alignment_are_copied_from_their_addresses() -> None:
    """K = 1001: no tensor map describes A or B, the kernel is told where rows begin, and takes any of them."""
    config = Sm90GemmConfig(num_consumers=1, blk_n=64, load="cp_async", epi_stages=1, pipe_depth=4)
    launch = lowered(GemmProblem.parse("300x1096x1001"), config).launch
    kinds = [(type(plan), plan.operand) for plan in launch.parameters]
    assert kinds == [
        (PointerPlan, "A"), (PointerPlan, "B"), (TensorMapPlan, "D"), (StridePlan, "A"), (StridePlan, "B")
    ]  # fmt: skip
    assert [launch.knows_stride_of(operand) for operand in "ABD"] == [False, False, False]
    assert [launch.alignment_of(operand) for operand in "ABD"] == [2, 2, 16]
    # a piece of 16 bytes more for each of the 128 rows of a stage
    assert launch.smem_bytes == 1024 + 4 * 128 * (2 * 64 + 16) + 2 * 64 * 64


def test_rows_of_d_that_are_no_whole_16_bytes_are_stored_by_threads() -> None:
    """N = 1095: a TMA store would write behind each row."""
    config = Sm90GemmConfig(num_consumers=2, blk_n=96, epi_n=32, epi_stages=1)
    lower_n = lowered(GemmProblem.parse("300x1095x512"), config)
    assert [plan.operand for plan in lower_n.launch.parameters if isinstance(plan, TensorMapPlan)] == ["A", "B"]
    assert "st_global_b16" in lower_n.source
    assert "st_global_b32" in lowered(GemmProblem.parse("300x1094x512"), config).source


def test_module_with_dynamic_m_takes_rows_from_the_call() -> None:
    """Tensor maps of A and D without rows, a box that shrinks with A, M as a parameter, all clusters that run."""
    config = Sm90GemmConfig(num_consumers=1, blk_n=128, pipe_depth=6)
    launch = lower(RAGGED, config, 132, dynamic_m=True).launch
    a, b, d, rows = launch.parameters
    assert isinstance(a, TensorMapPlan)
    assert isinstance(b, TensorMapPlan)
    assert isinstance(d, TensorMapPlan)
    assert isinstance(rows, RowsPlan)
    assert (a.extents, a.box, a.rows_from_call, a.short_box) == ((1032, 0), (64, 64), True, True)
    assert (d.extents, d.box, d.rows_from_call, d.short_box) == ((1096, 0), (64, 64), True, False)
    assert not b.rows_from_call
    assert a.called_with(13).box == (64, 13)
    assert a.called_with(1000).box == (64, 64)
    assert (launch.grid, launch.dynamic_m) == (132, True)
    source = lower(replace(RAGGED, m=77), config, 132, dynamic_m=True).source
    assert source == lower(RAGGED, config, 132, dynamic_m=True).source, "M of the problem is only an example"


def test_extent_whose_last_tile_passes_32_bits_is_refused() -> None:
    """The row of a tile's last element would be negative, and so inside of D."""
    with pytest.raises(ConfigError, match="m = 2147483647: coordinates are 32-bit"):
        lower(GemmProblem.parse("2147483647x8x8"), BASE, 132)


def test_parts_of_k_are_a_cluster_with_room_for_each_others_sums() -> None:
    """Eight CTAs, four of which own a chunk of 64 x 16 and take in seven parts of it."""
    config = Sm90GemmConfig(split_k=8, num_consumers=1, blk_n=64, epi_n=16, pipe_depth=6)
    launch = lowered(GemmProblem.parse("128x256x7168"), config).launch
    assert (launch.cluster, launch.grid) == ((8, 1, 1), 8 * 2 * 4)
    assert launch.smem_bytes == 1024 + 6 * 2 * 64 * 128 + 2 * 2 * 64 * 16 + 7 * 4 * 64 * 16


def test_uneven_parts_of_k_differ_by_one_block() -> None:
    """17 blocks in three parts: 6, 6, 5."""
    config = Sm90GemmConfig(split_k=3, num_consumers=1, blk_n=64, epi_n=16)
    source = lowered(RAGGED, config).source
    assert re.search(r"for \(int k = 0; k < \(\(.* < 2\) \? 6 : 5\); \+\+k\)", source)


def test_elements_past_2_to_the_31_are_stored_with_64_bit_addresses() -> None:
    """46341 x 46341 elements of D."""
    config = Sm90GemmConfig(swap_ab=True, blk_n=256, epi_n=8, epi_stages=1)
    source = lowered(GemmProblem.parse("46341x46341x64"), config).source
    body = source[source.rindex("setmaxnreg_inc") :]
    assert "(int64_t)d_stride" in body
    assert not re.search(r"\* d_stride|(?<!\(int64_t\))\bd_stride\b", body), "it is widened before it is multiplied"


@pytest.mark.parametrize("fault", ["no_sum_wait", "no_turn", "no_copy_wait"])
def test_fault_of_another_form_is_refused(fault: str) -> None:
    """A healthy kernel under the name of a bug would prove nothing."""
    with pytest.raises(ConfigError, match=f"unknown fault '{fault}'"):
        lower(BIG, BASE, 132, fault=fault)


def test_pingpong_has_two_consumers_that_each_take_a_whole_tile() -> None:
    """A third could not take turns, and parts of a tile could not meet."""
    config = Sm90GemmConfig(schedule="pingpong", blk_n=128)
    assert config.cta_rows == config.blk_m
    assert lower(BIG, config, 132).launch.threads == 384
    with pytest.raises(ConfigError, match="two consumers take turns, num_consumers = 3 cannot"):
        lower(BIG, replace(config, num_consumers=3), 132)


def test_staging_buffer_index_runs_on_across_tiles() -> None:
    """Three chunks over two buffers: a per-tile constant index is the epilogue race."""
    config = Sm90GemmConfig(num_consumers=3, blk_n=192, pipe_depth=3)
    right, racy = lowered(BIG, config).source, lowered(BIG, config, "epilogue_restart").source
    ring = re.search(r"if \(ring_stage\w*\[0\] == 2\)", right)
    assert ring is not None, "the buffer index must be a variable that wraps at epi_stages"
    assert "ring_stage" not in racy or re.search(r"if \(ring_stage\w*\[0\] == 2\)", racy) is None


def test_tvm_does_not_compile_what_we_compile() -> None:
    """Where a driver is present TVM would run nvcc too, and fail without CUDA headers: its callback is ours."""
    lowered(BIG, BASE)
    assert bytes(tvm_ffi.get_global_func("tvm_callback_cuda_compile")("any source", None)) == b"\x7fELF"


def test_short_loops_over_k_are_not_unrolled() -> None:
    """64x32x128 with 8 stages and 16 k-blocks spilled 56 B when nvcc unrolled the loop."""
    config = Sm90GemmConfig(num_consumers=1, blk_n=32, blk_k=128, epi_n=16, epi_stages=1, pipe_depth=8)
    short, long = GemmProblem.parse("64x4096x2048"), GemmProblem.parse("64x4096x8192")
    kept = [len(re.findall(r"#pragma unroll 1\n", lowered(problem, config).source)) for problem in (short, long)]
    assert kept[0] - kept[1] == 2  # the producer's loop and the consumers'
    assert compile_kernel(short, config, 132).spill_bytes == 0


def test_illegal_config_is_refused_with_numbers() -> None:
    """The template itself refuses, whoever calls it."""
    with pytest.raises(ConfigError, match=r"279552 B of shared memory"):
        lower(BIG, Sm90GemmConfig(pipe_depth=5), 132)


@pytest.mark.parametrize(
    "variant", [{"fault": "no_such_bug"}, {"delays_ns": {"nowhere": 2}}, {"delays_ns": {"consumer_wait": 3}}]
)
def test_unknown_variant_is_refused(variant: dict[str, Any]) -> None:
    """A misspelt fault must not silently build a healthy kernel."""
    with pytest.raises(ConfigError):
        lower(BIG, BASE, 132, **variant)


def test_module_needs_only_tvm_ffi_and_loads_without_a_driver(module_path: Path) -> None:
    """No CUDA library among its dependencies; it describes itself."""
    dynamic = subprocess.run(["readelf", "-d", module_path], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert "libtvm_ffi.so" in needed
    assert not [name for name in needed if "cuda" in name.lower() or "nvidia" in name.lower()]
    about = json.loads(tvm_ffi.load_module(module_path)["describe"]())
    assert about["config"] == BASE.to_dict()
    assert about["problem"] == {"m": 1000, "n": 1096, "k": 1032, "dtype": "fp16", "layout": "NT"}


def test_stored_module_loads_from_its_place_in_the_store(module: CompiledKernel, tmp_path: Path) -> None:
    """The store's file names must be ones that tvm_ffi takes for a library."""
    store = ArtifactStore(tmp_path)
    path = store.path(store.put(module.module))
    assert tvm_ffi.load_module(path)["gemm"] is not None


def test_module_was_compiled_without_spills(module: CompiledKernel) -> None:
    """What the compiler reports travels with the module."""
    assert (module.spill_bytes, module.stack_bytes, module.warnings) == (0, 0, ())
    assert 64 <= module.registers <= 255
    assert (module.arch, module.sm_count) == ("sm_90a", 132)
    assert module.toolchain.startswith("nvcc-13.0.88 tvm-0.27.0.post1")


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [(np.float32, TypeError, "A must be float16"), (np.float16, ValueError, "A must be on a CUDA device")],
)
def test_wrong_argument_is_refused_before_any_launch(
    module_path: Path, dtype: type, error: type[Exception], message: str
) -> None:
    """Wrong dtypes and host memory are named, and it takes no driver to say so."""
    operands = [np.zeros(shape, dtype) for shape in ((1000, 1032), (1096, 1032), (1000, 1096))]
    with pytest.raises(error, match=message):
        tvm_ffi.load_module(module_path)["gemm"](*operands)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros((1000, 1032), np.float16), np.zeros((1096, 1032), np.float16).T),  # in host memory
        (np.zeros((1000, 1032), np.float32), np.zeros((1096, 1032), np.float32).T),
        (np.zeros((1000, 1032), np.float16), np.zeros((1096, 1031), np.float16).T),
        (np.zeros(1032, np.float16), np.zeros((1096, 1032), np.float16).T),
    ],
)
def test_product_of_operands_that_the_module_does_not_serve_is_nothing(
    module_path: Path, a: NDArray[Any], b: NDArray[Any]
) -> None:
    """Its caller has another way to compute them: no error, no allocation, no launch."""
    assert tvm_ffi.load_module(module_path)["product"](tvm_ffi.from_dlpack(a), tvm_ffi.from_dlpack(b)) is None


def test_header_that_nothing_uses_is_left_out_and_makes_no_difference(tmp_path: Path) -> None:
    """The cubin is the same, byte for byte, with and without <cuda/barrier>."""
    source = lowered(RAGGED, BASE).source
    assert "#include <cuda/barrier>" in source
    used = source + "\n// cuda::barrier\n"  # named, so the header stays
    toolchain, cubins = find_toolchain(), []
    for name, text in (("without", source), ("with", used)):
        folder = tmp_path / name
        folder.mkdir()
        cubins.append(compile_cubin(text, "sm_90a", toolchain, folder)[0].read_bytes())
        assert ("#include <cuda/barrier>" in (folder / "kernel.cu").read_text()) is (name == "with")
    assert cubins[0] == cubins[1]


def test_compiling_twice_gives_the_same_bytes(module: CompiledKernel) -> None:
    """Content addressing needs reproducible modules."""
    assert compile_kernel(RAGGED, BASE, 132).sha256 == module.sha256


def test_stress_builds_keep_the_knobs_and_the_raggedness() -> None:
    """Shortest K, many tiles, last tiles as full as the original's; one build without and several with delays."""
    builds = stress_builds(RAGGED, BASE, 132)
    assert [build.label for build in builds[:2]] == ["1 k-block", "2 k-blocks"]
    assert sum(bool(build.delays_ns) for build in builds) == 20
    rows, cols = BASE.cluster_tile
    for build in builds:
        tiles_m, tiles_n = BASE.cluster_tiles(build.problem)
        assert tiles_m * tiles_n >= 6 * 66
        assert (build.problem.m % rows, build.problem.n % cols) == (RAGGED.m % rows, RAGGED.n % cols)
        assert build.problem.k % 64 == RAGGED.k % 64
    assert BASE.k_blocks(builds[0].problem) == 1


def test_ptxas_log_is_read_completely() -> None:
    """Spilled stores and loads add up; C75xx lines are kept."""
    log = """ptxas info    : 0 bytes gmem
    48 bytes stack frame, 64 bytes spill stores, 128 bytes spill loads
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Used 168 registers, used 1 barriers"""
    facts = ptxas_facts(log)
    assert (facts.registers, facts.spill_bytes, facts.stack_bytes) == (168, 192, 48)
    assert len(facts.warnings) == 1
    assert "serialized" in facts.warnings[0]
    with pytest.raises(CompileError, match="no register count"):
        ptxas_facts("nothing")
