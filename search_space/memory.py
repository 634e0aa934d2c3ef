"""Device memory that verifying and measuring one problem takes. `tuner.gpu` allocates by the same constants."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from search_space.rotation import set_count

if TYPE_CHECKING:
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

CASES = 5  # pairs of inputs that a kernel is verified on
REFERENCES = 4  # float32 products that the cases of one problem need
CACHED_REFERENCE_BYTES = 16 * 2**30
CHUNK_ELEMENTS = 2**26  # of a temporary
MAX_MARGIN = 2**22  # elements on each side of D
FINALISTS = 12  # verified outputs that are kept at a time: of the finalists
COMPARED_FLOATS = 8  # float32 temporaries of one element of D while it is compared
# CUDA context, code, workspaces of the vendor library. Stream-K kernels, which are not searched, keep up to 39 MB for
# each stream and captured graph until the process ends.
BESIDE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes by what they are for.

    inputs: the pairs of inputs that a kernel is verified on
    references: their float32 products where all of them fit CACHED_REFERENCE_BYTES, else the inputs that are kept
    outputs: D with its margins, and the verified outputs of the finalists
    rotating: the other operand sets that timed launches walk over
    temporaries: the largest that making inputs or comparing outputs needs
    beside: what the process needs for any problem
    """

    inputs: int
    references: int
    outputs: int
    rotating: int
    temporaries: int
    beside: int = BESIDE_BYTES

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = (f"{getattr(self, field.name) / 1e9:.1f} {field.name}" for field in fields(self))
        return f"{self.total / 1e9:.1f} GB ({', '.join(parts)})"


def keeps_references(problem: GemmProblem) -> bool:
    """Whether the float32 products of all cases are kept; else they are computed again, chunk by chunk."""
    return REFERENCES * 4 * problem.m * problem.n <= CACHED_REFERENCE_BYTES


def device_memory(problem: GemmProblem, l2_bytes: int) -> DeviceMemory:
    """What the child of a GPU allocates to verify and to measure this problem."""
    m, n, k = problem.m, problem.n, problem.k
    operands, output = 2 * (m + n) * k, 2 * m * n
    rows = min(m, max(1, CHUNK_ELEMENTS // n))
    compared = COMPARED_FLOATS * 4 * rows * n
    cast = 4 * (rows * k + min(n * k, max(CHUNK_ELEMENTS, k)) + rows * n)
    drawn = 3 * 2 * max(m, n) * k  # integers, their signs and magnitudes
    return DeviceMemory(
        inputs=CASES * operands,
        references=REFERENCES * 4 * m * n if keeps_references(problem) else operands,
        outputs=(1 + FINALISTS) * output + 2 * 2 * MAX_MARGIN,
        rotating=(set_count(problem, l2_bytes) - 1) * problem.min_bytes,
        temporaries=max(compared, cast, drawn),
    )


def shortage(problem: GemmProblem, profile: DeviceProfile) -> str:
    """Why a problem cannot be verified and measured on a device, with the figures; empty where it can."""
    needed = device_memory(problem, profile.l2_bytes)
    if needed.total <= profile.memory_bytes:
        return ""
    return (
        f"verifying and measuring {problem.shape} takes {needed} of device memory, {profile.name} has "
        f"{profile.memory_bytes / 1e9:.1f} GB"
    )
