"""Pieces of the Hopper template that are emitted while it is traced: plain Python that writes TIR."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from kernels.pause import pause
from kernels.problem import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tvm.backend.cuda.lang.pipeline import PipelineState

    from kernels.gemm_sm90_plan import Operand

SWIZZLE_MODE = {128: 3, 64: 2, 32: 1}  # CUtensorMapSwizzle by bytes of a shared-memory row
_DESCRIPTOR_MODE = {128: 1, 64: 2, 32: 3}  # wgmma shared-memory descriptor, bits 62-63
_TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_L2_PROMOTION_128B = 2  # 0 and 3 were within 0.2 % of it at 4096^3 and 8192^3 (H200)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is special about this build, beside problem and config.

    fault: planted bug, or empty
    delays_ns: longest sleep by delay point
    """

    fault: str = ""
    delays_ns: Mapping[str, int] = field(default_factory=dict)

    def pause(self, point: str) -> None:
        """Sleep here, if the build is one of those that do."""
        pause(self.delays_ns, point)


def i32(value: Any) -> Any:
    """A coordinate."""
    return value if isinstance(value, int) else T.cast(value, "int32")


def shared_address(pointer: Any) -> Any:
    """32-bit address of shared memory."""
    return T.cuda.cvta_generic_to_shared(pointer)


def named(name: str, dtype: str, value: Any) -> Any:
    """A value computed once."""
    variable = T.Var(name, dtype)
    T.Bind(value, var=variable)
    return variable


def kept(dtype: str, value: Any) -> Any:
    """A value in a register of its own. TVM would write out a named one wherever it is used."""
    register = T.alloc_local((1,), dtype)
    T.buffer_store(register, value, [0])
    return register[0]


@T.inline  # type: ignore[untyped-decorator]
def skip(turn: PipelineState, count: int) -> None:
    """Pass over `count` stages of a ring that another consumer uses."""
    turn.stage = turn.stage + count % turn.depth
    turn.phase = turn.phase ^ (count // turn.depth & 1)
    if turn.stage >= turn.depth:
        turn.stage = turn.stage - turn.depth
        turn.phase = turn.phase ^ 1


# ---------------------------------------------------------------------- tensor maps and loads


def tensor_map(name: str) -> Any:
    """Room for a tensor map."""
    variable = T.Var(name, ty=T.handle("tensormap").ty)
    T.Bind(T.tvm_stack_alloca("tensormap", 1), var=variable)
    return variable


def encode(tensor_map: Any, data: Any, rows: int, cols: int, dtype: str, box: tuple[int, int]) -> None:
    """Fill a tensor map, on the host. `box`: rows and columns of one copy."""
    box_rows, box_cols = box
    T.evaluate(
        T.tensormap_encode_tiled(
            tensor_map, data, cols, rows, cols * ELEMENT_BYTES, box_cols, box_rows, 1, 1, descriptor_dtype=dtype,
            rank=2, interleave=0, swizzle=SWIZZLE_MODE[box_cols * ELEMENT_BYTES], l2_promotion=_L2_PROMOTION_128B,
            oob_fill=0,
        )
    )  # fmt: skip


class Loads:
    """How a CTA fetches its part of the tiles of one operand."""

    def __init__(
        self, operand: Operand, tensor_map: Any, smem: Any, start: Any, *, slab_cols: int, multicast: int = 1
    ) -> None:
        """start: first row that this CTA fetches; multicast: CTAs of the cluster that get it, in equal parts."""
        self.operand, self.tensor_map, self.smem, self.start = operand, tensor_map, smem, start
        self.slab_cols, self.multicast = slab_cols, multicast

    def slab(self, stage: Any, slab: Any, col: Any, part: Any, barrier: Any) -> None:
        """All copies of one slab of a stage.

        col: first column; part: row of the tile in shared memory where this CTA's part starts
        """
        for first in self.operand.copies:
            place = slab * (self.operand.tile_rows * self.slab_cols) + (part + first) * self.slab_cols
            arguments = (
                self.smem.ptr_to([stage, place]), T.address_of(self.tensor_map), i32(col), i32(self.start + first),
                barrier,
            )  # fmt: skip
            if self.multicast > 1:
                T.evaluate(T.ptx[_TMA_LOAD + ".multicast::cluster"](*arguments, T.uint16((1 << self.multicast) - 1)))
            else:
                T.evaluate(T.ptx[_TMA_LOAD](*arguments))


# ---------------------------------------------------------------------- wgmma


def descriptor(smem: Any, first_byte: Any, row_bytes: int) -> Any:
    """Shared-memory descriptor of a K-major operand that starts `first_byte` bytes into a buffer.

    Start address / 16 in bits 0-13, stride between groups of 8 rows / 16 in bits 32-45, swizzle in bits 62-63; the
    leading offset is not used with a swizzle (PTX ISA, wgmma matrix descriptor).
    """
    fixed = (1 << 16) | (((8 * row_bytes) >> 4) << 32) | (_DESCRIPTOR_MODE[row_bytes] << 62)
    # TVM's uint64 literals stop at 2^63 - 1; the 64-byte swizzle sets bit 63
    base = T.reinterpret("uint64", T.int64(fixed - (1 << 64) if fixed >> 63 else fixed))
    address = shared_address(smem.ptr_to([0, 0]))
    if not (isinstance(first_byte, int) and first_byte == 0):
        address = address + T.cast(first_byte, "uint32")
    return base + T.cast((address & T.uint32(0x3FFFF)) >> T.uint32(4), "uint64")
