"""How long a config should take: a roofline with waves, a finite pipeline and the costs at both ends of a kernel.

A CTA's time for one stage is the longest of what the tensor core needs (compute), what one SM can take in from L2 and
what device memory delivers to all of them (bandwidth), and what the loads under way cover of their latency (Little's
law). Stages add up over the tiles of the busiest CTA; epilogues are added as far as nothing runs beside them.

It ranks configs before anything is measured and is never shown as a measurement. Its constants are data-sheet numbers
of the device profile, and the rates below, each with its source: a published figure, or what moving one knob on an H200
showed. None is adjusted to a single shape; those that a kernel bound by that rate alone showed are marked (*). For the
best measured config of 41 shapes, 6 us to 1.4 ms, the estimate lies within 20 % of the measurement and 1 % above it on
average; it cannot see that a depth of 2 with stages of 96 KiB does worse (0.71) than the same bytes in three (0.99).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.errors import ConfigError
from kernels.problem import ELEMENT_BYTES, FLOAT_BYTES, Dtype, GemmProblem
from search_space.walk import Walk, epilogue_chunks, loaded_rows, stages_by_threads, walk_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernels.devices import DeviceProfile

# Share of the data-sheet bandwidth that a streaming kernel gets: on an H200 (4.8 TB/s) cuBLAS passes 4.3 TB/s by up to
# 3 %.
BANDWIDTH_SHARE = 0.92

# Share of the tensor-core rate at the highest clock that random data leaves (power): the mainloops of 4096^3 and 8192^3
# on an H200 at 1980 MHz, bf16 and fp16; operands of zeros run up to 15 % faster. Blackwell: about 1610 TFLOP/s at
# 8192^3 fp16 on a B200 (Tilus documentation, cuBLAS and its own best kernel alike), which is 0.70 once the 1.2 % of its
# waves that idle are taken out; no figure of ours exists.
SUSTAINED_SHARE: dict[str, dict[Dtype, float]] = {
    "sm_90a": {Dtype.BF16: 0.79, Dtype.FP16: 0.77},
    "sm_100a": {Dtype.BF16: 0.70, Dtype.FP16: 0.70},
}

# Bytes that one SM takes in from L2 each clock: one 64-byte port (*). A lone CTA streams at this rate: 32x32x16384 and
# 128x256x7168 (32 CTAs) last as long as their stages at 64 B a clock.
SM_PORT_BYTES_PER_CLOCK = 64
# Shared memory: 32 banks of 4 bytes (CUDA programming guide). An MMA reads both operands from there, which is why an
# m64 wgmma needs n >= 64 for the full rate.
SMEM_BYTES_PER_CLOCK = 128
# From issuing a TMA load to its bytes counted on the mbarrier, stage transfer excluded: one stage of 16 KiB under way
# moved 64 stages in 49 us (64x7168x4096, depth 2), which leaves 0.65 us beside the transfer (*). Within a wave every
# CTA asks for the same columns of K at the same time, so operands shared through L2 wait for device memory as well.
LOAD_LATENCY_US = 0.65
# How sharply a pipeline turns from latency-bound to bandwidth-bound: loaded memory answers later, so near the knee both
# count. The same sweep at depths 2 to 12 lies within 10 % of the cube.
KNEE = 3.0
# A row stride that is not a multiple of a 32-byte sector makes each 128-byte row of a box touch two cache lines:
# K = 3000 lost 20 % without multicast, nothing with it, K = 3008 nothing either way (4000x5000).
SECTOR_BYTES = 32
MISALIGNED_FACTOR = 2
# Rows of 64 bytes (blk_k 32, the 64-byte swizzle) ask for half of each 128-byte line at a time: beside the same config
# with rows of 128 bytes, 10 % longer where memory limits (120 trials of 76 problems, H200), and a stage of wgmmas reads
# shared memory with that swizzle at a few clocks more (4 % where compute limits, 155 trials).
LINE_BYTES = 128
HALF_LINE_FACTOR = 1.12
HALF_LINE_CLOCKS = 12
# A pair that shares A: each CTA streams columns of B of its own through the slots that both must free. Where memory
# limits, 12 % longer than without a pair (82 trials, H200); nothing where compute limits.
SHARED_A_FACTOR = 1.12

# Launch after the previous kernel of a graph, barrier set-up and tensor map fetch: the shortest kernels measured take
# 5.8 us (16x720x2880), of which 3.8 are loads, their latency and the last store (*).
LAUNCH_US = 2.0
# Clocks a consumer loses at each stage to waiting and releasing: blk_k 32 instead of 64 costs 2 % at 4096^3. With a
# single m64 wgmma chain in the CTA nothing runs meanwhile and the chain drains: one consumer of 64x256 reached 0.87.
STAGE_CLOCKS = 30
LONE_CHAIN_CLOCKS = 80
# Clocks of an epilogue chunk besides moving its bytes (two named barriers, a proxy fence, the TMA issue): chunks of 16
# columns instead of 64 cost 2 % at 4096^3. A single staging buffer also waits for the store to have read it.
CHUNK_CLOCKS = 145
SINGLE_BUFFER_CLOCKS = 90
# Clocks between the last MMA of a tile and the first chunk, and from the last chunk to the next MMA: one barrier round
# trip each.
TILE_CLOCKS = 100
# Stores from registers (swap_ab): each of a warp writes 8 rows of 16 bytes, a sector each, and an SM sends one sector a
# clock to L2; nothing else is waited for.
REGISTER_STORE_CLOCKS = 8
# Parts of K that meet in shared memory: what the slowest CTA waits for beside the bytes (remote stores and their
# completion, the wait, the sum): swap_ab with two parts cost 1.3 to 1.6 us at 1 and 16 x 7168 x 4096 (*). And the rate
# at which an SM takes in what the others send, each 16 bytes with their own count on the barrier: 64 KiB of 128x256
# tiles took 5 us at 512x4096x14336.
EXCHANGE_US = 1.2
EXCHANGE_BYTES_PER_CLOCK = 8
# Parts of a tile that meet in the workspace (stream-K), beside their bytes through the SM's port: stores that drain,
# the counter, the first loads, each a round trip to L2 of 0.5 us. Stream-K as a whole took 1.03 to 1.6 times what is
# predicted (results/verify/stream_k.json): that clusters out of step find less in L2 is not modeled. Not searched.
PARTS_US = 1.5
# Stores by threads where TMA cannot store D (N % 8 != 0): a warp stores rows one after the other, a sector each clock
# and one more for a row that starts within a sector.
SECTOR_CLOCKS = 1
# Issue slots of a producer warp for 16 rows of 64 elements that cp_async copies and moves, counted in the machine code.
# Every scheduler of an SM has one of the four warps, so they are clocks as well.
COPY_STEP_SLOTS = 39
# With cp_async each stage waits for a load of its own (*): 12 stages of 64 columns took 9.82 us and 6 of 128 took
# 6.57 us (1x705x705, otherwise equal), which is 0.54 us a stage whatever its size. What the depth of the ring should
# hide is lost somewhere; not at the proxy fence before each hand-over, which waits for no copies under way: with one a
# step took 81 clocks, less than a round trip to L2 (a loop of copies six steps ahead, H200).
COPY_STAGE_US = 0.54
# Tensor memory delivers 32 bits to each of 128 lanes a clock (16 TB/s over 148 SMs, Blackwell architecture brief).
TMEM_COLUMNS_PER_CLOCK = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Estimated time of one launch and where it goes. The terms overlap, so they do not add up to the time.

    time_us: estimate
    bound: what a stage waits for: "compute", "memory", "l2" or "latency"
    compute_us: tensor-core time of the busiest CTA
    memory_us: device memory traffic at the sustained bandwidth
    l2_us: stages of the busiest CTA at the rate of its SM's port
    latency_us: stages of the busiest CTA if only the loads under way limited it
    epilogue_us: epilogues of the busiest CTA that nothing runs beside
    overhead_us: launch, first load and last store
    tiles: cluster tiles of D
    clusters: clusters launched
    waves: tiles of the busiest cluster
    wave_efficiency: share of the launched clusters' time that has a tile
    tile_efficiency: share of the computed elements that lie inside D
    bytes_in_flight: bytes that one SM has under way while its ring turns
    dram_bytes: device memory traffic
    l2_bytes: bytes that all CTAs request from L2 for their stages
    """

    time_us: float
    bound: str
    compute_us: float
    memory_us: float
    l2_us: float
    latency_us: float
    epilogue_us: float
    overhead_us: float
    tiles: int
    clusters: int
    waves: int
    wave_efficiency: float
    tile_efficiency: float
    bytes_in_flight: int
    dram_bytes: int
    l2_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """What one stage of a CTA takes, by what may limit it, and one epilogue.

    compute_us: tensor core
    port_us: bytes of the stage through the SM's port
    memory_us: share of the device memory traffic
    latency_us: round trip of a slot of the ring, over the slots
    load_us: what the loads come to, the three above taken together
    epilogue_us: from the last MMA of a tile until its accumulator is free
    """

    compute_us: float
    port_us: float
    memory_us: float
    latency_us: float
    load_us: float
    epilogue_us: float


def stage_times(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> StageTimes:
    """The pieces of `predict`, for whoever draws them."""
    walk = walk_of(problem, config, profile.sm_count)
    clocks_per_us = float(profile.clock_mhz)
    stages = walk.stages
    memory_us = _dram_bytes(problem, config, profile, walk) / (profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE) * 1e6
    memory_us *= _memory_factor(config)
    compute = _compute_clocks(problem, config) / clocks_per_us
    port = max(_stage_traffic(problem, config)) / SM_PORT_BYTES_PER_CLOCK / clocks_per_us
    port = max(port, _copy_clocks(problem, config) / clocks_per_us)
    bandwidth, latency = max(port, memory_us / stages), _latency_us(config, port, compute)
    return StageTimes(
        compute_us=compute,
        port_us=port,
        memory_us=memory_us / stages,
        latency_us=latency,
        load_us=bandwidth if _hides_latency(config, stages) else (latency**KNEE + bandwidth**KNEE) ** (1 / KNEE),
        epilogue_us=_epilogue_clocks(problem, config) / clocks_per_us + _exchange_us(config, clocks_per_us),
    )


def predict(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Prediction:
    """Estimate a config that breaks no rule on this device. Raises ConfigError for one of another architecture."""
    if config.arch.name != profile.arch.name:
        raise ConfigError(f"config for {config.arch.name}, {profile.name} runs {profile.arch.name}", knob="arch")
    walk = walk_of(problem, config, profile.sm_count)
    stages = walk.stages
    arriving, requested = _stage_traffic(problem, config)
    dram_bytes = _dram_bytes(problem, config, profile, walk)
    one = stage_times(problem, config, profile)
    tile_us = _tile_us(config, walk, one.compute_us, one.load_us, one.epilogue_us)
    parts_us = _parts_us(config, walk, profile.clock_mhz)
    overhead_us = LAUNCH_US + LOAD_LATENCY_US + one.port_us + LOAD_LATENCY_US
    last_us = walk.k_blocks * max(one.compute_us, one.load_us)
    between_us = (walk.waves - 1) * (tile_us - last_us)  # what epilogues of all tiles but the last add
    rows, cols = config.cluster_tile
    terms = {"compute": one.compute_us, "memory": one.memory_us, "l2": one.port_us, "latency": one.latency_us}
    if _hides_latency(config, stages):
        del terms["latency"]
    return Prediction(
        time_us=overhead_us + _mainloops_us(walk, one, tile_us, last_us) + one.epilogue_us + parts_us,
        bound=max(terms, key=lambda name: terms[name]),
        compute_us=one.compute_us * stages,
        memory_us=one.memory_us * stages,
        l2_us=one.port_us * stages,
        latency_us=one.latency_us * stages,
        epilogue_us=between_us + one.epilogue_us + parts_us,
        overhead_us=overhead_us,
        tiles=walk.tiles,
        clusters=walk.clusters,
        waves=walk.waves,
        wave_efficiency=walk.wave_efficiency,
        tile_efficiency=problem.m * problem.n / (walk.tiles * rows * cols),
        bytes_in_flight=min(_stages_in_flight(config), stages) * arriving,
        dram_bytes=dram_bytes,
        l2_bytes=walk.tiles * config.cluster_size * walk.k_blocks * requested,
    )


def rank(
    problem: GemmProblem, configs: Iterable[GemmConfig], profile: DeviceProfile
) -> list[tuple[GemmConfig, Prediction]]:
    """Configs with their predictions, fastest first; equal times in the order of the configs' keys."""
    estimated = [(config, predict(problem, config, profile)) for config in configs]
    return sorted(estimated, key=lambda pair: (pair[1].time_us, pair[0].key))


def _stage_traffic(problem: GemmProblem, config: GemmConfig) -> tuple[int, int]:
    """Bytes of a stage that arrive in one CTA, and bytes it requests: multicast brings half of one operand for free."""
    a_rows, b_rows = loaded_rows(problem, config)
    row_bytes = ELEMENT_BYTES * config.blk_k
    arriving = (a_rows + b_rows) * row_bytes
    requested = arriving
    if isinstance(config, Sm90GemmConfig) and config.cta_group == 2:
        requested -= (b_rows if config.share == "B" else a_rows) * row_bytes // 2
    if problem.k * ELEMENT_BYTES % SECTOR_BYTES:
        requested *= MISALIGNED_FACTOR
    return arriving, requested


def _memory_factor(config: GemmConfig) -> float:
    """What a Hopper config loses of the bandwidth; on Blackwell nothing was measured."""
    if not isinstance(config, Sm90GemmConfig):
        return 1.0
    factor = HALF_LINE_FACTOR if config.blk_k * ELEMENT_BYTES < LINE_BYTES else 1.0
    return factor * (SHARED_A_FACTOR if config.cta_group == 2 and config.share == "A" else 1.0)


def _compute_clocks(problem: GemmProblem, config: GemmConfig) -> float:
    """Clocks of one CTA's tensor core for one stage: the slower of multiplying and reading shared memory.

    Both machines run 16 elements of K at a time. A Hopper consumer issues wgmmas of 64 rows. On Blackwell one MMA
    covers a CTA's rows and the columns of both CTAs of a pair, each of which reads its own columns; 64 rows take as
    long as 128, because half of the data path idles.
    """
    share = SUSTAINED_SHARE[config.arch.name][problem.dtype]
    if isinstance(config, Sm100GemmConfig):
        rows, read_rows, columns = 128, config.blk_m, config.mma_n
        steps = config.num_consumers * config.blk_k // 16
        extra = 0  # one thread issues ahead of the tensor core, which never waits for a warpgroup
    else:
        assert isinstance(config, Sm90GemmConfig)
        rows, read_rows, columns = 64, 64, config.blk_n
        steps = config.mma_rows // 64 * config.blk_k // 16
        extra = STAGE_CLOCKS if config.mma_rows > 64 else LONE_CHAIN_CLOCKS
        extra += HALF_LINE_CLOCKS if config.blk_k * ELEMENT_BYTES < LINE_BYTES else 0
    multiply = 2 * rows * columns * 16 / config.arch.mma_flops_per_clock / share
    read = ELEMENT_BYTES * 16 * (read_rows + config.blk_n) / SMEM_BYTES_PER_CLOCK
    return steps * max(multiply, read) + extra


def _copy_clocks(problem: GemmProblem, config: GemmConfig) -> float:
    """Clocks of the producer's warps for one stage: none worth counting where TMA loads."""
    if not _copies(config):
        return 0.0
    steps = sum(-(-rows // 16) for rows in loaded_rows(problem, config))
    return COPY_STEP_SLOTS * steps * config.blk_k / 64


def _stages_in_flight(config: GemmConfig) -> int:
    """Hopper consumers release a stage once the next one has arrived and its wgmmas are issued; tcgen05 at once."""
    if _copies(config):
        return 1
    return config.pipe_depth - 1 if isinstance(config, Sm90GemmConfig) else config.pipe_depth


def _copies(config: GemmConfig) -> bool:
    return isinstance(config, Sm90GemmConfig) and config.load == "cp_async"


def _hides_latency(config: GemmConfig, stages: int) -> bool:
    """Whether all loads of a CTA are under way from the start."""
    return stages <= config.pipe_depth and not _copies(config)


def _latency_us(config: GemmConfig, port: float, compute: float) -> float:
    """Time per stage when a slot's round trip is all that limits: load, and on Blackwell the MMA that frees it."""
    if _copies(config):
        return max(COPY_STAGE_US, port)
    if isinstance(config, Sm90GemmConfig):
        return (LOAD_LATENCY_US + port) / max(1, _stages_in_flight(config))
    return (LOAD_LATENCY_US + port + compute) / config.pipe_depth


def _epilogue_clocks(problem: GemmProblem, config: GemmConfig) -> float:
    """Clocks from the last MMA of a tile until its accumulator is free: all consumers at once, sharing the SM."""
    if isinstance(config, Sm90GemmConfig) and config.swap_ab:
        stores = epilogue_chunks(config) * (config.epi_n // 8) * 2 * 4  # of 32 bits, by the four warps of a consumer
        return config.num_consumers * stores * REGISTER_STORE_CLOCKS + TILE_CLOCKS
    rows = 64 if isinstance(config, Sm90GemmConfig) else config.blk_m
    staged = config.num_consumers * rows * config.epi_n * ELEMENT_BYTES / SMEM_BYTES_PER_CLOCK
    if isinstance(config, Sm100GemmConfig):
        staged += config.num_consumers * config.epi_n / TMEM_COLUMNS_PER_CLOCK
    if stages_by_threads(problem, config):
        sectors = config.epi_n * ELEMENT_BYTES // SECTOR_BYTES + 1
        return epilogue_chunks(config) * (staged + config.num_consumers * rows * sectors * SECTOR_CLOCKS) + TILE_CLOCKS
    chunk = staged + CHUNK_CLOCKS + (SINGLE_BUFFER_CLOCKS if config.epi_stages == 1 else 0)
    return epilogue_chunks(config) * chunk + TILE_CLOCKS


def _exchange_us(config: GemmConfig, clocks_per_us: float) -> float:
    """Time for the parts of K of one tile to meet."""
    assert isinstance(config, Sm90GemmConfig | Sm100GemmConfig)
    if config.split_k == 1:
        return 0.0
    return EXCHANGE_US + config.exchange_bytes / EXCHANGE_BYTES_PER_CLOCK / clocks_per_us


def _mainloops_us(walk: Walk, one: StageTimes, tile_us: float, last_us: float) -> float:
    """Time of the busiest CTA without its last epilogue: stream-K shortens it to its share of the last waves."""
    if walk.split is None:
        return (walk.waves - 1) * tile_us + last_us
    stages = walk.stages * max(one.compute_us, one.load_us)
    return stages + (walk.waves - 1) * (tile_us - last_us)


def _parts_us(config: GemmConfig, walk: Walk, clock_mhz: int) -> float:
    """Time for the parts of a shared tile to meet: one is written, and the others are read by whoever comes last."""
    if walk.split is None or (parts := walk.split.most_parts) == 1:
        return 0.0
    part_bytes = FLOAT_BYTES * config.num_consumers * config.blk_m * config.blk_n
    read = 1 if walk.split.at_most_two_parts else parts
    return PARTS_US + (1 + read) * part_bytes / SM_PORT_BYTES_PER_CLOCK / clock_mhz


def _tile_us(config: GemmConfig, walk: Walk, compute: float, load: float, epilogue: float) -> float:
    """Time from one tile to the next.

    The producer runs on during an epilogue until the ring is full. The tensor core waits for the epilogue, because
    consumers hold their only accumulator, be it registers or their one slot of tensor memory; a consumer does not
    compute beside another's epilogue either, since both drain the same stages. With a second slot (acc_stages 2) the
    next tile starts at once, and only an epilogue longer than a whole tile is felt. With pingpong each of two consumers
    has a tile of its own, so one's epilogue runs beside the other's mainloop.
    """
    mainloop = walk.k_blocks * max(compute, load)
    if isinstance(config, Sm100GemmConfig) and config.acc_stages > 1:
        return max(mainloop, epilogue)
    if isinstance(config, Sm90GemmConfig) and config.schedule == "pingpong":
        return max(mainloop, (mainloop + epilogue) / 2)
    prefetched = min(epilogue, config.pipe_depth * load)
    return max(walk.k_blocks * compute + epilogue, walk.k_blocks * load + epilogue - prefetched)


def _dram_bytes(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile, walk: Walk) -> int:
    """Traffic of A, B and D. CTAs of one wave share what they read; a later wave reads again unless L2 still has it.

    Half of L2 counts: each of its two partitions keeps its own copy of what its SMs read (H100 white paper).
    """
    operands = ELEMENT_BYTES * problem.k * (problem.m + problem.n)
    result = ELEMENT_BYTES * problem.m * problem.n
    if operands <= profile.l2_bytes // 2 or walk.waves == 1:
        return operands + result
    rows, cols = config.cluster_tile
    lines, across = (walk.tiles_n, walk.tiles_m) if config.along_n else (walk.tiles_m, walk.tiles_n)
    group = min(config.l2_group_size, lines)
    length = min(across, -(-walk.clusters // group))
    group = max(group, min(lines, -(-walk.clusters // length)))
    tiles_m, tiles_n = (length, group) if config.along_n else (group, length)
    panel = min(problem.m, tiles_m * rows) + min(problem.n, tiles_n * cols)
    reads = int(walk.tiles / walk.clusters * panel * problem.k * ELEMENT_BYTES)
    return max(operands, reads) + result
