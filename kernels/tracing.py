"""What both templates need while they are traced."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def k_loop_unroll(k_blocks: int) -> bool | None:
    """`unroll` of a loop over K: never for loops that nvcc would unroll whole, unsaid for longer ones.

    Up to some 30 blocks nvcc (13.0) does so. On sm_90a 64x32x128, 8 stages, 16 blocks then compiled for 9.2 s instead
    of 4.4 s and spilled 56 B; on sm_100a 128x48x64, 3 stages, 6 blocks spilled 16 B.
    """
    return False if k_blocks <= 32 else None


@contextmanager
def light_frames() -> Iterator[None]:
    """While open, `inspect` lists call frames without reading their source lines.

    TVM lists the frames of every inlined call of a kernel to find its parser object. Python then looks for the source
    of each frame, which for evaluated text means a walk over every loaded module: 5.0 s of 5.6 s CPU for one sm_100a
    kernel on a busy 2-core machine (0.27.0.post1), and more where torch is loaded. The lines themselves only serve
    error messages. The replacement is process-wide while open: trace in one thread at a time.
    """
    original = inspect.getouterframes
    inspect.getouterframes = _frames_without_source
    try:
        yield
    finally:
        inspect.getouterframes = original


def _frames_without_source(frame: Any, context: int = 1) -> list[inspect.FrameInfo]:
    del context
    frames: list[inspect.FrameInfo] = []
    current: FrameType | None = frame
    while current is not None:
        code = current.f_code
        frames.append(inspect.FrameInfo(current, code.co_filename, current.f_lineno, code.co_name, None, None))
        current = current.f_back
    return frames
