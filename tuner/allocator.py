"""How the C library keeps what a long-lived process of many threads has freed."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # of glibc's <malloc.h>
ARENAS = 2


def use_few_arenas() -> bool:
    """Let all threads share two arenas of malloc; call it before the first thread starts. False where it is no glibc.

    glibc gives threads up to 8 arenas a core, and what is free in one serves no thread of another. Each study is a
    thread, so what a tuner held and did not use grew from 12 to 27 MiB in 150 studies, with every count of objects and
    `uordblks` level. Threads of Python take turns, so they hardly ever wait for an arena.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, ARENAS) == 1
