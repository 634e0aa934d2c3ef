"""Following a job: what is said of a study, and that it is said once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tuner.cli import watch as watch_module
from tuner.cli.watch import Status, left_s, watch

if TYPE_CHECKING:
    from tuner.client import Client


class FakeService:
    """Answers with one state of the job after the other, and counts questions about the study."""

    def __init__(self, steps: list[tuple[str, dict[str, int], float | None]]) -> None:
        self.steps = steps
        self.studies_asked = 0

    def job(self, job_id: str) -> dict[str, Any]:
        """The next state."""
        state, counts, best_us = self.steps.pop(0)
        problem = {"m": 64, "n": 128, "k": 256, "dtype": "bf16"}
        study = {"id": "s", "state": state, "problem": problem, "arch": "sm_90a", "device": None, "counts": counts}
        return {"id": job_id, "state": state, "studies": [study | {"best_us": best_us}]}

    def study(self, study_id: str) -> dict[str, Any]:
        """Details of the study."""
        self.studies_asked += 1
        best = {"ratio": {"cublaslt_best": {"median": 1.05, "low": 1.0, "high": 1.1}, "torch": 1.2}}
        return {"id": study_id, "request": {"budget": {"trials": 3, "wall_s": 600.0}}, "best": best}


STEPS: list[tuple[str, dict[str, int], float | None]] = [
    ("QUEUED", {}, None),
    ("RUNNING", {"MEASURED": 1, "REJECTED": 2}, 20.0),
    ("RUNNING", {"MEASURED": 1, "REJECTED": 2}, 20.0),
    ("DONE", {"MEASURED": 3, "REJECTED": 2}, 18.0),
]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again at once."""
    monkeypatch.setattr(watch_module, "POLL_S", 0.0)


def following(steps: list[tuple[str, dict[str, int], float | None]], *, quiet: bool) -> tuple[FakeService, Any]:
    """Follow a made-up job to its end."""
    service = FakeService(list(steps))
    client: Client = service  # type: ignore[assignment]
    return service, watch(client, "j", quiet=quiet)


def test_plain_lines_say_trial_best_and_ratio_once_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal, one line per change on standard error; standard output stays free for the result."""
    service, job = following(STEPS, quiet=False)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 3
    assert "64x128x256 bf16 sm_90a: RUNNING, trial 1/3 (3 tried), best 20.00 us, 1.050 of vendor" in lines[1]
    assert lines[2].startswith("64x128x256 bf16 sm_90a: DONE, trial 3/3 (5 tried), best 18.00 us")
    assert job["state"] == "DONE"
    assert service.studies_asked == 3


def test_quiet_prints_nothing_and_asks_only_for_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json nobody looks."""
    service, job = following(STEPS, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert (job["state"], service.studies_asked) == ("DONE", 0)


def test_bars_show_the_same_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The last picture stays on the screen."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    following(STEPS, quiet=False)
    picture = capsys.readouterr().err
    assert "64x128x256 bf16 sm_90a [done]" in picture
    assert "3/3" in picture
    assert "best 18.00 us" in picture


def test_time_left_is_the_pace_or_the_limit_whichever_ends_first() -> None:
    """4 trials in 8 s leave 12 s for 6 more, unless the time limit comes first."""
    assert left_s(counted=4, budget=10, elapsed_s=8.0, wall_s=None) == 12.0
    assert left_s(counted=4, budget=10, elapsed_s=8.0, wall_s=15.0) == 7.0
    assert left_s(counted=0, budget=10, elapsed_s=8.0, wall_s=None) is None
    assert left_s(counted=0, budget=10, elapsed_s=8.0, wall_s=5.0) == 0.0


def test_line_leaves_out_what_is_not_known() -> None:
    """A queued study has no time, no ratio and no estimate."""
    status = Status(title="t", state="QUEUED", counted=0, budget=8, tried=0, best_us=None, ratio=None, left_s=None)
    assert status.line == "t: QUEUED, trial 0/8 (0 tried), best -"
