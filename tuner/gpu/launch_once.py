"""Launches modules a few times and checks the products; run under compute-sanitizer.

Reads one line from standard input, a JSON list of {"path", "m", "n", "k", "dtype"} for each module, and ends with its
whole process group when standard input closes. Its last line says whether every launch was right.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import tvm_ffi

from tuner.gpu.wire import follow_parent

_LAUNCHES = 2
# Loose on purpose: the referee compares element by element; here a grossly wrong product means the run proved nothing.
_MAX_RELATIVE_ERROR = 1e-2


def launch(entry: dict[str, Any]) -> float:
    """Relative Frobenius error of the worst launch of one module."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[entry["dtype"]]
    m, n, k = entry["m"], entry["n"], entry["k"]
    generator = torch.Generator(device="cuda").manual_seed(1)
    a = torch.randn(m, k, device="cuda", generator=generator).to(dtype)
    b = torch.randn(n, k, device="cuda", generator=generator).to(dtype)
    d = torch.empty(m, n, device="cuda", dtype=dtype)
    reference = a.float() @ b.float().t()
    kernel = tvm_ffi.load_module(entry["path"])["gemm"]
    worst = 0.0
    for _ in range(_LAUNCHES):
        d.fill_(float("nan"))
        kernel(a, b, d)
        torch.cuda.synchronize()
        error = ((d.float() - reference).norm() / reference.norm()).item()
        worst = max(worst, float("inf") if math.isnan(error) else error)  # NaN: part of the poison was left
    return worst


def main() -> int:
    """0 when every launch was right."""
    launches = json.loads(sys.stdin.readline())
    follow_parent()
    torch.backends.cuda.matmul.allow_tf32 = False
    for entry in launches:
        if (error := launch(entry)) > _MAX_RELATIVE_ERROR:
            print(f"launch_once: {entry['path']} is wrong by {error:.3g}")
            return 1
    print("launch_once: all launches right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
