"""The kernels of this package: what the manifest says of them, and loading those of one device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

FOLDER = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
ALIGNMENT = 16  # bytes: of the start of an operand
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}

# a (M, K) @ b (K, N), or None where the kernel does not serve how they lie in memory
Product = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module in this process.

    product: of its kernel
    route: of all kernels that `add_route` of this module was told of; None where the module was built before it had one
    add_route: (m, n, k, whether bfloat16, index of the device, product)
    """

    product: Product
    route: Product | None = None
    add_route: Callable[[int, int, int, bool, int, Product], None] | None = None


class CorruptPackage(RuntimeError):
    """A file of this package is not what it was built with: install it again."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One tuned product, D[M, N] = A[M, K] @ B[K, N] with the columns of B contiguous.

    m, n, k: extents
    dtype: bf16 or fp16
    arch: code it holds
    device: name of the device that it was tuned on
    sm_count: SMs of that device
    evidence: what stands behind it
    file: of the module, below the package
    sha256: of the module
    """

    m: int
    n: int
    k: int
    dtype: str
    arch: str
    device: str
    sm_count: int
    evidence: tuple[str, ...]
    file: str
    sha256: str


@cache
def kernels() -> tuple[Kernel, ...]:
    """Every kernel of this package, for whatever device."""
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text(encoding="utf-8"))
        return tuple(_kernel(entry) for entry in manifest["modules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptPackage(f"{FOLDER / MANIFEST} cannot be read: {error!r}; install the package again") from error


def _kernel(entry: dict[str, Any]) -> Kernel:
    problem = entry["problem"]
    return Kernel(
        m=problem["m"],
        n=problem["n"],
        k=problem["k"],
        dtype=problem["dtype"],
        arch=entry["arch"],
        device=entry["device"],
        sm_count=entry["sm_count"],
        evidence=tuple(entry["evidence"]),
        file=entry["file"],
        sha256=entry["sha256"],
    )


def kernels_of(device: torch.device) -> tuple[Kernel, ...]:
    """Those that were tuned for exactly this kind of device: elsewhere they may run, and nobody knows how fast."""
    facts = torch.cuda.get_device_properties(device)
    here = (facts.name, facts.multi_processor_count, (facts.major, facts.minor))
    return tuple(one for one in kernels() if (one.device, one.sm_count, CAPABILITIES.get(one.arch)) == here)


def load(kernel: Kernel) -> Loaded:
    """The kernel, for operands that are on its device. Raises CorruptPackage."""
    path = FOLDER / kernel.file
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CorruptPackage(f"{path} cannot be read: {error.strerror}; install the package again") from error
    if digest != kernel.sha256:
        raise CorruptPackage(f"{path} was changed: its SHA-256 is not the manifest's; install the package again")
    module = tvm_ffi.load_module(str(path))
    if not module.implements_function("route"):
        return Loaded(
            module["product"] if module.implements_function("product") else _product_by(module["gemm"], kernel)
        )
    return Loaded(module["product"], route=module["route"], add_route=module["add_route"])


def _product_by(gemm: Any, kernel: Kernel) -> Product:
    """The same of a module that was built before modules had `product`. What the module does there is done here."""
    size = (kernel.m, kernel.n)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        weight = b.t()
        if not (
            b.dtype is a.dtype
            and b.device == a.device
            and a.is_contiguous()
            and weight.is_contiguous()
            and not (a.data_ptr() | b.data_ptr()) & (ALIGNMENT - 1)
        ):
            return None
        d = torch.empty(size, dtype=a.dtype, device=a.device)
        gemm(a, weight, d)
        return d

    return product
