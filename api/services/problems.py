"""Rules that a problem must keep before anything is stored or looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.errors import ProblemError
from kernels.errors import ProblemError as InvalidProblem
from kernels.problem import Dtype, GemmProblem, Layout
from kernels.rules import problem_violation

if TYPE_CHECKING:
    from api.services.targets import Target

NOT_A_MULTIPLE = "pad the operands with zeros to the next multiple of 8, tune that shape, and cut the result"


def checked_problem(
    *, m: int, n: int, k: int, dtype: str, layout: str, target: Target, prefix: str = ""
) -> GemmProblem:
    """The problem, or ProblemError that says which field breaks which rule, and what to do."""
    try:
        problem = GemmProblem(m=m, n=n, k=k, dtype=Dtype.parse(dtype), layout=Layout.parse(layout))
    except InvalidProblem as error:
        field = error.field or "problem"
        raise ProblemError(f"{prefix}{field}: {error}", hint="see /openapi.json for types and ranges") from error
    if reason := problem_violation(problem, target.arch):
        raise ProblemError(f"{prefix}{reason.split(' ', 1)[0]}: {reason}", hint=NOT_A_MULTIPLE)
    _check_memory(problem, target, prefix)
    return problem


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
