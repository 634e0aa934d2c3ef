"""Messages between a GPU child and its parent, and the loop that serves them in the child.

A child imports what takes long, says Warm, and touches the GPU only when it is told to Open it. Then it says what it
begins (PhaseStarted) and ends each job with one Done or Failed. Exceptions never travel: they are turned into text in
the child, so that one that cannot be pickled is no special case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.engine.base import DeviceFacts
    from tuner.gpu.jobs import Job, Phase, Reply

EXIT_UNHEALTHY = 4
EXIT_TAINTED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """From the parent: the GPU is yours, create a context and check its health."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warm:
    """The child has imported what takes long. It holds nothing of the GPU yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStarted:
    """The child begins a phase.

    phase: which
    subject: index of the candidate or build that is at work, 0 in a trial; None where none is, as in a baseline's burst
    """

    phase: Phase
    subject: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The child passed its health check.

    facts: of the device as the child sees it
    """

    facts: DeviceFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Unhealthy:
    """The child cannot use its GPU.

    reason: for people
    """

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The job ended with a reply.

    reply: of the type that belongs to the job
    doubtful: whether the data that it was judged by was found damaged afterwards, by whichever candidate
    """

    reply: Reply
    doubtful: bool = False

    @property
    def gpu_s(self) -> float:
        """Seconds of GPU time used."""
        return self.reply.gpu_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The job ended with an exception.

    outcome: CRASHED or OUT_OF_MEMORY
    reason: for people
    tainted: whether the CUDA context is lost, or its memory in doubt, so that the child must be replaced
    module_changed: whether a file was not the module that was stored, which says nothing about any candidate
    """

    outcome: Outcome
    reason: str
    tainted: bool
    module_changed: bool = False


type Message = Warm | PhaseStarted | Ready | Unhealthy | Done | Failed
type Order = Open | Job


class Report(Protocol):
    """How the code of the child tells its parent where it is."""

    def __call__(self, phase: Phase, subject: int | None = None) -> None:
        """A phase begins now."""


class Worker(Protocol):
    """What a child does between messages."""

    def warm(self) -> None:
        """Import what takes long, without touching the device. May raise anything."""

    def start(self, report: Report) -> DeviceFacts:
        """Open the device and check its health. Raises for a device that cannot be used."""

    def run(self, job: Job, report: Report) -> Done:
        """Run one job. May raise anything."""

    def failure(self, error: Exception) -> Failed:
        """Say what an exception of `run` means."""


def serve(connection: Connection, worker: Worker) -> int:
    """Serve jobs until the parent closes the connection. Returns the exit status of the process."""

    def report(phase: Phase, subject: int | None = None) -> None:
        connection.send(PhaseStarted(phase=phase, subject=subject))

    try:
        worker.warm()
        connection.send(Warm())
        if _next_order(connection) is None:
            return 0
        facts = worker.start(report)
    except Exception as error:  # the boundary of the process: whatever went wrong, the parent must hear of it
        connection.send(Unhealthy(reason=describe(error)))
        return EXIT_UNHEALTHY
    connection.send(Ready(facts=facts))
    while (job := _next_order(connection)) is not None:
        assert not isinstance(job, Open), "opened twice"
        answer = _answer(worker, job, report)
        _send(connection, answer)
        if isinstance(answer, Failed) and answer.tainted:
            return EXIT_TAINTED
    return 0


def _next_order(connection: Connection) -> Order | None:
    try:
        order: Order | None = connection.recv()
    except (EOFError, ConnectionError):
        return None
    return order


def _answer(worker: Worker, job: Job, report: Report) -> Done | Failed:
    try:
        return worker.run(job, report)
    except Exception as error:  # the boundary of the process: a candidate may raise anything
        return worker.failure(error)


def _send(connection: Connection, answer: Done | Failed) -> None:
    try:
        connection.send(answer)
    except ConnectionError:
        raise
    except Exception as error:  # pickling runs code of the objects in the reply, which may raise anything
        text = f"the reply cannot be sent: {describe(error)}"
        connection.send(Failed(outcome=Outcome.CRASHED, reason=text, tainted=False))


def describe(error: BaseException) -> str:
    """`Type: first line`, short enough for a reason text."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception class of a candidate may fail to print itself
        lines = []
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__


def follow_parent(stdin: int = 0) -> None:
    """End this process group when the parent goes away, even by SIGKILL, even while a kernel hangs.

    The parent holds the other end of standard input and never writes to it: end of file means that it is gone.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(stdin, 4096):
                pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def child_main(arguments: list[str], make_worker: Callable[[dict[str, str]], Worker]) -> int:
    """Entry of a child: `--channel FD` and any number of `--name value`, which `make_worker` receives."""
    options = {name.removeprefix("--"): value for name, value in zip(arguments[::2], arguments[1::2], strict=True)}
    descriptor = int(options.pop("channel"))
    os.set_inheritable(descriptor, False)
    follow_parent()
    connection: Connection[Any, Any] = Connection(descriptor)
    return serve(connection, make_worker(options))
