"""Everything that can be said about a config: needs, rules, parts, tiles, roofline, predicted time, compiled facts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kernels.anatomy import anatomy_of
from kernels.errors import ToolchainError
from kernels.resources import resources_of
from kernels.rules import violation
from search_space.checks import rejection
from search_space.model import predict
from search_space.timeline import timeline
from search_space.walk import walk_of
from tuner.picture import FAINT, GRID, Picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from search_space.timeline import Timeline

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
    return {
        "tiles": walk.tiles,
        "clusters": walk.clusters,
        "sms_used": walk.clusters * config.cluster_size,
        "sms": profile.sm_count,
        "waves": walk.waves,
        "tiles_in_last_wave": last,
        "idle_in_last_wave": 1 - last / walk.clusters,
        "wave_efficiency": walk.wave_efficiency,
        "rows_in_last_tile": problem.m - (walk.tiles_m - 1) * rows,
        "columns_in_last_tile": problem.n - (walk.tiles_n - 1) * cols,
        "tile_efficiency": problem.m * problem.n / (walk.tiles * rows * cols),
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


# ---------------------------------------------------------------------- compiled facts


def compiled_facts(problem: GemmProblem, config: GemmConfig, sm_count: int) -> Json:
    """Compile a config and say what became of it. Raises CompileError and ToolchainError."""
    from kernels.compile import compile_kernel

    kernel = compile_kernel(problem, config, sm_count, check_structure=True)
    return facts_of(kernel) | {"findings": list(kernel.findings or ())}


def facts_of(kernel: CompiledKernel) -> Json:
    """Registers, spills and instruction counts of a compiled kernel."""
    return {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "stack_bytes": kernel.stack_bytes,
        "warnings": list(kernel.warnings),
        "module_bytes": len(kernel.module),
        "compile_s": kernel.compile_s,
        "source_hash": kernel.source_hash,
        "artifact_sha256": kernel.sha256,
        "toolchain": kernel.toolchain,
    } | instruction_facts(lambda: kernel.module)


def instruction_facts(module: Callable[[], bytes]) -> Json:
    """Counts of the telling machine instructions of a module, or why there are none."""
    from kernels.sass import embedded_cubin, find_nvdisasm, instruction_counts, telling
    from kernels.toolchain import find_toolchain

    try:
        counts = instruction_counts(embedded_cubin(module()), find_nvdisasm(find_toolchain()))
    except (ToolchainError, ValueError) as error:
        return {"sass": None, "sass_missing": str(error)}
    return {"sass": telling(counts), "sass_missing": ""}


# ---------------------------------------------------------------------- picture

COLOURS = {
    "load": "#93c5fd", "full": "#dbeafe", "multiply": "#16a34a", "held": "#bbf7d0", "accumulate": "#22c55e",
    "drain": "#f59e0b",
}  # fmt: skip
LEGEND = (
    ("load", "TMA load under way"),
    ("full", "full, waits for the MMA"),
    ("multiply", "being multiplied"),
    ("held", "held until the next stage is issued"),
    ("drain", "epilogue: read back and stored"),
)
_LEFT, _TOP, _LANE, _LENGTH = 130, 104, 26, 1080


def timeline_picture(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Picture:
    """The pipeline of one CTA over its first tiles: ring slots, MMA, accumulators, writeback."""
    line = timeline(problem, config, profile)
    lanes, predicted = line.lanes, predict(problem, config, profile)
    height = _TOP + _LANE * len(lanes) + 74
    title = f"Pipeline of one CTA: {problem} on {profile.name}"
    drawn = Picture(width=_LEFT + _LENGTH + 30, height=height, title=title)
    drawn.text(16, 26, title, size=17)
    drawn.text(16, 46, f"modeled, not measured: durations of the performance model ({predicted.bound}-bound, "
               f"{predicted.time_us:.1f} us in all)", fill=FAINT)  # fmt: skip
    _legend(drawn, line)
    _axis(drawn, line, _TOP + _LANE * len(lanes))
    for place, lane in enumerate(lanes):
        _lane(drawn, line, lane, _TOP + place * _LANE)
    shown = f"{line.tiles} of {predicted.waves} tiles of this CTA"
    if line.k_blocks < line.whole_k_blocks:
        shown += f", {line.k_blocks} of the {line.whole_k_blocks} blocks of K of each"
    drawn.text(16, height - 28, f"shown: {shown}", size=11, fill=FAINT)
    knobs = ", ".join(f"{name} {value}" for name, value in config.to_dict().items())
    drawn.text(16, height - 12, knobs, size=10, fill=FAINT)
    return drawn


def _legend(drawn: Picture, line: Timeline) -> None:
    used, x = {span.kind for span in line.spans}, 16.0
    for kind, text in LEGEND:
        if kind in used:
            drawn.rect(x, 62, 12, 12, COLOURS[kind])
            drawn.text(x + 18, 73, text)
            x += 40 + 6.6 * len(text)


def _axis(drawn: Picture, line: Timeline, bottom: float) -> None:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if line.end_us / s <= 14)
    for mark in range(0, int(line.end_us) + 1, step):
        x = _LEFT + _LENGTH * mark / line.end_us
        drawn.line(x, _TOP - 6, x, bottom, GRID)
        drawn.text(x, bottom + 16, f"{mark} us", size=11, anchor="middle", fill=FAINT)


def _lane(drawn: Picture, line: Timeline, lane: str, y: float) -> None:
    drawn.text(16, y + 16, lane)
    scale = _LENGTH / line.end_us
    for span in (span for span in line.spans if span.lane == lane):
        width = (span.end_us - span.start_us) * scale
        block = f", block {span.block}" if span.block >= 0 else ""
        tip = f"tile {span.tile}{block}: {span.kind}, {span.start_us:.2f} to {span.end_us:.2f} us"
        # A gap of half a pixel tells one stage from the next.
        drawn.rect(_LEFT + span.start_us * scale, y + 3, max(width - 0.5, 0.3), _LANE - 7, COLOURS[span.kind], tip=tip)
