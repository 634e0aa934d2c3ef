"""Stream-K: every block of K of every tile is computed once, its parts meet, and the kernel does what the plan says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.compile import compile_cubin, ptxas_facts
from kernels.config import Sm90GemmConfig
from kernels.cuda_source import Statement, read_kernel
from kernels.cuda_trace import Walk, _Thread
from kernels.devices import profile_named
from kernels.errors import ConfigError
from kernels.launch import WorkspacePlan
from kernels.lowering import lower
from kernels.problem import MAX_EXTENT, GemmProblem
from kernels.rules import violation
from kernels.stream_k import Piece, StreamK, Workspace, stream_k_of, workspace_of
from kernels.stress import stress_builds
from kernels.structure import _parameters
from kernels.toolchain import find_toolchain
from search_space.explaining import describe

pytest.importorskip("tvm")


@st.composite
def splits(draw: st.DrawFn) -> StreamK:
    """Any number of tiles and blocks, shared by no more clusters than there are blocks."""
    tiles, k_blocks = draw(st.integers(1, 400)), draw(st.integers(1, 60))
    return StreamK(tiles=tiles, k_blocks=k_blocks, clusters=draw(st.integers(1, min(148, tiles * k_blocks))))


def pieces_of(split: StreamK) -> list[tuple[int, Piece]]:
    return [(cluster, piece) for cluster in range(split.clusters) for piece in split.pieces(cluster)]


# ---------------------------------------------------------------------- the plan


@given(splits())
@settings(max_examples=150, deadline=None)
def test_every_block_of_every_tile_is_computed_exactly_once(split: StreamK) -> None:
    """Pieces of all clusters tile the blocks of all tiles."""
    blocks = Counter(
        (piece.tile, block) for _, piece in pieces_of(split) for block in range(piece.first, piece.first + piece.count)
    )
    assert blocks == Counter((tile, block) for tile in range(split.tiles) for block in range(split.k_blocks))


@given(splits())
@settings(max_examples=150, deadline=None)
def test_parts_of_a_tile_are_its_pieces_in_the_order_of_k(split: StreamK) -> None:
    """What the last to arrive adds up is what the others have written, each at a place of its own."""
    found: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
    for cluster, piece in pieces_of(split):
        found[piece.tile].append((cluster, piece))
    places = set()
    for tile, parts in found.items():
        parts.sort(key=lambda part: part[1].first)
        if tile >= split.shared_tiles:
            assert len(parts) == 1
            continue
        assert tuple(cluster for cluster, _ in parts) == split.parts(tile)
        assert len(parts) <= split.most_parts
        assert len(parts) <= 2 or not split.at_most_two_parts
        for cluster, piece in parts if len(parts) > 1 else ():
            place = split.slot(cluster, begins_tile=piece.first == 0)
            assert 0 <= place < split.slots
            assert place not in places
            places.add(place)
    assert (split.most_parts == 1) == (not places)


@given(splits())
@settings(max_examples=150, deadline=None)
def test_spans_are_equal_to_one_block_and_no_cluster_is_left_out(split: StreamK) -> None:
    """The point of it: the busiest cluster computes one block more than the idlest, whatever the tiles."""
    counts = [sum(piece.count for piece in split.pieces(cluster)) for cluster in range(split.clusters)]
    assert max(counts) == split.stages
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1
    assert split.whole_waves * split.clusters + split.shared_tiles == split.tiles


@given(splits())
@settings(max_examples=100, deadline=None)
def test_owner_of_a_unit_is_the_cluster_whose_span_holds_it(split: StreamK) -> None:
    """The kernel finds the parts of a tile by this."""
    for cluster in range(split.clusters):
        first, end = split.first_unit(cluster), split.first_unit(cluster + 1)
        assert split.owner(first) == split.owner(end - 1) == cluster
    assert split.first_unit(split.clusters) == split.units


def test_160_tiles_for_132_clusters_take_1_21_tiles_each_in_place_of_two() -> None:
    """The last full wave is shared out as well, so that no part is much shorter than a tile."""
    split = StreamK(tiles=160, k_blocks=64, clusters=132)
    assert (split.shared_tiles, split.whole_waves, split.share, split.stages) == (160, 0, (77, 76), 78)
    assert (split.at_most_two_parts, split.most_parts) == (True, 2)
    many = StreamK(tiles=8, k_blocks=128, clusters=132)
    assert (many.shared_tiles, many.share, many.most_parts) == (8, (7, 100), 20)
    whole = StreamK(tiles=264, k_blocks=64, clusters=132)
    assert (whole.shared_tiles, whole.most_parts) == (132, 1)


def test_workspace_holds_a_counter_for_each_consumers_tile_and_two_parts_for_each_cluster() -> None:
    """Counters first, parts aligned behind them."""
    split = StreamK(tiles=160, k_blocks=64, clusters=132)
    space = Workspace(split=split, ctas=1, consumers=2, part_bytes=4 * 64 * 256)
    assert space.counters_bytes == 160 * 2 * 4
    assert space.size_bytes == space.counters_bytes + 2 * 132 * 2 * 65536


# ---------------------------------------------------------------------- what is legal


def test_more_blocks_than_32_bits_count_are_refused() -> None:
    """Units are int32 in the kernel."""
    config = Sm90GemmConfig(scheduler="stream_k", blk_k=32)
    problem = GemmProblem(m=2048, n=2560, k=MAX_EXTENT // 64)
    reason = violation(problem, config, 132)
    assert reason is not None
    assert "160 shared tiles of 1048576 blocks of K" not in reason
    assert "fit 32 bits" in (violation(GemmProblem(m=2048, n=2560, k=2**30), config, 132) or "")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"schedule": "pingpong"}, "take schedule = cooperative"),
        ({"split_k": 2}, "both cut K"),
        ({"load": "cp_async", "num_consumers": 1}, "no GPU has run both"),
        ({"blk_m": 128, "blk_n": 192, "pipe_depth": 3}, "need 234 registers a thread, 2 consumers leave 232"),
    ],
)
def test_stream_k_with_what_it_does_not_go_with_is_refused(knobs: dict[str, Any], message: str) -> None:
    """Each reason says what to take."""
    config = Sm90GemmConfig(scheduler="stream_k", **{"blk_n": 64, **knobs})
    assert message in (violation(GemmProblem(m=2048, n=2560, k=4096), config, 132) or "")


def test_stream_k_with_dynamic_m_is_refused() -> None:
    """The tiles are shared out when the kernel is built."""
    with pytest.raises(ConfigError, match="M is fixed"):
        lower(GemmProblem(m=2048, n=2560, k=512), Sm90GemmConfig(scheduler="stream_k"), 132, dynamic_m=True)


def test_unknown_scheduler_is_refused() -> None:
    """Cluster launch control is Blackwell's."""
    with pytest.raises(ConfigError, match="'static' or 'stream_k'"):
        Sm90GemmConfig(scheduler="clc")


def test_stress_builds_leave_tiles_to_share() -> None:
    """A multiple of the clusters would have no parts to meet."""
    problem, config = GemmProblem(m=2048, n=2560, k=4096), Sm90GemmConfig(scheduler="stream_k")
    for build in stress_builds(problem, config, 132)[1:]:
        split = stream_k_of(build.problem, config, 132)
        assert split.k_blocks == 1 or split.most_parts == 2


def test_configs_that_a_gpu_has_run_are_still_legal() -> None:
    """20 of them, with two parts of a tile and with more."""
    rows = json.loads(Path("results/verify/stream_k.json").read_text())["rows"]
    assert len(rows) == 20
    two = 0
    for row in rows:
        problem = GemmProblem.parse(row["shape"], dtype=row["dtype"])
        config = Sm90GemmConfig.from_dict(row["config"])
        assert violation(problem, config, 132) is None
        two += stream_k_of(problem, config, 132).at_most_two_parts
    assert 0 < two < 20


# ---------------------------------------------------------------------- the kernel


class Fetcher(_Thread):
    """The producer's thread, which notes where its loads begin in A and B."""

    loads: list[tuple[str, int, int]]

    def call(self, statement: Statement) -> None:
        helper = statement.helper
        if helper is not None and helper.kind == "tma_load":
            named = dict(zip(helper.parameters, statement.arguments, strict=True))
            col, row = (named[name] for name in sorted(name for name in named if name.startswith("coords")))
            tensor_map, *at = (self.kernel.scope.expression(text).evaluate(self) for text in (named["tmap"], col, row))
            self.loads.append((str(tensor_map), *at))
        super().call(statement)


@pytest.mark.parametrize(
    ("shape", "clusters", "knobs"),
    [
        ("700x400x520", 8, {"blk_n": 96, "epi_n": 32, "num_consumers": 1}),  # 55 tiles: whole waves and shared ones
        ("200x100x2000", 13, {"blk_n": 64, "num_consumers": 1}),  # 8 tiles, fewer than clusters
        ("900x500x328", 6, {"blk_n": 128, "num_consumers": 2, "cta_group": 2, "raster": "n-serpentine"}),
    ],
)
def test_kernel_fetches_every_block_of_every_tile_once(shape: str, clusters: int, knobs: dict[str, Any]) -> None:
    """The generated code is followed for each cluster: its loads are those of the plan's pieces, in order."""
    problem = GemmProblem.parse(shape)
    config = Sm90GemmConfig.from_dict({"scheduler": "stream_k", "epi_stages": 1, "pipe_depth": 3, **knobs})
    lowered = lower(problem, config, clusters * config.cluster_size)
    kernel = read_kernel(lowered.source, lowered.launch.symbol)
    split = stream_k_of(problem, config, clusters * config.cluster_size)
    assert split.clusters == clusters
    producer = 128 * config.num_consumers
    fetched: Counter[tuple[int, int, int]] = Counter()
    for cluster in range(clusters):
        pieces = split.pieces(cluster)
        walk = Walk(tiles=len(pieces), k_blocks=split.k_blocks, lap=10**6, kept=10**6, pieces=True, cluster=cluster)
        thread = Fetcher(kernel, producer, 0, config.cluster_size, walk, _parameters(lowered, problem, kernel))
        thread.loads = []
        thread.run(kernel.body)
        of_a = [load for load in thread.loads if load[0].startswith("a")]
        assert [col // config.blk_k for _, col, _ in of_a] == [
            block for piece in pieces for block in range(piece.first, piece.first + piece.count)
        ]
        of_b = [load for load in thread.loads if load[0].startswith("b")]
        for (_, col, row), (_, b_col, b_row) in zip(of_a, of_b, strict=True):
            assert col == b_col
            fetched[row, b_row, col] += 1
    tiles_m, tiles_n = config.cluster_tiles(problem)
    rows, cols = config.cluster_tile
    assert fetched == Counter(
        (m * rows, n * cols, k * config.blk_k)
        for m in range(tiles_m)
        for n in range(tiles_n)
        for k in range(split.k_blocks)
    )


def test_explanation_says_how_tiles_are_shared() -> None:
    """160 tiles for 132 clusters: 78 blocks of K each, where whole tiles would be 128."""
    problem, config = GemmProblem(m=2048, n=2560, k=4096), Sm90GemmConfig(scheduler="stream_k")
    tiles = describe(problem, config, profile_named("h200"))["tiles"]
    assert (tiles["shared_tiles"], tiles["k_blocks_of_the_busiest_cluster"]) == (160, 78)
    assert (tiles["parts_of_a_tile_at_most"], tiles["idle_in_last_wave"]) == (2, 0.0)


def test_launch_plan_asks_for_the_workspace() -> None:
    """The last parameter; its size is that of the plan, and static kernels have none."""
    problem, config = GemmProblem(m=2048, n=2560, k=512), Sm90GemmConfig(scheduler="stream_k")
    launch = lower(problem, config, 132).launch
    assert launch.parameters[-1] == WorkspacePlan(size_bytes=workspace_of(problem, config, 132).size_bytes)
    assert launch.workspace_bytes == 160 * 2 * 4 + 2 * 132 * 2 * 4 * 64 * 256
    assert lower(problem, Sm90GemmConfig(), 132).launch.workspace_bytes == 0


CONFIGS = (
    ("2048x2560x1024", {}),
    ("2048x2560x1024", {"epi_stages": 1}),
    ("2048x2560x4096", {"cta_group": 2}),
    ("2000x3000x328", {"num_consumers": 1, "blk_m": 128, "blk_n": 128, "pipe_depth": 6, "raster": "n-serpentine"}),
    ("8200x1040x128", {"num_consumers": 3, "blk_n": 128, "pipe_depth": 3}),
    ("1500x2047x776", {"blk_n": 128, "pipe_depth": 5, "epi_stages": 1}),
    ("512x1024x8192", {}),
    ("128x256x7168", {"num_consumers": 1, "blk_n": 64, "pipe_depth": 8}),
    ("640x768x2048", {"num_consumers": 1, "blk_m": 192, "blk_n": 96, "epi_n": 32, "pipe_depth": 5}),
    ("16x7168x4096", {"swap_ab": True, "num_consumers": 1, "blk_n": 16, "blk_k": 128, "epi_n": 8, "epi_stages": 1}),
    ("2304x2304x520", {"cta_group": 2, "share": "A", "blk_n": 192, "pipe_depth": 4}),
    ("7000x2560x512", {"blk_m": 128, "blk_n": 128, "pipe_depth": 4, "epi_stages": 1}),
    ("2000x2000x1000", {"num_consumers": 1, "blk_m": 192, "blk_n": 128, "pipe_depth": 4, "epi_stages": 1}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "knobs"), CONFIGS)
def test_stream_k_compiles_without_spills(shape: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    """A config that spills is dropped before it is measured: reads of all vectors of a part at once spilled 140 B."""
    config = Sm90GemmConfig.from_dict({"scheduler": "stream_k", **knobs})
    source = lower(GemmProblem.parse(shape), config, 132).source
    _, log = compile_cubin(source, "sm_90a", find_toolchain(), tmp_path)
    facts = ptxas_facts(log)
    assert (facts.spill_bytes, facts.warnings) == (0, ())
