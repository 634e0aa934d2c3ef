"""The ray engine without Ray: real dispatcher, real node workers, nodes that fail in every way they can."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kernels.artifacts import ArtifactStore
from search_space.request import Mode
from tests.tuner.ray_in_process import InProcess
from tests.tuner.support import PROFILE, STARTING, fake, request, told, tune
from tuner.engine.base import CompileJob, EngineError, EvaluateJob, NoDevice, WorkerLost
from tuner.engine.ray import engine as ray_engine
from tuner.engine.ray.dispatch import DispatchOptions
from tuner.engine.ray.engine import RayCluster
from tuner.engine.ray.nodes import Node
from tuner.engine.ray.wire import Submit
from tuner.recorder import MemoryRecorder
from tuner.records import Outcome, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tuner.engine.base import Engine
    from tuner.progress import StudyResult

WAIT_S = 20.0
# The tests' machine may be busy with other things: no healthy node may look slow.
QUICK = DispatchOptions(tick_s=0.02, health_every_s=0.1, health_timeout_s=30.0, no_node_s=1.0)


@contextmanager
def cluster(nodes: InProcess, folder: Path, options: DispatchOptions = QUICK) -> Iterator[RayCluster]:
    """A tuner's connection to these nodes."""
    opened = RayCluster(nodes, ArtifactStore(folder / "tuner"), options)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def nodes(tmp_path: Path) -> InProcess:
    """No node yet; jobs finish at once."""
    return InProcess(tmp_path)


def engine_of(opened: RayCluster) -> Engine:
    """For any H200."""
    return opened.engine("sm_90a", None, PROFILE.name)


def wait_for(question: Callable[[], object]) -> None:
    """Until it holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def compile_job(index: int = 0) -> CompileJob:
    """A kernel to build."""
    return CompileJob(problem=request().problem, config=STARTING[index], sm_count=PROFILE.sm_count)


def evaluate_job(engine: Engine, index: int = 0) -> EvaluateJob:
    """A module that was built on some node."""
    kernel = engine.compile(compile_job(index)).result(WAIT_S).kernel
    assert kernel is not None
    asked = request()
    return EvaluateJob(
        problem=asked.problem,
        config=STARTING[index],
        module_path=engine.module_path(kernel.sha256),
        module_sha256=kernel.sha256,
        source_hash=kernel.source_hash,
        protocol=asked.protocol,
        phase="trial",
    )


def trials(result: StudyResult) -> list[tuple[int, str, Outcome, Any]]:
    """What must be as with the local engine, times included."""
    return [
        (trial.number, trial.config.key, trial.outcome, trial.measurement and trial.measurement.samples_us)
        for trial in result.trials
    ]


def states(opened: RayCluster) -> dict[str, tuple[str, str]]:
    """State and reason by node."""
    found = {}
    for device in opened.devices():
        found[device.facts.uuid] = (device.state, device.reason)
    return found


# ---------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_study_on_three_nodes_has_the_trials_and_the_winner_of_the_local_engine(
    nodes: InProcess, tmp_path: Path, sampler: str
) -> None:
    """Number by number, sample by sample, for the same seed."""
    for name in ("a", "b", "c"):
        nodes.add(name)
    with cluster(nodes, tmp_path) as opened:
        found = tune(request(sampler=sampler), engine_of(opened))
    alone = tune(request(sampler=sampler), fake())
    assert trials(found) == trials(alone)
    assert found.winner is not None
    assert alone.winner is not None
    assert found.winner.config == alone.winner.config
    assert found.state is State.DONE
    assert [check.name for check in found.checks] == [check.name for check in alone.checks]
    cards = {trial.measurement.environment.gpu_uuid for trial in found.trials if trial.measurement}
    assert len(cards) == 3
    assert found.reason.startswith("measured on 3 cards, between which the vendor's kernel differs by ")
    assert {trial.measurement.environment.gpu_name for trial in found.trials if trial.measurement} == {"Fake H200"}


def test_modules_are_stored_once_on_each_machine_and_travel_only_where_they_are_missing(
    nodes: InProcess, tmp_path: Path
) -> None:
    """By content hash: a node that built a module, or has had it before, is sent none."""
    nodes.add("compiles", gpus=0, compiles=4)
    nodes.add("measures", compiles=0)
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        job = evaluate_job(engine)
        for _ in range(3):
            assert engine.evaluate(job).result(WAIT_S).outcome is Outcome.MEASURED
    calls = [message.call for message in nodes.seen if message.method == "run" and message.call]
    assert [(call.method, len(call.modules)) for call in calls] == [
        ("compile", 0),
        ("evaluate", 1),
        ("evaluate", 0),
        ("evaluate", 0),
    ]
    for folder in ("tuner", "modules-compiles", "modules-measures"):
        assert len(list((tmp_path / folder).glob("??/*.so"))) == 1


def test_compiles_run_on_nodes_that_compile_and_measurements_on_those_with_the_gpu(
    nodes: InProcess, tmp_path: Path
) -> None:
    """As they announce it."""
    nodes.add("compiles", gpus=0, compiles=4)
    nodes.add("measures", compiles=0)
    with cluster(nodes, tmp_path) as opened:
        tune(request(8), engine_of(opened))
    where = {(message.call.method, message.node.node_id) for message in nodes.seen if message.call}
    assert where == {
        ("compile", "compiles"),
        ("evaluate", "measures"),
        ("final", "measures"),
        ("certify", "measures"),
    }


def test_module_that_a_node_has_removed_is_sent_again(nodes: InProcess, tmp_path: Path) -> None:
    """The tuner believed that it was there."""
    nodes.add("a")
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        job = evaluate_job(engine)
        assert engine.evaluate(job).result(WAIT_S).outcome is Outcome.MEASURED
        for path in (tmp_path / "modules-a").glob("??/*.so"):
            path.unlink()
        assert engine.evaluate(job).result(WAIT_S).outcome is Outcome.MEASURED


def test_mode_model_needs_no_gpu_in_the_cluster(nodes: InProcess, tmp_path: Path) -> None:
    """A node that only compiles is enough."""
    nodes.add("compiles", gpus=0)
    with cluster(nodes, tmp_path) as opened:
        result = tune(request(6, mode=Mode.MODEL), opened.compiling(PROFILE))
    assert result.state is State.DONE
    assert {trial.outcome for trial in result.trials} <= {Outcome.MODELED, Outcome.REJECTED}


def test_device_that_no_node_has_is_refused_and_the_text_names_those_there_are(
    nodes: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some patience: nodes may be joining."""
    monkeypatch.setattr(ray_engine, "JOINING_S", 0.3)
    nodes.add("a")
    with cluster(nodes, tmp_path) as opened:
        assert engine_of(opened).device.name == "Fake H200"
        with pytest.raises(NoDevice, match=r"no sm_100a GPU in the Ray cluster \(GPUs there: Fake H200"):
            opened.engine("sm_100a", None, "NVIDIA B200")
        with pytest.raises(NoDevice, match="no NVIDIA H100 PCIe GPU"):
            opened.engine("sm_90a", "NVIDIA H100 PCIe", "NVIDIA H100 PCIe")


# ---------------------------------------------------------------------- one at a time, and not too far ahead


def test_jobs_sent_ahead_are_bounded_and_the_rest_waits_in_the_tuner(tmp_path: Path) -> None:
    """Back-pressure: a node gets what its slots take and a few more, however much is asked for."""
    nodes = InProcess(tmp_path, scale=0.1)
    nodes.add("a", gpus=2, compiles=4)
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        futures = [engine.compile(compile_job(index % 8)) for index in range(40)]
        sent = sum(message.method == "run" for message in nodes.seen)
        assert sent == 5
        assert opened.dispatcher.waiting == 35
        engine.drop(futures)
        wait_for(lambda: opened.dispatcher.waiting == 0)


def test_one_card_measures_one_candidate_at_a_time(tmp_path: Path) -> None:
    """Six evaluations on two cards take three rounds, however many were sent."""
    nodes = InProcess(tmp_path, scale=0.25)
    nodes.add("a", gpus=2)
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        job = evaluate_job(engine)
        began_s = time.monotonic()
        for future in [engine.evaluate(job) for _ in range(6)]:
            future.result(WAIT_S)
        assert time.monotonic() - began_s >= 3 * 0.8 * 0.25


# ---------------------------------------------------------------------- failures


def test_job_of_a_node_that_is_gone_is_lost_and_the_next_try_goes_elsewhere(tmp_path: Path) -> None:
    """The loop asks again under the same number; never back to where it was lost while there is another node."""
    nodes = InProcess(tmp_path, scale=0.5)
    nodes.add("a")
    nodes.add("b")
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        job = evaluate_job(engine)
        future = engine.evaluate(job)
        first = last_of(nodes, "evaluate")
        nodes.kill(first, noticed=False)
        with pytest.raises(WorkerLost, match=r"the node was killed|no such node"):
            future.result(WAIT_S)
        again = engine.evaluate(job)
        assert last_of(nodes, "evaluate") != first
        assert again.result(WAIT_S).outcome is Outcome.MEASURED


def last_of(nodes: InProcess, method: str) -> str:
    """Node that got the newest job of a kind."""
    return [message.node.node_id for message in nodes.seen if message.call and message.call.method == method][-1]


def test_study_during_which_nodes_are_killed_counts_no_trial_twice_and_loses_none(tmp_path: Path) -> None:
    """The same trials as on one machine that nothing happens to."""
    nodes = InProcess(tmp_path, scale=0.02)
    for name in ("a", "b", "c"):
        nodes.add(name)
    saved: list[int] = []

    class Recorder(MemoryRecorder):
        def save_trial(self, trial: Any, kernel: Any) -> None:
            """Kill a node now and then; another one joins."""
            saved.append(trial.number)
            if len(saved) in (5, 12, 20):
                victim = sorted(nodes._workers)[0]
                nodes.kill(victim)
                nodes.add(f"{victim}'")
            super().save_trial(trial, kernel)

    with cluster(nodes, tmp_path) as opened:
        found = tune(request(), engine_of(opened), recorder=Recorder())
        assert opened.dispatcher.retries > 0
    assert len(saved) == len(set(saved))
    assert told(found) == told(tune(request(), fake()))


def test_node_that_fails_three_health_checks_is_set_aside_shown_with_the_reason_and_used_again_later(
    nodes: InProcess, tmp_path: Path
) -> None:
    """What it runs is tried elsewhere; it gets nothing until it has passed several checks."""
    nodes.add("a")
    bad = nodes.add("b")
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        wait_for(lambda: len(states(opened)) == 2)

        async def sick() -> str:
            return "cannot write under modules: No space left on device"

        healthy, bad.health = bad.health, sick  # type: ignore[method-assign]
        wait_for(lambda: any(state == "SET_ASIDE" for state, _ in states(opened).values()))
        reasons = [reason for state, reason in states(opened).values() if state == "SET_ASIDE"]
        expected = "node b: 3 health checks in a row failed: cannot write under modules: No space left on device"
        assert reasons == [expected]
        before = len(nodes.seen)
        tune(request(4), engine)
        assert {message.node.node_id for message in nodes.seen[before:] if message.call} == {"a"}
        bad.health = healthy  # type: ignore[method-assign]
        wait_for(lambda: all(state == "READY" for state, _ in states(opened).values()))


def test_slow_node_loses_its_job_and_its_late_answer_is_dropped(nodes: InProcess, tmp_path: Path) -> None:
    """The trial is tried elsewhere; what comes in the end finds nobody who waits."""
    nodes.add("a")
    nodes.add("b")
    options = replace(QUICK, limits_s={"compile": 0.5, "evaluate": 0.5, "final": 0.5, "certify": 0.5})
    with cluster(nodes, tmp_path, options) as opened:
        engine = engine_of(opened)
        job = evaluate_job(engine)
        wait_for(lambda: len(states(opened)) == 2)
        nodes.stalled |= {"a", "b"}
        future = engine.evaluate(job)
        slow = last_of(nodes, "evaluate")
        with pytest.raises(WorkerLost, match=f"node {slow} did not answer within 0.5 s"):
            future.result(WAIT_S)
        nodes.stalled -= {"a", "b"} - {slow}
        again = engine.evaluate(job)
        reply = again.result(WAIT_S)
        nodes.release(slow)
        assert again.result() is reply
        assert isinstance(future.exception(), WorkerLost)


def test_frozen_node_is_set_aside_and_its_jobs_are_lost_without_waiting_for_their_limits(
    nodes: InProcess, tmp_path: Path
) -> None:
    """A network cut looks the same: no answer to three health checks."""
    nodes.add("a")
    with cluster(nodes, tmp_path, replace(QUICK, health_timeout_s=0.3)) as opened:
        engine = engine_of(opened)
        job = evaluate_job(engine)
        nodes.stalled.add("a")
        future = engine.evaluate(job)
        with pytest.raises(WorkerLost, match=r"set aside: 3 health checks in a row failed: no answer within 0\.3 s"):
            future.result(WAIT_S)


def test_node_with_a_full_disk_loses_only_its_turn(nodes: InProcess, tmp_path: Path) -> None:
    """A file where the folder should be refuses every module, as a full disk does."""
    (tmp_path / "full").write_text("")
    nodes.add("bad", folder=tmp_path / "full")
    nodes.add("good")
    with cluster(nodes, tmp_path) as opened:
        found = tune(request(8), engine_of(opened))
        wait_for(lambda: "SET_ASIDE" in {state for state, _ in states(opened).values()})
    assert told(found) == told(tune(request(8), fake()))


def test_disk_that_is_full_everywhere_ends_the_study_with_what_to_do(nodes: InProcess, tmp_path: Path) -> None:
    """No other node could do it: not the candidate's fault, and no reason to try for ever."""
    (tmp_path / "full").write_text("")
    nodes.add("bad", folder=tmp_path / "full")
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        with pytest.raises(EngineError, match=r"cannot store artifact.*no other node could do it"):
            engine.compile(compile_job()).result(WAIT_S)


def test_head_that_is_lost_costs_no_trial_and_counts_against_none(tmp_path: Path) -> None:
    """What was running waits, is sent again when the head is back, and nobody hears of it."""
    nodes = InProcess(tmp_path, scale=0.2)
    nodes.add("a")
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        futures = [engine.compile(compile_job(index)) for index in range(4)]
        nodes.cut()
        assert {state for state, _ in states(opened).values()} == {"OFFLINE"}
        assert "cannot be reached: the head is gone" in next(iter(states(opened).values()))[1]
        assert opened.dispatcher.waiting == 4
        nodes.reconnect()
        assert [future.result(WAIT_S).outcome for future in futures] == [None] * 4
        assert opened.dispatcher.retries == 0


def test_cluster_without_a_node_for_long_ends_its_jobs_with_the_reason(nodes: InProcess, tmp_path: Path) -> None:
    """Else a study would wait for ever."""
    nodes.add("a")
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        nodes.kill("a")
        with pytest.raises(EngineError, match="for 1 s there was no node that compiles: no node is in the cluster"):
            engine.compile(compile_job()).result(WAIT_S)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ({"template": "another"}, "template is another here"),
        ({"nvcc": "12.8.93"}, "nvcc is 12.8.93 here, 13.0 in the cluster"),
    ],
)
def test_node_that_differs_is_never_used_and_the_difference_is_named(
    nodes: InProcess, tmp_path: Path, version: dict[str, str], text: str
) -> None:
    """Even where `gemm-tuner node`, which refuses it, was bypassed."""
    nodes.add("a")
    nodes.add("odd", **version)
    with cluster(nodes, tmp_path) as opened:
        tune(request(6), engine_of(opened))
        assert text in opened.troubles()
    assert {message.node.node_id for message in nodes.seen if message.call} == {"a"}


def test_dropped_job_is_cancelled_on_its_node_and_its_slot_is_free(tmp_path: Path) -> None:
    """Also where it was already running."""
    nodes = InProcess(tmp_path, scale=1.0)
    nodes.add("a", compiles=1)
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        running = engine.compile(compile_job())
        queued = [engine.compile(compile_job(index)) for index in range(1, 4)]
        engine.drop([running, *queued])
        assert all(future.cancelled() for future in (running, *queued))
        assert opened.dispatcher.waiting == 0
        node = opened.dispatcher._registry.usable[0]
        assert node.running == {"compile": 0}


def test_node_set_aside_again_and_again_has_to_prove_itself_for_longer() -> None:
    """Else one that is half broken would take and lose jobs for ever."""
    node = Node(None)  # type: ignore[arg-type]
    proofs = []
    for _ in range(3):
        while not node.failed("sick"):
            pass
        count = 1
        while not node.passed():
            count += 1
        proofs.append(count)
    assert proofs == [6, 12, 24]


def test_submitted_messages_name_the_node_and_carry_no_path_of_the_tuner(nodes: InProcess, tmp_path: Path) -> None:
    """Jobs are localized on the node: its module path lies in the node's own folder."""
    worker = nodes.add("a")
    seen: list[Path] = []
    inner = worker._submit

    def spy(engine: Any, call: Any) -> Any:
        future = inner(engine, call)
        if call.method == "evaluate":
            seen.append(worker._cache.path(call.job.module_sha256))
        return future

    worker._submit = spy  # type: ignore[method-assign]
    with cluster(nodes, tmp_path) as opened:
        engine = engine_of(opened)
        engine.evaluate(evaluate_job(engine)).result(WAIT_S)
    assert seen
    assert all(path.is_relative_to(tmp_path / "modules-a") for path in seen)
    assert all(isinstance(message, Submit) for message in nodes.seen)
