"""Blackwell template: a persistent, warp-specialised GEMM on tcgen05 with accumulators in tensor memory (TMEM).

A cluster of `cta_group` CTAs computes one cluster tile of D at a time. Its CTAs hold different rows of A and different
columns of B; one MMA of the pair reads the shared memory of both. The consumers of a CTA hold different rows of A and
share the staged columns of B. Roles of a CTA:

    warpgroups 0 .. consumers-1     write back the accumulator of "their" consumer
    last warpgroup, warp 3          TMA producer
    last warpgroup, warps 0, 1      MMA issue of consumer 0, 1; in the leader CTA (rank 0) only

Every hand-over is one mbarrier ring named after the two sides:

    ring      slots                  protects               arrivals                                   waits
    tma2mma   pipe_depth             filled stage of A, B   1 expect_tx by the leader's producer,      MMA
                                                            plus the bytes of every CTA's copies
    mma2tma   pipe_depth             drained stage of A, B  1 commit of each consumer                  TMA producers
    mma2ld    consumers*acc_stages   finished accumulator   1 commit                                   writeback
    ld2mma    consumers*acc_stages   drained accumulator    every writeback thread of every CTA        MMA

tma2mma and ld2mma are waited on in the leader CTA only, so the other CTA arrives on the leader's copy of them.
"""
# A TVMScript body is parsed, not run: its annotations are buffers and its decorators have no types.
# mypy: disable-error-code="valid-type, untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import MBarrier, PipelineState, TCGen05Bar, TMABar
from tvm.backend.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import S, TileLayout, tcgen05_atom_layout, tid_in_wg, tmem_datapath_layout

from kernels.errors import ConfigError
from kernels.problem import ELEMENT_BYTES
from kernels.resources import HEADER_BYTES
from kernels.rules import violation
from kernels.tile_scheduler import TileWalk
from kernels.tracing import k_loop_unroll

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.config import Sm100GemmConfig
    from kernels.problem import GemmProblem

WARPGROUP_THREADS = 128
PRODUCER_WARP = 3
# Named barriers 10, 11 for the writeback warpgroups: 0 belongs to __syncthreads.
WRITEBACK_BARRIER = 10
# The tensor map of a copy has the dimensions of A, B or D as they are declared. "tma_auto" derives them from shared
# memory and drops a dimension of one element: M = 1 is refused ("globalStrides[0]=2 must be a multiple of 16B").
TMA = "tma_explicit"
# Phase on which a side starts its ring. All slots start empty: who fills them must not wait on the first lap.
FIRST_LAP_WAITS, FIRST_LAP_PASSES = 0, 1

# Protocol bugs that can be planted, to prove that the gates catch them. The product never builds with one.
FAULTS: dict[str, str] = {
    # barrier phases, counts and targets
    "phase": "the TMA producer starts its ring on the phase that waits for a first release",
    "acc_phase": "writeback starts its ring on the phase that passes, so it reads before the first MMA",
    "expect_tx": "tma2mma expects half the bytes that the copies bring",
    "arrive_count": "ld2mma expects one arrival more than there are writeback threads",
    "both_announce": "each CTA of the pair announces the bytes of both",
    "own_full": "the copies of the other CTA count on its own tma2mma, which nobody waits on",
    "own_drained": "the other CTA's writeback arrives on its own ld2mma, which nobody waits on",
    "one_cta_mask": "the commit that releases a stage reaches the leader CTA only",
    "result_mask": "the commit that finishes an accumulator reaches the leader CTA only",
    # waits and hand-overs left out
    "no_empty_wait": "the TMA producer overwrites a stage without waiting on mma2tma",
    "no_full_wait": "the MMA reads a stage without waiting on tma2mma",
    "no_acc_wait": "the MMA overwrites an accumulator without waiting on ld2mma",
    "no_result_wait": "writeback reads an accumulator without waiting on mma2ld",
    "no_ld_wait": "writeback uses the values of tcgen05.ld without tcgen05.wait::ld",
    "no_store_wait": "a staging buffer is rewritten while a TMA store may still read it",
    "no_exit_wait": "a CTA exits while its last TMA stores may still read shared memory",
    "no_stage_drain": "the producer leaves before the last release of each stage has arrived",
    "no_stage_commit": "the MMAs of a stage are not committed to mma2tma",
    "no_result_commit": "the MMAs of a tile are not committed to mma2ld",
    "no_store_commit": "TMA stores are not closed by a commit_group, so no wait covers them",
    # fences left out
    "no_proxy_fence": "no proxy fence between writing a staging buffer and its TMA store",
    "no_after_fence": "no tcgen05 fence between the wait on mma2ld and tcgen05.ld",
    "no_mma_fence": "no tcgen05 fence between the waits of the MMA warp and its MMAs",
    "no_before_fence": "no tcgen05 fence between the last tcgen05.ld and the arrival on ld2mma",
    "no_init_fence": "no fence.mbarrier_init between mbarrier.init and the barrier that publishes it",
    # barriers of threads
    "no_staging_sync": "the TMA store is issued before the other threads have filled the staging buffer",
    "shared_sync": "the writeback warpgroups of both consumers wait on one named barrier",
    "cta_sync_in_role": "writeback waits for the whole CTA, whose other roles never come",
    "no_cluster_sync": "barriers are initialised under a CTA barrier where the whole cluster has to wait",
    "no_init_sync": "no barrier at all after the barriers are initialised",
    "cta_exit": "a pair leaves through a CTA barrier, so one CTA frees tensor memory that the other still uses",
    # order, reuse and lifetime
    "early_release": "writeback releases the accumulator before its last tcgen05.ld has completed",
    "early_stage_release": "a stage is committed as drained before the MMAs that read it are issued",
    "staging_restart": "the staging buffer index starts again at 0 with every tile",
    "one_buffer_short": "the wait before a staging buffer is rewritten allows one store too many",
    "one_accumulator": "every tile is accumulated in the same slot, although the barriers count slots in turn",
    "dealloc_two_warps": "warp 0 of every warpgroup gives tensor memory back",
    "no_dealloc": "tensor memory is never given back",
    # values
    "stale_accumulator": "the first MMA of a tile adds to what the slot held before",
    "same_b_half": "both CTAs of a pair load the same columns of B",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What the template derives from problem and knobs.

    clusters: clusters launched
    k_blocks: stages that one tile consumes
    copies: TMA copies that fill one operand of one stage
    copy_k: K elements of one copy
    stores: TMA stores that empty one staging buffer
    store_n: columns of one store
    tx_bytes: bytes that all copies of all CTAs bring to one slot of tma2mma
    chunks: epilogue chunks of one accumulator
    chunk_registers: values that one writeback thread holds of a chunk
    swizzle_ab: shared-memory swizzle of A and B
    swizzle_d: shared-memory swizzle of the staging buffers
    """

    clusters: int
    k_blocks: int
    copies: int
    copy_k: int
    stores: int
    store_n: int
    tx_bytes: int
    chunks: int
    chunk_registers: int
    swizzle_ab: SwizzleMode
    swizzle_d: SwizzleMode


def _plan(problem: GemmProblem, config: Sm100GemmConfig, sm_count: int) -> _Plan:
    # Copies and stores are one swizzle atom wide: a wider box is a 3-D tensor map, which exists only where K or N is a
    # multiple of the atom. Past the end of K zeros arrive, and count as bytes; past the ends of D nothing is written.
    copy_k, swizzle_ab = _swizzle(config.blk_k)
    store_n, swizzle_d = _swizzle(config.epi_n)
    return _Plan(
        clusters=config.clusters(problem, sm_count),
        k_blocks=config.k_blocks(problem),
        copies=config.blk_k // copy_k,
        copy_k=copy_k,
        stores=config.epi_n // store_n,
        store_n=store_n,
        tx_bytes=config.cta_group * config.stage_bytes,
        chunks=config.mma_n // config.epi_n,
        chunk_registers=config.epi_n * config.blk_m // WARPGROUP_THREADS,
        swizzle_ab=swizzle_ab,
        swizzle_d=swizzle_d,
    )


def _swizzle(row_elements: int) -> tuple[int, SwizzleMode]:
    """The widest swizzle whose atom divides a row, with the atom's width in elements."""
    for atom_bytes, mode in (
        (128, SwizzleMode.SWIZZLE_128B_ATOM),
        (64, SwizzleMode.SWIZZLE_64B_ATOM),
        (32, SwizzleMode.SWIZZLE_32B_ATOM),
    ):
        if row_elements * ELEMENT_BYTES % atom_bytes == 0:
            return atom_bytes // ELEMENT_BYTES, mode
    raise ConfigError(f"a row of {row_elements} elements holds no 32-byte swizzle atom")


def _at(extent: int, index: Any) -> Any:
    """Index of a dimension that may have one element.

    TVM drops a unit dimension from a shared-memory layout, and with it the stride that a run-time index needs
    ("shared slice offset must preserve 128B alignment"); a literal 0 is right there.
    """
    return index if extent > 1 else 0


def _when(condition: bool, emit: Callable[..., Any], *arguments: Any) -> None:
    """Put a statement into the kernel or leave it out; the parser would keep an `if` on a Python bool as an `if`."""
    if condition:
        statement = emit(*arguments)
        if statement is not None:  # methods of barriers emit what they do, instructions are returned
            T.evaluate(statement)


def build_gemm_sm100(problem: GemmProblem, config: Sm100GemmConfig, sm_count: int, *, fault: str = "") -> Any:
    """Trace the kernel of one problem and config for a device of `sm_count` SMs into a TVM PrimFunc named "gemm".

    fault plants one protocol bug of `FAULTS`, for tests of the gates. Raises ConfigError where `kernels.rules` has an
    objection, ValueError for an unknown fault.
    """
    if reason := violation(problem, config, sm_count):
        raise ConfigError(reason)
    if fault and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}: known are {', '.join(FAULTS)}")

    M, N, K, dtype = problem.m, problem.n, problem.k, problem.dtype.long_name
    plan = _plan(problem, config, sm_count)
    PIPE, CG, CONSUMERS, ACC, STAGING = (
        config.pipe_depth, config.cta_group, config.num_consumers, config.acc_stages, config.epi_stages,
    )  # fmt: skip
    BM, BN, BK, EPI, MMA_N = config.blk_m, config.blk_n, config.blk_k, config.epi_n, config.mma_n
    TMEM_COLUMNS = config.arch.tmem_columns
    EVERY_CTA = (1 << CG) - 1

    def leader_copy(barrier: Any) -> Any:
        return barrier.remote_view(0) if CG > 1 else barrier

    def planted(name: str) -> bool:
        return fault == name

    def unless(name: str, emit: Callable[..., Any], *arguments: Any) -> None:
        _when(not planted(name), emit, *arguments)

    def sync_writers(consumer: Any) -> Any:
        if planted("cta_sync_in_role"):
            return T.cuda.cta_sync()
        return T.cuda.warpgroup_sync(WRITEBACK_BARRIER + (0 if planted("shared_sync") else consumer))

    def announces(rank: Any) -> Any:
        """Whether this CTA's producer says how many bytes will come: the leader's does, for both."""
        return rank >= 0 if planted("both_announce") else rank == 0

    def adds(k: Any) -> Any:
        """Whether the MMAs of this block add to the accumulator or overwrite it."""
        return True if planted("stale_accumulator") else k != 0

    stage_mask = 1 if planted("one_cta_mask") else EVERY_CTA
    result_mask = 1 if planted("result_mask") else EVERY_CTA
    tx_bytes = plan.tx_bytes // 2 if planted("expect_tx") else plan.tx_bytes
    drained_arrivals = WARPGROUP_THREADS * CG + planted("arrive_count")
    owners = {"dealloc_two_warps": CONSUMERS + 1, "no_dealloc": 0}.get(fault, 1)
    first_fill = FIRST_LAP_WAITS if planted("phase") else FIRST_LAP_PASSES
    first_result = FIRST_LAP_PASSES if planted("acc_phase") else FIRST_LAP_WAITS
    stores_in_flight = STAGING - 1 + planted("one_buffer_short")
    b_halves = 0 if planted("same_b_half") else 1

    UNROLL = k_loop_unroll(plan.k_blocks)
    A_layout = mma_shared_layout(dtype, plan.swizzle_ab, (PIPE, CONSUMERS, BM, BK))
    B_layout = mma_shared_layout(dtype, plan.swizzle_ab, (PIPE, BN, BK))
    D_layout = mma_shared_layout(dtype, plan.swizzle_d, (CONSUMERS, STAGING, BM, EPI))
    # 128 rows sit on the 128 lanes of tensor memory, one per writeback thread. 64 rows sit on 16 lanes of each warp.
    if BM == WARPGROUP_THREADS:
        acc_layout = tmem_datapath_layout("D", BM, TMEM_COLUMNS)
        chunk_layout = TileLayout(S[(BM, EPI) : (1 @ tid_in_wg, 1)])
    else:
        acc_layout = tmem_datapath_layout("F", BM, TMEM_COLUMNS)
        chunk_layout = tcgen05_atom_layout("16x256b", (BM, EPI), "float32")

    @T.prim_func
    def gemm(A: T.Buffer((M, K), dtype), B: T.Buffer((N, K), dtype), D: T.Buffer((M, N), dtype)):
        T.device_entry()
        cta = T.cta_id([plan.clusters * CG])
        rank, _row = T.cta_id_in_cluster([CG, 1])
        wg = T.warpgroup_id([CONSUMERS + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])

        # ------------------------------------------------------------ shared memory
        pool = T.SMEMPool()
        tmem_addr = pool.alloc((1,), "uint32")
        tma2mma = TMABar(pool, PIPE)
        mma2tma = TCGen05Bar(pool, PIPE)
        mma2ld = TCGen05Bar(pool, CONSUMERS * ACC)
        ld2mma = MBarrier(pool, CONSUMERS * ACC)
        pool.move_base_to(HEADER_BYTES)
        A_smem = pool.alloc((PIPE, CONSUMERS, BM, BK), dtype, layout=A_layout)
        B_smem = pool.alloc((PIPE, BN, BK), dtype, layout=B_layout)
        D_smem = pool.alloc((CONSUMERS, STAGING, BM, EPI), dtype, layout=D_layout)

        # ------------------------------------------------------------ barriers and tensor memory
        # A stage is full when the leader's producer has announced its bytes and the copies of all CTAs have landed.
        tma2mma.init(1)
        # A stage is empty when the MMAs of every consumer that read it have completed.
        mma2tma.init(CONSUMERS)
        # An accumulator is finished when the MMAs of its consumer have completed.
        mma2ld.init(1)
        # An accumulator is drained when each of the 128 threads of each CTA that reads it has its values.
        ld2mma.init(drained_arrivals)
        pool.commit()

        if (wg == 0) & (warp == 0):
            T.ptx[f"tcgen05.alloc.cta_group::{CG}.sync.aligned.shared::cta.b32"](
                tmem_addr.ptr_to([0]), T.uint32(TMEM_COLUMNS)
            )
        T.ptx.fence.proxy.async_.shared__cta()
        unless("no_init_fence", T.ptx.fence.mbarrier_init.release.cluster)
        # A CTA barrier is not enough for a pair: the peer's copies and commits arrive on these barriers too.
        unless("no_init_sync", T.cuda.cta_sync if CG == 1 or planted("no_cluster_sync") else T.cuda.cluster_sync)

        # Bound to a value first: a buffer element as allocated_addr is refused when the host call is built.
        tmem_base: T.let = tmem_addr[0]
        tmem = T.decl_buffer((BM, TMEM_COLUMNS), "float32", scope="tmem", allocated_addr=tmem_base, layout=acc_layout)

        tiles = T.meta_var(TileWalk(problem, config, plan.clusters))
        tiles.init(cta // CG)
        # First row of A, and first row of B, that this CTA holds of the tile; consumer c starts c * CG * BM further.
        m_start = T.meta_var((tiles.row * CONSUMERS * CG + rank) * BM)
        n_start = T.meta_var((tiles.col * CG + rank * b_halves) * BN)
        tma2mma_leader = T.meta_var(leader_copy(tma2mma))
        ld2mma_leader = T.meta_var(leader_copy(ld2mma))
        filled = T.meta_var(tma2mma if planted("own_full") else tma2mma_leader)
        drained = T.meta_var(ld2mma if planted("own_drained") else ld2mma_leader)

        # ------------------------------------------------------------ roles
        @T.inline
        def load_stage(stage, k_start):
            for part in T.unroll(plan.copies):
                in_stage = T.meta_var(part * plan.copy_k)
                k_from = T.meta_var(k_start + in_stage)
                for c in T.unroll(CONSUMERS):
                    m_from = T.meta_var(m_start + c * CG * BM)
                    Tx.copy_async(
                        A_smem[_at(PIPE, stage), c, :, in_stage : in_stage + plan.copy_k],
                        A[m_from : m_from + BM, k_from : k_from + plan.copy_k],
                        dispatch=TMA, cta_group=CG, mbar=filled.ptr_to([stage]),
                    )  # fmt: skip
                Tx.copy_async(
                    B_smem[_at(PIPE, stage), :, in_stage : in_stage + plan.copy_k],
                    B[n_start : n_start + BN, k_from : k_from + plan.copy_k],
                    dispatch=TMA, cta_group=CG, mbar=filled.ptr_to([stage]),
                )  # fmt: skip

        @T.inline
        def produce():
            if T.cuda.elect_sync():
                fill = PipelineState(PIPE, phase=first_fill)
                while tiles.valid():
                    for k in T.serial(plan.k_blocks, unroll=UNROLL):
                        unless("no_empty_wait", mma2tma.wait, fill.stage, fill.phase)
                        load_stage(fill.stage, k * BK)
                        if announces(rank):
                            tma2mma_leader.arrive(fill.stage, tx_bytes)
                        fill.advance()
                    tiles.next_tile()
                # The leader's commits arrive in this CTA's shared memory: stay until the last lap of them is in.
                for _stage in range(0 if planted("no_stage_drain") else PIPE):
                    mma2tma.wait(fill.stage, fill.phase)
                    fill.advance()

        @T.inline
        def release_stage(stage):
            mma2tma.arrive(stage, cta_group=CG, cta_mask=stage_mask)

        @T.inline
        def finish_accumulator(slot):
            mma2ld.arrive(slot, cta_group=CG, cta_mask=result_mask)

        @T.inline
        def multiply(consumer):
            if T.cuda.elect_sync():
                drain = PipelineState(PIPE, phase=FIRST_LAP_WAITS)
                acc = PipelineState(ACC, phase=FIRST_LAP_PASSES)
                while tiles.valid():
                    slot = T.meta_var(consumer * ACC + acc.stage)
                    unless("no_acc_wait", ld2mma.wait, slot, acc.phase)
                    unless("no_mma_fence", T.ptx.tcgen05.fence__after_thread_sync)
                    column = T.meta_var((consumer * ACC if planted("one_accumulator") else slot) * MMA_N)
                    for k in T.serial(plan.k_blocks, unroll=UNROLL):
                        unless("no_full_wait", tma2mma.wait, drain.stage, drain.phase)
                        unless("no_mma_fence", T.ptx.tcgen05.fence__after_thread_sync)
                        _when(planted("early_stage_release"), release_stage, drain.stage)
                        Tx.gemm_async(
                            tmem[:, column : column + MMA_N],
                            A_smem[_at(PIPE, drain.stage), _at(CONSUMERS, consumer), :, :],
                            B_smem[_at(PIPE, drain.stage), :, :],
                            accum=adds(k), dispatch="tcgen05", cta_group=CG,
                        )  # fmt: skip
                        # The commit arrives once the MMAs issued so far have completed, in every CTA of the cluster.
                        unless(
                            fault if planted("early_stage_release") else "no_stage_commit", release_stage, drain.stage
                        )
                        drain.advance()
                    unless("no_result_commit", finish_accumulator, slot)
                    acc.advance()
                    tiles.next_tile()

        @T.inline
        def write_back(consumer):
            acc = PipelineState(ACC, phase=first_result)
            # Runs on across tiles. Starting again with each tile would let a tile rewrite the buffer that the store
            # before it may still be reading: wait_group.read(STAGING - 1) covers buffers in turn, not by number.
            staging = PipelineState(STAGING, phase=FIRST_LAP_WAITS)
            chunk_f32 = T.alloc_local((plan.chunk_registers,), "float32")
            chunk_16 = T.alloc_local((plan.chunk_registers,), dtype)
            chunk_f32_wg = chunk_f32.view(BM, EPI, layout=chunk_layout)
            chunk_16_wg = chunk_16.view(BM, EPI, layout=chunk_layout)
            storer = T.meta_var((warp == 0) & (lane == 0))
            while tiles.valid():
                slot = T.meta_var(consumer * ACC + acc.stage)
                unless("no_result_wait", mma2ld.wait, slot, acc.phase)
                unless("no_after_fence", T.ptx.tcgen05.fence__after_thread_sync)
                _when(planted("staging_restart"), staging.init, FIRST_LAP_WAITS)
                for chunk in range(plan.chunks):
                    column = T.meta_var(slot * MMA_N + chunk * EPI)
                    Tx.wg.copy_async(chunk_f32_wg[:], tmem[:, column : column + EPI])
                    _when(fault not in ("early_release", "no_ld_wait"), T.ptx.tcgen05.wait__ld.sync.aligned)
                    # Before the stores, so that the next tile's MMAs overlap them.
                    if chunk == plan.chunks - 1:
                        unless("no_before_fence", T.ptx.tcgen05.fence__before_thread_sync)
                        drained.arrive(slot)
                    _when(planted("early_release"), T.ptx.tcgen05.wait__ld.sync.aligned)
                    Tx.cast(chunk_16[:], chunk_f32[:])
                    # The thread that issues the stores is the one that can wait for them to have read their buffer.
                    if storer:
                        unless("no_store_wait", T.ptx.cp.async_.bulk.wait_group.read, stores_in_flight)
                    sync_writers(consumer)
                    buffer = T.meta_var((_at(CONSUMERS, consumer), _at(STAGING, staging.stage)))
                    Tx.wg.copy(D_smem[buffer[0], buffer[1], :, :], chunk_16_wg[:, :])
                    # Each thread makes its own writes visible to the copy engine, then the storer may start it.
                    unless("no_proxy_fence", T.ptx.fence.proxy.async_.shared__cta)
                    unless("no_staging_sync", sync_writers, consumer)
                    if storer:
                        m_from = T.meta_var(m_start + consumer * CG * BM)
                        for part in T.unroll(plan.stores):
                            in_chunk = T.meta_var(part * plan.store_n)
                            n_from = T.meta_var(tiles.col * MMA_N + chunk * EPI + in_chunk)
                            Tx.copy_async(
                                D[m_from : m_from + BM, n_from : n_from + plan.store_n],
                                D_smem[buffer[0], buffer[1], :, in_chunk : in_chunk + plan.store_n],
                                dispatch=TMA,
                            )
                        unless("no_store_commit", T.ptx.cp.async_.bulk.commit_group)
                    staging.advance()
                acc.advance()
                tiles.next_tile()
            if storer:
                unless("no_exit_wait", T.ptx.cp.async_.bulk.wait_group, 0)

        if wg == CONSUMERS:
            if warp == PRODUCER_WARP:
                produce()
            elif (warp < CONSUMERS) & (rank == 0):
                multiply(warp)
        else:
            write_back(wg)

        # ------------------------------------------------------------ clean-up
        # Lanes that were not elected are here long before the one that was; an aligned barrier takes whole warps.
        T.cuda.warp_sync()
        # The pair shares its tensor memory and its barriers: neither CTA leaves before both are done.
        _when(True, T.cuda.cta_sync if CG == 1 or planted("cta_exit") else T.cuda.cluster_sync)
        # `warp` counts within the warpgroup, so the warpgroup has to be named too.
        if (wg < owners) & (warp == 0):
            T.ptx[f"tcgen05.relinquish_alloc_permit.cta_group::{CG}.sync.aligned"]()
            T.ptx[f"tcgen05.dealloc.cta_group::{CG}.sync.aligned.b32"](tmem_base, T.uint32(TMEM_COLUMNS))

    return gemm
