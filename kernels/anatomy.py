"""What a kernel of the templates is made of: who does what, what stands between them, and what lies where.

Every entry follows from the config alone. Tests hold it against the barriers and addresses of generated sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.problem import ELEMENT_BYTES
from kernels.resources import HEADER_BYTES, SM90_REGISTERS, WGMMA_ROWS, resources_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WARPGROUP_THREADS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One kind of thread.

    name: what people call it
    scope: which warps and threads, of which CTAs
    dispatch: hardware paths that it drives
    waits: what it waits for
    signals: what it tells others
    """

    name: str
    scope: str
    dispatch: str
    waits: tuple[str, ...]
    signals: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Barrier:
    """One ring of barriers.

    name: as in the template
    kind: mbarrier, named barrier, cluster barrier or bulk group
    slots: barriers of the ring
    arrivals: arrivals that end a phase of one of them
    arrives: who arrives, and with what
    waits: who waits
    protects: the resource whose life it guards
    """

    name: str
    kind: str
    slots: int
    arrivals: int
    arrives: str
    waits: str
    protects: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A part of one CTA's shared memory.

    name: what it holds
    start: first byte
    size_bytes: bytes
    layout: how elements lie in it
    """

    name: str
    start: int
    size_bytes: int
    layout: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Tensor-memory columns, 128 lanes of 32 bits each.

    name: what they hold
    start: first column
    count: columns
    """

    name: str
    start: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Registers:
    """Registers of one kind of warpgroup.

    owner: which warpgroups
    granted: registers of a thread that setmaxnreg grants; None where the compiler's figure counts
    accumulators: float32 values of a tile that a thread holds at a time
    """

    owner: str
    granted: int | None
    accumulators: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """All of it.

    roles: kinds of threads
    barriers: what stands between them
    shared_memory: regions in the order of their addresses
    tensor_memory: columns; empty where there is none
    registers: by kind of warpgroup
    """

    roles: tuple[Role, ...]
    barriers: tuple[Barrier, ...]
    shared_memory: tuple[Region, ...]
    tensor_memory: tuple[Columns, ...]
    registers: tuple[Registers, ...]


def anatomy_of(config: GemmConfig) -> Anatomy:
    """Take a legal config of either template apart."""
    if isinstance(config, Sm90GemmConfig):
        return _sm90(config)
    assert isinstance(config, Sm100GemmConfig)
    return _sm100(config)


def _swizzle(row_elements: int) -> str:
    """Swizzle of rows in shared memory: the widest atom that divides a row."""
    row_bytes = row_elements * ELEMENT_BYTES
    return next(f"{atom}-byte swizzle" for atom in (128, 64, 32) if row_bytes % atom == 0)


def _shared_memory(config: GemmConfig, staging_rows: int) -> tuple[Region, ...]:
    """Header, ring of A, ring of B, staging buffers: both templates lay them out in this order."""
    a_bytes = ELEMENT_BYTES * config.pipe_depth * config.cta_rows * config.blk_k
    b_bytes = ELEMENT_BYTES * config.pipe_depth * config.blk_n * config.blk_k
    operand, consumers = _swizzle(config.blk_k), config.num_consumers
    rows = f"{consumers} x {config.blk_m}" if consumers > 1 else str(config.blk_m)
    parts = (
        ("mbarriers, TMEM address" if isinstance(config, Sm100GemmConfig) else "mbarriers", HEADER_BYTES, "8 B each"),
        ("A ring", a_bytes, f"{config.pipe_depth} stages of {rows} rows x {config.blk_k}, K-major, {operand}"),
        ("B ring", b_bytes, f"{config.pipe_depth} stages of {config.blk_n} rows x {config.blk_k}, K-major, {operand}"),
        (
            "D staging",
            config.epilogue_bytes,
            f"{consumers} x {config.epi_stages} buffers of {staging_rows} rows x {config.epi_n}, "
            f"{_swizzle(config.epi_n)}",
        ),
    )
    return tuple(_placed(parts))


def _placed(parts: tuple[tuple[str, int, str], ...]) -> Iterator[Region]:
    start = 0
    for name, size_bytes, layout in parts:
        yield Region(name=name, start=start, size_bytes=size_bytes, layout=layout)
        start += size_bytes


def _stores(config: GemmConfig) -> Barrier:
    return Barrier(
        name="store groups",
        kind="bulk group",
        slots=config.epi_stages,
        arrivals=1,
        arrives="the thread of each consumer that issues its TMA stores commits one group a chunk",
        waits="the same thread, for all but the newest epi_stages - 1 groups; at the end for all",
        protects="a staging buffer that a store still reads",
    )


def _staging_sync(config: GemmConfig, first: int) -> Barrier:
    numbers = f"{first}" if config.num_consumers == 1 else f"{first}-{first + config.num_consumers - 1}"
    return Barrier(
        name=f"named barriers {numbers}",
        kind="named barrier",
        slots=config.num_consumers,
        arrivals=WARPGROUP_THREADS,
        arrives="all threads of one consumer's warpgroup, before and after they fill a staging buffer",
        waits="the same threads",
        protects="a staging buffer that is not yet free, or not yet full",
    )


def _lifetime(config: GemmConfig, what: str) -> Barrier:
    pair = config.cta_group > 1
    scope = "cluster" if pair else "CTA"
    return Barrier(
        name=f"{scope} barrier",
        kind=f"{scope} barrier",
        slots=1,
        arrivals=config.threads * config.cta_group,
        arrives=f"all threads of the {scope}, after the set-up and before the exit",
        waits="the same threads",
        protects=what + (" of both CTAs" if pair else ""),
    )


# ---------------------------------------------------------------------- sm_100a


def _sm100(config: Sm100GemmConfig) -> Anatomy:
    chunk = config.epi_n * config.blk_m // WARPGROUP_THREADS
    return Anatomy(
        roles=tuple(_sm100_roles(config)),
        barriers=_sm100_barriers(config),
        shared_memory=_shared_memory(config, config.blk_m),
        tensor_memory=tuple(_sm100_columns(config)),
        registers=(
            Registers(owner="writeback: one chunk, then its 16-bit pack", granted=None, accumulators=chunk),
            Registers(owner="producer and MMA warps", granted=None, accumulators=0),
        ),
    )


def _sm100_roles(config: Sm100GemmConfig) -> Iterator[Role]:
    pair, last = config.cta_group > 1, config.num_consumers
    every = " of both CTAs" if pair else ""
    two = f".cta_group::{config.cta_group}"
    yield Role(
        name="TMA producer",
        scope=f"warpgroup {last}, warp 3{every}: one elected thread",
        dispatch=f"cp.async.bulk.tensor loads of A and B{', counted in the leader CTA' if pair else ''}",
        waits=("mma2tma",),
        signals=("tma2mma",),
    )
    for consumer in range(config.num_consumers):
        yield Role(
            name=f"MMA of consumer {consumer}",
            scope=f"warpgroup {last}, warp {consumer}{' of CTA 0, the leader' if pair else ''}: one elected thread",
            dispatch=f"tcgen05.mma{two} of {config.cta_group * config.blk_m} x {config.mma_n} x 16, tcgen05.commit",
            waits=("tma2mma", "ld2mma"),
            signals=("mma2tma", "mma2ld"),
        )
    for consumer in range(config.num_consumers):
        yield Role(
            name=f"writeback of consumer {consumer}",
            scope=f"warpgroup {consumer}{every}: 128 threads, one of which issues the stores",
            dispatch=f"tcgen05.ld of {config.blk_m} x {config.epi_n}, round, st.shared, TMA store",
            waits=("mma2ld", "store groups"),
            signals=("ld2mma",),
        )
    yield Role(
        name="owner of tensor memory",
        scope=f"warpgroup 0, warp 0{every}: 32 threads",
        dispatch=f"tcgen05.alloc of {config.arch.tmem_columns} columns at the start; relinquish and dealloc at the end",
        waits=("cluster barrier" if pair else "CTA barrier",),
        signals=(),
    )


def _sm100_barriers(config: Sm100GemmConfig) -> tuple[Barrier, ...]:
    pair, slots = config.cta_group > 1, config.num_consumers * config.acc_stages
    consumers = "each consumer" if config.num_consumers > 1 else "the consumer"
    leader = "leader's " if pair else ""
    both = ", in both CTAs" if pair else ""
    return (
        Barrier(
            name="tma2mma",
            kind="mbarrier",
            slots=config.pipe_depth,
            arrivals=1,
            arrives=f"the {leader}producer announces {config.cta_group * config.stage_bytes} B; the copies"
            f"{' of both CTAs' if pair else ''} count theirs",
            waits=f"MMA of {consumers}",
            protects="a stage of A and B that is not yet full",
        ),
        Barrier(
            name="mma2tma",
            kind="mbarrier",
            slots=config.pipe_depth,
            arrivals=config.num_consumers,
            arrives=f"tcgen05.commit of {consumers}{both}",
            waits=f"TMA producer{' of each CTA' if pair else ''}",
            protects="a stage of A and B that MMAs still read",
        ),
        Barrier(
            name="mma2ld",
            kind="mbarrier",
            slots=slots,
            arrivals=1,
            arrives=f"tcgen05.commit after a tile's last MMA{both}",
            waits="writeback of the same consumer",
            protects="an accumulator slot that is not yet finished",
        ),
        Barrier(
            name="ld2mma",
            kind="mbarrier",
            slots=slots,
            arrivals=WARPGROUP_THREADS * config.cta_group,
            arrives=f"every writeback thread of the consumer{' of both CTAs, in the leader' if pair else ''}",
            waits="MMA of the same consumer",
            protects="an accumulator slot that is still being read",
        ),
        _staging_sync(config, 10),
        _stores(config),
        _lifetime(config, "barriers and tensor memory"),
    )


def _sm100_columns(config: Sm100GemmConfig) -> Iterator[Columns]:
    for consumer in range(config.num_consumers):
        for slot in range(config.acc_stages):
            start = (consumer * config.acc_stages + slot) * config.mma_n
            yield Columns(name=f"consumer {consumer}, slot {slot}", start=start, count=config.mma_n)
    if free := config.arch.tmem_columns - config.tmem_columns:
        yield Columns(name="allocated, not used", start=config.tmem_columns, count=free)


# ---------------------------------------------------------------------- sm_90a


def _sm90(config: Sm90GemmConfig) -> Anatomy:
    producer, consumer = SM90_REGISTERS[config.num_consumers]
    return Anatomy(
        roles=tuple(_sm90_roles(config)),
        barriers=_sm90_barriers(config),
        shared_memory=_shared_memory(config, WGMMA_ROWS),
        tensor_memory=(),
        registers=(
            Registers(owner="producer warpgroup", granted=producer, accumulators=0),
            Registers(
                owner=f"consumer warpgroups, {resources_of(config).registers} expected to be used",
                granted=consumer,
                accumulators=config.blk_m * config.blk_n // WARPGROUP_THREADS,
            ),
        ),
    )


def _sm90_roles(config: Sm90GemmConfig) -> Iterator[Role]:
    pair = config.cta_group > 1
    every = " of both CTAs" if pair else ""
    multicast = f", half of each tile of {config.share} multicast to both" if pair else ""
    yield Role(
        name="TMA producer",
        scope=f"warpgroup {config.num_consumers}, warp 0{every}: one elected thread",
        dispatch=f"cp.async.bulk.tensor loads of A and B{multicast}",
        waits=("mma2tma",),
        signals=("tma2mma",),
    )
    for consumer in range(config.num_consumers):
        yield Role(
            name=f"consumer {consumer}",
            scope=f"warpgroup {consumer}{every}: 128 threads, one of which issues the stores",
            dispatch=f"{config.blk_m // WGMMA_ROWS} x wgmma.m64n{config.blk_n}k16, then stmatrix and TMA store",
            waits=("tma2mma", "store groups"),
            signals=("mma2tma",),
        )


def _sm90_barriers(config: Sm90GemmConfig) -> tuple[Barrier, ...]:
    pair = config.cta_group > 1
    return (
        Barrier(
            name="tma2mma",
            kind="mbarrier",
            slots=config.pipe_depth,
            arrivals=1,
            arrives="this CTA's producer announces the bytes; the copies"
            f"{' of both CTAs' if pair else ''} count theirs",
            waits="every consumer of this CTA",
            protects="a stage of A and B that is not yet full",
        ),
        Barrier(
            name="mma2tma",
            kind="mbarrier",
            slots=config.pipe_depth,
            arrivals=config.num_consumers * config.cta_group,
            arrives=f"one thread of each consumer{' of both CTAs' if pair else ''}",
            waits="this CTA's producer",
            protects="a stage of A and B that wgmmas still read",
        ),
        _staging_sync(config, 1),
        _stores(config),
        _lifetime(config, "barriers"),
    )
