"""Long lists of independent runs, one at a time in a process of its own, stopped and resumed at will."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from kernels.artifacts import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

SCHEMA = 1
Row = dict[str, Any]


class Rows:
    """A file of rows that is complete after each one."""

    def __init__(self, path: Path, command: str) -> None:
        """Reads what an earlier run left."""
        self.path, self.command = path, command
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []

    def find(self, **wanted: Any) -> Row | None:
        """The row with these values, or None."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())), None)

    def put(self, row: Row, **place: Any) -> None:
        """Add a row, in place of the one with the values of `place`."""
        self.rows = [kept for kept in self.rows if any(kept.get(name) != value for name, value in place.items())]
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """The rows as they are now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "command": self.command, "rows": self.rows}
        write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())


def in_process[Answer](function: Callable[..., Answer], *arguments: Any, limit_s: float) -> Answer | str:
    """What a function answers in a fresh process, or one line that says why there is no answer.

    The process leads a group, so that compilers which it started end with it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return f"no answer within {limit_s:g} s"
        answer: Answer | str = ours.recv()
        return answer
    except EOFError:
        process.join(5)
        return f"the process ended with exit status {process.exitcode}"
    finally:
        if process.is_alive() and process.pid is not None:
            process.join(1)
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        ours.close()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    try:
        pipe.send(function(*arguments))
    except Exception as error:  # whatever it is becomes the row's answer
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def say(text: str, began: float) -> None:
    """A line of progress, seen at once."""
    print(f"[{time.monotonic() - began:6.0f} s] {text}", flush=True)


def versions_match(row: Mapping[str, Any] | None, source_hash: str, versions: Mapping[str, str]) -> bool:
    """Whether a row is about this source and these tools, so that it need not be run again."""
    return row is not None and row.get("source_hash") == source_hash and row.get("versions") == dict(versions)


def command_line(module: str) -> str:
    """How this run was asked for, to be repeated."""
    return " ".join(["python", "-m", module, *sys.argv[1:]])
