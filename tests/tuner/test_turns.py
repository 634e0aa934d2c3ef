"""What ends a study goes before candidates of others, and nobody starves or leaves the GPU idle."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from tests.tuner.support import PROBLEM, PROFILE, PROTOCOL, STARTING, request, tune
from tuner.engine.compile_pool import CompilePool, CompilePoolOptions
from tuner.engine.fake import FakeEngine, FakeOptions, FakeTimes, fake_device
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.engine.turns import TurnPool, Turns
from tuner.records import State

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.engine.base import CertifyJob, CertifyReply, EvaluateJob, EvaluateReply, FinalJob, FinalReply
    from tuner.progress import StudyResult

WAIT_S = 60.0


def test_urgent_ones_come_first_and_let_one_pass_now_and_then() -> None:
    """Within a class first come, first served."""
    turns: Turns[str] = Turns(lambda: 2)
    for name in "abc":
        turns.put(name)
    for name in "VWXYZ":
        turns.put(name, urgent=True)
    assert "".join(turns.take() for _ in range(8)) == "VWaXYbZc"
    turns.put("d")
    assert turns.drain() == ["d"]


def test_closed_pool_cancels_what_waits() -> None:
    """Nobody waits for ever."""
    pool, go, begun = TurnPool(1, "t"), threading.Event(), threading.Event()
    running = pool.submit(lambda: (begun.set(), go.wait(WAIT_S)))
    waiting = [pool.submit(lambda: 1, urgent=urgent) for urgent in (False, True)]
    assert begun.wait(WAIT_S)
    threading.Timer(0.1, go.set).start()
    pool.close()
    assert running.done()
    assert all(future.cancelled() for future in waiting)


def order_of(pool: CompilePool, submitted: list[tuple[str, bool]]) -> list[str]:
    """Names in the order in which they were compiled, all queued behind one that takes a while."""
    done: list[str] = []
    first = pool.submit("nap", 0.3)
    while not first.running():
        time.sleep(0.001)
    futures = []
    for name, urgent in submitted:
        future = pool.submit("echo", name, urgent=urgent)
        future.add_done_callback(lambda ended: done.append(ended.result().value))
        futures.append(future)
    first.result(WAIT_S)
    while len(done) < len(futures):
        time.sleep(0.001)
    return done


def test_builds_of_a_winner_pass_candidates_and_alternate_with_them_while_a_gpu_is_short_of_work() -> None:
    """One compile process; the pool asks at each turn."""
    is_short = False
    options = CompilePoolOptions(function="tests.tuner.fake_compilers:run", processes=1)
    pool = CompilePool(options, lambda: is_short)
    submitted = [*((f"c{n}", False) for n in range(3)), *((f"B{n}", True) for n in range(3))]
    try:
        assert order_of(pool, submitted) == ["B0", "B1", "B2", "c0", "c1", "c2"]
        is_short = True
        assert order_of(pool, submitted) == ["B0", "c0", "B1", "c1", "B2", "c2"]
    finally:
        pool.close()


class Noting:
    """A GPU child that notes what it does, and begins when it is told to."""

    def __init__(self) -> None:
        self.go, self.done = threading.Event(), []
        self.engine = FakeEngine(PROFILE)

    def evaluate(self, job: EvaluateJob) -> EvaluateReply:
        """See Child."""
        self.go.wait(WAIT_S)
        self.done.append(f"trial {job.config.key}")
        return self.engine.evaluate(job).result()

    def final(self, job: FinalJob) -> FinalReply:
        """See Child."""
        self.done.append("final")
        return self.engine.final(job).result()

    def close(self) -> None:
        """See Child."""
        self.go.set()


def test_final_has_the_gpu_before_the_candidates_that_wait(tmp_path: Path) -> None:
    """One card; the trial that runs is not disturbed, the three behind it wait."""
    child, device = Noting(), fake_device(PROFILE)
    machine = LocalMachine(
        LocalOptions(compile=CompilePoolOptions(processes=1)),
        ArtifactStore(tmp_path),
        list_gpus=lambda: (device,),
        start_child=lambda index: child,  # type: ignore[arg-type,return-value]
    )
    try:
        engine = machine.engine(device.profile, live=True)
        jobs = [evaluate_job(engine, place) for place in range(4)]
        trials = [engine.evaluate(job) for job in jobs]
        final = engine.final(final_job(jobs[:2]))
        assert engine.is_short_of_work is False
        child.go.set()
        for future in (*trials, final):
            future.result(WAIT_S)
        assert [one == "final" for one in child.done].index(True) <= 1
        assert engine.is_short_of_work is True
    finally:
        machine.close()


def evaluate_job(engine: Any, place: int) -> EvaluateJob:
    from tuner.engine.base import EvaluateJob

    return EvaluateJob(
        problem=PROBLEM,
        config=STARTING[place],
        module_path=engine.module_path("0" * 64),
        module_sha256="0" * 64,
        source_hash=f"source {place}",
        protocol=PROTOCOL,
        phase="trial",
    )


def final_job(jobs: list[EvaluateJob]) -> FinalJob:
    from tuner.engine.base import FinalJob

    return FinalJob(problem=PROBLEM, candidates=tuple(jobs), protocol=PROTOCOL, seed=0)


class Timeline(FakeEngine):
    """Notes the beginning of each job on the GPU, by the study's seed."""

    def __init__(self) -> None:
        # As on a card: a compile takes longer than a trial, so candidates of several studies keep the GPU busy.
        times = FakeTimes(
            compile_s=0.02, evaluate_s=0.01, final_s=0.03, stress_build_s=0.015, scale=1.0, compile_workers=4
        )
        super().__init__(PROFILE, options=FakeOptions(times=times))
        self.begun: list[tuple[str, int]] = []

    def _evaluate(self, job: EvaluateJob) -> EvaluateReply:
        self.begun.append(("trial", job.seed))
        return super()._evaluate(job)

    def _final(self, job: FinalJob) -> FinalReply:
        self.begun.append(("final", job.seed))
        return super()._final(job)

    def _certify(self, job: CertifyJob) -> CertifyReply:
        self.begun.append(("certify", job.seed))
        return super()._certify(job)


def test_study_whose_search_is_over_has_its_result_while_seven_others_search() -> None:
    """Its final begins after the trial that runs then; others' trials go on while the builds of its winner compile."""
    engine = Timeline()
    results: dict[int, StudyResult] = {}

    def run(seed: int, trials: int) -> None:
        asked = replace(request(trials), seed=seed, in_flight=4)
        results[seed] = tune(asked, engine)

    threads = [threading.Thread(target=run, args=(seed, 8 if seed == 0 else 30)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    engine.close()
    assert {result.state for result in results.values()} == {State.DONE}
    begun = engine.begun
    last_trial = max(place for place, one in enumerate(begun) if one == ("trial", 0))
    final, certified = begun.index(("final", 0)), begun.index(("certify", 0))
    assert final - last_trial <= 16  # in a queue without classes about 28 wait: four of each of seven studies
    between = [one for one in begun[final:certified] if one[0] == "trial"]
    assert len(between) >= 5
    assert certified < len(begun) / 2
