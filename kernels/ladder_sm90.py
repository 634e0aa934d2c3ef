"""Steps 1, 3 and 4 of the ladder on Hopper: the same rungs as on Blackwell, with wgmma and accumulators in registers.

One warpgroup computes one tile of 128 x 128 as two blocks of 64 rows. For each block of 64 K elements it loads,
multiplies and waits, in turn.

    step 1   threads copy A and B; each block's product is added to sums by the threads
    step 3   threads copy A and B; wgmma adds up over K
    step 4   TMA brings A and B and takes D away
"""
# A TVMScript body is parsed, not run: its annotations are buffers and its decorators have no types.
# mypy: disable-error-code="valid-type, untyped-decorator, no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.backend.cuda.lang import TMABar
from tvm.backend.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import tcgen05_atom_layout

from kernels.errors import ConfigError
from kernels.ladder import TILE_COLUMNS, TILE_K, TILE_ROWS, step_violation
from kernels.problem import ELEMENT_BYTES
from kernels.resources import HEADER_BYTES, WGMMA_ROWS

if TYPE_CHECKING:
    from kernels.ladder import Sm90StepConfig
    from kernels.problem import GemmProblem

STAGE_BYTES = ELEMENT_BYTES * TILE_K * (TILE_ROWS + TILE_COLUMNS)
ACCUMULATORS = WGMMA_ROWS * TILE_COLUMNS // 128  # float32 of one block of 64 rows in each thread
STORE_COLUMNS = 64  # of one TMA store: a swizzle atom of 128 bytes
ROW_BYTES = 128  # of a swizzled row in shared memory
# K-major operand: start address / 16 in bits 0-13, stride between groups of 8 rows / 16 in bits 32-45, 128-byte swizzle
# in bits 62-63 (PTX ISA, wgmma matrix descriptor).
DESCRIPTOR = (1 << 16) | ((8 * ROW_BYTES >> 4) << 32) | (1 << 62)


def build_step_sm90(problem: GemmProblem, config: Sm90StepConfig) -> Any:
    """Trace one of the simple kernels. Raises ConfigError for a problem that is not made of whole tiles."""
    if reason := step_violation(problem):
        raise ConfigError(reason)
    M, N, K, dtype, step = problem.m, problem.n, problem.k, problem.dtype.long_name, config.step
    BM, BN, BK = TILE_ROWS, TILE_COLUMNS, TILE_K
    short = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    WGMMA = f"wgmma.mma_async.sync.aligned.m64n{BN}k16.f32.{short}.{short}"
    operand_layout = mma_shared_layout(dtype, SwizzleMode.SWIZZLE_128B_ATOM, (BM, BK))
    D_layout = mma_shared_layout(dtype, SwizzleMode.SWIZZLE_128B_ATOM, (BM, BN))
    # wgmma leaves its result as tcgen05.ld of shape 16x256b does: a thread has two columns of rows g and g + 8.
    fragment_layout = tcgen05_atom_layout("16x256b", (WGMMA_ROWS, BN), "float32")

    def emit(wanted: bool, statement: Any, *arguments: Any) -> None:
        if wanted:
            statement(*arguments)

    def descriptor(pointer: Any) -> Any:
        address = T.cuda.cvta_generic_to_shared(pointer) & T.uint32(0x3FFFF)
        return T.uint64(DESCRIPTOR) + T.cast(address >> T.uint32(4), "uint64")

    def multiply_block(acc: Any, block: int, a: Any, b: Any, adds: Any) -> None:
        """The wgmmas of 64 rows of A and one block of K; `adds` says whether the first one adds or overwrites."""
        for k in range(0, BK, 16):
            a_offset, b_offset = (block * WGMMA_ROWS * ROW_BYTES + k * ELEMENT_BYTES) >> 4, k * ELEMENT_BYTES >> 4
            T.evaluate(
                T.ptx[WGMMA](
                    *[acc[r] for r in range(ACCUMULATORS)], a + T.uint64(a_offset), b + T.uint64(b_offset),
                    T.ptx.pred(adds if k == 0 else 1), 1, 1, 0, 0,
                )
            )  # fmt: skip

    @T.prim_func
    def gemm(A: T.Buffer((M, K), dtype), B: T.Buffer((N, K), dtype), D: T.Buffer((M, N), dtype)):
        T.device_entry()
        cta = T.cta_id([M // BM * (N // BN)])
        _warpgroup = T.warpgroup_id([1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        first = T.meta_var((warp == 0) & (lane == 0))

        pool = T.SMEMPool()
        tma2mma = TMABar(pool, 1)
        pool.move_base_to(HEADER_BYTES)
        A_smem = pool.alloc((BM, BK), dtype, layout=operand_layout)
        B_smem = pool.alloc((BN, BK), dtype, layout=operand_layout)
        D_smem = T.meta_var(pool.alloc((BM, BN), dtype, layout=D_layout) if step == 4 else None)
        tma2mma.init(1)
        pool.commit()
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()

        m_start = T.meta_var(cta // (N // BN) * BM)
        n_start = T.meta_var(cta % (N // BN) * BN)
        phase: T.int32 = 0
        upper = T.alloc_local((ACCUMULATORS,), "float32")
        lower = T.alloc_local((ACCUMULATORS,), "float32")

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
                    dispatch="tma_explicit", mbar=tma2mma.ptr_to([0]),
                )  # fmt: skip
                Tx.copy_async(
                    B_smem[:, :], B[n_start : n_start + BN, k_start : k_start + BK],
                    dispatch="tma_explicit", mbar=tma2mma.ptr_to([0]),
                )  # fmt: skip
                tma2mma.arrive(0, STAGE_BYTES)
            tma2mma.wait(0, phase)

        @T.inline
        def clear_sums():
            for i in T.unroll(ACCUMULATORS):
                upper[i] = T.float32(0)
                lower[i] = T.float32(0)

        @T.inline
        def multiply(acc, block, adds):
            T.ptx.wgmma.fence.sync.aligned()
            multiply_block(acc, block, descriptor(A_smem.ptr_to([0, 0])), descriptor(B_smem.ptr_to([0, 0])), adds)
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def add_product(acc, block, part):
            multiply(part, block, 0)
            T.ptx.wgmma.wait_group.sync.aligned(0)
            for i in T.unroll(ACCUMULATORS):
                acc[i] = acc[i] + part[i]

        @T.inline
        def step_alone():
            part = T.alloc_local((ACCUMULATORS,), "float32")
            add_product(upper, 0, part)
            add_product(lower, 1, part)

        @T.inline
        def step_accumulated(k):
            multiply(upper, 0, k != 0)
            multiply(lower, 1, k != 0)
            T.ptx.wgmma.wait_group.sync.aligned(0)

        emit(step == 1, clear_sums)
        for k in T.serial(K // BK):
            emit(step == 4, load_by_tma, k * BK)
            emit(step != 4, load_by_threads, k * BK)
            emit(step == 1, step_alone)
            emit(step != 1, step_accumulated, k)
            # All warps have read A and B before they are overwritten.
            T.cuda.cta_sync()
            phase = phase ^ 1

        @T.inline
        def store_by_threads(acc, block):
            rounded = T.alloc_local((ACCUMULATORS,), dtype)
            fragment = rounded.view(WGMMA_ROWS, BN, layout=fragment_layout)
            Tx.cast(rounded[:], acc[:])
            Tx.wg.copy(
                D[m_start + block * WGMMA_ROWS : m_start + (block + 1) * WGMMA_ROWS, n_start : n_start + BN],
                fragment[:, :],
            )

        @T.inline
        def stage(acc, block):
            rounded = T.alloc_local((ACCUMULATORS,), dtype)
            fragment = rounded.view(WGMMA_ROWS, BN, layout=fragment_layout)
            Tx.cast(rounded[:], acc[:])
            Tx.wg.copy(D_smem[block * WGMMA_ROWS : (block + 1) * WGMMA_ROWS, :], fragment[:, :])

        @T.inline
        def store_by_tma():
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

        emit(step != 4, store_by_threads, upper, 0)
        emit(step != 4, store_by_threads, lower, 1)
        emit(step == 4, stage, upper, 0)
        emit(step == 4, stage, lower, 1)
        emit(step == 4, store_by_tma)

    return gemm
