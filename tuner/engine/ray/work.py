"""A job on its way through the cluster."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tuner.engine.base import CompileJob, FinalJob

if TYPE_CHECKING:
    from kernels.devices import DeviceProfile
    from tuner.engine.ray.wire import Job, Method


class Ticket(Future[Any]):
    """The future of a job, and what is needed to send it.

    lane: its queue
    number: of the request that carries it now; 0 before the first
    """

    def __init__(self, method: Method, profile: DeviceProfile, job: Job, lane: str) -> None:
        super().__init__()
        self.method, self.profile, self.job, self.lane = method, profile, job, lane
        self.number = 0

    @property
    def is_urgent(self) -> bool:
        """Whether the result of a finished search waits for it."""
        return self.method in ("final", "certify") or getattr(self.job, "urgent", False)

    def succeed(self, value: Any) -> None:
        """First come, first kept: one that was dropped meanwhile stays dropped."""
        with suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: Exception) -> None:
        """As `succeed`."""
        with suppress(InvalidStateError):
            self.set_exception(error)


def modules_of(job: Job) -> tuple[str, ...]:
    """Hashes of the modules that a job loads."""
    match job:
        case CompileJob():
            return ()
        case FinalJob():
            return tuple(candidate.module_sha256 for candidate in job.candidates)
        case _:
            return (job.module_sha256,)


def work_key(ticket: Ticket) -> tuple[str, ...]:
    """Equal for a job that is tried again."""
    job = ticket.job
    keys = [candidate.config.key for candidate in job.candidates] if isinstance(job, FinalJob) else [job.config.key]
    return (ticket.lane, ticket.method, job.problem.key, *keys)
