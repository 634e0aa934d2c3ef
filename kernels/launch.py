"""How a compiled kernel is launched: read once from what TVM generated, written into each module for the launcher."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.problem import ELEMENT_BYTES

TMA_ALIGNMENT = 16
OPERANDS = ("A", "B", "D")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMapPlan:
    """Arguments of cuTensorMapEncodeTiled for one operand.

    operand: "A", "B" or "D"
    data_type: CUtensorMapDataType
    extents: elements per dimension, innermost first
    strides_bytes: of every dimension but the innermost
    box: elements one copy brings, per dimension
    element_strides: per dimension
    interleave, swizzle, l2_promotion, oob_fill: the driver's enumerations
    rows_from_call: whether the rows are those of the call, and `extents` has 0 for them
    short_box: whether the box has at most as many rows as the call
    """

    operand: str
    data_type: int
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int
    rows_from_call: bool = False
    short_box: bool = False

    def called_with(self, rows: int) -> TensorMapPlan:
        """What a call with this many rows encodes."""
        if not self.rows_from_call:
            return self
        cols, box_rows = self.extents[0], self.box[1]
        box = (self.box[0], min(box_rows, rows) if self.short_box else box_rows)
        return replace(self, extents=(cols, rows), box=box)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerPlan:
    """A kernel parameter that is the address of an operand.

    operand: "A", "B" or "D"
    """

    operand: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StridePlan:
    """A kernel parameter that is the distance of two rows of an operand, in elements, as an int32.

    operand: "A", "B" or "D"
    """

    operand: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsPlan:
    """A kernel parameter that is M of the call, as an int32."""

    operand: str = "A"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspacePlan:
    """A kernel parameter that is the address of device memory of the launcher's own.

    size_bytes: how much; all zero before a launch as far as the kernel needs it, and again after it
    """

    size_bytes: int = 0
    operand: str = ""


Parameter = TensorMapPlan | PointerPlan | StridePlan | RowsPlan | WorkspacePlan
WORKSPACE = "workspace"  # parameter of the template by name
ROWS, MAPPED_ROWS = "m", "mapped_m"  # M of the call, for the kernel and for its tensor maps
STRIDES = {"a_stride": "A", "b_stride": "B", "d_stride": "D"}  # parameters of the templates by name


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """One launch.

    symbol: name of the kernel in the cubin
    grid: CTAs
    threads: threads of one CTA
    cluster: CTAs of one cluster in x, y, z
    smem_bytes: dynamic shared memory of one CTA
    parameters: kernel parameters in order
    """

    symbol: str
    grid: int
    threads: int
    cluster: tuple[int, int, int]
    smem_bytes: int
    parameters: tuple[Parameter, ...]

    def with_workspace(self, size_bytes: int) -> LaunchPlan:
        """The plan whose workspace has this size."""
        sized = (replace(p, size_bytes=size_bytes) if isinstance(p, WorkspacePlan) else p for p in self.parameters)
        return replace(self, parameters=tuple(sized))

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a launch needs beside its operands."""
        return sum(parameter.size_bytes for parameter in self.parameters if isinstance(parameter, WorkspacePlan))

    @property
    def dynamic_m(self) -> bool:
        """Whether M is that of the call."""
        return any(isinstance(parameter, RowsPlan) for parameter in self.parameters)

    def knows_stride_of(self, operand: str) -> bool:
        """Whether the kernel was built for the row stride of a contiguous operand, so that no other can be served.

        It was where it computes addresses itself and is not told the stride.
        """
        mine = {type(parameter) for parameter in self.parameters if parameter.operand == operand} - {RowsPlan}
        return mine not in ({TensorMapPlan}, {PointerPlan, StridePlan})

    def alignment_of(self, operand: str) -> int:
        """Bytes that the start and the row stride of an operand must be a multiple of.

        Loads without TMA take any element. Stores without TMA write words of D, so its rows stay as TMA wants them.
        """
        told = any(isinstance(one, StridePlan) and one.operand == operand for one in self.parameters)
        return ELEMENT_BYTES if told and operand != "D" else TMA_ALIGNMENT
