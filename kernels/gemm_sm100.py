"""Blackwell template: a persistent, warp-specialised GEMM on tcgen05 with accumulators in tensor memory (TMEM).

A cluster of `cta_group` CTAs computes one cluster tile of D at a time. Its CTAs hold different rows of A and different
columns of B; one MMA of the pair reads the shared memory of both. The consumers of a CTA hold different rows of A and
share the staged columns of B. Roles of a CTA:

    warpgroups 0 .. consumers-1     write back the accumulator of "their" consumer
    last warpgroup, warp 3          TMA producer
    last warpgroup, warp 2          scheduler, with scheduler = clc (`gemm_sm100_clc`)
    last warpgroup, warps 0, 1      MMA issue of consumer 0, 1; in the leader CTA (rank 0) only

Every hand-over is one mbarrier ring named after the two sides:

    ring      slots                  protects               arrivals                                   waits
    tma2mma   pipe_depth             filled stage of A, B   1 expect_tx by the leader's producer,      MMA
                                                            plus the bytes of every CTA's copies
    mma2tma   pipe_depth             drained stage of A, B  1 commit of each consumer                  TMA producers
    mma2ld    consumers*acc_stages   finished accumulator   1 commit                                   writeback
    ld2mma    consumers*acc_stages   drained accumulator    every writeback thread of every CTA        MMA

tma2mma and ld2mma are waited on in the leader CTA only, so the other CTA arrives on the leader's copy of them.

Variations
    swap_ab     the roles of A and B in the MMA change places: rows of B ride its 128-row side and rows of A the other,
                which may be short. A chunk then holds columns of D by lanes, and is staged transposed.
    split_k     the CTAs of a cluster compute parts of K of one tile and add them up (`gemm_sm100_exchange`)
"wide" is the operand on the 128-row side, "narrow" the other one.
"""
# A TVMScript body is parsed, not run: its annotations are buffers and its decorators have no types.
# mypy: disable-error-code="valid-type, untyped-decorator, no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import MBarrier, PipelineState, TCGen05Bar, TMABar
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import S, TileLayout, tcgen05_atom_layout, tid_in_wg, tmem_datapath_layout

from kernels.errors import ConfigError
from kernels.gemm_sm100_clc import Answers, StolenTiles
from kernels.gemm_sm100_exchange import Exchange
from kernels.gemm_sm100_plan import CLC_FAULTS, FAULTS, SPLIT_FAULTS, WARPGROUP_THREADS, Plan
from kernels.pause import check_delays, pause
from kernels.resources import HEADER_BYTES
from kernels.rules import violation
from kernels.tile_scheduler import TileWalk
from kernels.tracing import k_loop_unroll

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kernels.config import Sm100GemmConfig
    from kernels.problem import GemmProblem

PRODUCER_WARP, SCHEDULER_WARP = 3, 2
# Named barriers 10, 11 for the writeback warpgroups: 0 belongs to __syncthreads.
WRITEBACK_BARRIER = 10
# The tensor map of a copy has the dimensions of A, B or D as they are declared. "tma_auto" derives them from shared
# memory and drops a dimension of one element: M = 1 is refused ("globalStrides[0]=2 must be a multiple of 16B").
TMA = "tma_explicit"
# Phase on which a side starts its ring. All slots start empty: who fills them must not wait on the first lap.
FIRST_LAP_WAITS, FIRST_LAP_PASSES = 0, 1


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


def build_gemm_sm100(
    problem: GemmProblem,
    config: Sm100GemmConfig,
    sm_count: int,
    *,
    fault: str = "",
    delays_ns: Mapping[str, int] | None = None,
) -> Any:
    """Trace the kernel of one problem and config for a device of `sm_count` SMs into a TVM PrimFunc named "gemm".

    fault: name of a bug of FAULTS, of SPLIT_FAULTS with split_k, or of CLC_FAULTS with scheduler = clc, to plant for
        tests of the gates
    delays_ns: longest sleep at points of DELAY_POINTS, a power of two, for stress builds
    Raises ConfigError where `kernels.rules` has an objection or a delay is unknown, ValueError for an unknown fault.
    """
    if reason := violation(problem, config, sm_count):
        raise ConfigError(reason)
    CLC = config.scheduler == "clc"
    known = FAULTS | (SPLIT_FAULTS if config.split_k > 1 else {}) | (CLC_FAULTS if CLC else {})
    if fault and fault not in known:
        raise ValueError(f"unknown fault {fault!r}: known are {', '.join(known)}")
    delays = dict(delays_ns or {})
    check_delays(delays)

    M, N, K, dtype = problem.m, problem.n, problem.k, problem.dtype.long_name
    plan = Plan(problem=problem, config=config, sm_count=sm_count)
    PIPE, CG, CONSUMERS, ACC, STAGING, SPLIT, SWAP = (
        config.pipe_depth, config.cta_group, config.num_consumers, config.acc_stages, config.epi_stages,
        config.split_k, config.swap_ab,
    )  # fmt: skip
    BM, BN, BK, EPI, MMA_N = config.blk_m, config.blk_n, config.blk_k, config.epi_n, config.mma_n
    CLUSTER, CHUNKS, STAGED = config.cluster_size, config.chunks, plan.staged_tile
    K_LEAST, K_EXTRA = plan.k_share
    TMEM_COLUMNS = config.arch.tmem_columns
    EVERY_CTA = (1 << CG) - 1  # of one MMA

    def leader_copy(barrier: Any) -> Any:
        return barrier.remote_view(0) if CG > 1 else barrier

    def planted(name: str) -> bool:
        return fault == name

    def unless(name: str, emit: Callable[..., Any], *arguments: Any) -> None:
        _when(not planted(name), emit, *arguments)

    def sleep(point: str) -> None:
        pause(delays, point)

    def sync_writers(consumer: Any) -> Any:
        if planted("cta_sync_in_role"):
            return T.cuda.cta_sync()
        return T.cuda.warpgroup_sync(WRITEBACK_BARRIER + (0 if planted("shared_sync") else consumer))

    def announces(member: Any) -> Any:
        """Whether this CTA's producer says how many bytes will come: the leader's does, for both."""
        return member >= 0 if planted("both_announce") else member == 0

    def adds(k: Any) -> Any:
        """Whether the MMAs of this block add to the accumulator or overwrite it."""
        return True if planted("stale_accumulator") else k != 0

    def blocks_of(part: Any) -> Any:
        """Blocks of K that this CTA multiplies; the first parts may have one more."""
        return T.Select(part < K_EXTRA, K_LEAST + 1, K_LEAST) if K_EXTRA else K_LEAST

    def first_block_of(part: Any) -> Any:
        if SPLIT == 1:
            return 0
        return part * K_LEAST + (T.Select(part < K_EXTRA, part, K_EXTRA) if K_EXTRA else 0)

    def tile_walk(answers: Answers | None) -> TileWalk:
        if answers is None:
            return TileWalk(problem, config, plan.clusters)
        return TileWalk(problem, config, plan.clusters, kind=partial(StolenTiles, answers))

    stage_mask = 1 if planted("one_cta_mask") else EVERY_CTA
    result_mask = 1 if planted("result_mask") else EVERY_CTA
    tx_bytes = plan.tx_bytes // 2 if planted("expect_tx") else plan.tx_bytes
    drained_arrivals = WARPGROUP_THREADS * CG + planted("arrive_count")
    tmem_owners = {"dealloc_two_warps": CONSUMERS + 1, "no_dealloc": 0}.get(fault, 1)
    first_fill = FIRST_LAP_WAITS if planted("phase") else FIRST_LAP_PASSES
    first_result = FIRST_LAP_PASSES if planted("acc_phase") else FIRST_LAP_WAITS
    stores_in_flight = STAGING - 1 + planted("one_buffer_short")
    halves = 0 if planted("same_b_half") else 1
    publish = T.cuda.cta_sync if CLUSTER == 1 or planted("no_cluster_sync") else T.cuda.cluster_sync
    leave = T.cuda.cta_sync if CLUSTER == 1 or planted("cta_exit") else T.cuda.cluster_sync

    UNROLL = k_loop_unroll(K_LEAST + (K_EXTRA > 0))
    wide_layout = mma_shared_layout(dtype, plan.operand_swizzle, (PIPE, CONSUMERS, BM, BK))
    narrow_layout = mma_shared_layout(dtype, plan.operand_swizzle, (PIPE, BN, BK))
    D_layout = mma_shared_layout(dtype, plan.staging_swizzle, (CONSUMERS, STAGING, *STAGED))
    # 128 rows sit on the 128 lanes of tensor memory, one per writeback thread. 64 rows sit on 16 lanes of each warp.
    if BM == WARPGROUP_THREADS:
        acc_layout = tmem_datapath_layout("D", BM, TMEM_COLUMNS)
        chunk_layout = TileLayout(S[(BM, EPI) : (1 @ tid_in_wg, 1)])
        staged_layout = TileLayout(S[(EPI, BM) : (1, 1 @ tid_in_wg)]) if SWAP else chunk_layout
    else:
        acc_layout = tmem_datapath_layout("F", BM, TMEM_COLUMNS)
        chunk_layout = staged_layout = tcgen05_atom_layout("16x256b", (BM, EPI), "float32")

    @T.prim_func
    def gemm(A: T.Buffer((M, K), dtype), B: T.Buffer((N, K), dtype), D: T.Buffer((M, N), dtype)):
        T.device_entry()
        cta = T.cta_id([plan.clusters * CLUSTER])
        rank, _row = T.cta_id_in_cluster([CLUSTER, 1])
        wg = T.warpgroup_id([CONSUMERS + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        # Place within the pair of one MMA, and which part of K: a cluster is one or the other.
        member = T.meta_var(rank if SPLIT == 1 else 0)
        part = T.meta_var(rank if SPLIT > 1 else 0)

        # ------------------------------------------------------------ shared memory
        pool = T.SMEMPool()
        tmem_addr = pool.alloc((1,), "uint32")
        tma2mma = TMABar(pool, PIPE)
        mma2tma = TCGen05Bar(pool, PIPE)
        mma2ld = TCGen05Bar(pool, CONSUMERS * ACC)
        ld2mma = MBarrier(pool, CONSUMERS * ACC)
        exchange = T.meta_var(Exchange(plan, pool, fault=fault, delays_ns=delays) if SPLIT > 1 else None)
        answers = T.meta_var(Answers(plan, pool, fault=fault, delays_ns=delays) if CLC else None)
        pool.move_base_to(HEADER_BYTES)
        wide_smem = pool.alloc((PIPE, CONSUMERS, BM, BK), dtype, layout=wide_layout)
        narrow_smem = pool.alloc((PIPE, BN, BK), dtype, layout=narrow_layout)
        D_smem = pool.alloc((CONSUMERS, STAGING, *STAGED), dtype, layout=D_layout)
        _when(SPLIT > 1, lambda: exchange.allocate(pool))

        # ------------------------------------------------------------ barriers and tensor memory
        # A stage is full when the leader's producer has announced its bytes and the copies of all CTAs have landed.
        tma2mma.init(1)
        # A stage is empty when the MMAs of every consumer that read it have completed.
        mma2tma.init(CONSUMERS)
        # An accumulator is finished when the MMAs of its consumer have completed.
        mma2ld.init(1)
        # An accumulator is drained when each of the 128 threads of each CTA that reads it has its chunk_f32.
        ld2mma.init(drained_arrivals)
        _when(SPLIT > 1, lambda: exchange.init())  # noqa: PLW0108 (there may be none)
        _when(CLC, lambda: answers.init())  # noqa: PLW0108
        pool.commit()

        if (wg == 0) & (warp == 0):
            T.ptx[f"tcgen05.alloc.cta_group::{CG}.sync.aligned.shared::cta.b32"](
                tmem_addr.ptr_to([0]), T.uint32(TMEM_COLUMNS)
            )
        T.ptx.fence.proxy.async_.shared__cta()
        unless("no_init_fence", T.ptx.fence.mbarrier_init.release.cluster)
        # A CTA barrier is not enough for a cluster: the others' copies, commits and sums arrive on these barriers too.
        unless("no_init_sync", publish)

        # Bound to a value first: a buffer element as allocated_addr is refused when the host call is built.
        tmem_base: T.let = tmem_addr[0]
        tmem = T.decl_buffer((BM, TMEM_COLUMNS), "float32", scope="tmem", allocated_addr=tmem_base, layout=acc_layout)

        tiles = T.meta_var(tile_walk(answers))
        tiles.init(cta // CLUSTER)
        wide_matrix = T.meta_var(B if SWAP else A)
        narrow_matrix = T.meta_var(A if SWAP else B)
        wide_tile = T.meta_var(tiles.col if SWAP else tiles.row)
        narrow_tile = T.meta_var(tiles.row if SWAP else tiles.col)
        # First row of each operand that this CTA holds of the tile; consumer c starts c * CG * BM further.
        wide_start = T.meta_var((wide_tile * CONSUMERS * CG + member) * BM)
        narrow_start = T.meta_var((narrow_tile * CG + member * halves) * BN)
        k_blocks = T.meta_var(blocks_of(part))
        tma2mma_leader = T.meta_var(leader_copy(tma2mma))
        ld2mma_leader = T.meta_var(leader_copy(ld2mma))
        filled = T.meta_var(tma2mma if planted("own_full") else tma2mma_leader)
        drained = T.meta_var(ld2mma if planted("own_drained") else ld2mma_leader)

        # ------------------------------------------------------------ roles
        @T.inline
        def load_stage(stage, k_start):
            for copy in T.unroll(plan.copies):
                in_stage = T.meta_var(copy * plan.copy_k)
                k_from = T.meta_var(k_start + in_stage)
                for c in T.unroll(CONSUMERS):
                    row_from = T.meta_var(wide_start + c * CG * BM)
                    Tx.copy_async(
                        wide_smem[_at(PIPE, stage), c, :, in_stage : in_stage + plan.copy_k],
                        wide_matrix[row_from : row_from + BM, k_from : k_from + plan.copy_k],
                        dispatch=TMA, cta_group=CG, mbar=filled.ptr_to([stage]),
                    )  # fmt: skip
                Tx.copy_async(
                    narrow_smem[_at(PIPE, stage), :, in_stage : in_stage + plan.copy_k],
                    narrow_matrix[narrow_start : narrow_start + BN, k_from : k_from + plan.copy_k],
                    dispatch=TMA, cta_group=CG, mbar=filled.ptr_to([stage]),
                )  # fmt: skip

        @T.inline
        def produce():
            if T.cuda.elect_sync():
                fill = PipelineState(PIPE, phase=first_fill)
                while tiles.valid():
                    for k in T.serial(k_blocks, unroll=UNROLL):
                        sleep("producer_wait")
                        unless("no_empty_wait", mma2tma.wait, fill.stage, fill.phase)
                        sleep("producer_load")
                        load_stage(fill.stage, (first_block_of(part) + k) * BK)
                        if announces(member):
                            tma2mma_leader.arrive(fill.stage, tx_bytes)
                        fill.advance()
                    tiles.next_tile()
                # The leader's commits arrive in this CTA's shared memory: stay until the last lap of them is in.
                for _stage in range(0 if planted("no_stage_drain") else PIPE):
                    mma2tma.wait(fill.stage, fill.phase)
                    fill.advance()

        @T.inline
        def schedule():
            if warp == SCHEDULER_WARP:
                if T.cuda.elect_sync():
                    tiles.scheduler.schedule(member)

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
                    for k in T.serial(k_blocks, unroll=UNROLL):
                        sleep("consumer_wait")
                        unless("no_full_wait", tma2mma.wait, drain.stage, drain.phase)
                        unless("no_mma_fence", T.ptx.tcgen05.fence__after_thread_sync)
                        _when(planted("early_stage_release"), release_stage, drain.stage)
                        Tx.gemm_async(
                            tmem[:, column : column + MMA_N],
                            wide_smem[_at(PIPE, drain.stage), _at(CONSUMERS, consumer), :, :],
                            narrow_smem[_at(PIPE, drain.stage), :, :],
                            accum=adds(k), dispatch="tcgen05", cta_group=CG,
                        )  # fmt: skip
                        sleep("consumer_release")
                        # The commit arrives once the MMAs issued so far have completed, in every CTA of the pair.
                        released = T.meta_var(planted("early_stage_release") or planted("no_stage_commit"))
                        _when(not released, release_stage, drain.stage)
                        drain.advance()
                    unless("no_result_commit", finish_accumulator, slot)
                    acc.advance()
                    tiles.next_tile()

        @T.inline
        def read_chunk(chunk_f32_wg, slot, chunk):
            column = T.meta_var(slot * MMA_N + chunk * EPI)
            Tx.wg.copy_async(chunk_f32_wg[:], tmem[:, column : column + EPI])
            _when(fault not in ("early_release", "no_ld_wait"), T.ptx.tcgen05.wait__ld.sync.aligned)

        @T.inline
        def release_accumulator(slot):
            unless("no_before_fence", T.ptx.tcgen05.fence__before_thread_sync)
            drained.arrive(slot)

        @T.inline
        def write_chunk(consumer, staging, storer, chunk, chunk_f32, chunk_f32_wg, chunk_16, chunk_16_wg):
            Tx.cast(chunk_16[:], chunk_f32[:])
            # The thread that issues the stores is the one that can wait for them to have read their buffer.
            if storer:
                unless("no_store_wait", T.ptx.cp.async_.bulk.wait_group.read, stores_in_flight)
            sync_writers(consumer)
            sleep("epilogue_stage")
            buffer = T.meta_var((_at(CONSUMERS, consumer), _at(STAGING, staging.stage)))
            Tx.wg.copy(D_smem[buffer[0], buffer[1], :, :], chunk_16_wg[:, :])
            # Each thread makes its own writes visible to the copy engine, then the storer may start it.
            unless("no_proxy_fence", T.ptx.fence.proxy.async_.shared__cta)
            unless("no_staging_sync", sync_writers, consumer)
            if storer:
                sleep("epilogue_store")
                lanes_from = T.meta_var(wide_start + consumer * CG * BM)
                columns_from = T.meta_var(narrow_tile * MMA_N + chunk * EPI)
                m_from = T.meta_var(columns_from if SWAP else lanes_from)
                for store in T.unroll(plan.stores):
                    in_chunk = T.meta_var(store * plan.store_n)
                    n_from = T.meta_var((lanes_from if SWAP else columns_from) + in_chunk)
                    Tx.copy_async(
                        D[m_from : m_from + STAGED[0], n_from : n_from + plan.store_n],
                        D_smem[buffer[0], buffer[1], :, in_chunk : in_chunk + plan.store_n],
                        dispatch=TMA,
                    )
                unless("no_store_commit", T.ptx.cp.async_.bulk.commit_group)
            staging.advance()

        @T.inline
        def write_back(consumer):
            acc = PipelineState(ACC, phase=first_result)
            # Runs on across tiles. Starting again with each tile would let a tile rewrite the buffer that the store
            # before it may still be reading: wait_group.read(STAGING - 1) covers buffers in turn, not by number.
            staging = PipelineState(STAGING, phase=FIRST_LAP_WAITS)
            chunk_f32 = T.alloc_local((plan.chunk_registers,), "float32")
            chunk_16 = T.alloc_local((plan.chunk_registers,), dtype)
            chunk_f32_wg = chunk_f32.view(BM, EPI, layout=chunk_layout)
            chunk_16_wg = chunk_16.view(*STAGED, layout=staged_layout)
            storer = T.meta_var((warp == 0) & (lane == 0))
            while tiles.valid():
                slot = T.meta_var(consumer * ACC + acc.stage)
                unless("no_result_wait", mma2ld.wait, slot, acc.phase)
                unless("no_after_fence", T.ptx.tcgen05.fence__after_thread_sync)
                _when(planted("staging_restart"), staging.init, FIRST_LAP_WAITS)
                for chunk in range(CHUNKS):
                    read_chunk(chunk_f32_wg, slot, chunk)
                    # Before the stores, so that the next tile's MMAs overlap them.
                    if chunk == CHUNKS - 1:
                        release_accumulator(slot)
                    _when(planted("early_release"), T.ptx.tcgen05.wait__ld.sync.aligned)
                    write_chunk(consumer, staging, storer, chunk, chunk_f32, chunk_f32_wg, chunk_16, chunk_16_wg)
                acc.advance()
                tiles.next_tile()
            if storer:
                unless("no_exit_wait", T.ptx.cp.async_.bulk.wait_group, 0)

        @T.inline
        def sum_and_write_back(consumer):
            acc = PipelineState(ACC, phase=first_result)
            staging = PipelineState(STAGING, phase=FIRST_LAP_WAITS)
            turn = PipelineState(1, phase=FIRST_LAP_WAITS)
            chunk_f32 = T.alloc_local((plan.chunk_registers,), "float32")
            chunk_16 = T.alloc_local((plan.chunk_registers,), dtype)
            received = T.alloc_local((4,), "float32")
            chunk_f32_wg = chunk_f32.view(BM, EPI, layout=chunk_layout)
            chunk_16_wg = chunk_16.view(*STAGED, layout=staged_layout)
            storer = T.meta_var((warp == 0) & (lane == 0))
            thread = T.meta_var(warp * 32 + lane)
            while tiles.valid():
                slot = T.meta_var(consumer * ACC + acc.stage)
                unless("no_result_wait", mma2ld.wait, slot, acc.phase)
                unless("no_after_fence", T.ptx.tcgen05.fence__after_thread_sync)
                _when(planted("staging_restart"), staging.init, FIRST_LAP_WAITS)
                exchange.wait_to_send(consumer, turn)
                for chunk in range(CHUNKS):
                    if part != exchange.owner_of(chunk):
                        read_chunk(chunk_f32_wg, slot, chunk)
                        exchange.send(chunk_f32, chunk, consumer, part, thread)
                if part < plan.owners:
                    _when(planted("early_sum_release"), exchange.release, consumer, thread)
                    exchange.wait_to_sum(consumer, part, thread, turn)
                    for chunk in range(CHUNKS):
                        if part == exchange.owner_of(chunk):
                            read_chunk(chunk_f32_wg, slot, chunk)
                            exchange.add(chunk_f32, received, chunk, consumer, thread)
                            write_chunk(
                                consumer, staging, storer, chunk, chunk_f32, chunk_f32_wg, chunk_16, chunk_16_wg
                            )
                    sync_writers(consumer)
                    unless("early_sum_release", exchange.release, consumer, thread)
                # There is a tile for each cluster and little more, so nothing is lost by holding the accumulator.
                release_accumulator(slot)
                _when(fault == "early_release", T.ptx.tcgen05.wait__ld.sync.aligned)
                turn.advance()
                acc.advance()
                tiles.next_tile()
            if storer:
                unless("no_exit_wait", T.ptx.cp.async_.bulk.wait_group, 0)

        if wg == CONSUMERS:
            if warp == PRODUCER_WARP:
                produce()
            elif (warp < CONSUMERS) & (member == 0):
                multiply(warp)
            _when(CLC, schedule)
        else:
            _when(SPLIT == 1, write_back, wg)
            _when(SPLIT > 1, sum_and_write_back, wg)

        # ------------------------------------------------------------ clean-up
        # Lanes that were not elected are here long before the one that was; an aligned barrier takes whole warps.
        T.cuda.warp_sync()
        # The CTAs of a cluster reach into one another's barriers, shared and tensor memory: none leaves before all are
        # done.
        _when(True, leave)
        # `warp` counts within the warpgroup, so the warpgroup has to be named too.
        if (wg < tmem_owners) & (warp == 0):
            T.ptx[f"tcgen05.relinquish_alloc_permit.cta_group::{CG}.sync.aligned"]()
            T.ptx[f"tcgen05.dealloc.cta_group::{CG}.sync.aligned.b32"](tmem_base, T.uint32(TMEM_COLUMNS))

    return gemm
