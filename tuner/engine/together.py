"""Works that may share a GPU with one another but not with a timing, run a few at a time.

Why: a winner's soak and its memcheck start processes of their own, and hold the GPU for 5 to 9 s of which the kernels
run for 2 to 4 (results/h200/certify.json). Winners of other studies can be checked in the same seconds; a candidate
must not be timed in them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 4  # at a time: each process holds a CUDA context, and inputs and outputs of its problem
LONGEST_WAIT_S = 20.0

type Work = Callable[[str], Any]  # given the UUID of the GPU


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Work
    future: Future[Any]
    since_s: float = field(default_factory=time.monotonic)

    def run(self, uuid: str) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work(uuid)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Together:
    """Collects works until it is no use to wait, MOST have come, or one has waited for LONGEST_WAIT_S."""

    def __init__(self, take_gpu: Callable[[Work], Future[Any]], is_no_use_to_wait: Callable[[int], bool]) -> None:
        """take_gpu: runs a work alone on a GPU, in its turn.

        is_no_use_to_wait: whether so many works wait for nothing: no timing needs the GPU, or no more works can come
        """
        self._take_gpu, self._is_no_use_to_wait = take_gpu, is_no_use_to_wait
        self._waiting: list[_Waiting] = []
        self._asked = 0  # batches that wait for a GPU
        self._lock = threading.Lock()

    def submit[Reply](self, work: Callable[[str], Reply]) -> Future[Reply]:
        """Run it beside others. The future can be cancelled until the work has begun."""
        future: Future[Reply] = Future()
        with self._lock:
            self._waiting.append(_Waiting(work, future))
        timer = threading.Timer(LONGEST_WAIT_S, self.look)
        timer.daemon = True
        future.add_done_callback(lambda _: timer.cancel())
        timer.start()
        self.look()
        return future

    def look(self) -> None:
        """Ask for a GPU if it is time to. Called when a work came, when a GPU became free, and by the clock."""
        with self._lock:
            self._waiting = [one for one in self._waiting if not one.future.cancelled()]
            waiting = self._waiting[self._asked * MOST :]
            if not waiting:
                return
            late = time.monotonic() - waiting[0].since_s >= LONGEST_WAIT_S
            if not (late or len(waiting) >= MOST or (self._is_no_use_to_wait(len(waiting)) and not self._asked)):
                return
            self._asked += 1
        try:
            self._take_gpu(self._run).add_done_callback(self._over)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Cancel what has not begun."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.future.cancel()

    def _run(self, uuid: str) -> None:
        with self._lock:
            self._asked -= 1
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        if batch:
            with ThreadPoolExecutor(len(batch), "together") as threads:
                list(threads.map(lambda one: one.run(uuid), batch))

    def _over(self, taken: Future[Any]) -> None:
        error = None if taken.cancelled() else taken.exception()
        if error is not None:  # before _run was reached: no GPU child could be started
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._asked = max(0, self._asked - 1)
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(error)
