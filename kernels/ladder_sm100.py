"""Steps 1, 3 and 4 of the ladder on Blackwell, written with tile primitives: what the template is better than.

One warpgroup computes one tile of 128 x 128. For each block of 64 K elements it loads, multiplies and waits, in turn.

    step 1   threads copy A and B; each block's product is read back and added to sums in registers
    step 3   threads copy A and B; the tensor core adds up over K in tensor memory
    step 4   TMA brings A and B and takes D away

Scope: every thread copies, one elected thread issues MMAs, the warpgroup reads tensor memory.
Layout: A and B in shared memory with the 128-byte swizzle that TMA and tcgen05 share; row r of D in lane r.
Dispatch: `Tx.cta.copy` or TMA, `tcgen05`.
"""
# A TVMScript body is parsed, not run: its annotations are buffers and its decorators have no types.
# mypy: disable-error-code="valid-type, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import TCGen05Bar, TMABar
from tvm.backend.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import S, TileLayout, tid_in_wg, tmem_datapath_layout

from kernels.errors import ConfigError
from kernels.ladder import TILE_COLUMNS, TILE_K, TILE_ROWS, step_violation
from kernels.problem import ELEMENT_BYTES
from kernels.resources import HEADER_BYTES

if TYPE_CHECKING:
    from kernels.ladder import Sm100StepConfig
    from kernels.problem import GemmProblem

STAGE_BYTES = ELEMENT_BYTES * TILE_K * (TILE_ROWS + TILE_COLUMNS)
CHUNK = 32  # columns of tensor memory read at a time where they are added to sums
STORE_COLUMNS = 64  # of one TMA store: a swizzle atom of 128 bytes


def build_step_sm100(problem: GemmProblem, config: Sm100StepConfig) -> Any:
    """Trace one of the simple kernels. Raises ConfigError for a problem that is not made of whole tiles."""
    if reason := step_violation(problem):
        raise ConfigError(reason)
    M, N, K, dtype, step = problem.m, problem.n, problem.k, problem.dtype.long_name, config.step
    BM, BN, BK = TILE_ROWS, TILE_COLUMNS, TILE_K
    TMEM_COLUMNS = config.arch.tmem_columns
    operand_layout = mma_shared_layout(dtype, SwizzleMode.SWIZZLE_128B_ATOM, (BM, BK))
    D_layout = mma_shared_layout(dtype, SwizzleMode.SWIZZLE_128B_ATOM, (BM, BN))
    acc_layout = tmem_datapath_layout("D", BM, TMEM_COLUMNS)

    def row_layout(columns: int) -> Any:
        return TileLayout(S[(BM, columns) : (1 @ tid_in_wg, 1)])

    def emit(wanted: bool, statement: Any, *arguments: Any) -> None:
        """Put a statement into the kernel or leave it out."""
        made = statement(*arguments) if wanted else None
        if made is not None:  # inlined functions emit what they do, instructions are returned
            T.evaluate(made)

    @T.prim_func
    def gemm(A: T.Buffer((M, K), dtype), B: T.Buffer((N, K), dtype), D: T.Buffer((M, N), dtype)):
        T.device_entry()
        cta = T.cta_id([M // BM * (N // BN)])
        _warpgroup = T.warpgroup_id([1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        first = T.meta_var((warp == 0) & (lane == 0))

        pool = T.SMEMPool()
        tmem_addr = pool.alloc((1,), "uint32")
        tma2mma = TMABar(pool, 1)
        mma2ld = TCGen05Bar(pool, 1)
        pool.move_base_to(HEADER_BYTES)
        A_smem = pool.alloc((BM, BK), dtype, layout=operand_layout)
        B_smem = pool.alloc((BN, BK), dtype, layout=operand_layout)
        D_smem = T.meta_var(pool.alloc((BM, BN), dtype, layout=D_layout) if step == 4 else None)
        tma2mma.init(1)
        mma2ld.init(1)
        pool.commit()
        if warp == 0:
            T.ptx["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"](
                tmem_addr.ptr_to([0]), T.uint32(TMEM_COLUMNS)
            )
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        tmem_base: T.let = tmem_addr[0]
        tmem = T.decl_buffer((BM, TMEM_COLUMNS), "float32", scope="tmem", allocated_addr=tmem_base, layout=acc_layout)

        m_start = T.meta_var(cta // (N // BN) * BM)
        n_start = T.meta_var(cta % (N // BN) * BN)
        row = T.meta_var(warp * 32 + lane)
        phase: T.int32 = 0
        sums = T.alloc_local((BN,), "float32")
        rounded = T.alloc_local((BN,), dtype)

        @T.inline
        def load_by_threads(k_start):
            # The tensor core has read the block before through the asynchronous proxy; threads write through the
            # generic one. racecheck found the first of these two fences missing.
            T.ptx.fence.proxy.async_.shared__cta()
            Tx.cta.copy(A_smem[:, :], A[m_start : m_start + BM, k_start : k_start + BK])
            Tx.cta.copy(B_smem[:, :], B[n_start : n_start + BN, k_start : k_start + BK])
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()

        @T.inline
        def load_by_tma(k_start):
            if first:
                Tx.copy_async(
                    A_smem[:, :], A[m_start : m_start + BM, k_start : k_start + BK],
                    dispatch="tma_explicit", cta_group=1, mbar=tma2mma.ptr_to([0]),
                )  # fmt: skip
                Tx.copy_async(
                    B_smem[:, :], B[n_start : n_start + BN, k_start : k_start + BK],
                    dispatch="tma_explicit", cta_group=1, mbar=tma2mma.ptr_to([0]),
                )  # fmt: skip
                tma2mma.arrive(0, STAGE_BYTES)
            tma2mma.wait(0, phase)

        @T.inline
        def read_back(destination, column, columns):
            view = destination.view(BM, columns, layout=row_layout(columns))
            Tx.wg.copy_async(view[:], tmem[:, column : column + columns])
            T.ptx.tcgen05.wait__ld.sync.aligned()

        @T.inline
        def add_to_sums():
            part = T.alloc_local((CHUNK,), "float32")
            for chunk in T.unroll(BN // CHUNK):
                read_back(part, chunk * CHUNK, CHUNK)
                for i in T.unroll(CHUNK):
                    sums[chunk * CHUNK + i] = sums[chunk * CHUNK + i] + part[i]
            # All threads have read the product before the next block's MMA overwrites it.
            T.ptx.tcgen05.fence__before_thread_sync()

        @T.inline
        def clear_sums():
            for i in T.unroll(BN):
                sums[i] = T.float32(0)

        @T.inline
        def store_by_threads():
            Tx.copy(D[m_start + row, n_start : n_start + BN], rounded[:])

        @T.inline
        def store_by_tma():
            Tx.copy(D_smem[row, :], rounded[:])
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
            if first:
                for part in T.unroll(BN // STORE_COLUMNS):
                    column = T.meta_var(part * STORE_COLUMNS)
                    Tx.copy_async(
                        D[m_start : m_start + BM, n_start + column : n_start + column + STORE_COLUMNS],
                        D_smem[:, column : column + STORE_COLUMNS], dispatch="tma_explicit",
                    )  # fmt: skip
                T.ptx.cp.async_.bulk.commit_group()
                T.ptx.cp.async_.bulk.wait_group(0)

        emit(step == 1, clear_sums)
        for k in T.serial(K // BK):
            emit(step == 4, load_by_tma, k * BK)
            emit(step != 4, load_by_threads, k * BK)
            T.ptx.tcgen05.fence__after_thread_sync()
            if warp == 0:
                if T.cuda.elect_sync():
                    Tx.gemm_async(
                        tmem[:, :BN], A_smem[:, :], B_smem[:, :],
                        accum=(False if step == 1 else k != 0), dispatch="tcgen05", cta_group=1,
                    )  # fmt: skip
                    mma2ld.arrive(0, cta_group=1, cta_mask=1)
            mma2ld.wait(0, phase)
            T.ptx.tcgen05.fence__after_thread_sync()
            emit(step == 1, add_to_sums)
            # Without this, warp 0 could finish the next block while another warp still waits for this one's phase, and
            # would wait for ever (synccheck: "can be overtaken"). Threads that copy meet at a barrier anyway.
            emit(step == 4, T.cuda.cta_sync)
            phase = phase ^ 1
        emit(step != 1, read_back, sums, 0, BN)
        Tx.cast(rounded[:], sums[:])
        emit(step == 4, store_by_tma)
        emit(step != 4, store_by_threads)

        T.ptx.tcgen05.fence__before_thread_sync()
        T.cuda.cta_sync()
        if warp == 0:
            T.ptx["tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned"]()
            T.ptx["tcgen05.dealloc.cta_group::1.sync.aligned.b32"](tmem_base, T.uint32(TMEM_COLUMNS))

    return gemm
