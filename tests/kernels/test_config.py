"""Knobs, their derived geometry, and the rules that refuse them."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.arch import SM_90A, SM_100A
from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig, config_from_dict
from kernels.errors import ConfigError
from kernels.problem import GemmProblem
from kernels.resources import resources_of
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
     ({"raster": "z"}, "raster"), ({"share": "C"}, "share")],
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


@pytest.mark.parametrize(("shape", "name", "padded"), [("64x30522x768", "n", 30528), ("64x64x36", "k", 40)])
def test_problem_that_tma_cannot_address_is_refused_with_the_padding(shape: str, name: str, padded: int) -> None:
    """TMA needs 16-byte row strides, and the Blackwell template has no other path."""
    assert problem_violation(GemmProblem.parse(shape), SM_90A) is None
    reason = problem_violation(GemmProblem.parse(shape), SM_100A)
    assert reason is not None
    assert reason.startswith(f"{name} = ")
    assert f"pad {name} to {padded}" in reason


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
