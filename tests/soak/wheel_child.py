"""Runs where a wheel is installed beside torch and apache-tvm-ffi, and nothing of this project can be imported.

    python wheel_child.py OUT.json

For each kernel of this device: right against float32, repeated calls bitwise equal, the same under a CUDA graph, under
torch.compile and on another stream. Then what the fallback does and counts, and what a call costs the host.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tuned_gemms
import tvm_ffi
from tuned_gemms import _dispatch, _library

if TYPE_CHECKING:
    from collections.abc import Callable

FORBIDDEN = ("tvm", "tuner", "kernels", "db", "api", "optuna", "sqlalchemy", "fastapi")
CALLS = 200  # between two synchronisations: far fewer than a stream takes before it makes the host wait
ROUNDS = 15
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def operands(kernel: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal random A (M, K) and W (N, K)."""
    torch.manual_seed(seed)
    options = {"dtype": DTYPES[kernel.dtype], "device": "cuda"}
    return torch.randn(kernel.m, kernel.k, **options), torch.randn(kernel.n, kernel.k, **options)


def worst_error(d: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> float:
    """Largest error of all elements over what the referee of this project allows (`tuner.gpu.referee` derives it)."""
    reference = a.float() @ w.float().t()
    norms = a.float().norm(dim=1)[:, None] * w.float().norm(dim=1)[None, :]
    rounding = torch.finfo(d.dtype).eps / 2 * (1 + 2**-7) * reference.abs()
    allowed = rounding + (8 + math.sqrt(a.shape[1]) / 4) * 2**-23 * norms
    return float(((d.float() - reference).abs() / allowed).max())


def check_kernel(kernel: Any) -> dict[str, Any]:
    """One product in every way that the package promises."""
    a, w = operands(kernel, seed=kernel.m + kernel.n)
    before = tuned_gemms.counts().tuned
    d = tuned_gemms.matmul(a, w.t())
    served = tuned_gemms.counts().tuned - before == 1
    again = [torch.equal(d, tuned_gemms.matmul(a, w.t())) for _ in range(3)]

    graph, static_a = torch.cuda.CUDAGraph(), a.clone()
    with torch.cuda.graph(graph):
        captured = tuned_gemms.matmul(static_a, w.t())
    static_a.copy_(a * 2)
    graph.replay()
    graphed = torch.equal(captured, tuned_gemms.matmul(static_a, w.t()))

    compiled = torch.compile(lambda x, y: tuned_gemms.matmul(x, y.t()) + 1, fullgraph=True, dynamic=False)
    before = tuned_gemms.counts().tuned
    compiled_right = torch.equal(compiled(a, w), d + 1)
    compiled_served = tuned_gemms.counts().tuned - before == 1
    torch._dynamo.reset()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a kernel on the wrong stream would run before the operands are written
        late = a * 2
        other = tuned_gemms.matmul(late, w.t())
    torch.cuda.current_stream().wait_stream(stream)
    streamed = torch.equal(other, captured)
    error = worst_error(d, a, w)
    row = {
        "shape": f"{kernel.m}x{kernel.n}x{kernel.k}",
        "dtype": kernel.dtype,
        "served": served,
        "worst_error_over_bound": round(error, 3),
        "repeats_equal": all(again),
        "cuda_graph": graphed,
        "torch_compile": compiled_right and compiled_served,
        "own_stream": streamed,
    }
    row["right"] = error <= 1.0 and all(value is True for value in row.values() if isinstance(value, bool))
    return row


def check_fallback(kernel: Any) -> dict[str, Any]:
    """What no kernel serves: the result of torch, and the reason in the counts."""
    a, w = operands(kernel, seed=1)
    odd = a.as_strided((kernel.m, kernel.k - 8), (kernel.k, 1))
    cases: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
        "another shape": (a[: max(1, kernel.m // 2)] if kernel.m > 1 else a.repeat(3, 1), w.t(), _dispatch.NO_KERNEL),
        "float32": (a.float(), w.float().t(), _dispatch.NO_KERNEL),
        "row-major b": (a, w.t().contiguous(), _dispatch.LAYOUT),
        "strided a": (odd, w[:, : kernel.k - 8].t(), _dispatch.NO_KERNEL),
        "gradient": (a.clone().requires_grad_(), w.t(), _dispatch.AUTOGRAD),
        "cpu": (a.cpu(), w.cpu().t(), _dispatch.NO_CUDA),
    }
    found = {}
    for name, (x, y, reason) in cases.items():
        tuned_gemms.reset_counts()
        made, expected = tuned_gemms.matmul(x, y), torch.matmul(x, y)
        counted = tuned_gemms.counts() == tuned_gemms.Counts(tuned=0, fallback={reason: 1})
        found[name] = torch.equal(made, expected) and counted
    return found


def host_us(call: Callable[[], Any]) -> float:
    """Host time of one call, in microseconds: many calls before anybody waits for the GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def host_cost(kernel: Any) -> dict[str, Any]:
    """Medians over interleaved rounds: the bare module call, ours, torch's, and both for a shape without a kernel."""
    a, w = operands(kernel, seed=2)
    d = torch.empty(kernel.m, kernel.n, dtype=a.dtype, device="cuda")
    bare, b = tvm_ffi.load_module(str(_library.FOLDER / kernel.file))["gemm"], w.t()
    x = a.repeat(2, 1)
    calls: dict[str, Callable[[], Any]] = {
        "bare_module": lambda: bare(a, w, d),
        "tuned_matmul": lambda: tuned_gemms.matmul(a, b),
        "torch_matmul": lambda: torch.matmul(a, b),
        "fallback_matmul": lambda: tuned_gemms.matmul(x, b),
        "torch_matmul_of_the_fallback": lambda: torch.matmul(x, b),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            host_us(call)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(host_us(call))
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {
        "shape": f"{kernel.m}x{kernel.n}x{kernel.k}",
        "median_us": medians,
        "added_us": round(medians["tuned_matmul"] - medians["bare_module"], 3),
        "over_torch_us": round(medians["tuned_matmul"] - medians["torch_matmul"], 3),
        "fallback_added_us": round(medians["fallback_matmul"] - medians["torch_matmul_of_the_fallback"], 3),
    }


def main(out: str) -> int:
    """0 when everything is right and a call costs what it may."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = _library.kernels_of(device)
    print(f"{len(kernels)} of {len(tuned_gemms.kernels())} kernels are for {torch.cuda.get_device_name()}", flush=True)
    rows = []
    for kernel in kernels:
        rows.append(check_kernel(kernel))
        print(json.dumps(rows[-1]), flush=True)
    small = min(kernels, key=lambda one: one.m * one.n * one.k)
    report = {
        "importable_but_forbidden": [name for name in FORBIDDEN if importlib.util.find_spec(name) is not None],
        "torch": torch.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(),
        "rows": rows,
        "fallback": check_fallback(small),
        "host": host_cost(small),
    }
    report["kept"] = bool(
        rows
        and not report["importable_but_forbidden"]
        and all(row["right"] for row in rows)
        and all(report["fallback"].values())
        and report["host"]["added_us"] < 5.0
        and report["host"]["over_torch_us"] <= 0.0
    )
    Path(out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("fallback", "host", "kept")}, indent=1), flush=True)
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
