"""Problems of the kill tests."""

from __future__ import annotations

from kernels.problem import GemmProblem

# Two, so that neither of two studies knows a previous winner of the other's.
KILL_PROBLEMS = (GemmProblem(m=64, n=7168, k=4096), GemmProblem(m=16, n=4096, k=2048))
