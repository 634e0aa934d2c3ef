"""Tuned GEMM kernels behind the contract of `torch.matmul`.

    from tuned_gemms import matmul

    y = matmul(x, w.t())  # x (M, K), w (N, K), both row-major: y = x @ w.t()

A product that a kernel of this package was tuned for (shape, dtype and device) runs on that kernel, on the current
stream; any other goes to `torch.matmul`, and `counts()` says how often and why. Works under CUDA graphs (call each
product once before the capture, as for any kernel) and under `torch.compile`.
"""

from ._dispatch import Counts, counts, matmul, reset_counts
from ._library import CorruptPackage, Kernel, kernels

__all__ = ["CorruptPackage", "Counts", "Kernel", "counts", "kernels", "matmul", "reset_counts"]
