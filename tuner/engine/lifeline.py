"""A process that must not outlive its parent: it reads a pipe whose other end only the parent holds."""

from __future__ import annotations

import os
import signal
import threading


def die_with(lifeline: int) -> None:
    """Kill this process's whole group, and with it all that it has started, once the lifeline closes."""

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
