"""Orders of tiles, held against a walk written out tile by tile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.config import Rasters, Sm90GemmConfig, Sm100GemmConfig
from kernels.problem import GemmProblem
from search_space.space import choices
from search_space.walk import epilogue_chunks, loaded_rows, plain_order, plain_orders, walk_of

GROUPS = (1, 2, 4, 8, 16, 32)


def written_out(tiles_m: int, tiles_n: int, raster: str, group: int) -> tuple[tuple[int, int], ...]:
    """Tiles in the order that clusters take them: groups of lines, the line fastest, every other group backwards."""
    along_n = raster.startswith("n")
    lines, across = (tiles_n, tiles_m) if along_n else (tiles_m, tiles_n)
    walk = []
    for number, first in enumerate(range(0, lines, group)):
        steps = range(across)
        for step in reversed(steps) if raster.endswith("serpentine") and number % 2 else steps:
            walk += [(line, step) for line in range(first, min(lines, first + group))]
    return tuple((step, line) if along_n else (line, step) for line, step in walk)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 35), st.integers(1, 35))
def test_two_settings_have_one_plain_order_exactly_when_they_walk_alike(tiles_m: int, tiles_n: int) -> None:
    """No distinct order is lost, no repeated one is kept, and the plain setting is one of those that walk so."""
    plain_of: dict[tuple[tuple[int, int], ...], tuple[str, int]] = {}
    for raster in Rasters:
        for group in GROUPS:
            walk = written_out(tiles_m, tiles_n, raster, group)
            plain = plain_order("sm_90a", tiles_m, tiles_n, raster, group)
            assert plain_of.setdefault(walk, plain) == plain, (tiles_m, tiles_n, raster, group)
            assert written_out(tiles_m, tiles_n, *plain) == walk
    assert len(set(plain_of.values())) == len(plain_of)
    assert set(plain_orders("sm_90a", tiles_m, tiles_n)) == set(plain_of.values())


@pytest.mark.parametrize(("tiles_m", "kept"), [(8, 8), (9, 16), (31, 32), (3, 4)])
def test_group_that_covers_all_rows_becomes_the_smallest_that_does(tiles_m: int, kept: int) -> None:
    """16 and 32 order 8 rows of tiles as 8 does."""
    assert [plain_order("sm_100a", tiles_m, 50, "m", group) for group in GROUPS if group >= kept] == [
        ("m", kept) for group in GROUPS if group >= kept
    ]
    assert plain_order("sm_100a", tiles_m, 50, "m", kept // 2) == ("m", kept // 2)


def test_single_row_or_column_of_tiles_has_one_order_and_it_is_a_choice() -> None:
    """Something always stays askable."""
    assert plain_orders("sm_90a", 1, 112) == plain_orders("sm_90a", 112, 1) == (("m", 1),)
    assert 1 in choices("sm_90a")["l2_group_size"]


def test_waves_count_the_tiles_of_the_busiest_cluster() -> None:
    """4096^3 with 256 x 256 cluster tiles: 256 tiles on 66 clusters take 4 waves."""
    problem = GemmProblem(m=4096, n=4096, k=4096)
    walk = walk_of(problem, Sm90GemmConfig(cta_group=2), 132)
    assert (walk.tiles, walk.clusters, walk.waves, walk.k_blocks) == (256, 66, 4, 64)
    assert walk.wave_efficiency == pytest.approx(256 / 264)


def test_short_matrix_is_loaded_with_a_short_box_unless_its_rows_are_multicast() -> None:
    """M = 1 loads one row of A; a cluster that shares A loads all of them."""
    problem = GemmProblem(m=1, n=4096, k=4096)
    tile = Sm90GemmConfig(num_consumers=1, blk_m=64, blk_n=64)
    assert loaded_rows(problem, tile) == (1, 64)
    assert loaded_rows(problem, Sm90GemmConfig(swap_ab=True, num_consumers=1, blk_n=8)) == (1, 64)
    assert loaded_rows(problem, Sm90GemmConfig(num_consumers=1, blk_n=64, cta_group=2, share="A")) == (64, 64)
    assert loaded_rows(problem, Sm100GemmConfig()) == (256, 128)


def test_epilogue_chunks_cover_the_accumulator_of_one_consumer() -> None:
    """64-row slices on Hopper, all columns of the pair on Blackwell."""
    assert epilogue_chunks(Sm90GemmConfig(blk_m=128, blk_n=192, epi_n=64)) == 6
    assert epilogue_chunks(Sm100GemmConfig(cta_group=2, blk_n=128, epi_n=64)) == 4
