"""What a kernel of the templates is made of: who does what, what stands between them, and what lies where.

Every entry follows from the config alone. Tests hold it against the barriers and addresses of generated sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.gemm_names import ANSWER_SLOTS
from kernels.problem import ELEMENT_BYTES
from kernels.resources import HEADER_BYTES, WGMMA_ROWS, resources_of, sm90_registers

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


def _ring(config: GemmConfig, operand: str, rows: int, shown_rows: str = "") -> tuple[str, int, str]:
    layout = (
        f"{config.pipe_depth} stages of {shown_rows or rows} rows x {config.blk_k}, K-major, {_swizzle(config.blk_k)}"
    )
    return f"{operand} ring", ELEMENT_BYTES * config.pipe_depth * rows * config.blk_k, layout


def _staging(config: GemmConfig, rows: int, cols: int, size_bytes: int) -> tuple[str, int, str]:
    buffers = f"{config.num_consumers} x {config.epi_stages} buffers of {rows} rows of D x {cols}"
    return "D staging", size_bytes, f"{buffers}, {_swizzle(cols)}"


def _exchange_region(config: Sm90GemmConfig | Sm100GemmConfig) -> tuple[str, int, str]:
    layout = f"float32 sums of {config.split_k - 1} other parts of K, for each chunk that the CTA owns"
    return "exchange", config.exchange_bytes, layout


def _placed(*parts: tuple[str, int, str]) -> Iterator[Region]:
    """Regions one behind the other, behind the header; both templates lay them out so."""
    yield Region(
        name="header", start=0, size_bytes=HEADER_BYTES, layout="mbarriers of 8 B; on sm_100a the TMEM address"
    )
    start = HEADER_BYTES
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
    scope = "cluster" if config.cluster_size > 1 else "CTA"
    return Barrier(
        name=f"{scope} barrier",
        kind=f"{scope} barrier",
        slots=1,
        arrivals=config.threads * config.cluster_size,
        arrives=f"all threads of the {scope}, after the set-up and before the exit",
        waits="the same threads",
        protects=what + (" of every CTA of the cluster" if config.cluster_size > 1 else ""),
    )


# ---------------------------------------------------------------------- sm_100a


def _sm100(config: Sm100GemmConfig) -> Anatomy:
    chunk = config.epi_n * config.blk_m // WARPGROUP_THREADS
    wide, narrow = ("B", "A") if config.swap_ab else ("A", "B")
    rows = f"{config.num_consumers} x {config.blk_m}" if config.num_consumers > 1 else ""
    parts = [_ring(config, wide, config.wide_rows, rows), _ring(config, narrow, config.blk_n)]
    staged = (config.epi_n, config.blk_m) if config.swap_ab else (config.blk_m, config.epi_n)
    parts.append(_staging(config, *staged, config.staging_bytes))
    if config.split_k > 1:
        parts.append(_exchange_region(config))
    return Anatomy(
        roles=tuple(_sm100_roles(config)),
        barriers=tuple(_sm100_barriers(config)),
        shared_memory=tuple(_placed(*parts)),
        tensor_memory=tuple(_sm100_columns(config)),
        registers=(
            Registers(owner="writeback: one chunk, then its 16-bit pack", granted=None, accumulators=chunk),
            Registers(owner="producer and MMA warps", granted=None, accumulators=0),
        ),
    )


def _sm100_roles(config: Sm100GemmConfig) -> Iterator[Role]:
    pair, last, split = config.cta_group > 1, config.num_consumers, config.split_k > 1
    every = " of both CTAs" if pair else f" of each of {config.split_k} CTAs" if split else ""
    two = f".cta_group::{config.cta_group}"
    yield Role(
        name="TMA producer",
        scope=f"warpgroup {last}, warp 3{every}: one elected thread",
        dispatch=f"cp.async.bulk.tensor loads of A and B{', counted in the leader CTA' if pair else ''}",
        waits=("mma2tma",),
        signals=("tma2mma",),
    )
    if config.scheduler == "clc":
        yield Role(
            name="scheduler",
            scope=f"warpgroup {last}, warp 2{every}: one elected thread",
            dispatch=f"clusterlaunchcontrol.try_cancel{', by the leader for both' if pair else ''}",
            waits=("roles2next", "next2roles"),
            signals=("next2roles", "roles2next"),
        )
    for consumer in range(config.num_consumers):
        yield Role(
            name=f"MMA of consumer {consumer}",
            scope=f"warpgroup {last}, warp {consumer}{' of CTA 0, the leader' if pair else every}: one elected thread",
            dispatch=f"tcgen05.mma{two} of {config.cta_group * config.blk_m} x {config.mma_n} x 16, tcgen05.commit",
            waits=("tma2mma", "ld2mma"),
            signals=("mma2tma", "mma2ld"),
        )
    exchange = " st.async of parts to the CTA that sums them," if split else ""
    for consumer in range(config.num_consumers):
        yield Role(
            name=f"writeback of consumer {consumer}",
            scope=f"warpgroup {consumer}{every}: 128 threads, one of which issues the stores",
            dispatch=f"tcgen05.ld of {config.blk_m} x {config.epi_n},{exchange} round, st.shared, TMA store",
            waits=("mma2ld", "store groups", *(("sum2parts", "parts2sum") if split else ())),
            signals=("ld2mma", *(("parts2sum", "sum2parts") if split else ())),
        )
    yield Role(
        name="owner of tensor memory",
        scope=f"warpgroup 0, warp 0{every}: 32 threads",
        dispatch=f"tcgen05.alloc of {config.arch.tmem_columns} columns at the start; relinquish and dealloc at the end",
        waits=("cluster barrier" if config.cluster_size > 1 else "CTA barrier",),
        signals=(),
    )


def _sm100_barriers(config: Sm100GemmConfig) -> Iterator[Barrier]:
    pair, slots = config.cta_group > 1, config.num_consumers * config.acc_stages
    consumers = "each consumer" if config.num_consumers > 1 else "the consumer"
    leader = "leader's " if pair else ""
    both = ", in both CTAs" if pair else ""
    yield from (
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
    )
    if config.split_k > 1:
        yield from _exchange_barriers(config)
    if config.scheduler == "clc":
        yield from _answer_barriers(config)
    yield from (_staging_sync(config, 10), _stores(config), _lifetime(config, "barriers and tensor memory"))


def _answer_barriers(config: Sm100GemmConfig) -> Iterator[Barrier]:
    pair = config.cta_group > 1
    yield Barrier(
        name="next2roles",
        kind="mbarrier",
        slots=ANSWER_SLOTS,
        arrivals=1,
        arrives="the scheduler announces 16 B; the answer of the hardware counts them",
        waits="every role, and the scheduler",
        protects="the number of the next tile that is not yet known",
    )
    yield Barrier(
        name="roles2next",
        kind="mbarrier",
        slots=ANSWER_SLOTS,
        arrivals=config.answer_readers,
        arrives=f"every thread that has read the answer{' of both CTAs, in the leader' if pair else ''}",
        waits=f"scheduler{' of the leader' if pair else ''}",
        protects="an answer that a role still has to read",
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
    producer, consumer = sm90_registers(config)
    wide, narrow = ("B", "A") if config.swap_ab else ("A", "B")
    parts = [_ring(config, wide, config.mma_rows), _ring(config, narrow, config.blk_n)]
    if not config.swap_ab:
        parts.append(_staging(config, WGMMA_ROWS, config.epi_n, config.staging_bytes))
    if config.split_k > 1:
        parts.append(_exchange_region(config))
    if config.load == "cp_async":
        layout = f"{config.pipe_depth} stages of 16 B for each row: what is copied of it beyond its place in the rings"
        parts.append(("tails", config.pipe_depth * config.tail_bytes, layout))
    return Anatomy(
        roles=tuple(_sm90_roles(config)),
        barriers=tuple(_sm90_barriers(config)),
        shared_memory=tuple(_placed(*parts)),
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
    every = f" of each of {config.cluster_size} CTAs" if config.cluster_size > 1 else ""
    multicast = f", half of each tile of {config.share} multicast to both" if config.cta_group > 1 else ""
    turns, split = config.schedule == "pingpong", config.split_k > 1
    if config.load == "tma":
        scope, dispatch = "warp 0{}: one elected thread", f"cp.async.bulk.tensor loads of A and B{multicast}"
    else:
        scope, dispatch = "all{}: 128 threads", "cp.async of 16-byte pieces of A and B, shifted to their place"
    yield Role(
        name="TMA producer" if config.load == "tma" else "copying producer",
        scope=f"warpgroup {config.num_consumers}, {scope.format(every)}",
        dispatch=dispatch,
        waits=("mma2tma",),
        signals=("tma2mma",),
    )
    wgmma = f"{config.blk_m // WGMMA_ROWS} x wgmma.m64n{config.blk_n}k16"
    exchange = ", st.async of parts to the CTA that sums them" if split else ""
    if config.scheduler == "stream_k":
        exchange = ", st.global of parts of shared tiles, which the last to arrive adds"
    stores = ", then st.global" if config.swap_ab else ", then stmatrix and TMA store"
    waits = ["tma2mma", *(["turn"] if turns else []), *(["sum2parts", "parts2sum"] if split else [])]
    signals = ["mma2tma", *(["turn"] if turns else []), *(["parts2sum", "sum2parts"] if split else [])]
    signals += ["parts"] if config.scheduler == "stream_k" else []
    for consumer in range(config.num_consumers):
        issuer = "" if config.swap_ab else ", one of which issues the stores"
        yield Role(
            name=f"consumer {consumer}{', every second tile' if turns else ''}",
            scope=f"warpgroup {consumer}{every}: 128 threads{issuer}",
            dispatch=f"{wgmma}{exchange}{stores}",
            waits=(*waits, *(() if config.swap_ab else ("store groups",))),
            signals=tuple(signals),
        )


def _sm90_barriers(config: Sm90GemmConfig) -> Iterator[Barrier]:
    pair, turns = config.cta_group > 1, config.schedule == "pingpong"
    readers = "the consumer whose turn it is" if turns else "each consumer"
    fills = f"this CTA's producer announces the bytes; the copies{' of both CTAs' if pair else ''} count theirs"
    yield Barrier(
        name="tma2mma",
        kind="mbarrier",
        slots=config.pipe_depth,
        arrivals=1 if config.load == "tma" else 4,
        arrives=fills if config.load == "tma" else "one thread of each producer warp, when its values are in place",
        waits=f"{readers} of this CTA",
        protects="a stage of A and B that is not yet full",
    )
    yield Barrier(
        name="mma2tma",
        kind="mbarrier",
        slots=config.pipe_depth,
        arrivals=(1 if turns else config.num_consumers) * config.cta_group,
        arrives=f"one thread of {readers}{' of both CTAs' if pair else ''}",
        waits="this CTA's producer",
        protects="a stage of A and B that wgmmas still read",
    )
    if turns:
        yield Barrier(
            name="turn",
            kind="mbarrier",
            slots=config.num_consumers,
            arrivals=1,
            arrives="one thread of the other consumer, when it has waited for its tile's last stage",
            waits="the consumer",
            protects="the order in which consumers take stages",
        )
    if config.split_k > 1:
        yield from _exchange_barriers(config)
    if config.scheduler == "stream_k":
        yield Barrier(
            name="parts",
            kind="counter in the workspace",
            slots=config.num_consumers,
            arrivals=2,
            arrives="one thread of the same consumer of every cluster that computes a part of the tile (two, or more "
            "where there are fewer tiles than clusters)",
            waits="nobody: the last to arrive adds the parts and stores the tile",
            protects="parts of a tile that have not all been written",
        )
    if not config.swap_ab or config.split_k > 1 or config.scheduler == "stream_k":
        yield _staging_sync(config, 1)
    if not config.swap_ab:
        yield _stores(config)
    yield _lifetime(config, "barriers")


def _exchange_barriers(config: Sm90GemmConfig | Sm100GemmConfig) -> Iterator[Barrier]:
    yield Barrier(
        name="parts2sum",
        kind="mbarrier",
        slots=config.num_consumers,
        arrivals=1,
        arrives="one thread of the owner announces the bytes; the st.async of the other CTAs count theirs",
        waits="the same consumer of the CTA that owns the chunk",
        protects="parts of a sum that have not all come",
    )
    yield Barrier(
        name="sum2parts",
        kind="mbarrier",
        slots=config.num_consumers,
        arrivals=min(config.split_k, config.chunks) if isinstance(config, Sm100GemmConfig) else config.split_k,
        arrives="one thread of the same consumer of every CTA that sums, when it has read what was sent to it",
        waits="the consumer that sends",
        protects="parts of a sum that are still being read",
    )
