"""A problem and a config as numbers that a learned model can use.

Sizes are logarithms, so that doubling is a step wherever it happens. What the performance model knows (where the time
goes, how waves and rings fill) is given as its terms: a learned model then only has to learn where it is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2
from typing import TYPE_CHECKING

from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.problem import Dtype
from kernels.resources import resources_of
from search_space.model import predict
from search_space.walk import epilogue_chunks, walk_of

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

# Knobs in the form in which two configs are compared, each scaled so that 1 is a step that matters.
KNOB_NAMES = (
    "rows", "cols", "blk_k", "depth", "consumers", "pair", "share", "swap_ab", "split_k", "pingpong", "epi_n",
    "epi_stages", "acc_stages", "l2_group", "along_n", "serpentine", "stream_k",
)  # fmt: skip
TERM_NAMES = (
    "model_us", "compute", "memory", "l2", "latency", "epilogue", "overhead", "waves", "wave_efficiency",
    "tile_efficiency", "in_flight", "tiles", "clusters", "k_blocks", "chunks", "smem", "threads", "depth_share",
    "accumulators", "idle_sms",
)  # fmt: skip
PROBLEM_NAMES = ("m", "n", "k", "intensity", "is_fp16", "ragged_m", "ragged_n", "odd_k", "bandwidth", "sm_count")
NAMES = (*KNOB_NAMES, *TERM_NAMES, *PROBLEM_NAMES)


@dataclass(frozen=True, slots=True)
class Features:
    """One config for one problem on one device.

    model_us: what the performance model predicts
    knobs: as in KNOB_NAMES
    values: as in NAMES
    """

    model_us: float
    knobs: tuple[float, ...]
    values: tuple[float, ...]


def features(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Features:
    """Needs a config that breaks no rule on the device. About 0.2 ms."""
    found, walk = predict(problem, config, profile), walk_of(problem, config, profile.sm_count)
    resources = resources_of(config)
    knobs = _knobs(config)
    rows, cols = config.cluster_tile
    time_us = found.time_us
    terms = (
        log(time_us),
        found.compute_us / time_us,
        found.memory_us / time_us,
        found.l2_us / time_us,
        found.latency_us / time_us,
        found.epilogue_us / time_us,
        found.overhead_us / time_us,
        log2(walk.stages / walk.k_blocks),
        walk.wave_efficiency,
        found.tile_efficiency,
        log2(found.bytes_in_flight / 1024),
        log2(walk.tiles),
        log2(walk.clusters),
        log2(walk.k_blocks),
        log2(epilogue_chunks(config)),
        resources.smem_bytes / config.arch.smem_bytes,
        resources.threads / 128,
        config.pipe_depth / walk.stages,
        log2(config.cta_rows * config.cta_cols),
        1 - walk.clusters * config.cluster_size / profile.sm_count,
    )
    whole = (
        log2(problem.m),
        log2(problem.n),
        log2(problem.k),
        log2(problem.flops / problem.min_bytes),
        float(problem.dtype == Dtype.FP16),
        problem.m % rows / rows,
        problem.n % cols / cols,
        float(problem.k % 16 != 0),
        profile.bandwidth_bytes_per_s / 1e12,
        profile.sm_count / 100,
    )
    return Features(model_us=time_us, knobs=knobs, values=(*knobs, *terms, *whole))


def _knobs(config: GemmConfig) -> tuple[float, ...]:
    sm90 = config if isinstance(config, Sm90GemmConfig) else None
    sm100 = config if isinstance(config, Sm100GemmConfig) else None
    return (
        log2(config.num_consumers * config.blk_m / 64),
        log2(config.blk_n / 16),
        log2(config.blk_k / 32),
        2 * log2(config.pipe_depth),
        float(config.num_consumers),
        float(config.cta_group == 2),
        float(sm90 is not None and config.cta_group == 2 and sm90.share == "A"),
        2 * float(sm90 is not None and sm90.swap_ab),
        log2(sm90.split_k) if sm90 else 0.0,
        2 * float(sm90 is not None and sm90.schedule == "pingpong"),
        0.5 * log2(config.epi_n / 8),
        0.5 * config.epi_stages,
        float(sm100.acc_stages) if sm100 else 0.0,
        0.3 * log2(config.l2_group_size),
        0.5 * float(config.along_n),
        0.5 * float(config.serpentine),
        2 * float(sm90 is not None and sm90.scheduler == "stream_k"),
    )
