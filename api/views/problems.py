"""Bodies that others hold: the problem of a study, its state.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from pydantic import BaseModel

from api.examples import PROBLEM_EXAMPLE
from api.views.base import example


class ProblemView(BaseModel):
    """One GEMM, D[M,N] = A[M,K] @ B[N,K]^T."""

    model_config = example(PROBLEM_EXAMPLE)

    m: int
    n: int
    k: int
    dtype: str
    layout: str


class StudyState(BaseModel):
    """A study of a job that was just submitted."""

    id: str
    state: str
