"""The simple kernels of the ladder: what they refuse, what their source does, what the compiler makes of them."""

from __future__ import annotations

import pytest

from kernels import checkers
from kernels.checkers import Instance, check
from kernels.compile import compile_kernel
from kernels.errors import ConfigError, ToolchainError
from kernels.ladder import (
    PUBLISHED,
    STEP_CONFIGS,
    Sm90StepConfig,
    Sm100StepConfig,
    StepConfig,
    as_published,
    simple_rungs,
    step_violation,
)
from kernels.launch import PointerPlan, TensorMapPlan
from kernels.lowering import lower
from kernels.problem import Dtype, GemmProblem
from kernels.sass import embedded_cubin, find_nvdisasm, instruction_counts, telling
from kernels.toolchain import find_toolchain

SMALL = GemmProblem(m=256, n=128, k=128, dtype=Dtype.FP16)


@pytest.mark.parametrize("arch", STEP_CONFIGS)
def test_rungs_of_both_architectures_are_the_same_three_steps(arch: str) -> None:
    """Each has a published time, and falls as the steps rise."""
    rungs = simple_rungs(arch)
    assert [rung.name for rung in rungs] == ["step1", "step3", "step4"]
    assert {rung.config.arch.name for rung in rungs} == {arch}
    times = [PUBLISHED[rung.name][0] for rung in rungs]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("knobs", "said"), [({"step": 2}, "steps 1, 3 and 4"), ({"blk_n": 64}, "blk_n of a simple kernel"), ({"x": 1}, "x")]
)
def test_a_simple_kernel_has_no_knobs(knobs: dict[str, int], said: str) -> None:
    """Its numbers say what it does; another value would be a lie."""
    with pytest.raises(ConfigError, match=said):
        Sm100StepConfig.from_dict(knobs)
    assert Sm90StepConfig.from_dict(Sm90StepConfig(step=4).to_dict()) == Sm90StepConfig(step=4)


@pytest.mark.parametrize(("shape", "name"), [("200x128x64", "m"), ("128x200x64", "n"), ("128x128x96", "k")])
def test_ragged_problems_are_refused_with_the_extent(shape: str, name: str) -> None:
    """The simple kernels have no clipped copies."""
    problem = GemmProblem.parse(shape)
    assert (step_violation(problem) or "").startswith(f"{name} = ")
    with pytest.raises(ConfigError, match=f"{name} = .* whole tiles"):
        lower(problem, Sm90StepConfig(step=1), 132)


@pytest.mark.parametrize("config", [kind(step=step) for kind in STEP_CONFIGS.values() for step in (1, 4)], ids=str)
def test_step_4_moves_data_by_tma_and_step_1_by_threads(config: StepConfig) -> None:
    """One CTA a tile, whatever the device; 128-bit copies; step 1 never lets the tensor core accumulate."""
    lowered = lower(SMALL, config, 8)
    assert lowered.launch.grid == 2
    assert lowered.launch.threads == config.threads == 128
    kinds = {type(parameter) for parameter in lowered.launch.parameters}
    assert kinds == ({TensorMapPlan} if config.step == 4 else {PointerPlan})
    assert ("ld_vec_global_v4" in lowered.source) == (config.step != 4)
    smem_bytes = 1024 + config.stage_bytes + config.epilogue_bytes
    assert lowered.launch.smem_bytes == smem_bytes


def test_compiled_step_uses_the_instructions_that_its_text_promises() -> None:
    """From the module itself: synchronous loads, MMAs on tensor memory, no spill."""
    kernel = compile_kernel(SMALL, Sm100StepConfig(step=3), 148)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    try:
        nvdisasm = find_nvdisasm(find_toolchain())
    except ToolchainError as error:
        pytest.skip(str(error))
    counts = instruction_counts(embedded_cubin(kernel.module), nvdisasm)
    families = {name.split(".")[0] for name in telling(counts)}
    assert {"UTCHMMA", "UTCBAR", "LDTM", "LDG", "STG"} <= families
    assert not {"UTMALDG", "LDL", "STL"} & families
    assert counts["LDG.E.128"] % 16 == 0  # eight vectors each of A and B for a block of K


def test_a_module_without_cubin_is_said_to_be_none() -> None:
    """Such as one of the invented devices."""
    with pytest.raises(ValueError, match="no cubin"):
        embedded_cubin(b"not a module\x7fELF" + bytes(100))


def test_only_the_published_problem_stands_beside_the_published_times() -> None:
    """Other sizes and GPUs are shown with a remark."""
    square = GemmProblem.parse("4096x4096x4096", dtype="fp16")
    assert as_published(square, "sm_100a")
    assert not as_published(square, "sm_90a")
    assert not as_published(SMALL, "sm_100a")


@pytest.mark.verify
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(checkers.available() is not None, reason="no Rust toolchain or no tirx-harness")
@pytest.mark.parametrize("rung", simple_rungs("sm_100a"), ids=lambda rung: rung.name)
def test_simple_blackwell_kernels_are_clean_and_exact(rung: object) -> None:
    """Through both checkers and the simulator."""
    config = getattr(rung, "config")  # noqa: B009
    report = check(config, Instance(label="whole", problem=SMALL, sm_count=2))
    assert report.passed, report
