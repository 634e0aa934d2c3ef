"""Everything that can be said about a config before compiling: needs, rules, parts, tiles, roofline, predicted time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kernels.anatomy import anatomy_of
from kernels.resources import resources_of
from kernels.rules import violation
from search_space.checks import rejection
from search_space.model import predict
from search_space.walk import walk_of

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

Json = dict[str, Any]


def describe(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Json:
    """What is known before compiling, as plain JSON values. Parts and times are None for a config that cannot run."""
    reason = violation(problem, config, profile.sm_count)
    return {
        "arch": config.arch.name,
        "device": profile.name,
        "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype, "layout": problem.layout},
        "config": config.to_dict(),
        "violation": reason,
        "rejection": None if reason else rejection(problem, config, profile),
        "resources": asdict(resources_of(config)),
        "limits": _limits(config),
        "geometry": _geometry(problem, config, profile),
        "anatomy": None if reason else asdict(anatomy_of(config)),
        "tiles": None if reason else _tiles(problem, config, profile),
        "roofline": _roofline(problem, profile),
        "prediction": None if reason else asdict(predict(problem, config, profile)),
    }


def _limits(config: GemmConfig) -> dict[str, int]:
    return {
        "smem_bytes": config.arch.smem_bytes,
        "tmem_columns": config.arch.tmem_columns,
        "threads": 1024,
        "registers": config.arch.max_registers_per_thread,
    }


def _geometry(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Json:
    tiles_m, tiles_n = config.cluster_tiles(problem)
    return {
        "cluster_tile": list(config.cluster_tile),
        "cluster_tiles": [tiles_m, tiles_n],
        "clusters": config.clusters(problem, profile.sm_count),
        "k_blocks": config.k_blocks(problem),
        "stage_bytes": config.stage_bytes,
        "epilogue_bytes": config.epilogue_bytes,
    }


def _tiles(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Json:
    """Waves and tail: how many tiles each cluster gets, and how much of the last wave and of the edge tiles is idle."""
    walk, (rows, cols) = walk_of(problem, config, profile.sm_count), config.cluster_tile
    last = walk.tiles - (walk.waves - 1) * walk.clusters
    shared: Json = {}
    if walk.split is not None:
        shared = {
            "shared_tiles": walk.split.shared_tiles,
            "whole_tiles_of_each_cluster": walk.split.whole_waves,
            "k_blocks_of_the_busiest_cluster": walk.split.stages,
            "parts_of_a_tile_at_most": walk.split.most_parts,
        }
    return {
        "tiles": walk.tiles,
        "clusters": walk.clusters,
        "sms_used": walk.clusters * config.cluster_size,
        "sms": profile.sm_count,
        "waves": walk.waves,
        "tiles_in_last_wave": last,
        "idle_in_last_wave": 1 - last / walk.clusters if walk.split is None else 0.0,
        "wave_efficiency": walk.wave_efficiency,
        "rows_in_last_tile": problem.m - (walk.tiles_m - 1) * rows,
        "columns_in_last_tile": problem.n - (walk.tiles_n - 1) * cols,
        "tile_efficiency": problem.m * problem.n / (walk.tiles * rows * cols),
        **shared,
    }


def _roofline(problem: GemmProblem, profile: DeviceProfile) -> Json:
    """What no kernel can beat, from data-sheet rates."""
    compute_us = problem.flops / profile.peak_flops * 1e6
    memory_us = problem.min_bytes / profile.bandwidth_bytes_per_s * 1e6
    return {
        "flops": problem.flops,
        "bytes": problem.min_bytes,
        "flops_per_byte": problem.flops / problem.min_bytes,
        "ridge_flops_per_byte": profile.peak_flops / profile.bandwidth_bytes_per_s,
        "compute_us": compute_us,
        "memory_us": memory_us,
        "bound": "compute" if compute_us > memory_us else "memory",
    }
