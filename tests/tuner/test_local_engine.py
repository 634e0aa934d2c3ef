"""The local engine: compile replies, artifacts, GPU children; with a fake compiler and fake children."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernels.artifacts import ArtifactError, ArtifactStore
from tests.tuner.support import PROBLEM, PROFILE, PROTOCOL, SPACE, STARTING, request, told, tune
from tuner.engine.base import (
    CompileJob,
    DeviceFacts,
    DeviceLost,
    EngineError,
    EvaluateJob,
    EvaluateReply,
    FinalJob,
    FinalReply,
    WorkerLost,
)
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.fake import FakeEngine, fake_device
from tuner.engine.local import LocalEngine, LocalMachine, LocalOptions
from tuner.records import Outcome, State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

WAIT_S = 60.0
DEVICE = fake_device(PROFILE)


class FakeChild:
    """A GPU child that answers like the fake engine, or waits until it is closed."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.engine = FakeEngine(PROFILE)
        self.hangs = hangs
        self.started, self.closed = threading.Event(), threading.Event()
        self.at_work = 0

    def evaluate(self, job: EvaluateJob) -> EvaluateReply:
        """See Child."""
        assert job.module_path.is_file()
        self.at_work += 1
        assert self.at_work == 1, "one evaluation at a time"
        self.started.set()
        if self.hangs:
            self.closed.wait(WAIT_S)
        self.at_work -= 1
        return self.engine.evaluate(job).result()

    def final(self, job: FinalJob) -> FinalReply:
        """See Child."""
        return self.engine.final(job).result()

    def close(self) -> None:
        """See Child."""
        self.closed.set()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[LocalMachine]:
    """A machine with two fake GPUs of one kind and a compiler that fails on demand."""
    made = LocalMachine(
        LocalOptions(
            compile=CompilePoolOptions(function="tests.tuner.fake_kernels:compile_kernel", processes=1, limit_s=1.0)
        ),
        ArtifactStore(tmp_path / "artifacts"),
        list_gpus=lambda: (DEVICE, replace(DEVICE, uuid="GPU-2")),
        start_child=lambda index: FakeChild(),
    )
    yield made
    made.close()


def engine_of(machine: LocalMachine) -> LocalEngine:
    """The engine of the fake GPUs."""
    return machine.engine(DEVICE.profile, live=True)


def job(depth: int) -> CompileJob:
    """A compile that goes wrong in the way that the depth means."""
    return CompileJob(problem=PROBLEM, config=replace(STARTING[0], pipe_depth=depth), sm_count=132)


def test_compiled_module_lies_in_the_store_under_its_hash(machine: LocalMachine) -> None:
    """What the reply names can be read back and verified."""
    reply = engine_of(machine).compile(job(4)).result(WAIT_S)
    assert reply.outcome is None
    assert reply.kernel is not None
    assert machine.artifacts.read(reply.kernel.sha256) == reply.kernel.module


@pytest.mark.parametrize(
    ("depth", "outcome", "words"),
    [
        (9, Outcome.COMPILE_FAILED, "SIGABRT"),
        (10, Outcome.TIMED_OUT, "longer than 1 s"),
        (11, Outcome.COMPILE_FAILED, "line 7: error"),
        (12, Outcome.SPILLED, "spills 64 B"),
    ],
)
def test_failed_compile_gets_its_outcome_and_names_config_and_shape(
    machine: LocalMachine, depth: int, outcome: Outcome, words: str
) -> None:
    """A3, A9: a crash, a hang, an error and a spill, each followed by a compile that works."""
    engine = engine_of(machine)
    reply = engine.compile(job(depth)).result(WAIT_S)
    assert reply.outcome is outcome
    assert words in reply.reason
    assert f'"pipe_depth":{depth}' in reply.reason
    assert str(PROBLEM) in reply.reason
    assert engine.compile(job(3)).result(WAIT_S).outcome is None


def test_full_disk_is_the_engines_trouble(machine: LocalMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be stored blames nobody's config."""

    def full(data: bytes) -> str:
        raise ArtifactError("cannot store artifact: No space left on device")

    monkeypatch.setattr(machine.artifacts, "put", full)
    with pytest.raises(EngineError, match="No space left on device"):
        engine_of(machine).compile(job(4)).result(WAIT_S)


def test_study_runs_on_the_local_engine_from_compile_to_final(machine: LocalMachine) -> None:
    """Processes compile, children evaluate, the final chooses: the same study as on the fake engine."""
    asked = request(6)
    local = tune(asked, engine_of(machine), starting=STARTING[:3], space=SPACE)
    fake = tune(asked, FakeEngine(PROFILE), starting=STARTING[:3], space=SPACE)
    assert local.state is State.DONE
    assert [trial.config for trial in local.trials if trial.outcome is Outcome.MEASURED]
    assert local.aa_ratio is not None
    healthy = [t for t in local.trials if t.outcome.counts_against_budget]
    assert {t.config for t in healthy} & {t.config for t in fake.trials}


def test_dropped_evaluation_ends_its_child_and_the_next_one_gets_a_fresh_child(tmp_path: Path) -> None:
    """A24: a kernel that never returns does not hold the GPU after a cancel."""
    children = [FakeChild(hangs=True), FakeChild()]
    machine = LocalMachine(
        LocalOptions(compile=CompilePoolOptions(function="tests.tuner.fake_kernels:compile_kernel", processes=1)),
        ArtifactStore(tmp_path),
        list_gpus=lambda: (DEVICE,),
        start_child=lambda index: children.pop(0),
    )
    engine = engine_of(machine)
    kernel = engine.compile(job(4)).result(WAIT_S).kernel
    assert kernel is not None
    evaluate = EvaluateJob(
        problem=PROBLEM,
        config=job(4).config,
        module_path=engine.module_path(kernel.sha256),
        module_sha256=kernel.sha256,
        source_hash=kernel.source_hash,
        protocol=PROTOCOL,
        phase="trial",
    )
    hanging = children[0]
    future = engine.evaluate(evaluate)
    assert hanging.started.wait(WAIT_S)
    engine.drop([future])
    assert hanging.closed.is_set()
    assert engine.evaluate(evaluate).result(WAIT_S).outcome is Outcome.MEASURED
    machine.close()


def test_machine_without_a_gpu_compiles_for_the_data_sheet_only(tmp_path: Path) -> None:
    """Mode model needs no GPU; asking to evaluate says so."""
    machine = LocalMachine(
        LocalOptions(compile=CompilePoolOptions(function="tests.tuner.fake_kernels:compile_kernel", processes=1)),
        ArtifactStore(tmp_path),
        list_gpus=lambda: (),
    )
    engine = machine.engine(PROFILE, live=False)
    assert engine.device == DeviceFacts(name=PROFILE.name, uuid="", profile=PROFILE, environment=None)
    result = tune(request(4, mode="model"), engine, starting=STARTING[:4])
    assert result.state is State.DONE
    assert result.counts["MODELED"] == 4
    with pytest.raises(EngineError, match="only compiling is possible"):
        engine.final(FinalJob(problem=PROBLEM, candidates=(), protocol=PROTOCOL, seed=0))
    machine.close()


# ---------------------------------------------------------------------- GPUs that cannot be used


class SickChild(FakeChild):
    """Its GPU fails every health check while `sick` is set."""

    sick: threading.Event

    def evaluate(self, job: EvaluateJob) -> EvaluateReply:
        """See Child."""
        if self.sick.is_set():
            raise DeviceLost("GPU-1: 3 health checks failed; the last: a known product is wrong")
        return super().evaluate(job)


def sick_machine(folder: Path, sick: list[threading.Event]) -> LocalMachine:
    """A machine whose GPUs are sick while their events are set."""

    def start(index: int) -> SickChild:
        child = SickChild()
        child.sick = sick[index]
        return child

    compiler = CompilePoolOptions(function="tests.tuner.fake_kernels:compile_kernel", processes=2, limit_s=2.0)
    return LocalMachine(
        LocalOptions(compile=compiler),
        ArtifactStore(folder),
        list_gpus=lambda: tuple(replace(DEVICE, uuid=f"GPU-{index}") for index in range(len(sick))),
        start_child=start,
    )


def test_sick_gpu_ends_the_study_and_blames_no_candidate(tmp_path: Path) -> None:
    """A1: nothing is recorded of the candidates that never ran, and the study goes on once the GPU is well."""
    sick = [threading.Event()]
    machine = sick_machine(tmp_path, sick)
    engine = engine_of(machine)
    whole = tune(request(6), engine, starting=STARTING[:6])
    sick[0].set()
    broken = tune(request(6), engine, starting=STARTING[:6])
    assert broken.state is State.FAILED
    assert "3 health checks failed" in broken.reason
    assert "nvidia-smi" in broken.reason
    assert all(trial.gpu_s == 0 and trial.outcome is not Outcome.CRASHED for trial in broken.trials)
    assert not any(trial.outcome.counts_against_budget for trial in broken.trials)
    sick[0].clear()
    assert told(tune(request(6), engine, starting=STARTING[:6], resume_from=broken.trials)) == told(whole)
    machine.close()


def test_sick_gpu_leaves_its_trials_to_the_others_of_its_kind(tmp_path: Path) -> None:
    """A11: the trial is tried again elsewhere, under its number."""
    sick = [threading.Event(), threading.Event()]
    sick[1].set()
    machine = sick_machine(tmp_path, sick)
    result = tune(request(6), engine_of(machine), starting=STARTING[:6])
    assert result.state is State.DONE
    assert Outcome.CRASHED.value not in result.counts
    machine.close()


def test_compiler_killed_from_outside_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A11: a machine short of memory says nothing about the config that was being compiled."""
    monkeypatch.setenv("FAKE_COMPILER_STATE", str(tmp_path))
    machine = LocalMachine(
        LocalOptions(compile=CompilePoolOptions(function="tests.tuner.fake_kernels:compile_shot_once", processes=1)),
        ArtifactStore(tmp_path / "artifacts"),
        list_gpus=lambda: (DEVICE,),
        start_child=lambda index: FakeChild(),
    )
    with pytest.raises(WorkerLost, match="SIGKILL"):
        engine_of(machine).compile(job(4)).result(WAIT_S)
    result = tune(request(2), engine_of(machine), starting=STARTING[:2])
    assert [trial.outcome for trial in result.trials[:1]] == [Outcome.MEASURED]
    machine.close()


def test_e4_jobs_of_two_studies_have_a_gpu_one_after_the_other(tmp_path: Path) -> None:
    """E4: eight parallel workers on one GPU would cache a bad winner: at no moment are two jobs on the card."""
    children: list[FakeChild] = []
    most = 0

    class Watched(FakeChild):
        """Notes how many jobs it has at once."""

        def evaluate(self, job: EvaluateJob) -> EvaluateReply:
            """See Child."""
            nonlocal most
            self.at_work += 1
            most = max(most, self.at_work)
            self.closed.wait(0.005)
            self.at_work -= 1
            return self.engine.evaluate(job).result()

    def start(index: int) -> FakeChild:
        children.append(Watched())
        return children[-1]

    options = LocalOptions(compile=CompilePoolOptions(processes=1))
    one_gpu = LocalMachine(options, ArtifactStore(tmp_path), list_gpus=lambda: (DEVICE,), start_child=start)
    engine = one_gpu.engine(DEVICE.profile, live=True)

    def job(number: int) -> EvaluateJob:
        return EvaluateJob(
            problem=PROBLEM, config=STARTING[number % len(STARTING)], module_path=tmp_path, module_sha256="",
            source_hash=f"{number}", protocol=PROTOCOL, phase="trial",
        )  # fmt: skip

    futures: list[Future[EvaluateReply]] = []
    studies = [
        threading.Thread(target=lambda base=base: futures.extend(engine.evaluate(job(base + n)) for n in range(8)))
        for base in (0, 100)
    ]
    for study in studies:
        study.start()
    for study in studies:
        study.join()
    assert all(future.result(WAIT_S).outcome is Outcome.MEASURED for future in futures)
    one_gpu.close()
    assert len(futures) == 16
    assert (len(children), most) == (1, 1)
