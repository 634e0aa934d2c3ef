"""Child process of the compile pool: runs one function on one job after another until its pipe closes.

Started as `python -m tuner.engine.compile_worker PIPE LIFELINE MODULE:FUNCTION` in a session of its own, so that
whatever it starts (nvcc, ptxas) belongs to its process group and can be killed with it.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from kernels.errors import ToolchainError
from tuner.engine.lifeline import die_with

if TYPE_CHECKING:
    from collections.abc import Callable

READY, VALUE, FAILED, BROKEN = "ready", "value", "failed", "broken"
_TAIL_CHARS = 2000


def main(arguments: list[str]) -> int:
    """Serve jobs. Returns when the pool closes its end of the pipe."""
    pipe = Connection(int(arguments[0]))
    die_with(int(arguments[1]))
    name, _, function_name = arguments[2].partition(":")
    module = importlib.import_module(name)
    function: Callable[..., Any] = getattr(module, function_name)
    if (warm_up := getattr(module, "warm_up", None)) is not None:
        warm_up()
    pipe.send((READY, None))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return 0
        try:
            _send(pipe, _run(function, job))
        except BrokenPipeError:
            return 0


def _run(function: Callable[..., Any], job: tuple[Any, ...]) -> tuple[str, Any]:
    """The function's value, or text about its failure: an exception may refuse to be pickled, text does not."""
    try:
        return VALUE, function(*job)
    except ToolchainError as error:
        return BROKEN, str(error)
    except Exception as error:  # the worker boundary: any fault of one compile becomes that compile's reply
        last_frame = traceback.format_exc(limit=-1)
        tail = str(getattr(error, "log_tail", "") or last_frame)[-_TAIL_CHARS:]
        return FAILED, (f"{type(error).__name__}: {_text(error)}", tail)


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # an error that cannot even be printed must not take the worker with it
        return "(no text)"


def _send(pipe: Connection, reply: tuple[str, Any]) -> None:
    try:
        pipe.send(reply)
    except BrokenPipeError:
        raise
    except Exception as error:  # the value does not pickle: that too is the job's failure, not the worker's
        pipe.send((FAILED, (f"the compile function returned something unpicklable: {_text(error)}", "")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
