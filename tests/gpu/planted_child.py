"""The real GPU child with planted kernels: the module's file name says which one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tuner.gpu.child import main

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.gpu.referee import Kernel


def load(path: Path, sha256: str) -> Kernel:
    """A planted kernel by name."""
    import torch

    from tests.gpu import planted

    def hang(a: Any, b: Any, d: Any) -> None:
        torch.cuda._sleep(10**15)  # days of spinning

    def illegal_address(a: Any, b: Any, d: Any) -> None:
        # A device-side assertion: like an illegal address, it takes the whole context with it.
        d.flatten()[torch.full((1,), 2**40, device=d.device)] = 1.0

    def too_much_memory(a: Any, b: Any, d: Any) -> None:
        torch.empty(2**43, dtype=torch.uint8, device=d.device)

    def refuses(a: Any, b: Any, d: Any) -> None:
        raise ValueError("A: expected 2 dimensions")

    own = {"hang": hang, "illegal_address": illegal_address, "too_much_memory": too_much_memory, "refuses": refuses}
    name = path.name.partition("#")[0]
    kernel: Kernel = own.get(name) or getattr(planted, name)
    return kernel


if __name__ == "__main__":
    main(sys.argv[1:], load)
