"""The Hopper template: a persistent, warp-specialized cluster GEMM for sm_90a.

    D[M, N] = A[M, K] @ B[N, K]^T        16-bit in and out, float32 accumulate

Roles of one CTA
    warpgroup num_consumers       TMA producer: one elected thread fills a ring of `pipe_depth` stages
    warpgroups 0 .. n-1           consumers: wgmma on their own `blk_m` rows of A and the shared B tile, then the
                                  epilogue: registers -> stmatrix -> swizzled staging buffer -> TMA store

Barriers, one pair for each stage
    tma2mma   the stage is filled        1 arrival (producer) and the bytes of this CTA's A and B, with multicast parts
    mma2tma   the stage may be refilled  1 arrival of each consumer of each CTA of the cluster

A cluster of two shares B (CTAs stacked along M) or A (along N): each CTA fetches half of the shared tile and multicasts
it to both, so a stage is free only when the consumers of both CTAs have read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang.alloc_pool import SMEMPool
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

from kernels.errors import ConfigError
from kernels.gemm_names import DELAY_POINTS
from kernels.problem import ELEMENT_BYTES, GemmProblem
from kernels.resources import HEADER_BYTES, SM90_REGISTERS, WGMMA_ROWS
from kernels.rules import MAX_TMA_BOX_ROWS, violation
from kernels.tile_scheduler import TileWalk
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
    "illegal_address": "values are staged at an address far outside of shared memory",
}

_SWIZZLE_MODE = {128: 3, 64: 2, 32: 1}  # CUtensorMapSwizzle by bytes of a shared-memory row
_DESCRIPTOR_MODE = {128: 1, 64: 2, 32: 3}  # wgmma shared-memory descriptor, bits 62-63
_TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
_L2_PROMOTION_128B = 2  # 0 and 3 were within 0.2 % of it at 4096^3 and 8192^3 (H200)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Numbers that follow from problem, config and SM count."""

    problem: GemmProblem
    config: Sm90GemmConfig
    sm_count: int

    @property
    def slab_cols(self) -> int:
        """K elements of one swizzled slab: a shared-memory row of at most 128 bytes."""
        return min(self.config.blk_k, 64)

    @property
    def slab_row_bytes(self) -> int:
        return self.slab_cols * ELEMENT_BYTES

    @property
    def slabs(self) -> int:
        return self.config.blk_k // self.slab_cols

    @property
    def a_rows(self) -> int:
        """Rows of A that a CTA fetches for each tile.

        A box that lies partly outside of the matrix is slow: M = 16 took 21.96 us with a 64-row box and 16.75 us with a
        16-row one (H200, 16x7168x4096). So a short matrix gets a short box; the rows never fetched only feed rows of D
        that the clipped store drops.
        """
        config, m = self.config, self.problem.m
        multicast = config.cta_group > 1 and config.share == "A"
        short = ceil(m / 8) * 8
        return short if m < config.cta_rows and short <= MAX_TMA_BOX_ROWS and not multicast else config.cta_rows

    @property
    def a_box_rows(self) -> int:
        """Rows of one A copy: this CTA's part, cut into equal boxes of at most 256 rows."""
        part = self.a_rows // self.a_parts
        return part // ceil(part / MAX_TMA_BOX_ROWS)

    @property
    def a_parts(self) -> int:
        return self.config.cta_group if self.config.share == "A" else 1

    @property
    def b_box_rows(self) -> int:
        return self.config.blk_n // self.b_parts

    @property
    def b_parts(self) -> int:
        return self.config.cta_group if self.config.share == "B" else 1

    @property
    def filled_bytes(self) -> int:
        """Bytes that arrive on one tma2mma barrier: all of this CTA's stage, whoever fetched them."""
        return ELEMENT_BYTES * self.config.blk_k * (self.a_rows + self.config.blk_n)

    @property
    def store_cols(self) -> int:
        """Columns of one TMA store box: the widest swizzle row that divides an epilogue chunk."""
        return next(cols for cols in (64, 32, 16) if self.config.epi_n % cols == 0)

    @property
    def chunks(self) -> int:
        """Epilogue chunks of 64 x epi_n that one consumer writes for each tile."""
        return self.config.blk_m // WGMMA_ROWS * (self.config.blk_n // self.config.epi_n)


def build_gemm_sm90(
    problem: GemmProblem,
    config: Sm90GemmConfig,
    sm_count: int,
    *,
    fault: str = "",
    delays_ns: Mapping[str, int] | None = None,
) -> Any:
    """The template as a TIRx function `gemm(A, B, D)` for one problem, config and number of SMs.

    fault: name of a bug of FAULTS to plant, for tests of the referee
    delays_ns: longest sleep at points of DELAY_POINTS, a power of two, for stress builds
    Raises ConfigError with the rule that is broken.
    """
    if reason := violation(problem, config, sm_count):
        raise ConfigError(reason)
    if fault and fault not in FAULTS:
        raise ConfigError(f"unknown fault {fault!r}: use one of {', '.join(FAULTS)}")
    delays = dict(delays_ns or {})
    if unknown := set(delays) - set(DELAY_POINTS):
        raise ConfigError(f"unknown delay point {sorted(unknown)[0]!r}: use one of {', '.join(DELAY_POINTS)}")
    if any(longest < 1 or longest & (longest - 1) for longest in delays.values()):
        raise ConfigError("delays must be powers of two")
    plan = _Plan(problem=problem, config=config, sm_count=sm_count)

    M, N, K, dtype = problem.m, problem.n, problem.k, problem.dtype.long_name
    PIPE, CG, NC = config.pipe_depth, config.cta_group, config.num_consumers
    BLK_M, BLK_N, BLK_K, CTA_M = config.blk_m, config.blk_n, config.blk_k, config.cta_rows
    SLAB, SLABS, ROW_BYTES = plan.slab_cols, plan.slabs, plan.slab_row_bytes
    K_BLOCKS = config.k_blocks(problem)
    UNROLL = k_loop_unroll(K_BLOCKS)
    TILE_M, TILE_N = config.cluster_tile
    CLUSTERS = config.clusters(problem, sm_count)
    SHARE_A, SHARE_B = CG > 1 and config.share == "A", CG > 1 and config.share == "B"
    A_BOX, B_BOX = plan.a_box_rows, plan.b_box_rows
    A_COPIES = plan.a_rows // plan.a_parts // A_BOX
    A_STAGE_BYTES, B_STAGE_BYTES = CTA_M * BLK_K * ELEMENT_BYTES, BLK_N * BLK_K * ELEMENT_BYTES
    ACC = BLK_N // 2  # float32 accumulators of one 64-row wgmma in each thread
    WGMMAS = BLK_M // WGMMA_ROWS
    EPI_N, EPI_STAGES, STORE_N = config.epi_n, config.epi_stages, plan.store_cols
    STORE_ROW_BYTES = STORE_N * ELEMENT_BYTES
    BUFFER_BYTES = WGMMA_ROWS * EPI_N * ELEMENT_BYTES
    # Where a tile's chunks come round to buffer 0 the index that runs on is a constant; elsewhere it is a register.
    # Restarting it at 0 there would rewrite a buffer whose store the waits below do not cover.
    FIXED_BUFFERS = plan.chunks % EPI_STAGES == 0 or fault == "epilogue_restart"
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = SM90_REGISTERS[NC]
    SHORT = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    WGMMA = f"wgmma.mma_async.sync.aligned.m64n{BLK_N}k16.f32.{SHORT}.{SHORT}"
    CONVERT = f"cvt.rn.{SHORT}x2.f32"
    # K-major operand in shared memory: start address / 16 in bits 0-13, stride between groups of 8 rows / 16 in bits
    # 32-45, swizzle in bits 62-63; the leading offset is not used with a swizzle (PTX ISA, wgmma matrix descriptor).
    DESCRIPTOR = (1 << 16) | (((8 * ROW_BYTES) >> 4) << 32) | (_DESCRIPTOR_MODE[ROW_BYTES] << 62)
    EMPTY_ARRIVALS = NC * CG + (fault == "arrive_count")

    # ---------------------------------------------------------------- trace-time helpers: plain Python that emits TIR

    def when(condition: bool, *emit: Any) -> None:
        for statement in emit if condition else ():
            statement()

    def pause(point: str) -> None:
        """Sleep for a time that differs from thread to thread and launch to launch: a hash of the SM's clock."""
        if longest_ns := delays.get(point):
            ticks = T.call_extern("int64", "clock64")
            drawn = T.bitwise_and(T.shift_right(ticks * T.int64(2654435761), T.int64(20)), T.int64(longest_ns - 1))
            T.evaluate(T.cuda.nano_sleep(T.cast(drawn, "uint64")))

    def new_map(name: str) -> Any:
        variable = T.Var(name, ty=T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=variable)
        return variable

    def encode(tensor_map: Any, data: Any, rows: int, cols: int, box: tuple[int, int], row_bytes: int) -> None:
        box_rows, box_cols = box
        T.evaluate(
            T.tensormap_encode_tiled(
                tensor_map, data, cols, rows, cols * ELEMENT_BYTES, box_cols, box_rows, 1, 1,
                descriptor_dtype=dtype, rank=2, interleave=0, swizzle=_SWIZZLE_MODE[row_bytes],
                l2_promotion=_L2_PROMOTION_128B, oob_fill=0,
            )
        )  # fmt: skip

    def i32(value: Any) -> Any:
        return value if isinstance(value, int) else T.cast(value, "int32")

    def tma_load(dst: Any, tensor_map: Any, col: Any, row: Any, barrier: Any, multicast: bool) -> None:
        arguments = (dst, T.address_of(tensor_map), i32(col), i32(row), barrier)
        if multicast and fault != "half_multicast":
            T.evaluate(T.ptx[_TMA_LOAD + ".multicast::cluster"](*arguments, T.uint16((1 << CG) - 1)))
        else:
            T.evaluate(T.ptx[_TMA_LOAD](*arguments))

    def descriptor_base() -> Any:
        # TVM's uint64 literals stop at 2^63 - 1; the 64-byte swizzle sets bit 63
        return T.reinterpret("uint64", T.int64(DESCRIPTOR - (1 << 64) if DESCRIPTOR >> 63 else DESCRIPTOR))

    def multiply_stage(acc: Any, a_desc: Any, b_desc: Any, stage: Any, first: bool) -> None:
        """All wgmmas of one stage; `first` overwrites the accumulators."""
        for k in range(0, BLK_K, 16):
            slab, col = divmod(k, SLAB)
            for i in range(WGMMAS):
                a_offset = (slab * CTA_M * ROW_BYTES + i * WGMMA_ROWS * ROW_BYTES + col * ELEMENT_BYTES) >> 4
                b_offset = (slab * BLK_N * ROW_BYTES + col * ELEMENT_BYTES) >> 4
                T.evaluate(
                    T.ptx[WGMMA](
                        *[acc[i * ACC + r] for r in range(ACC)],
                        a_desc + T.cast(stage * (A_STAGE_BYTES >> 4) + a_offset, "uint64"),
                        b_desc + T.cast(stage * (B_STAGE_BYTES >> 4) + b_offset, "uint64"),
                        T.ptx.pred(0 if first and k == 0 else 1), 1, 1, 0, 0,
                    )
                )  # fmt: skip

    def release(mma2tma: Any, stage: Any, tid: Any) -> None:
        """Hand a stage back to the producers that wrote into it: one thread for each CTA of the cluster."""
        pause("consumer_release")
        with T.If(tid < CG), T.Then():
            if CG == 1:
                mma2tma.arrive(stage)
            else:
                mma2tma.arrive(stage, remote=tid)

    def stage_chunk(acc: Any, packed: Any, chunk: int, address: Any, lane_xor: Any, buffer: Any) -> None:
        """Round one 64 x epi_n chunk to 16 bit and stmatrix it into staging buffer `buffer`."""
        block, col = divmod(chunk * EPI_N, BLK_N)
        for j in range(EPI_N // 16):
            register = block * ACC + (col // 16 + j) * 8
            for q in range(4):
                T.evaluate(T.ptx[CONVERT](packed[q], acc[register + 2 * q + 1], acc[register + 2 * q]))
            box, piece = divmod(j, STORE_N // 16)
            offset = (
                buffer * BUFFER_BYTES + box * WGMMA_ROWS * STORE_ROW_BYTES + (fault == "illegal_address") * (1 << 20)
            )
            target = address + T.cast(offset, "uint32") + (lane_xor ^ T.uint32(piece * 32))
            T.evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared::cta.b16"](target, *[packed[q] for q in range(4)]))

    def store_chunk(Dsm: Any, d_map: Any, buffer: Any, wg_id: Any, row: Any, col: Any) -> None:
        for box in range(EPI_N // STORE_N):
            T.evaluate(
                T.ptx[_TMA_STORE](
                    T.address_of(d_map), i32(col + box * STORE_N), i32(row),
                    Dsm.ptr_to([wg_id, buffer, box * WGMMA_ROWS * STORE_N]),
                )
            )  # fmt: skip
        T.evaluate(T.ptx["cp.async.bulk.commit_group"]())

    def epilogue(
        acc: Any, packed: Any, Dsm: Any, d_map: Any, ring: Any, thread: tuple[Any, Any, Any, Any], m_st: Any, n_st: Any
    ) -> None:
        """Write one consumer's accumulators, chunk by chunk; the last stores drain under the next tile's mainloop."""
        wg_id, tid, address, lane_xor = thread
        for chunk in range(plan.chunks):
            buffer = chunk % EPI_STAGES if FIXED_BUFFERS else ring.stage
            block, col = divmod(chunk * EPI_N, BLK_N)
            if fault != "no_store_wait":
                # Stores complete in order: at most EPI_STAGES - 1 still reading means that this buffer's has finished.
                # The thread that committed them is the only one that can wait for them.
                with T.If(tid == 0), T.Then():
                    T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](EPI_STAGES - 1))
            T.evaluate(T.cuda.warpgroup_sync(wg_id + 1))
            pause("epilogue_stage")
            stage_chunk(acc, packed, chunk, address, lane_xor, buffer)
            if fault != "no_proxy_fence":
                T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
            if fault != "no_stage_barrier":
                T.evaluate(T.cuda.warpgroup_sync(wg_id + 1))
            with T.If(tid == 0), T.Then():
                pause("epilogue_store")
                shift = 1 if fault == "wrong_row" and chunk == plan.chunks - 1 else 0
                store_chunk(Dsm, d_map, buffer, wg_id, m_st + wg_id * BLK_M + block * WGMMA_ROWS + shift, n_st + col)
            if not FIXED_BUFFERS:
                ring.advance()

    def cluster_barrier(planted: str) -> None:
        """Every CTA of the cluster has reached this point and sees the others' barrier initialisation."""
        if CG > 1 and fault != planted:
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
    ):
        T.func_attr({"global_symbol": "gemm"})
        a_map = T.meta_var(new_map("a_map"))
        b_map = T.meta_var(new_map("b_map"))
        d_map = T.meta_var(new_map("d_map"))
        encode(a_map, A.data, M, K, (A_BOX, SLAB), ROW_BYTES)
        encode(b_map, B.data, N, K, (B_BOX, SLAB), ROW_BYTES)
        encode(d_map, D.data, M, N, (WGMMA_ROWS, STORE_N), STORE_ROW_BYTES)
        T.device_entry()
        # setmaxnreg needs a register cap at entry: __launch_bounds__(threads, 1)
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        bx = T.cta_id([CLUSTERS * CG])
        if CG > 1:
            rank, _rank_y = T.cta_id_in_cluster([CG, 1])
        else:
            rank = T.meta_var(0)
        wg_id = T.warpgroup_id([NC + 1])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])
        tid = T.meta_var(warp_id * 32 + lane_id)

        pool = SMEMPool()
        tma2mma = TMABar(pool, PIPE)
        mma2tma = MBarrier(pool, PIPE)
        pool.move_base_to(HEADER_BYTES)
        Asm = pool.alloc((PIPE, CTA_M * BLK_K), dtype, align=1024)
        Bsm = pool.alloc((PIPE, BLK_N * BLK_K), dtype, align=1024)
        Dsm = pool.alloc((NC, EPI_STAGES, WGMMA_ROWS * EPI_N), dtype, align=1024)
        pool.commit()
        tma2mma.init(1)
        mma2tma.init(EMPTY_ARRIVALS)
        T.ptx.fence.mbarrier_init.release.cluster()
        cluster_barrier("init_without_cluster_barrier")

        tiles = T.meta_var(TileWalk(problem, config, CLUSTERS))
        tiles.init(bx // CG)
        m_st = T.meta_var(tiles.row * TILE_M + (rank * CTA_M if SHARE_B else 0))
        n_st = T.meta_var(tiles.col * TILE_N + (rank * BLK_N if SHARE_A else 0))
        a_part = T.meta_var(rank * (CTA_M // 2) if SHARE_A else 0)
        b_part = T.meta_var(rank * (BLK_N // 2) if SHARE_B else 0)

        if wg_id == NC:
            # ============ TMA producer: waits mma2tma, signals tma2mma
            T.ptx.setmaxnreg.dec.sync.aligned.u32(PRODUCER_REGISTERS)
            if warp_id == 0:
                if T.cuda.elect_sync() != T.uint32(0):
                    T.ptx.prefetch.tensormap(T.address_of(a_map))
                    T.ptx.prefetch.tensormap(T.address_of(b_map))
                    # phase 1: the wait for a stage that was never filled returns at once
                    fill = PipelineState(PIPE, 0 if fault == "producer_phase" else 1)
                    while tiles.valid():
                        for k in T.serial(K_BLOCKS, unroll=UNROLL):
                            pause("producer_wait")
                            when(fault != "no_empty_wait", lambda: mma2tma.wait(fill.stage, fill.phase))
                            tma2mma.arrive(fill.stage, plan.filled_bytes // (2 if fault == "expect_tx" else 1))
                            pause("producer_load")
                            for s in T.unroll(SLABS):
                                for c in T.unroll(A_COPIES):
                                    tma_load(
                                        Asm.ptr_to([fill.stage, s * (CTA_M * SLAB) + (a_part + c * A_BOX) * SLAB]),
                                        a_map, k * BLK_K + s * SLAB, m_st + a_part + c * A_BOX,
                                        tma2mma.ptr_to([fill.stage]), SHARE_A,
                                    )  # fmt: skip
                                tma_load(
                                    Bsm.ptr_to([fill.stage, s * (BLK_N * SLAB) + b_part * SLAB]),
                                    b_map, k * BLK_K + s * SLAB, n_st + b_part,
                                    tma2mma.ptr_to([fill.stage]), SHARE_B,
                                )  # fmt: skip
                            fill.advance()
                        tiles.next_tile()
        else:
            # ============ consumers: wait tma2mma, signal mma2tma, write D
            T.ptx.setmaxnreg.inc.sync.aligned.u32(CONSUMER_REGISTERS)
            acc = T.alloc_local((WGMMAS * ACC,), "float32")
            packed = T.alloc_local((4,), "uint32")
            drain = PipelineState(PIPE, 0)
            ring = PipelineState(EPI_STAGES, 0)
            previous = T.local_scalar("int32")
            a_desc: T.uint64
            b_desc: T.uint64
            st_address: T.uint32
            st_xor: T.uint32
            st_row: T.int32
            a_desc = descriptor_base() + T.cast(
                ((T.cuda.cvta_generic_to_shared(Asm.ptr_to([0, 0])) + T.cast(wg_id * (BLK_M * ROW_BYTES), "uint32"))
                 & T.uint32(0x3FFFF)) >> T.uint32(4),
                "uint64",
            )  # fmt: skip
            b_desc = descriptor_base() + T.cast(
                (T.cuda.cvta_generic_to_shared(Bsm.ptr_to([0, 0])) & T.uint32(0x3FFFF)) >> T.uint32(4), "uint64"
            )
            # stmatrix: lane l of a warp holds the address of row l % 16, column half l / 16, of its 16 x 16 piece; the
            # store box is swizzled, so the 16-byte column is xored with the row within each 128 bytes of rows
            st_row = warp_id * 16 + (lane_id & 15)
            st_address = T.cuda.cvta_generic_to_shared(Dsm.ptr_to([0, 0, 0])) + T.cast(
                wg_id * (EPI_STAGES * BUFFER_BYTES) + st_row * STORE_ROW_BYTES, "uint32"
            )
            st_xor = T.cast(
                (((lane_id >> 4) ^ ((st_row * STORE_ROW_BYTES) >> 7)) & (STORE_ROW_BYTES // 16 - 1)) << 4, "uint32"
            )
            while tiles.valid():
                # One wgmma group stays in flight: a stage is released when the group after it has been issued and its
                # own has completed.
                pause("consumer_wait")
                when(fault != "no_full_wait", lambda: tma2mma.wait(drain.stage, drain.phase))
                T.ptx.wgmma.fence.sync.aligned()
                multiply_stage(acc, a_desc, b_desc, drain.stage, True)
                T.ptx.wgmma.commit_group.sync.aligned()
                previous = drain.stage
                drain.advance()
                for k in T.serial(K_BLOCKS - 1, unroll=UNROLL):
                    pause("consumer_wait")
                    when(fault != "no_full_wait", lambda: tma2mma.wait(drain.stage, drain.phase))
                    T.ptx.wgmma.fence.sync.aligned()
                    multiply_stage(acc, a_desc, b_desc, drain.stage, False)
                    T.ptx.wgmma.commit_group.sync.aligned()
                    when(fault != "early_release", lambda: T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1)))
                    release(mma2tma, previous, tid)
                    previous = drain.stage
                    drain.advance()
                when(fault != "no_accumulator_wait", lambda: T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(0)))
                release(mma2tma, previous, tid)
                epilogue(acc, packed, Dsm, d_map, ring, (wg_id, tid, st_address, st_xor), m_st, n_st)
                tiles.next_tile()
            if tid == 0:
                T.ptx["cp.async.bulk.wait_group"](0)
        # A CTA must not leave while its peer still multicasts into it or signals its barriers. The aligned form needs
        # whole warps, and the producer's elected thread has been on its own.
        T.cuda.warp_sync()
        when(CG > 1, lambda: cluster_barrier("exit_without_cluster_barrier"))

    return gemm
