"""Numbers of the Blackwell template that follow from problem, config and SM count, and the bugs that can be planted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tvm.backend.cuda.tile_primitive.tma_utils import SwizzleMode

from kernels.errors import ConfigError
from kernels.problem import ELEMENT_BYTES, FLOAT_BYTES
from kernels.split_plan import PartsOfK

if TYPE_CHECKING:
    from kernels.config import Sm100GemmConfig
    from kernels.problem import GemmProblem

WARPGROUP_THREADS = 128

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
# Those of the parts of K, which need split_k above 1.
SPLIT_FAULTS: dict[str, str] = {
    "no_parts_wait": "the owner of a chunk adds parts without waiting until they are here",
    "no_sum_wait": "parts are sent before the last tile's were read",
    "parts_bytes": "the owner expects the bytes of one part too few",
    "early_sum_release": "the owner lets the next parts come before it has read these",
}
# Those of tiles by cluster launch control, which need scheduler = clc.
CLC_FAULTS: dict[str, str] = {
    "no_answer_wait": "the roles read which tile is next without waiting for the answer",
    "no_answer_slot_wait": "the scheduler asks for another answer before the last one in this slot was read",
    "no_answer_release": "the roles do not say that they have read the answer",
    "answer_count": "roles2next expects one arrival fewer than there are threads that read the answer",
    "answer_bytes": "next2roles expects half the bytes of an answer",
    "answer_to_leader_only": "the answer is not multicast, so the other CTA never gets it",
}


def swizzle(row_elements: int) -> tuple[int, SwizzleMode]:
    """The widest swizzle whose atom divides a row, with the atom's width in elements."""
    for atom_bytes, mode in (
        (128, SwizzleMode.SWIZZLE_128B_ATOM),
        (64, SwizzleMode.SWIZZLE_64B_ATOM),
        (32, SwizzleMode.SWIZZLE_32B_ATOM),
    ):
        if row_elements * ELEMENT_BYTES % atom_bytes == 0:
            return atom_bytes // ELEMENT_BYTES, mode
    raise ConfigError(f"a row of {row_elements} elements holds no 32-byte swizzle atom")


@dataclass(frozen=True, kw_only=True)
class Plan(PartsOfK):
    """What the template derives from problem and knobs.

    Copies and stores are one swizzle atom wide: a wider box is a 3-D tensor map, which exists only where K or N is a
    multiple of the atom. Past the end of K zeros arrive, and count as bytes; past the ends of D nothing is written.
    """

    problem: GemmProblem
    config: Sm100GemmConfig
    sm_count: int

    @cached_property
    def clusters(self) -> int:
        """Clusters launched."""
        return self.config.launched_clusters(self.problem, self.sm_count)

    @property
    def copy_k(self) -> int:
        """K elements of one copy."""
        return swizzle(self.config.blk_k)[0]

    @property
    def copies(self) -> int:
        """TMA copies that fill one operand of one stage."""
        return self.config.blk_k // self.copy_k

    @property
    def operand_swizzle(self) -> SwizzleMode:
        """Of A and B in shared memory."""
        return swizzle(self.config.blk_k)[1]

    @property
    def tx_bytes(self) -> int:
        """Bytes that all copies of the CTAs of one MMA bring to one slot of tma2mma."""
        return self.config.cta_group * self.config.stage_bytes

    # ------------------------------------------------------------------ epilogue

    @property
    def staged_tile(self) -> tuple[int, int]:
        """Rows and columns of D of one chunk, as it lies in its staging buffer."""
        lanes, cols = self.config.blk_m, self.config.epi_n
        return (cols, lanes) if self.config.swap_ab else (lanes, cols)

    @property
    def store_n(self) -> int:
        """Columns of one TMA store."""
        return swizzle(self.staged_tile[1])[0]

    @property
    def stores(self) -> int:
        """TMA stores that empty one staging buffer."""
        return self.staged_tile[1] // self.store_n

    @property
    def staging_swizzle(self) -> SwizzleMode:
        """Of the staging buffers."""
        return swizzle(self.staged_tile[1])[1]

    @property
    def chunk_registers(self) -> int:
        """Values that one writeback thread holds of a chunk."""
        return self.config.epi_n * self.config.blk_m // WARPGROUP_THREADS

    # ------------------------------------------------------------------ parts of K

    @property
    def part_bytes(self) -> int:
        """float32 values of one chunk."""
        return FLOAT_BYTES * self.config.blk_m * self.config.epi_n
