"""Finalists whose modules are gone are built again before the final."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kernels.artifacts import ArtifactStore
from tests.tuner.support import PROFILE, request, told, tune
from tuner.engine.base import EvaluateJob
from tuner.engine.fake import FakeEngine
from tuner.recorder import MemoryRecorder
from tuner.records import Outcome, State

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.compile import CompiledKernel
    from tuner.records import Trial


class NotingRecorder(MemoryRecorder):
    """Also keeps which trials were built again."""

    def __init__(self) -> None:
        super().__init__()
        self.rebuilt: list[int] = []

    def save_rebuilt(self, trial: Trial, kernel: CompiledKernel) -> None:
        """See Recorder."""
        self.rebuilt.append(trial.number)
        super().save_rebuilt(trial, kernel)


def test_study_that_goes_on_without_its_modules_ends_as_if_they_were_there(tmp_path: Path) -> None:
    """All trials are stored, no file is left: only the finalists are built again, and the winner's module exists."""
    artifacts = ArtifactStore(tmp_path / "artifacts")
    first = tune(request(16), FakeEngine(PROFILE, artifacts=artifacts))
    assert first.winner is not None
    shutil.rmtree(artifacts.root)
    recorder = NotingRecorder()
    again = tune(request(16), FakeEngine(PROFILE, artifacts=artifacts), recorder=recorder, resume_from=first.trials)
    assert again.state is State.DONE
    assert again.winner == first.winner
    assert sorted(recorder.rebuilt) == sorted(first.finals)
    assert artifacts.path(again.winner.artifact_sha256).is_file()


def test_finalist_of_an_older_template_is_left_out_and_named(tmp_path: Path) -> None:
    """Its config generates another source now, so what was measured cannot be handed out."""
    artifacts = ArtifactStore(tmp_path / "artifacts")
    first = tune(request(16), FakeEngine(PROFILE, artifacts=artifacts))
    assert first.winner is not None
    fastest = first.winner.number
    artifacts.delete(first.winner.artifact_sha256)
    older = [replace(trial, source_hash="0" * 64) if trial.number == fastest else trial for trial in first.trials]
    again = tune(request(16), FakeEngine(PROFILE, artifacts=artifacts), resume_from=older)
    assert again.winner is not None
    assert again.winner.number != fastest
    assert f"trial {fastest} is no finalist: its module is gone and the template now generates" in again.reason


def test_nothing_is_built_again_while_the_modules_are_there(tmp_path: Path) -> None:
    """The usual case costs nothing."""
    recorder = NotingRecorder()
    tune(request(12), FakeEngine(PROFILE, artifacts=ArtifactStore(tmp_path)), recorder=recorder)
    assert recorder.rebuilt == []


class Damaging(FakeEngine):
    """Cuts the module of a config short on disk, `times` times, just before it would be loaded in a phase."""

    def __init__(self, artifacts: ArtifactStore, phase: str, times: int = 1) -> None:
        super().__init__(PROFILE, artifacts=artifacts)
        self._phase, self.left = phase, times

    def _load(self, job: Any) -> None:
        phase = job.phase if isinstance(job, EvaluateJob) else "certify"
        if phase == self._phase and self.left:
            self.left -= 1
            job.module_path.write_bytes(job.module_path.read_bytes()[:-1])
        super()._load(job)


@pytest.mark.parametrize("phase", ["trial", "final", "certify"])
def test_module_that_was_damaged_on_disk_is_built_again_and_held_against_nobody(tmp_path: Path, phase: str) -> None:
    """The study ends as if nothing had happened."""
    expected = tune(request(8), FakeEngine(PROFILE, artifacts=ArtifactStore(tmp_path / "whole")))
    engine = Damaging(ArtifactStore(tmp_path / "damaged"), phase, times=2)
    recorder = NotingRecorder()
    result = tune(request(8), engine, recorder=recorder)
    assert engine.left == 0
    assert told(result) == told(expected)
    assert result.state is State.DONE
    assert result.winner == expected.winner
    assert result.evidence == expected.evidence
    assert recorder.bad == {}
    assert engine.has_module(result.winner.artifact_sha256)


def test_module_that_is_damaged_again_and_again_ends_the_study_and_blames_the_disk(tmp_path: Path) -> None:
    """Nothing is stored for its trial: resumed, the study tries it again."""
    engine = Damaging(ArtifactStore(tmp_path), "trial", times=99)
    result = tune(request(8), engine)
    assert result.state is State.FAILED
    assert "3 times: see to the disk, then resume the study" in result.reason
    assert all(trial.outcome is not Outcome.CRASHED for trial in result.trials)
