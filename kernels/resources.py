"""What a configuration needs of one SM, computed before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig

HEADER_BYTES = 1024  # mbarriers and the TMEM address; keeps the first tile 1024-byte aligned for the 128-byte swizzle
WGMMA_ROWS = 64

# setmaxnreg values per number of consumer warpgroups: (producer, consumer). What consumers gain the producer must have
# given back: 128 * (producer + consumers * consumer) stays within what the CTA was launched with, or they wait for ever
# (two consumers with 96 + 2 * 208 of 3 * 168: a hang at every launch, H200).
SM90_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
# With load = cp_async the producer's threads hold values while they move them, and addresses of both operands.
SM90_COPY_REGISTERS = {1: (168, 240), 2: (104, 200), 3: (80, 144)}

# Registers a consumer thread needs besides its accumulators (addresses, descriptors, loop state). One below 26 spilled
# with nvcc 13.0 in the Hopper template: 2 consumers, 128x208 spilled 4672 bytes.
SM90_OVERHEAD_REGISTERS = 26

# More of them where a consumer reads parts of its tile from the workspace (stream-K): two consumers of 128x192 spilled
# 24 bytes with 14 registers to spare, one of 192x128 none with 22.
SM90_PARTS_REGISTERS = 16

# One byte more than half of the 228 KiB of an SM, of which each CTA takes 1 KiB for the system, in steps of 128 B.
ONE_CTA_SMEM_BYTES = 115840


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Needs of one CTA.

    smem_bytes: dynamic shared memory
    tmem_columns: tensor-memory columns allocated
    threads: threads
    registers: registers of the thread that needs most (estimate; the compiler's figure is stored with the artifact)
    """

    smem_bytes: int
    tmem_columns: int
    threads: int
    registers: int


def sm90_registers(config: Sm90GemmConfig) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread, after setmaxnreg."""
    granted = SM90_COPY_REGISTERS if config.load == "cp_async" else SM90_REGISTERS
    return granted[config.num_consumers]


def sm90_entry_registers(config: Sm90GemmConfig) -> int:
    """Registers a thread owns at kernel entry, before setmaxnreg moves them: the file shared out, in steps of 8."""
    arch = config.arch
    return min(arch.max_registers_per_thread, arch.registers // config.threads // 8 * 8)


def resources_of(config: GemmConfig) -> Resources:
    """Arithmetic only; says what is needed, not whether it fits (see `kernels.rules`)."""
    smem = HEADER_BYTES + config.pipe_depth * config.stage_bytes + config.epilogue_bytes
    if isinstance(config, Sm90GemmConfig):
        accumulators = config.blk_m * config.blk_n // 128
        registers = accumulators + SM90_OVERHEAD_REGISTERS
        registers += SM90_PARTS_REGISTERS if config.scheduler == "stream_k" else 0
        return Resources(smem_bytes=smem, tmem_columns=0, threads=config.threads, registers=registers)
    assert isinstance(config, Sm100GemmConfig)
    # A writeback thread holds one chunk twice: float32 from tensor memory and its 16-bit pack. The constant is what
    # ptxas (13.0) used beyond that over 29 builds.
    chunk = config.epi_n * config.blk_m // 128
    return Resources(
        smem_bytes=smem,
        tmem_columns=config.arch.tmem_columns,
        threads=config.threads,
        registers=chunk + chunk // 2 + 24,
    )


def launch_smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory that a CTA is launched with: at least so much that no other CTA of ours shares its SM.

    On Blackwell a CTA allocates all tensor memory, and waits for it inside the kernel where another one holds it. Two
    clusters that each hold the SM that the other's second CTA waits for would never end: two launches on two streams
    are enough. A cluster is placed as a whole, so it is enough that no CTA is placed where tensor memory is taken. With
    cluster launch control a waiting CTA would also keep a tile that no other can take over.
    """
    need = resources_of(config).smem_bytes
    if isinstance(config, Sm100GemmConfig) and (config.cluster_size > 1 or config.scheduler == "clc"):
        return max(need, ONE_CTA_SMEM_BYTES)
    return need
