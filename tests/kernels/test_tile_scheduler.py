"""The order of tiles, run on the CPU: what the persistent loop of a kernel would visit."""
# mypy: disable-error-code="valid-type, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm.backend.cuda.lang import ClusterPersistentScheduler2D
from tvm.script import tirx as T

from kernels.config import Sm100GemmConfig
from kernels.problem import GemmProblem
from kernels.tile_scheduler import TileWalk
from kernels.tracing import light_frames

ROWS, COLS = Sm100GemmConfig().cluster_tile
GRIDS = [(5, 3), (3, 5), (4, 2)]


class _TvmSerpentine:
    def __init__(self, tiles_m: int, tiles_n: int, group: int, clusters: int) -> None:
        self.scheduler = ClusterPersistentScheduler2D(
            "tiles",
            num_m_tiles=tiles_m,
            num_n_tiles=tiles_n,
            num_clusters=clusters,
            l2_group_size=group,
            serpentine=True,
        )
        self.init, self.valid, self.next_tile = self.scheduler.init, self.scheduler.valid, self.scheduler.next_tile
        self.row, self.col = self.scheduler.m_idx, self.scheduler.n_idx


def _visited(make_tiles: Any, clusters: int, steps: int) -> list[list[tuple[int, int]]]:
    """Tiles of each cluster in the order of their visit."""

    with light_frames():
        walk = _traced_walk(make_tiles, clusters, steps)
    out = tvm.runtime.tensor(np.full((clusters, steps, 2), -1, "int32"))
    tvm.compile(tvm.IRModule({"main": walk}), target="llvm")(out)
    return [[(int(row), int(col)) for row, col in cluster if row >= 0] for cluster in out.numpy()]


def _traced_walk(make_tiles: Any, clusters: int, steps: int) -> Any:
    @T.prim_func
    def walk(out: T.Buffer((clusters, steps, 2), "int32")):
        for cluster in range(clusters):
            tiles = T.meta_var(make_tiles())
            step = T.local_scalar("int32")
            step = 0
            tiles.init(cluster)
            while tiles.valid():
                out[cluster, step, 0] = tiles.row
                out[cluster, step, 1] = tiles.col
                step = step + 1
                tiles.next_tile()

    return walk


def _walk(tiles_m: int, tiles_n: int, clusters: int, **knobs: Any) -> list[list[tuple[int, int]]]:
    problem = GemmProblem(m=tiles_m * ROWS - 1, n=tiles_n * COLS - 8, k=8)
    config = Sm100GemmConfig(**knobs)
    return _visited(lambda: TileWalk(problem, config, clusters), clusters, tiles_m * tiles_n)


@pytest.mark.parametrize("raster", ["m", "n", "m-serpentine", "n-serpentine"])
@pytest.mark.parametrize("group", [2, 16])
def test_every_tile_is_visited_once_in_every_raster_and_group_size(raster: str, group: int) -> None:
    """A tile that no cluster computes would stay unwritten in D."""
    for tiles_m, tiles_n in GRIDS:
        visits = _walk(tiles_m, tiles_n, clusters=1, raster=raster, l2_group_size=group)[0]
        assert sorted(visits) == [(row, col) for row in range(tiles_m) for col in range(tiles_n)], (tiles_m, tiles_n)


def test_clusters_share_the_tiles_without_overlap() -> None:
    """Clusters take every n-th tile of one order."""
    one = _walk(5, 3, clusters=1, raster="m-serpentine", l2_group_size=2)[0]
    four = _walk(5, 3, clusters=4, raster="m-serpentine", l2_group_size=2)
    assert [four[step % 4][step // 4] for step in range(15)] == one


def test_groups_of_rows_and_groups_of_columns_are_mirror_images() -> None:
    """Raster n on a grid is raster m on the transposed grid."""
    along_m = _walk(5, 3, clusters=1, raster="m", l2_group_size=2)[0]
    along_n = _walk(3, 5, clusters=1, raster="n", l2_group_size=2)[0]
    assert along_m[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert along_n == [(col, row) for row, col in along_m]


def test_a_serpentine_turns_back_where_the_group_before_it_ended() -> None:
    """The second group starts in the column that the first one left, so its B tile is still in L2."""
    order = _walk(4, 3, clusters=1, raster="m-serpentine", l2_group_size=2)[0]
    assert order[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert order[6:] == [(2, 2), (3, 2), (2, 1), (3, 1), (2, 0), (3, 0)]


def test_the_serpentine_of_tvm_loses_tiles_which_is_why_ours_exists() -> None:
    """Delete `SerpentineScheduler` when this fails: TVM then visits the strip below the last whole block."""
    visits = _visited(lambda: _TvmSerpentine(5, 3, 2, 1), clusters=1, steps=15)[0]
    assert visits.count((0, 0)) == 3
    assert (4, 0) not in visits
