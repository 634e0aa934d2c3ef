"""The Hopper template: a persistent, warp-specialized cluster GEMM for sm_90a.

    D[M, N] = A[M, K] @ B[N, K]^T        16-bit in and out, float32 accumulate

Roles of one CTA
    warpgroup num_consumers       producer: one elected thread fills a ring of `pipe_depth` stages by TMA, or all of
                                  them by cp.async
    warpgroups 0 .. n-1           consumers: wgmma on their own `blk_m` rows of the wide operand and the shared tile of
                                  the narrow one, then the epilogue (`gemm_sm90_epilogue`)

Barriers, one pair for each stage
    tma2mma   the stage is filled        1 arrival (producer) and the bytes of this CTA's A and B, with multicast parts;
                                         1 arrival of each producer warp with cp_async
    mma2tma   the stage may be refilled  1 arrival of each consumer that reads it, of each CTA that is written to
and with pingpong, for each consumer
    turn      the stages are its own     1 arrival of the other consumer, when it has waited for its last stage

Variations
    cta_group 2         the CTAs of a pair share B (stacked along M) or A (along N): each fetches half of the shared
                        tile and multicasts it to both, so a stage is free only when the consumers of both have read it
    schedule pingpong   two consumers take turns with whole tiles, one's epilogue beside the other's mainloop
    swap_ab             B is the wide operand, on the 64-row side of wgmma, and A the narrow one: M may be small
    split_k             the CTAs of a cluster compute parts of K of one tile and add them up (`gemm_sm90_exchange`)
    load cp_async       rows of A and B may start anywhere (`gemm_sm90_copy`)
    scheduler stream_k  clusters share the last waves of tiles in blocks of K (`gemm_sm90_stream_k`)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

from kernels.errors import ConfigError
from kernels.gemm_sm90_copy import CopyProducer
from kernels.gemm_sm90_emit import Loads, Variant, descriptor, encode, skip, tensor_map
from kernels.gemm_sm90_epilogue import MaskedEpilogue, Output, RegisterEpilogue, StagedEpilogue, Thread
from kernels.gemm_sm90_exchange import Exchange
from kernels.gemm_sm90_plan import Plan
from kernels.gemm_sm90_stream_k import PartialSums, StreamKTiles
from kernels.pause import check_delays
from kernels.problem import ELEMENT_BYTES, FLOAT_BYTES, GemmProblem
from kernels.resources import HEADER_BYTES, WGMMA_ROWS, sm90_registers
from kernels.rules import violation
from kernels.tile_scheduler import SerpentineScheduler, TileWalk
from kernels.tracing import k_loop_unroll

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.config import Sm90GemmConfig

# Protocol bugs that can be planted, to prove that the referee catches them. The product never builds with one.
FAULTS = {
    "producer_phase": "the producer waits for the wrong phase of mma2tma, so it never starts",
    "arrive_count": "mma2tma expects one arrival more than it gets",
    "expect_tx": "tma2mma expects half of the bytes, so the stage looks filled too early",
    "no_full_wait": "consumers do not wait for tma2mma",
    "no_empty_wait": "the producer does not wait for mma2tma",
    "early_release": "consumers release a stage while its wgmmas may still read it",
    "no_accumulator_wait": "the epilogue reads accumulators without waiting for the last wgmma group",
    "no_store_wait": "a staging buffer is rewritten while its TMA store may still read it",
    "epilogue_restart": "the staging buffer index restarts with each tile, although the waits assume it runs on",
    "no_proxy_fence": "staged values are not fenced before the TMA store reads them",
    "no_stage_barrier": "the TMA store starts before all warps have staged their values",
    "init_without_cluster_barrier": "the peer CTA may signal barriers that are not initialised yet",
    "exit_without_cluster_barrier": "a CTA may leave while its peer still multicasts into it",
    "half_multicast": "the shared operand is multicast to this CTA only",
    "wrong_row": "the last tile is stored one row too low",
    "register_pool": "consumers ask for registers that nobody has given back",
    "illegal_address": "values are written far outside of shared memory, or of D",
}
# Those of one form only.
SPLIT_FAULTS = {
    "no_parts_wait": "an owner adds up the parts of K before they have arrived",
    "no_sum_wait": "parts are sent over those of the tile before, which their owner may still read",
    "parts_bytes": "an owner expects the bytes of one part fewer, so it adds up before the last has arrived",
    "early_sum_release": "an owner lets the next parts come before it has read these",
}
PINGPONG_FAULTS = {
    "no_turn": "a consumer does not wait for its turn, so it takes another tile's stages for its own",
}
COPY_FAULTS = {
    "no_copy_wait": "values are moved to their place before their copies have arrived",
    "no_copy_barrier": "a lane moves values before the copies of the warp's other lanes have arrived",
    "no_read_barrier": "a lane writes values over those that its neighbour still has to read",
    "no_fill_fence": "moved values are not fenced before wgmma reads them",
    "early_fill": "a stage is handed over before the warp has moved its values",
    "whole_pieces": "the last copy of a row brings what lies behind K",
}
STREAM_K_FAULTS = {
    "no_part_count": "the first part of a tile adds up the others without knowing that they have arrived",
    "no_part_fence": "a part's counter neither releases what was written nor acquires what others have",
    "no_part_barrier": "a part is counted before all threads have written theirs",
    "no_count_reset": "the counter of a tile keeps its value for the next launch",
}
EVERY_FAULT = FAULTS | SPLIT_FAULTS | PINGPONG_FAULTS | COPY_FAULTS | STREAM_K_FAULTS


def build_gemm_sm90(
    problem: GemmProblem,
    config: Sm90GemmConfig,
    sm_count: int,
    *,
    fault: str = "",
    delays_ns: Mapping[str, int] | None = None,
    dynamic_m: bool = False,
) -> Any:
    """The template as a TIRx function `gemm(A, B, D)` for one problem, config and number of SMs.

    fault: name of a bug of FAULTS to plant, for tests of the referee
    delays_ns: longest sleep at points of DELAY_POINTS, a power of two, for stress builds
    dynamic_m: whether the kernel takes M when it is called; that of the problem is then an example
    Raises ConfigError with the rule that is broken.
    """
    if reason := violation(problem, config, sm_count):
        raise ConfigError(reason)
    if dynamic_m and config.scheduler == "stream_k":
        raise ConfigError(
            "scheduler = stream_k: the tiles are shared out when the kernel is built, so M is fixed; take "
            "scheduler = static for a kernel that takes M when it is called",
            knob="scheduler",
        )
    variant = _variant(config, fault, delays_ns or {})
    plan = Plan(problem=problem, config=config, sm_count=sm_count, dynamic_m=dynamic_m)

    M, N, K, dtype = problem.m, problem.n, problem.k, problem.dtype.long_name
    PIPE, CG, NC, SPLIT = config.pipe_depth, config.cta_group, config.num_consumers, config.split_k
    COPY, TMA_STORES = plan.copies, plan.tma_stores
    CLUSTER, PINGPONG, SWAP = config.cluster_size, config.schedule == "pingpong", config.swap_ab
    STREAM_K, WORKSPACE_FLOATS = config.scheduler == "stream_k", plan.workspace_bytes // FLOAT_BYTES or 1
    BLK_M, BLK_N, BLK_K, MMA_ROWS = config.blk_m, config.blk_n, config.blk_k, config.mma_rows
    CTA_M, CTA_N = config.cta_rows, config.cta_cols
    SLAB, SLABS, ROW_BYTES = plan.slab_cols, plan.slabs, plan.slab_row_bytes
    K_BLOCKS, (K_LEAST, K_EXTRA) = config.cta_k_blocks(problem), plan.k_share
    UNROLL = k_loop_unroll(K_BLOCKS)
    TILE_M, TILE_N = config.cluster_tile
    CLUSTERS = plan.clusters
    SHARE_A, SHARE_B = plan.a.parts > 1, plan.b.parts > 1
    A_CTAS, B_CTAS = (1, 1) if fault == "half_multicast" else (plan.a.parts, plan.b.parts)
    WIDE_BYTES, NARROW_BYTES = MMA_ROWS * BLK_K * ELEMENT_BYTES, BLK_N * BLK_K * ELEMENT_BYTES
    ACC, WGMMAS = plan.accumulators, plan.wgmmas
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = sm90_registers(config)
    if fault == "register_pool":
        CONSUMER_REGISTERS += 8
    WGMMA = f"wgmma.mma_async.sync.aligned.m64n{BLK_N}k16.f32.{plan.short_dtype}.{plan.short_dtype}"
    EMPTY_ARRIVALS = plan.stage_consumers * CG + (fault == "arrive_count")

    # ---------------------------------------------------------------- trace-time helpers: plain Python that emits TIR

    def when(condition: bool, *emit: Any) -> None:
        for statement in emit if condition else ():
            statement()

    def k_count(rank: Any, tiles: Any) -> Any:
        """Blocks of K that a CTA multiplies: the first parts have one more where they do not come out equal."""
        if STREAM_K:
            return tiles.scheduler.k_count
        return T.Select(rank < K_EXTRA, K_LEAST + 1, K_LEAST) if K_EXTRA else K_LEAST

    def k_first(rank: Any, tiles: Any) -> Any:
        if STREAM_K:
            return tiles.scheduler.k_first
        if SPLIT == 1:
            return 0
        return rank * K_LEAST + (T.Select(rank < K_EXTRA, rank, K_EXTRA) if K_EXTRA else 0)

    def multiply_stage(acc: Any, wide: Any, narrow: Any, stage: Any, first: bool) -> None:
        """All wgmmas of one stage; `first` overwrites the accumulators."""
        for k in range(0, BLK_K, 16):
            slab, col = divmod(k, SLAB)
            for i in range(WGMMAS):
                wide_offset = (slab * MMA_ROWS * ROW_BYTES + i * WGMMA_ROWS * ROW_BYTES + col * ELEMENT_BYTES) >> 4
                narrow_offset = (slab * BLK_N * ROW_BYTES + col * ELEMENT_BYTES) >> 4
                T.evaluate(
                    T.ptx[WGMMA](
                        *[acc[i * ACC + r] for r in range(ACC)],
                        wide + T.cast(stage * (WIDE_BYTES >> 4) + wide_offset, "uint64"),
                        narrow + T.cast(stage * (NARROW_BYTES >> 4) + narrow_offset, "uint64"),
                        T.ptx.pred(0 if first and k == 0 else 1), 1, 1, 0, 0,
                    )
                )  # fmt: skip

    def release(mma2tma: Any, stage: Any, tid: Any) -> None:
        """Hand a stage back to the producers that wrote into it: one thread for each CTA of the pair."""
        variant.pause("consumer_release")
        with T.If(tid < CG), T.Then():
            if CG == 1:
                mma2tma.arrive(stage)
            else:
                mma2tma.arrive(stage, remote=tid)

    def take_turn(turns: Any, wg_id: Any, turn: Any) -> None:
        """Wait until the other consumer has waited for all stages of the tile before.

        A wait tells odd from even uses of a stage, not the next from the one after it. A consumer that went ahead would
        take a stage of the other's tile for its own (launch failure at 4096^3 and K = 768, H200).
        """
        if fault == "no_turn":
            return
        variant.pause("consumer_wait")
        turns.wait(wg_id, turn.phase)
        turn.advance()

    def pass_turn(turns: Any, wg_id: Any, tid: Any) -> None:
        """Let the other consumer begin its tile, while this one's last wgmmas and its epilogue run."""
        with T.If(tid == 0), T.Then():
            turns.arrive(1 - wg_id)

    def write_finished(sums: Any, epilogue: Any, acc: Any, row: Any, col: Any) -> None:
        """Store the tile if this consumer has the sum over all of K."""
        with sums.finished():
            epilogue.write(acc, row, col)

    def filled_bytes(rows: Any) -> Any:
        """Bytes that arrive on one tma2mma barrier."""
        half = 2 if fault == "expect_tx" else 1
        if not plan.short_box:
            return plan.filled_bytes // half
        return (T.min(rows, plan.a.box_rows) + plan.b.fetched_rows) * (ELEMENT_BYTES * BLK_K // half)

    def cluster_barrier(planted: str) -> None:
        """Every CTA of the cluster has reached this point and sees the others' barrier initialisation."""
        if CLUSTER > 1 and fault != planted:
            T.evaluate(T.ptx.barrier.cluster.arrive.release.aligned())
            T.evaluate(T.ptx.barrier.cluster.wait.acquire.aligned())
        else:
            T.evaluate(T.cuda.cta_sync())

    # ---------------------------------------------------------------- the kernel

    @T.prim_func  # type: ignore[untyped-decorator]
    def gemm(  # type: ignore[no-untyped-def]
        A: T.Buffer((M, K), dtype),  # type: ignore[valid-type]
        B: T.Buffer((N, K), dtype),  # type: ignore[valid-type]
        D: T.Buffer((M, N), dtype),  # type: ignore[valid-type]
        a_stride: T.int32,
        b_stride: T.int32,
        d_stride: T.int32,
        m: T.int32,
        mapped_m: T.int32,  # m again, for the host: TVM would compute what host and device share but once, on the host
        workspace: T.Buffer((WORKSPACE_FLOATS,), "float32"),  # type: ignore[valid-type]
    ):
        T.func_attr({"global_symbol": "gemm"})
        rows = T.meta_var(m if dynamic_m else M)
        mapped_rows = T.meta_var(mapped_m if dynamic_m else M)
        if not COPY:
            a_map = T.meta_var(tensor_map("a_map"))
            b_map = T.meta_var(tensor_map("b_map"))
            a_box = T.meta_var(T.min(mapped_m, plan.a.box_rows) if plan.short_box else plan.a.box_rows)
            encode(a_map, A.data, mapped_rows, K, dtype, (a_box, SLAB))
            encode(b_map, B.data, N, K, dtype, (plan.b.box_rows, SLAB))
        if TMA_STORES:
            d_map = T.meta_var(tensor_map("d_map"))
            encode(d_map, D.data, mapped_rows, N, dtype, (WGMMA_ROWS, plan.store_cols))
        T.device_entry()
        # setmaxnreg needs a register cap at entry: __launch_bounds__(threads, 1)
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        bx = T.cta_id([CLUSTERS * CLUSTER])
        if CLUSTER > 1:
            rank, _rank_y = T.cta_id_in_cluster([CLUSTER, 1])
        else:
            rank = T.meta_var(0)
        wg_id = T.warpgroup_id([NC + 1])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])
        thread = T.meta_var(Thread(rank=rank, warpgroup=wg_id, warp=warp_id, lane=lane_id))
        tid = T.meta_var(thread.number)

        pool = SMEMPool()
        tma2mma = T.meta_var(MBarrier(pool, PIPE) if COPY else TMABar(pool, PIPE))
        mma2tma = MBarrier(pool, PIPE)
        turns = T.meta_var(MBarrier(pool, NC) if PINGPONG else None)
        exchange = T.meta_var(Exchange(plan, variant, pool) if SPLIT > 1 else None)
        pool.move_base_to(HEADER_BYTES)
        wide_smem = pool.alloc((PIPE, MMA_ROWS * BLK_K), dtype, align=1024)
        narrow_smem = pool.alloc((PIPE, BLK_N * BLK_K), dtype, align=512 if SWAP else 1024)
        if not SWAP:
            staging = pool.alloc((NC, config.epi_stages, WGMMA_ROWS * config.epi_n), dtype, align=1024)
        if SPLIT > 1:
            exchange.allocate(pool)
        if COPY:
            tails = pool.alloc((PIPE * plan.tail_stage_bytes,), "uint8", align=128)
        a_smem = T.meta_var(narrow_smem if SWAP else wide_smem)
        b_smem = T.meta_var(wide_smem if SWAP else narrow_smem)
        pool.commit()
        tma2mma.init(plan.fill_arrivals)
        mma2tma.init(EMPTY_ARRIVALS)
        if PINGPONG:
            turns.init(1)
        if SPLIT > 1:
            exchange.init()
        T.ptx.fence.mbarrier_init.release.cluster()
        cluster_barrier("init_without_cluster_barrier")

        walk = T.meta_var(partial(StreamKTiles, plan.workspace.split) if STREAM_K else SerpentineScheduler)
        tiles = T.meta_var(TileWalk(problem, config, CLUSTERS, rows=m if dynamic_m else None, kind=walk))
        tiles.init(bx // CLUSTER)
        m_st = T.meta_var(tiles.row * TILE_M + (rank * CTA_M if SHARE_B else 0))
        n_st = T.meta_var(tiles.col * TILE_N + (rank * CTA_N if SHARE_A else 0))
        a_part = T.meta_var(rank * plan.a.part_rows if SHARE_A else 0)
        b_part = T.meta_var(rank * plan.b.part_rows if SHARE_B else 0)

        if not COPY:
            a_loads = T.meta_var(Loads(plan.a, a_map, a_smem, m_st + a_part, slab_cols=SLAB, multicast=A_CTAS))
            b_loads = T.meta_var(Loads(plan.b, b_map, b_smem, n_st + b_part, slab_cols=SLAB, multicast=B_CTAS))

        if wg_id == NC:
            # ============ producer: waits mma2tma, signals tma2mma
            T.ptx.setmaxnreg.dec.sync.aligned.u32(PRODUCER_REGISTERS)
            if COPY:
                copies = T.meta_var(CopyProducer(plan, variant, thread, tma2mma))
                copies.begin((A, a_stride, rows, a_smem), (B, b_stride, N, b_smem), tails)
                fill = PipelineState(PIPE, 0 if fault == "producer_phase" else 1)
                ready = PipelineState(PIPE, 0)
                under_way = T.local_scalar("int32")
                under_way = 0
                while tiles.valid():
                    for k in T.serial(k_count(rank, tiles), unroll=UNROLL):
                        variant.pause("producer_wait")
                        when(fault != "no_empty_wait", lambda: mma2tma.wait(fill.stage, fill.phase))
                        variant.pause("producer_load")
                        copies.copy(fill.stage, m_st, n_st, (k + k_first(rank, tiles)) * BLK_K)
                        fill.advance()
                        if under_way == plan.stages_under_way:
                            copies.wait(plan.stages_under_way)
                            copies.hand_over(ready.stage)
                            ready.advance()
                        else:
                            under_way = under_way + 1
                    tiles.next_tile()
                copies.wait(0)
                for _ in T.serial(under_way, unroll=False):
                    copies.hand_over(ready.stage)
                    ready.advance()
            elif warp_id == 0:
                if T.cuda.elect_sync() != T.uint32(0):
                    T.ptx.prefetch.tensormap(T.address_of(a_map))
                    T.ptx.prefetch.tensormap(T.address_of(b_map))
                    # phase 1: the wait for a stage that was never filled returns at once
                    fill = PipelineState(PIPE, 0 if fault == "producer_phase" else 1)
                    while tiles.valid():
                        for k in T.serial(k_count(rank, tiles), unroll=UNROLL):
                            variant.pause("producer_wait")
                            when(fault != "no_empty_wait", lambda: mma2tma.wait(fill.stage, fill.phase))
                            tma2mma.arrive(fill.stage, filled_bytes(rows))
                            variant.pause("producer_load")
                            for s in T.unroll(SLABS):
                                col = T.meta_var((k + k_first(rank, tiles)) * BLK_K + s * SLAB)
                                a_loads.slab(fill.stage, s, col, a_part, tma2mma.ptr_to([fill.stage]))
                                b_loads.slab(fill.stage, s, col, b_part, tma2mma.ptr_to([fill.stage]))
                            fill.advance()
                        tiles.next_tile()
        else:
            # ============ consumers: wait tma2mma, signal mma2tma, write D
            T.ptx.setmaxnreg.inc.sync.aligned.u32(CONSUMER_REGISTERS)
            acc = T.alloc_local((WGMMAS * ACC,), "float32")
            drain = PipelineState(PIPE, 0)
            previous = T.local_scalar("int32")
            own_row = T.meta_var(0 if PINGPONG else wg_id * BLK_M)  # of this consumer in the CTA's wide tile
            wide: T.uint64
            narrow: T.uint64
            wide = descriptor(wide_smem, own_row * ROW_BYTES, ROW_BYTES)
            narrow = descriptor(narrow_smem, 0, ROW_BYTES)
            if not TMA_STORES:
                output = T.meta_var(Output(plan, variant, D, d_stride, rows))
            if SWAP:
                epilogue = T.meta_var(RegisterEpilogue(plan, variant, thread, output))
            elif not TMA_STORES:
                ring = PipelineState(config.epi_stages, 0)
                epilogue = T.meta_var(MaskedEpilogue(plan, variant, thread, ring, staging, output))
            else:
                ring = PipelineState(config.epi_stages, 0)
                epilogue = T.meta_var(StagedEpilogue(plan, variant, thread, ring, staging, d_map))
            if SPLIT > 1:
                turn = PipelineState(1, 0)
                exchange.begin(turn)
            if STREAM_K:
                sums = T.meta_var(PartialSums(plan, variant, thread, tiles.scheduler, bx // CLUSTER))
                sums.begin(workspace)
            if PINGPONG:
                # The first turn of consumer 0 comes by itself: it waits for a phase that never was.
                turn = PipelineState(1, 1 - wg_id)
                if wg_id == 1:
                    tiles.next_tile()
                    skip(drain, K_BLOCKS)
            while tiles.valid():
                # One wgmma group stays in flight: a stage is released when the group after it has been issued and its
                # own has completed.
                if PINGPONG:
                    take_turn(turns, wg_id, turn)
                variant.pause("consumer_wait")
                when(fault != "no_full_wait", lambda: tma2mma.wait(drain.stage, drain.phase))
                T.ptx.wgmma.fence.sync.aligned()
                multiply_stage(acc, wide, narrow, drain.stage, True)
                T.ptx.wgmma.commit_group.sync.aligned()
                previous = drain.stage
                drain.advance()
                for k in T.serial(k_count(rank, tiles) - 1, unroll=UNROLL):
                    variant.pause("consumer_wait")
                    when(fault != "no_full_wait", lambda: tma2mma.wait(drain.stage, drain.phase))
                    T.ptx.wgmma.fence.sync.aligned()
                    multiply_stage(acc, wide, narrow, drain.stage, False)
                    T.ptx.wgmma.commit_group.sync.aligned()
                    when(fault != "early_release", lambda: T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1)))
                    release(mma2tma, previous, tid)
                    previous = drain.stage
                    drain.advance()
                if PINGPONG:
                    pass_turn(turns, wg_id, tid)
                when(fault != "no_accumulator_wait", lambda: T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0)))
                release(mma2tma, previous, tid)
                if SPLIT > 1:
                    exchange.sum(acc, thread)
                if STREAM_K:
                    sums.settle(acc)
                    write_finished(
                        sums, epilogue, acc, m_st + (0 if SWAP else own_row), n_st + (own_row if SWAP else 0)
                    )
                else:
                    epilogue.write(acc, m_st + (0 if SWAP else own_row), n_st + (own_row if SWAP else 0))
                tiles.next_tile()
                if PINGPONG:
                    tiles.next_tile()
                    skip(drain, K_BLOCKS)
            epilogue.finish()
        # A CTA must not leave while its peers still write into it or signal its barriers. The aligned form needs whole
        # warps, and the producer's elected thread has been on its own.
        T.cuda.warp_sync()
        when(CLUSTER > 1, lambda: cluster_barrier("exit_without_cluster_barrier"))

    return gemm


def _variant(config: Sm90GemmConfig, fault: str, delays_ns: Mapping[str, int]) -> Variant:
    known = {name: bug for name, bug in FAULTS.items() if name != "register_pool" or config.num_consumers > 1}
    known |= SPLIT_FAULTS if config.split_k > 1 else {}
    known |= PINGPONG_FAULTS if config.schedule == "pingpong" else {}
    known |= COPY_FAULTS if config.load == "cp_async" else {}
    known |= STREAM_K_FAULTS if config.scheduler == "stream_k" else {}
    if fault and fault not in known:
        raise ConfigError(f"unknown fault {fault!r}: for this config use one of {', '.join(known)}")
    check_delays(delays_ns)
    return Variant(fault=fault, delays_ns=delays_ns)
