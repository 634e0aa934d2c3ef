"""A compiler whose first worker is warm at once, and any other after a while."""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = "TEST_SLOW_STARTERS"
COLD_S = 20.0


def warm_up() -> None:
    """Whoever makes the file is the first."""
    try:
        Path(os.environ[FOLDER], "first").touch(exist_ok=False)
    except FileExistsError:
        time.sleep(COLD_S)


def run() -> int:
    """The worker that did it."""
    return os.getpid()
