"""Why a config is turned away, and that no measured winner is."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.devices import PROFILES, DeviceProfile, profile_named
from kernels.problem import GemmProblem
from kernels.rules import violation
from search_space.checks import plainest, rejection
from search_space.space import random_legal
from tests.search_space.known import WINNERS, Known, sm90

H200, B200 = profile_named("h200"), profile_named("b200")
SQUARE = GemmProblem(m=4096, n=4096, k=4096)
DECODE = GemmProblem(m=64, n=7168, k=4096)


@pytest.mark.parametrize("known", WINNERS, ids=lambda known: f"{known.problem} {known.config.blk_n}")
def test_measured_winner_is_not_rejected(known: Known) -> None:
    """A check that drops a winner costs more than all it saves. Its plainest form is asked, with the same tile."""
    asked = plainest(known.problem, known.config, H200)
    assert rejection(known.problem, asked, H200) is None
    tile = ("num_consumers", "blk_m", "blk_n", "blk_k", "pipe_depth", "cta_group")
    assert [getattr(asked, knob) for knob in tile] == [getattr(known.config, knob) for knob in tile]


def test_config_that_breaks_a_rule_is_rejected_with_the_rule() -> None:
    """Rules come first, with their own words."""
    config = sm90(2, "64x256x64", 6)
    assert rejection(SQUARE, config, H200) == violation(SQUARE, config, H200.sm_count)
    assert "shared memory" in str(rejection(SQUARE, config, H200))


def test_config_of_another_architecture_is_rejected() -> None:
    """A Blackwell config has no meaning on an H200."""
    assert rejection(SQUARE, Sm100GemmConfig(), H200) == "config for sm_100a, NVIDIA H200 runs sm_90a"


def test_profile_that_came_from_another_process_is_understood() -> None:
    """Profiles are sent between processes, so architectures are compared by name."""
    assert rejection(SQUARE, sm90(2, "64x256x64", 4), pickle.loads(pickle.dumps(H200))) is None


def test_operands_larger_than_memory_are_rejected_with_both_sizes() -> None:
    """An 80 GB card refuses what a 141 GB card takes."""
    big = GemmProblem(m=200_000, n=200_000, k=64)
    config = sm90(2, "64x256x64", 4)
    reason = rejection(big, config, profile_named("h100"))
    assert reason == f"A, B and D take {big.min_bytes} B, NVIDIA H100 80GB HBM3 has 80000000000 B"
    assert rejection(big, config, H200) is None


@pytest.mark.parametrize(
    ("problem", "config", "words"),
    [
        (DECODE, sm90(1, "64x64x64", 4), ("49152 B in flight", "0.75")),
        (SQUARE, sm90(2, "64x256x64", 2, cluster=2), ("49152 B in flight",)),
        (SQUARE, sm90(2, "64x256x128", 2, cluster=2), ("pipe_depth = 2", "98304 B", "at least 3")),
        (GemmProblem(m=72, n=1096, k=1032), sm90(3, "64x64x64", 6), ("M = 72 fills 128 of the 192 rows",)),
        (DECODE, sm90(1, "64x64x128", 6, cluster=2), ("M = 64 fills 64 of the 128 rows",)),
        (GemmProblem(m=4096, n=64, k=4096), sm90(2, "64x256x64", 4), ("N = 64 fills 64 of the 256 columns",)),
        (GemmProblem(m=64, n=2048, k=7168), sm90(1, "64x256x64", 5), ("8 CTAs for 132 SMs", "blk_n = 64")),
    ],
)
def test_hopeless_config_is_rejected_with_numbers(
    problem: GemmProblem, config: Sm90GemmConfig, words: tuple[str, ...]
) -> None:
    """Each was measured to lose, or wastes what the numbers say."""
    reason = rejection(problem, plainest(problem, config, H200), H200)
    assert reason is not None
    assert all(word in reason for word in words), reason


def test_nearly_empty_last_wave_is_rejected_with_the_idle_share() -> None:
    """136 tiles on 132 clusters run two waves for the price of one tile in each of four clusters."""
    problem = GemmProblem(m=17 * 128, n=8 * 256, k=4096)
    reason = rejection(problem, sm90(2, "64x256x64", 4), H200)
    assert reason == "136 tiles on 132 clusters take 2 waves: 48% of the grid has no tile"


def test_wasteful_last_wave_is_left_to_the_measurement() -> None:
    """216 tiles on 132 clusters: 18 % of two waves idle, no more than what other tiles lose elsewhere."""
    assert rejection(GemmProblem(m=1536, n=2304, k=4096), sm90(1, "64x256x64", 5), H200) is None


def test_shallow_ring_is_fine_where_it_holds_all_of_k() -> None:
    """With two k-blocks in all, two stages load everything at once."""
    short = GemmProblem(m=64, n=8192, k=128)
    config = plainest(short, sm90(1, "64x64x64", 2), H200)
    assert config.pipe_depth == 2
    assert rejection(short, config, H200) is None


def test_stages_that_never_fill_are_rejected_for_the_depth_that_holds_all() -> None:
    """K = 256 in blocks of 64 fills four stages; the fifth to eighth change nothing."""
    problem = GemmProblem(m=64, n=4096, k=256)
    deep = plainest(problem, sm90(1, "64x32x64", 4), H200)
    assert rejection(problem, deep, H200) is None
    reason = rejection(problem, replace(deep, pipe_depth=8), H200)
    assert reason == "pipe_depth = 8: a CTA loads 1 x 4 stages in all, so it runs like pipe_depth = 4"


def test_buffers_that_are_never_used_are_rejected() -> None:
    """One chunk a tile and one tile a CTA need one staging buffer and one accumulator slot."""
    one_chunk = replace(sm90(1, "64x64x128", 6), l2_group_size=1)
    assert rejection(DECODE, one_chunk, H200) is None
    assert "runs like epi_stages = 1" in str(rejection(DECODE, replace(one_chunk, epi_stages=2), H200))
    pair = Sm100GemmConfig(cta_group=1, num_consumers=1, blk_m=64, blk_n=64, l2_group_size=1)
    assert rejection(DECODE, pair, B200) is None
    assert "runs like acc_stages = 1" in str(rejection(DECODE, replace(pair, acc_stages=2), B200))


def test_order_of_tiles_that_changes_nothing_is_rejected_for_the_plain_one() -> None:
    """One row of tiles: only raster m with groups of 1 is asked; eight rows: no group above 8."""
    plain = replace(sm90(1, "64x64x128", 6), l2_group_size=1)
    for change in ({"l2_group_size": 8}, {"raster": "n"}, {"raster": "m-serpentine"}):
        reason = rejection(DECODE, replace(plain, **change), H200)
        assert reason is not None
        assert "same order as raster = m, l2_group_size = 1" in reason
    eight_rows = Sm100GemmConfig()
    assert rejection(SQUARE, eight_rows, B200) is None
    reason = rejection(SQUARE, replace(eight_rows, l2_group_size=32), B200)
    assert reason is not None
    assert "8 x 16 tiles in the same order as raster = m, l2_group_size = 8" in reason


def test_steps_of_the_ladder_are_asked_at_the_published_size() -> None:
    """Steps 7, 8 and 9 at 4096^3 on a B200."""
    for cta_group, consumers, depth in ((1, 1, 2), (2, 1, 4), (2, 2, 4)):
        config = Sm100GemmConfig(cta_group=cta_group, num_consumers=consumers, pipe_depth=depth)
        assert rejection(SQUARE, config, B200) is None


PROBLEMS = st.builds(
    GemmProblem,
    m=st.one_of(st.integers(1, 300), st.integers(1, 20_000)),
    n=st.one_of(st.integers(1, 64), st.integers(1, 3000)).map(lambda x: 8 * x),
    k=st.one_of(st.integers(1, 64), st.integers(1, 2000)).map(lambda x: 8 * x),
)


@settings(max_examples=100, deadline=None)
@given(PROBLEMS, st.sampled_from(PROFILES), st.integers(0, 2**32))
def test_plainest_config_is_legal_stable_and_rejected_only_for_being_hopeless(
    problem: GemmProblem, profile: DeviceProfile, seed: int
) -> None:
    """A config that repeats another is never the reason that both are lost."""
    config = random_legal(problem, profile, random.Random(seed))
    plain = plainest(problem, config, profile)
    assert violation(problem, plain, profile.sm_count) is None
    assert plainest(problem, plain, profile) == plain
    reason = rejection(problem, plain, profile)
    assert reason is None or ("runs like" not in reason and "same order" not in reason)
    if plain != config:
        assert rejection(problem, config, profile) is not None
