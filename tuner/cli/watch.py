"""Following a job: a progress bar on a terminal, plain lines elsewhere, nothing with --json."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tuner.client import FINAL_STATES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.answers import Job, JobStudy, Study
    from tuner.client import Client

POLL_S = 0.5
COUNTED = ("MEASURED", "MODELED", "STOPPED_EARLY")  # outcomes that the budget counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What there is to say about one study.

    title: problem and device
    state: of the study
    counted: trials that the budget counts
    budget: trials asked for
    tried: all trials
    best_us: best time so far
    ratio: vendor library's time over ours
    left_s: estimate of the seconds left
    """

    title: str
    state: str
    counted: int
    budget: int
    tried: int
    best_us: float | None
    ratio: float | None
    left_s: float | None

    @property
    def line(self) -> str:
        """All of it as one line."""
        best = "best -" if self.best_us is None else f"best {self.best_us:.2f} us"
        ratio = "" if self.ratio is None else f", {self.ratio:.3f} of vendor"
        left = "" if self.left_s is None else f", {self.left_s:.0f} s left"
        return (
            f"{self.title}: {self.state}, trial {self.counted}/{self.budget} ({self.tried} tried), {best}{ratio}{left}"
        )


class Display(Protocol):
    """Shows the studies of a job."""

    def update(self, statuses: list[Status]) -> None:
        """The latest of every study, in the order of the job."""

    def close(self) -> None:
        """The job ended."""


def watch(client: Client, job_id: str, *, quiet: bool, check: Callable[[], None] = lambda: None) -> Job:
    """Follow a job to its end. Raises ClientError, and whatever `check` raises; it is called at each look."""
    display = _display(quiet=quiet)
    watcher = _Watcher(client)
    try:
        while True:
            job = client.job(job_id)
            if not quiet:
                display.update([watcher.status(row) for row in job["studies"]])
            if job["state"] in FINAL_STATES:
                return job
            check()
            time.sleep(POLL_S)
    finally:
        display.close()


def left_s(*, counted: int, budget: int, elapsed_s: float, wall_s: float | None) -> float | None:
    """Seconds until the trials are used up at the pace so far, or the time limit, whichever comes first."""
    limits = []
    if counted:
        limits.append(elapsed_s / counted * max(0, budget - counted))
    if wall_s is not None:
        limits.append(max(0.0, wall_s - elapsed_s))
    return min(limits) if limits else None


class _Watcher:
    """Asks for a study's details only when its number of trials changed: a job may hold thousands."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen: dict[str, tuple[int, Study]] = {}
        self._first_s: dict[str, float] = {}

    def status(self, row: JobStudy) -> Status:
        tried = sum(row["counts"].values())
        counted = sum(row["counts"].get(outcome, 0) for outcome in COUNTED)
        if self._seen.get(row["id"], (-1,))[0] != tried:
            self._seen[row["id"]] = (tried, self._client.study(row["id"]))
        study = self._seen[row["id"]][1]
        limits = study["request"].get("budget", {})
        budget = int(limits.get("trials", 0))
        if row["state"] != "QUEUED":
            self._first_s.setdefault(row["id"], time.monotonic())
        elapsed_s = time.monotonic() - self._first_s.get(row["id"], time.monotonic())
        running = row["state"] == "RUNNING"
        problem = row["problem"]
        return Status(
            title=f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']} {row['device'] or row['arch']}",
            state=row["state"],
            counted=counted,
            budget=budget,
            tried=tried,
            best_us=row["best_us"],
            ratio=_ratio(study),
            left_s=left_s(counted=counted, budget=budget, elapsed_s=elapsed_s, wall_s=limits.get("wall_s"))
            if running
            else None,
        )


def _ratio(study: Study) -> float | None:
    ratios = (study["best"]["ratio"] if study["best"] else None) or {}
    for name in ("cublaslt_best", "torch"):
        if (value := ratios.get(name)) is not None:
            return float(value["median"] if isinstance(value, dict) else value)
    return None


def _display(*, quiet: bool) -> Display:
    if quiet:
        return _Silent()
    return _Bars() if sys.stderr.isatty() else _Lines()


class _Silent:
    def update(self, statuses: list[Status]) -> None:
        """Nothing to see."""

    def close(self) -> None:
        """Nothing to close."""


class _Lines:
    """A line when something changed. On standard error: standard output carries the result."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, int]] = {}

    def update(self, statuses: list[Status]) -> None:
        """Print the studies whose state or number of trials changed."""
        for index, status in enumerate(statuses):
            mark = (status.state, status.tried)
            if self._last.get(index) != mark:
                self._last[index] = mark
                sys.stderr.write(status.line + "\n")

    def close(self) -> None:
        """Nothing to close."""


class _Bars:
    """One bar a study."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TextColumn("{task.fields[ratio]}"),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True, highlight=False),
        )
        self._tasks: list[Any] = []
        self._progress.start()

    def update(self, statuses: list[Status]) -> None:
        """Redraw."""
        for index, status in enumerate(statuses):
            if index == len(self._tasks):
                self._tasks.append(self._progress.add_task(status.title, total=None, best="", ratio="", left=""))
            self._progress.update(
                self._tasks[index],
                description=f"{status.title} [{status.state.lower()}]".replace("[", r"\["),
                completed=status.counted,
                total=status.budget or None,
                best="best -" if status.best_us is None else f"best {status.best_us:.2f} us",
                ratio="" if status.ratio is None else f"{status.ratio:.3f}x vendor",
                left="" if status.left_s is None else f"{status.left_s:.0f} s left",
            )

    def close(self) -> None:
        """Leave the last picture on the screen."""
        self._progress.stop()
