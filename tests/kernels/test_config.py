"""Knobs, their derived geometry, and the rules that refuse them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from kernels.arch import SM_90A, SM_100A, Arch
from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig, config_from_dict
from kernels.errors import ConfigError
from kernels.problem import GemmProblem
from kernels.resources import resources_of, sm90_entry_registers, sm90_registers
from kernels.rules import config_violation, problem_violation, violation

SQUARE = GemmProblem.parse("4096x4096x4096")


@pytest.mark.parametrize(
    "config", [Sm90GemmConfig(cta_group=2, share="A"), Sm100GemmConfig(acc_stages=2, num_consumers=1)]
)
def test_config_reads_back_from_its_dict(config: GemmConfig) -> None:
    """Stored configs become the same objects again."""
    assert config_from_dict(config.arch.name, config.to_dict()) == config


def test_unknown_knob_is_refused_with_the_known_ones() -> None:
    """A typing error fails here and not in the kernel."""
    with pytest.raises(ConfigError, match=r"unknown knob 'stages' for sm_90a: knobs are pipe_depth") as caught:
        config_from_dict("sm_90a", {"stages": 4})
    assert caught.value.knob == "stages"


@pytest.mark.parametrize(
    ("knobs", "knob"),
    [({"pipe_depth": 0}, "pipe_depth"), ({"blk_k": 64.0}, "blk_k"), ({"cta_group": True}, "cta_group"),
     ({"raster": "z"}, "raster"), ({"share": "C"}, "share"), ({"schedule": "solo"}, "schedule"),
     ({"swap_ab": 1}, "swap_ab"), ({"split_k": 0}, "split_k")],
)  # fmt: skip
def test_knob_of_the_wrong_kind_is_refused_by_name(knobs: dict[str, Any], knob: str) -> None:
    """Bools and floats are no integers here; words must be known."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict("sm_90a", knobs)
    assert caught.value.knob == knob


def test_step9_uses_the_shared_memory_and_tmem_of_the_published_kernel() -> None:
    """512 x 256 cluster tile, 230400 bytes, all 512 columns."""
    step9 = Sm100GemmConfig(pipe_depth=4, cta_group=2, num_consumers=2)
    assert step9.cluster_tile == (512, 256)
    needs = resources_of(step9)
    assert (needs.smem_bytes, needs.tmem_columns, needs.threads) == (230400, 512, 384)
    assert config_violation(step9) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Sm90GemmConfig(pipe_depth=5), ("279552 B", "232448")),
        (Sm90GemmConfig(pipe_depth=1), ("pipe_depth = 1", "at least 2")),
        (Sm90GemmConfig(blk_m=96), ("blk_m = 96", "64, 128 or 192")),
        (Sm90GemmConfig(blk_n=264, epi_n=88), ("blk_n = 264",)),
        (Sm90GemmConfig(epi_n=48), ("epi_n = 48", "blk_n = 256")),
        (Sm90GemmConfig(num_consumers=3, blk_n=208, epi_n=16, pipe_depth=2), ("n = 208", "130 registers", "128")),
        (Sm90GemmConfig(blk_m=128, blk_n=208, epi_n=16, pipe_depth=2), ("128x208", "234 registers", "232")),
        (Sm90GemmConfig(cta_group=2, blk_n=24, epi_n=8), ("blk_n = 24",)),
        (Sm90GemmConfig(share="A"), ("share = A", "cta_group = 1")),
        (Sm90GemmConfig(split_k=17), ("split_k = 17",)),
        (Sm90GemmConfig(split_k=2, cta_group=2, blk_n=64), ("split_k = 2", "cta_group = 1")),
        (Sm90GemmConfig(split_k=2, pipe_depth=4), ("98304 B epilogue", "232448")),
        (Sm90GemmConfig(swap_ab=True, blk_n=12, epi_n=4, epi_stages=1), ("blk_n = 12", "multiples of 8")),
        (Sm90GemmConfig(swap_ab=True, epi_n=8), ("epi_stages = 2", "must be 1")),
        (Sm90GemmConfig(swap_ab=True, epi_n=16, epi_stages=1), ("epi_n = 16", "must be 8")),
        (Sm90GemmConfig(schedule="pingpong", num_consumers=1), ("schedule = pingpong", "num_consumers = 1")),
        (Sm100GemmConfig(acc_stages=2), ("1024 tensor-memory columns", "512")),
        (Sm100GemmConfig(blk_n=144), ("cta_group * blk_n = 288", "256")),
        (Sm100GemmConfig(blk_m=64), ("blk_m = 64", "cta_group 2")),
        (Sm100GemmConfig(pipe_depth=5), ("279552 B",)),
        (Sm100GemmConfig(num_consumers=3), ("num_consumers = 3",)),
    ],
)  # fmt: skip
def test_config_beyond_the_hardware_is_refused_with_numbers(config: GemmConfig, words: tuple[str, ...]) -> None:
    """A reason names the knob, what it needs and what there is."""
    reason = config_violation(config)
    assert reason is not None
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("arch", "shape", "name", "padded"),
    [(SM_100A, "64x30522x768", "n", 30528), (SM_100A, "64x64x36", "k", 40)],
)
def test_problem_that_tma_cannot_address_is_refused_with_the_padding(
    arch: Arch, shape: str, name: str, padded: int
) -> None:
    """TMA needs 16-byte row strides."""
    reason = problem_violation(GemmProblem.parse(shape), arch)
    assert reason is not None
    assert reason.startswith(f"{name} = ")
    assert f"pad {name} to {padded}" in reason


def test_hopper_serves_any_n_by_stores_without_tma() -> None:
    """A TMA store would write up to 7 elements past the end of such a row."""
    problem = GemmProblem.parse("64x30522x768")
    assert problem_violation(problem, SM_90A) is None
    assert violation(problem, Sm90GemmConfig(), 132) is None
    assert violation(problem, Sm90GemmConfig(swap_ab=True, epi_n=8, epi_stages=1), 132) is None


def test_hopper_serves_any_k_by_loads_without_tma() -> None:
    """With a rule for each thing that cp_async has not."""
    problem, config = GemmProblem.parse("64x64x35"), Sm90GemmConfig(load="cp_async", num_consumers=1, pipe_depth=3)
    assert problem_violation(problem, SM_90A) is None
    assert "load = cp_async takes any" in (violation(problem, replace(config, load="tma"), 132) or "")
    assert violation(problem, config, 132) is None
    assert "only TMA multicasts" in (violation(problem, replace(config, cta_group=2), 132) or "")
    assert "take blk_k = 64 or 128" in (violation(problem, replace(config, blk_k=32), 132) or "")
    assert config.stage_bytes == 2 * 64 * (64 + 256) + 16 * (64 + 256)


def test_each_part_of_k_needs_a_block() -> None:
    """K = 128 has two blocks of 64."""
    config = Sm90GemmConfig(split_k=4, blk_n=64, num_consumers=1)
    assert "K = 128 has 2 block(s) of 64" in (violation(GemmProblem.parse("64x64x128"), config, 132) or "")
    assert violation(GemmProblem.parse("64x64x256"), config, 132) is None


@pytest.mark.parametrize(("size", "clusters"), [(1, 132), (2, 66), (4, 28), (8, 14), (16, 7)])
def test_clusters_that_run_at_once_leave_room_for_uneven_gpcs(size: int, clusters: int) -> None:
    """8 clusters of 16 and 16 of 8 did not fit an H200 at once."""
    assert Sm90GemmConfig(split_k=size).resident_clusters(132) == clusters


def test_swapped_config_counts_rows_of_both_operands_in_their_own_names() -> None:
    """blk_m counts rows of B then, and the tile of D is transposed."""
    config = Sm90GemmConfig(swap_ab=True, num_consumers=2, blk_m=128, blk_n=24)
    assert (config.cta_rows, config.cta_cols, config.cluster_tile) == (24, 256, (24, 256))
    assert config.staging_bytes == config.exchange_bytes == 0


def test_cluster_of_two_needs_two_sms() -> None:
    """The same config is fine on a larger device."""
    config = Sm90GemmConfig(cta_group=2)
    assert violation(SQUARE, config, 132) is None
    assert "needs 2 SMs" in (violation(SQUARE, config, 1) or "")


def test_clusters_never_exceed_tiles_or_sms() -> None:
    """Persistent: one CTA an SM at most, and none without a tile."""
    config = Sm90GemmConfig(cta_group=2)
    assert config.clusters(SQUARE, 132) == 66
    assert config.clusters(GemmProblem.parse("64x256x64"), 132) == 1


@pytest.mark.parametrize("load", ["tma", "cp_async"])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_registers_that_warpgroups_are_granted_are_there(consumers: int, load: str) -> None:
    """setmaxnreg waits for registers: 96 + 2 * 208 of 3 * 168 hung at every launch (H200)."""
    config = Sm90GemmConfig(num_consumers=consumers, load=load)
    producer, consumer = sm90_registers(config)
    assert producer % 8 == consumer % 8 == 0
    assert producer + consumers * consumer <= (consumers + 1) * sm90_entry_registers(config)


@pytest.mark.parametrize("config", [Sm90GemmConfig(), Sm100GemmConfig()])
def test_config_with_another_choice_equals_one_that_was_made_with_it(config: GemmConfig) -> None:
    """Equal, with the same hash and key, and the first one stays as it is."""
    made = config.with_choices({"pipe_depth": 2, "raster": "n"})
    whole = replace(config, pipe_depth=2, raster="n")
    assert (made, hash(made), made.key) == (whole, hash(whole), whole.key)
    assert config == type(config)()
    assert replace(made, pipe_depth=3).raster == "n"
    assert pickle.loads(pickle.dumps(made)) == made
