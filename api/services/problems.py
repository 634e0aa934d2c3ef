"""Rules that a problem must keep before anything is stored or looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.errors import ProblemError
from kernels.errors import ProblemError as InvalidProblem
from kernels.problem import Dtype, GemmProblem, Layout
from kernels.rules import problem_violation

if TYPE_CHECKING:
    from api.services.targets import Target

TOO_LONG = "split the product into several of fewer rows or columns"
NOT_A_MULTIPLE = "pad the operands with zeros to the next multiple of 8, tune that shape, and cut the result"


def checked_kind(dtype: str, layout: str, prefix: str = "") -> tuple[Dtype, Layout]:
    """Dtype and layout by any of their names, or ProblemError that says which one there is not."""
    try:
        return Dtype.parse(dtype), Layout.parse(layout)
    except InvalidProblem as error:
        raise _refused(error, prefix) from error


def checked_problem(
    *, m: int, n: int, k: int, dtype: str, layout: str, target: Target, prefix: str = ""
) -> GemmProblem:
    """The problem, or ProblemError that says which field breaks which rule, and what to do."""
    kind, storage = checked_kind(dtype, layout, prefix)
    try:
        problem = GemmProblem(m=m, n=n, k=k, dtype=kind, layout=storage)
    except InvalidProblem as error:
        raise _refused(error, prefix) from error
    if reason := problem_violation(problem, target.arch):
        hint = NOT_A_MULTIPLE if "multiple" in reason else TOO_LONG
        raise ProblemError(f"{prefix}{reason.split(' ', 1)[0]}: {reason}", hint=hint)
    _check_memory(problem, target, prefix)
    return problem


def _refused(error: InvalidProblem, prefix: str) -> ProblemError:
    return ProblemError(f"{prefix}{error.field or 'problem'}: {error}", hint="see /openapi.json for types and ranges")


def _check_memory(problem: GemmProblem, target: Target, prefix: str) -> None:
    """A, B and D must lie in device memory together."""
    if target.profile is None or problem.min_bytes <= target.profile.memory_bytes:
        return
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    largest = max(sizes, key=lambda name: sizes[name])
    raise ProblemError(
        f"{prefix}{largest}: {problem.shape} needs {problem.min_bytes} bytes for A, B and D, "
        f"{target.profile.name} has {target.profile.memory_bytes}",
        hint=f"make {largest} smaller: split the product along {largest.upper()} into several",
    )
