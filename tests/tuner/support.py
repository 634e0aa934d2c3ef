"""What the tests of the tuner share: a problem, a device, a small space, a loop that runs in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.request import Budget, MeasureProtocol, TuneRequest
from search_space.starting import starting_configs
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.faults import TRIAL_LAUNCHES, Fault, FaultKind, FaultPlan
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.records import Environment, Measurement, Outcome
from tuner.search.searched import SearchedSpace
from tuner.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.engine.base import Engine
    from tuner.progress import StudyResult

PROFILE = profile_named("h200")
# Few askable configs (about 3,700), so that building the space takes milliseconds.
PROBLEM = GemmProblem(m=64, n=7168, k=4096)
STARTING = starting_configs(PROBLEM, PROFILE)
SPACE = SearchedSpace.of(PROBLEM, PROFILE)
ENVIRONMENT = Environment(gpu_name="Test GPU", arch="sm_90a", sm_count=132, driver="580.1", cuda="13.0", toolchain="t")
PROTOCOL = MeasureProtocol()


@dataclass(frozen=True, kw_only=True, slots=True)
class Everyone(FaultPlan):
    """Every config has this fault."""

    fault: Fault

    def of(self, config_key: str) -> Fault | None:
        """See FaultPlan."""
        return self.fault


# Right in each trial, wrong in each final.
LATE = Everyone(fault=Fault(kind=FaultKind.WRONG_RARELY, launch=TRIAL_LAUNCHES + 1))


def request(trials: int = 24, **changes: Any) -> TuneRequest:
    """A request that the fake engine serves; with TPE, which asks all starting configs first, in their order."""
    return TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=trials), **{"sampler": "tpe", **changes})


def fake(**options: Any) -> FakeEngine:
    """A fake H200 that finishes at once."""
    return FakeEngine(PROFILE, options=FakeOptions(**options))


def instant_service(folder: Path, database_url: str | None = None) -> Settings:
    """A tuner with everything in a folder of its own, whose fake engine finishes at once."""
    return Settings(
        database_url=database_url or f"sqlite:///{folder / 'tuner.db'}",
        artifacts_dir=folder / "artifacts",
        exports_dir=folder / "exports",
        engine="fake",
        compile_processes=2,
        fake_scale=0.0,
        poll_s=0.02,
    )


def tune(asked: TuneRequest, engine: Engine | None = None, **arguments: Any) -> StudyResult:
    """Tune on a fake engine into memory."""
    recorder = arguments.pop("recorder", None) or MemoryRecorder()
    return tune_study(asked, engine or fake(), recorder, **{"starting": STARTING[:8], "space": SPACE, **arguments})


def measurement(*samples_us: float, baseline_us: float = 100.0, **changes: Any) -> Measurement:
    """A measurement with one baseline that never changes."""
    made = Measurement(
        samples_us=samples_us,
        protocol=PROTOCOL,
        environment=ENVIRONMENT,
        baselines_us={"cublaslt_best": (baseline_us,) * len(samples_us)},
    )
    return replace(made, **changes)


def told(result: StudyResult) -> list[tuple[int, str, Outcome]]:
    """What must repeat: number, config and outcome of each trial."""
    return [(trial.number, trial.config.key, trial.outcome) for trial in result.trials]
