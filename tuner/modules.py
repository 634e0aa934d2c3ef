"""Finalists whose modules are gone: a study may go on on another machine, or after a clean-up of the artifact store.

A module is a function of its config and the toolchain, so it is built again; the source hash says whether it is still
the kernel that was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.engine.base import CompileJob, CompileReply, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from search_space.request import TuneRequest
    from tuner.recorder import Recorder
    from tuner.records import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """Trials that can be timed.

    trials: those that have their module, in the order they were given
    notes: why others are left out, for people
    """

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]


def with_modules(
    trials: Sequence[Trial],
    request: TuneRequest,
    engine: Engine,
    recorder: Recorder,
    wait: Callable[[Future[Any]], bool],
) -> Modules | None:
    """Build what is missing. None when `wait`, which waits for a future, was told to stop.

    Raises EngineError and WorkerLost.
    """
    sm_count = engine.device.profile.sm_count
    building = {
        trial.number: engine.compile(
            CompileJob(problem=request.problem, config=trial.config, sm_count=sm_count, urgent=True)
        )
        for trial in trials
        if not engine.has_module(trial.artifact_sha256)
    }
    ready: list[Trial] = []
    notes: list[str] = []
    for trial in trials:
        if (future := building.get(trial.number)) is None:
            ready.append(trial)
            continue
        if not wait(future):
            engine.drop(list(building.values()))
            return None
        found = _rebuilt(trial, future.result(), recorder)
        if isinstance(found, str):
            notes.append(f"trial {trial.number} is no finalist: its module is gone and {found}")
        else:
            ready.append(found)
    return Modules(trials=tuple(ready), notes=tuple(notes))


def _rebuilt(trial: Trial, reply: CompileReply, recorder: Recorder) -> Trial | str:
    """The trial with its new module, or why it has none."""
    kernel = reply.kernel
    if reply.outcome is not None or kernel is None:
        return f"building it again failed: {reply.reason}"
    if kernel.source_hash != trial.source_hash:
        return "the template now generates another source for its config"
    again = replace(trial, artifact_sha256=kernel.sha256)
    recorder.save_rebuilt(again, kernel)
    return again
