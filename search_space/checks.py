"""Why a config is not worth a compile for a problem: it cannot run, it repeats another config, or it is hopeless.

There are three kinds of reason. `kernels.rules` says what cannot run. A config that does the same work in the same
order as a plainer one is turned away in favour of that one, which always stays available. And a few configs are legal
but were measured to lose by a quarter or more for a cause that the numbers show; everything less clear is left to the
measurement, because a filter that drops a winner cannot be seen in any result.

Measured: H200, ratio to the vendor library unless it says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.devices import DeviceProfile
from kernels.problem import GemmProblem
from kernels.rules import violation
from search_space.space import choices, loads_plainly
from search_space.walk import Walk, epilogue_chunks, plain_order, stages_by_threads, walk_of

type Check = Callable[[GemmProblem, GemmConfig, DeviceProfile, Walk], str | None]

# 64 x 7168 x 4096, one consumer, 64x64x64, 16 KiB a stage: depth 2 reached 0.36, 3 0.59, 4 0.75, 6 0.93, 8 1.00. The
# stage being multiplied is released after the next MMA was issued, so depth - 1 stages are under way: 48 KiB gave 0.75.
# At 4096^3, 128x256x64 with depth 2 has one stage of 48 KiB under way and reached 0.65.
HOPELESS_BYTES_IN_FLIGHT = 48 * 1024
# Also with big stages: 4096^3, 128x256x128, depth 2, 96 KiB under way: 0.71 (0.74 at 8192^3); depth 3 of 48 KiB: 1.00.
HOPELESS_SM90_DEPTH = 2
# Time goes with waves: at 4096^3 a 128x192 tile makes 5.3 waves out of 6 and reached 0.91 of what 3.9 out of 4 reached.
# Below this share of a grid that runs more than one wave, nearly half of it is idle.
HOPELESS_WAVE_EFFICIENCY = 0.55
# One SM took at most 64 B a clock (32x32x16384 and 128x256x7168 took as long as that says), so SMs without a tile are
# bandwidth lost. 64x4096x7168 won by 1.23 with 128 tiles of 32 columns. This is the share of SMs that must stay idle
# even after cutting the tile in four.
IDLE_SM_FACTOR = 4
# Beyond it the 64-row side of wgmma is at least 80 % full of rows of A (257 of 320), so there is nothing to swap for.
MOST_ROWS_TO_SWAP = 256
# With more waves than this an idle share of the last one costs less than a quarter, and finer tiles cut it as well.
MOST_WAVES_TO_SPLIT = 3


def rejection(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> str | None:
    """Why this config should not be compiled for this problem on this device, or None when it should be asked."""
    if config.arch.name != profile.arch.name:
        return f"config for {config.arch.name}, {profile.name} runs {profile.arch.name}"
    if reason := violation(problem, config, profile.sm_count) or memory_rejection(problem, profile):
        return reason
    walk = walk_of(problem, config, profile.sm_count)
    return (
        tile_rejection(problem, config, profile, walk)
        or depth_rejection(config, config.pipe_depth, walk)
        or _order(config, walk)
    )


def memory_rejection(problem: GemmProblem, profile: DeviceProfile) -> str | None:
    """Why the operands cannot lie in device memory, or None."""
    if problem.min_bytes <= profile.memory_bytes:
        return None
    return f"A, B and D take {problem.min_bytes} B, {profile.name} has {profile.memory_bytes} B"


def tile_rejection(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    """The reasons that depend on neither pipeline depth nor order of tiles."""
    return next((reason for check in TILE_CHECKS if (reason := check(problem, config, profile, walk))), None)


def depth_rejection(config: GemmConfig, depth: int, walk: Walk) -> str | None:
    """The reasons that the config with this many stages has because of its depth, whatever its order of tiles."""
    return _unused_stages(config, depth, walk) or _bytes_in_flight(config, depth, walk)


def plainest(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> GemmConfig:
    """The config that is asked in place of this legal one because it does the same: often the config itself."""
    walk = walk_of(problem, config, profile.sm_count)
    raster, group = plain_order(config.arch.name, walk.tiles_m, walk.tiles_n, config.raster, config.l2_group_size)
    if isinstance(config, Sm90GemmConfig) and _plays_alone(config, walk):
        config = replace(config, schedule="cooperative", num_consumers=1)
    if isinstance(config, Sm90GemmConfig) and walk.split is not None and walk.split.most_parts == 1:
        config = replace(config, scheduler="static")
    plain = replace(
        config,
        pipe_depth=min(config.pipe_depth, max(_useful_depth(config, walk), walk.stages)),
        epi_stages=1
        if stages_by_threads(problem, config)
        else min(config.epi_stages, epilogue_chunks(config) * walk.waves),
        raster=raster,
        l2_group_size=group,
    )
    if isinstance(plain, Sm100GemmConfig) and plain.acc_stages > walk.waves:
        return replace(plain, acc_stages=walk.waves)
    return plain


# ---------------------------------------------------------------------- the same work as a plainer config


@cache
def _depths(arch: str) -> tuple[int, ...]:
    return tuple(sorted(int(depth) for depth in choices(arch)["pipe_depth"]))


def _useful_depth(config: GemmConfig, walk: Walk) -> int:
    """The fewest stages of the space that hold everything one CTA ever loads, or the most there are."""
    needed, depths = walk.stages, _depths(config.arch.name)
    return depths[min(bisect_left(depths, needed), len(depths) - 1)]


def _unused_stages(config: GemmConfig, depth: int, walk: Walk) -> str | None:
    useful = _useful_depth(config, walk)
    if depth <= max(useful, walk.stages):
        return None
    return f"pipe_depth = {depth}: a CTA loads {_loaded(walk)} stages in all, so it runs like pipe_depth = {useful}"


def _loaded(walk: Walk) -> str:
    return f"{walk.waves} x {walk.k_blocks}" if walk.split is None else str(walk.stages)


def _unused_buffers(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    stores = epilogue_chunks(config) * walk.waves
    if config.epi_stages > stores:
        return (
            f"epi_stages = {config.epi_stages}: a consumer stores {stores} chunk(s) in all, "
            f"so it runs like epi_stages = {stores}"
        )
    if config.epi_stages > 1 and stages_by_threads(problem, config):
        return (
            f"epi_stages = {config.epi_stages}: n = {problem.n} is not a multiple of 8, so threads store D from one "
            "buffer, and it runs like epi_stages = 1"
        )
    if isinstance(config, Sm100GemmConfig) and config.acc_stages > walk.waves:
        return f"acc_stages = {config.acc_stages}: a CTA computes one tile, so it runs like acc_stages = 1"
    return None


def _plays_alone(config: GemmConfig, walk: Walk) -> bool:
    return isinstance(config, Sm90GemmConfig) and config.schedule == "pingpong" and walk.waves == 1


def _lone_player(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    if not _plays_alone(config, walk):
        return None
    return "schedule = pingpong: a CTA computes one tile, so it runs like schedule = cooperative with one consumer"


def _order(config: GemmConfig, walk: Walk) -> str | None:
    plain = plain_order(config.arch.name, walk.tiles_m, walk.tiles_n, config.raster, config.l2_group_size)
    if plain == (config.raster, config.l2_group_size):
        return None
    return (
        f"raster = {config.raster}, l2_group_size = {config.l2_group_size} walk {walk.tiles_m} x {walk.tiles_n} tiles "
        f"in the same order as raster = {plain[0]}, l2_group_size = {plain[1]}"
    )


# ---------------------------------------------------------------------- legal, but measured to lose


def _bytes_in_flight(config: GemmConfig, depth: int, walk: Walk) -> str | None:
    """Hopper only: a tcgen05 commit frees its stage by itself, and no depth sweep was measured on Blackwell.

    Nor was one with cp_async.
    """
    if not isinstance(config, Sm90GemmConfig) or config.load != "tma" or depth >= walk.stages:
        return None
    stage = config.stage_bytes
    in_flight = (depth - 1) * stage
    if in_flight <= HOPELESS_BYTES_IN_FLIGHT:
        return (
            f"{depth} stages of {stage} B keep {in_flight} B in flight per SM: at most 0.75 of the library was "
            f"reached with {HOPELESS_BYTES_IN_FLIGHT} B, take more or bigger stages"
        )
    if depth <= HOPELESS_SM90_DEPTH:
        return (
            f"pipe_depth = {depth} leaves one stage ({stage} B) under way while the other is multiplied: "
            "0.65 to 0.74 of the library were measured, take at least 3"
        )
    return None


def _idle_rows(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    """Whole blocks of MMA rows that no row of D ever reaches. 72 rows in a tile of 192: 0.46 of the library."""
    rows = config.cluster_tile[0]
    if _swapped(config):
        used = _narrowest(config.arch.name, problem.m)
    else:
        block = 64 if isinstance(config, Sm90GemmConfig) else config.blk_m
        used = ceil(problem.m / block) * block
    if rows <= used:
        return None
    return f"M = {problem.m} fills {used} of the {rows} rows of a cluster tile: {rows - used} are computed for nothing"


def _swapped(config: GemmConfig) -> bool:
    return isinstance(config, Sm90GemmConfig | Sm100GemmConfig) and config.swap_ab


@lru_cache(maxsize=256)
def _narrowest(arch: str, extent: int) -> int:
    """Smallest blk_n of the space that holds this extent of an operand on the narrow side, or the extent itself."""
    return min((int(width) for width in choices(arch)["blk_n"] if int(width) >= extent), default=extent)


def _idle_columns(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    """Half or more of the only column of tiles lies outside of D, or a whole block of MMA rows: as bad as idle rows."""
    cols, swapped = config.cluster_tile[1], _swapped(config)
    step = 16 if not swapped else 64 if isinstance(config, Sm90GemmConfig) else config.blk_m
    used = max(step * (cols // config.cta_cols), ceil(problem.n / step) * step)
    if cols <= used if swapped else cols < 2 * used:
        return None
    return f"N = {problem.n} fills {used} of the {cols} columns of a cluster tile: the rest is computed for nothing"


def _idle_sms(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    ctas = walk.tiles * config.cluster_size
    narrower = config.blk_n // IDLE_SM_FACTOR // 16 * 16
    if _swapped(config) or narrower == 0 or ctas * IDLE_SM_FACTOR > profile.sm_count or walk.split is not None:
        return None
    return (
        f"{ctas} CTAs for {profile.sm_count} SMs: blk_n = {narrower} would let about {IDLE_SM_FACTOR} times as many "
        "SMs load, still in one wave"
    )


def _form(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    """Forms of the templates where what they are for cannot happen."""
    assert isinstance(config, Sm90GemmConfig | Sm100GemmConfig)
    if isinstance(config, Sm90GemmConfig) and not loads_plainly(problem, config):
        return f"load = cp_async: k = {problem.k} is a multiple of 8, so TMA loads the same rows without moving them"
    if config.swap_ab and problem.m > MOST_ROWS_TO_SWAP and problem.n % 8 == 0:
        return f"swap_ab: M = {problem.m} fills the wide side of the MMA well enough, N can keep the narrow one"
    unsplit = ceil(walk.tiles / profile.sm_count)
    if config.split_k > 1 and unsplit > MOST_WAVES_TO_SPLIT:
        return f"split_k = {config.split_k}: {walk.tiles} tiles give every SM {unsplit} tiles already"
    if walk.split is not None and walk.split.most_parts == 1:
        return (
            f"scheduler = stream_k: {walk.tiles} tiles fill whole waves of {walk.clusters} clusters, so it runs like "
            "scheduler = static"
        )
    if isinstance(config, Sm100GemmConfig) and config.scheduler == "clc" and walk.tiles <= walk.clusters:
        return f"scheduler = clc: {walk.tiles} tiles for {walk.clusters} clusters leave none to take over"
    return None


def _last_wave(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> str | None:
    if walk.waves == 1 or walk.wave_efficiency >= HOPELESS_WAVE_EFFICIENCY:
        return None
    return (
        f"{walk.tiles} tiles on {walk.clusters} clusters take {walk.waves} waves: "
        f"{1 - walk.wave_efficiency:.0%} of the grid has no tile"
    )


# Those that rest on measurements, by name. tests/soak/filters.py looks at what they drop, and how close to their limits
# the best configs come.
MEASURED_FILTERS: dict[str, Check] = {
    "bytes in flight": lambda problem, config, profile, walk: _bytes_in_flight(config, config.pipe_depth, walk),
    "idle rows": _idle_rows,
    "idle columns": _idle_columns,
    "idle SMs": _idle_sms,
    "last wave": _last_wave,
    "form": _form,
}
TILE_CHECKS: tuple[Check, ...] = (
    _form,
    _idle_rows,
    _idle_columns,
    _idle_sms,
    _last_wave,
    _lone_player,
    _unused_buffers,
)
