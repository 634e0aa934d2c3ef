"""The order in which persistent clusters walk the tiles of D, for both templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import ClusterPersistentScheduler2D
from tvm.script import tirx as T

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem


class SerpentineScheduler(ClusterPersistentScheduler2D):  # type: ignore[misc]
    """Group-major order in which every other group runs backwards, so a group starts on the tiles still in L2.

    TVM's own serpentine loses tiles when neither side is a multiple of the group size: the strip below the last whole
    block has no branch, and its clusters recompute tile (0, 0) instead (0.27.0.post1, read in `_update_serpentine`).
    """

    def _update_serpentine(self, tile_linear: Any, set_tile_coords: Any) -> None:
        group_size, last_col = self._l2_group_size, self._N_TILE_COLS - 1

        def set_turned(tile_row: Any, tile_col: Any) -> None:
            forward = tile_row // group_size % 2 == 0
            set_tile_coords(tile_row, T.Select(forward, tile_col, last_col - tile_col))

        # where rows of tiles are counted when the kernel runs, a single group is the first, which runs forward
        one_group = isinstance(self._M_TILE_ROWS, int) and group_size >= self._M_TILE_ROWS
        self._update_group_major(tile_linear, set_tile_coords if one_group else set_turned)


class TileWalk:
    """A scheduler with its rows and columns put back in their place: `row` and `col` count cluster tiles of D.

    Call only while a kernel is traced.
    """

    def __init__(
        self,
        problem: GemmProblem,
        config: GemmConfig,
        clusters: int,
        *,
        rows: Any = None,
        kind: Callable[..., SerpentineScheduler] = SerpentineScheduler,
    ) -> None:
        """rows: of D, where they are known only when the kernel is called, an int32; kind: makes the scheduler, where
        its tiles come from elsewhere than from counting on.
        """
        tiles_m, tiles_n = config.cluster_tiles(problem)
        if rows is not None:
            tile_rows = config.cluster_tile[0]
            tiles_m = T.truncdiv(rows + (tile_rows - 1), tile_rows)
        grouped, walked = (tiles_n, tiles_m) if config.along_n else (tiles_m, tiles_n)
        scheduler = kind(
            "tiles",
            num_m_tiles=grouped,
            num_n_tiles=walked,
            num_clusters=clusters,
            # A group larger than the grid orders tiles like one as large as the grid: one source for all of them.
            l2_group_size=min(config.l2_group_size, grouped) if isinstance(grouped, int) else config.l2_group_size,
            serpentine=config.serpentine,
        )
        self.scheduler = scheduler
        self.init = scheduler.init
        self.valid = scheduler.valid
        self.next_tile = scheduler.next_tile
        first, second = scheduler.m_idx, scheduler.n_idx
        self.row, self.col = (second, first) if config.along_n else (first, second)
