"""Configs that NVIDIA's matmul heuristics propose, in our knobs. Needs the optional package nvidia-matmul-heuristics.

The library ranks CUTLASS 3 kernels by a model of its own; what it calls a CTA tile, stages, cluster, split of K and
rasterisation are knobs of ours. Kernels that differ only in what has no knob here (the tile of a warp) become one.
"""

from __future__ import annotations

import atexit
from functools import cache
from typing import TYPE_CHECKING, Any

from kernels.config import GemmConfig, Sm90GemmConfig
from kernels.problem import Dtype
from search_space.space import choices
from search_space.translate import translated

if TYPE_CHECKING:
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

ASKED = 16  # kernels that the library is asked for
# Our devices among those that the library knows. Blackwell's tiles span two CTAs there, and nothing was tried.
GPUS = {"NVIDIA H200": "H200_SXM", "NVIDIA H100 80GB HBM3": "H100_SXM", "NVIDIA H100 PCIe": "H100_PCIE"}
# Its words for inputs, accumulator and output: H is half, T bfloat16, S float32.
PRECISIONS = {Dtype.FP16: "HSH", Dtype.BF16: "TST"}


def is_available() -> bool:
    """Whether the package is installed and loads."""
    return _library() is not None


def heuristic_configs(problem: GemmProblem, profile: DeviceProfile, count: int = ASKED) -> tuple[GemmConfig, ...]:
    """What the heuristics' first `count` kernels become here, best first; empty without the package or the device."""
    if (gpu := GPUS.get(profile.name)) is None or (library := _library()) is None:
        return ()
    try:
        kernels = _ask(library, gpu, problem, count)
    except RuntimeError:  # the library refuses some shapes
        return ()
    found: dict[str, GemmConfig] = {}
    for kernel in kernels:
        config = _in_our_knobs(kernel)
        if config is not None and (legal := translated(config, problem, profile)) is not None:
            found.setdefault(legal.key, legal)
    return tuple(found.values())


@cache
def _library() -> Any:
    try:
        import nvMatmulHeuristics
    except (ImportError, OSError):  # not installed, or without its shared library
        return None
    return nvMatmulHeuristics


@cache
def _interface(library: Any, gpu: str) -> Any:
    # Its destructor needs modules that are gone when the interpreter ends.
    atexit.register(_interface.cache_clear)
    return library.NvMatmulHeuristicsInterfaceEx(
        backend=library.NvMatmulHeuristicsTarget.CUTLASS3,
        flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=library.NvMatmulHeuristicsNvidiaGpu[gpu],
    )


def _ask(library: Any, gpu: str, problem: GemmProblem, count: int) -> list[Any]:
    interface = _interface(library, gpu)
    layout = library.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR  # A (M, K), B (N, K)
    shape = interface.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout)
    return [found["kernel"] for found in interface.get(shape, count, precision=PRECISIONS[Dtype(problem.dtype)])]


def _in_our_knobs(kernel: Any) -> GemmConfig | None:
    """The Hopper config with this tile; None for a tile that no combination of consumers has."""
    values = choices("sm_90a")
    shape = _consumers(kernel.cta_tile_m)
    if shape is None or kernel.cta_tile_n not in values["blk_n"] or kernel.cta_tile_k not in values["blk_k"]:
        return None
    consumers, rows = shape
    pair = max(kernel.cluster_m, kernel.cluster_n) > 1 and kernel.split_k == 1
    epi_n = next(width for width in (64, 32, 16, 8) if kernel.cta_tile_n % width == 0)
    return Sm90GemmConfig(
        num_consumers=consumers,
        blk_m=rows,
        blk_n=kernel.cta_tile_n,
        blk_k=kernel.cta_tile_k,
        pipe_depth=_nearest(kernel.stages, values["pipe_depth"]),
        cta_group=2 if pair else 1,
        share="B" if kernel.cluster_m >= kernel.cluster_n or not pair else "A",
        split_k=_nearest(kernel.split_k, values["split_k"]),
        raster="n" if kernel.cta_order else "m",
        l2_group_size=_nearest(kernel.swizzle_factor, values["l2_group_size"]),
        epi_n=epi_n,
        epi_stages=1,
    )


def _consumers(rows: int) -> tuple[int, int] | None:
    """Consumers and rows of each: CUTLASS gives tiles of 128 rows and more to two warpgroups."""
    return {64: (1, 64), 128: (2, 64), 192: (3, 64), 256: (2, 128)}.get(rows)


def _nearest(value: int, allowed: tuple[Any, ...]) -> int:
    return min((int(choice) for choice in allowed), key=lambda choice: (abs(choice - value), choice))
