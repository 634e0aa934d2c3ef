"""The parent's side of a GPU child, with a child that needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kernels.config import Sm90GemmConfig
from tests.gpu.jobs import PROBLEM, evaluate_job, final_job
from tuner.engine.base import ModuleChanged, WorkerLost
from tuner.gpu.host import GpuChild, GpuUnavailable, PhaseLimits
from tuner.gpu.jobs import StressJob, StressModule
from tuner.gpu.spare import MAX_DEATHS
from tuner.records import Outcome

ROOMY = PhaseLimits(load_s=20.0, first_launch_s=20.0, verify_s=20.0, measure_s=20.0, start_s=30.0, health_s=30.0)
QUICK = PhaseLimits(load_s=0.5, first_launch_s=0.5, verify_s=0.5, measure_s=0.5, start_s=30.0, health_s=30.0)

type Start = Callable[..., GpuChild]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts children that are closed at the end; afterwards no process of theirs may be left."""
    started: list[GpuChild] = []

    def make(**options: object) -> GpuChild:
        settings: dict[str, object] = {
            "limits": ROOMY,
            "health_pause_s": 0.01,
            "child_module": "tests.gpu.fake_child",
            "uuid": "GPU-fake",
            "environ": {**os.environ, "FAKE_CHILD_STATE": str(tmp_path)},
        }
        child = GpuChild(0, **{**settings, **options})  # type: ignore[arg-type]
        started.append(child)
        return child

    yield make
    for child in started:
        child.close()
    assert [pid for pid in pids(tmp_path, "born") if psutil.pid_exists(pid)] == []


def pids(state: Path, name: str) -> list[int]:
    """Process ids that children noted: when they were "born", were "warm", had got the GPU ("starts")."""
    path = state / name
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def starts(state: Path) -> list[int]:
    """Process ids of the children that were handed the GPU so far."""
    return pids(state, "starts")


def test_facts_come_from_the_child_and_start_it_once(start: Start, tmp_path: Path) -> None:
    """The parent creates no CUDA context, so what is known of the device comes from its child."""
    child = start()
    assert starts(tmp_path) == []
    assert child.facts().uuid == "GPU-fake"
    assert child.facts().is_live
    assert len(starts(tmp_path)) == 1


def test_good_candidates_share_one_child(start: Start, tmp_path: Path) -> None:
    """The child is long-lived: what it has prepared for a problem is used again."""
    child = start()
    replies = [child.evaluate(evaluate_job("good")) for _ in range(3)]
    assert [reply.outcome for reply in replies] == [Outcome.MEASURED] * 3
    assert replies[0].measurement is not None
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize("phase", ["load", "first_launch", "verify", "measure"])
def test_a6_hang_is_killed_at_the_limit_of_its_phase_and_the_next_trial_runs(
    start: Start, tmp_path: Path, phase: str
) -> None:
    """A6, A7: a kernel that never returns costs its limit, is named, and leaves the GPU usable."""
    child = start(limits=QUICK)
    child.facts()
    began = time.monotonic()
    reply = child.evaluate(evaluate_job(f"hang@{phase}"))
    assert time.monotonic() - began < 4
    assert reply.outcome is Outcome.TIMED_OUT
    assert f"phase {phase} within 0.5 s" in reply.reason
    assert reply.gpu_s >= 0.4
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_hang_takes_grandchildren_with_it(start: Start, tmp_path: Path) -> None:
    """A10: the whole process group is killed."""
    child = start(limits=QUICK)
    assert child.evaluate(evaluate_job("forks")).outcome is Outcome.TIMED_OUT
    grandchild = int((tmp_path / "grandchild").read_text())
    assert _gone(grandchild)


def test_exit_is_reported_with_status_and_last_lines(start: Start) -> None:
    """A3: what the child printed last is the best clue there is."""
    child = start()
    reply = child.evaluate(evaluate_job("exit"))
    assert reply.outcome is Outcome.CRASHED
    assert "exit status 7" in reply.reason
    assert "line before the end" in reply.reason
    assert "assertion failed: phase == 1" in reply.reason
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED


def test_segmentation_fault_is_reported_by_its_signal(start: Start) -> None:
    """A signal has a name that people can search for."""
    reply = start().evaluate(evaluate_job("segv"))
    assert reply.outcome is Outcome.CRASHED
    assert "SIGSEGV" in reply.reason


def test_a4_reason_names_config_shape_and_gpu(start: Start) -> None:
    """A4: an error that names no config helps nobody."""
    child = start(limits=QUICK)
    for module in ("exit", "hang", "wrong", "sticky"):
        reason = child.evaluate(evaluate_job(module)).reason
        assert Sm90GemmConfig().key in reason
        assert str(PROBLEM) in reason
        assert "GPU-fake" in reason


def test_only_the_last_output_of_a_noisy_child_is_kept(start: Start) -> None:
    """Endless output fills neither the pipe nor the memory of the parent."""
    reply = start().evaluate(evaluate_job("noisy"))
    assert reply.outcome is Outcome.CRASHED
    assert "line 49999" in reply.reason
    assert "line 100 " not in reply.reason
    assert len(reply.reason) < 2000


def test_a1_a2_sticky_error_replaces_the_child_before_the_next_candidate(start: Start, tmp_path: Path) -> None:
    """A1, A2: after an illegal access every later call of that process fails, so there must be none."""
    child = start()
    reply = child.evaluate(evaluate_job("sticky"))
    assert reply.outcome is Outcome.CRASHED
    assert "illegal memory access" in reply.reason
    assert [child.evaluate(evaluate_job("good")).outcome for _ in range(2)] == [Outcome.MEASURED] * 2
    assert len(starts(tmp_path)) == 2


def test_a23_out_of_memory_has_its_own_outcome_and_a_fresh_child_follows(start: Start, tmp_path: Path) -> None:
    """A23: no room is no fault of the kernel, and what was allocated must go."""
    child = start()
    assert child.evaluate(evaluate_job("memory")).outcome is Outcome.OUT_OF_MEMORY
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_harmless_exception_keeps_the_child(start: Start, tmp_path: Path) -> None:
    """A kernel that refuses its arguments has broken nothing."""
    child = start()
    reply = child.evaluate(evaluate_job("refuses"))
    assert reply.outcome is Outcome.CRASHED
    assert "expected 2 dimensions" in reply.reason
    child.evaluate(evaluate_job("good"))
    assert len(starts(tmp_path)) == 1


def test_exception_that_can_neither_be_pickled_nor_printed_is_reported(start: Start) -> None:
    """Exceptions travel as text, so that no candidate can break the messages."""
    child = start()
    reply = child.evaluate(evaluate_job("unpicklable"))
    assert reply.outcome is Outcome.CRASHED
    assert "Unpicklable" in reply.reason
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED


def test_reply_that_cannot_be_pickled_is_reported(start: Start, tmp_path: Path) -> None:
    """The parent hears of it, instead of waiting for a reply that never comes."""
    child = start()
    reply = child.evaluate(evaluate_job("unsendable"))
    assert reply.outcome is Outcome.CRASHED
    assert "cannot be sent" in reply.reason
    assert len(starts(tmp_path)) == 1


def test_big_reply_arrives_whole(start: Start) -> None:
    """20 MB do not fit any pipe buffer."""
    reply = start().evaluate(evaluate_job("big"))
    assert len(reply.reason) > 20_000_000


def test_half_a_message_does_not_block_the_parent(start: Start) -> None:
    """A child may be killed or may stall in the middle of sending."""
    assert start(limits=QUICK).evaluate(evaluate_job("half")).outcome is Outcome.TIMED_OUT


def test_wrong_result_is_an_ordinary_reply(start: Start, tmp_path: Path) -> None:
    """A refused kernel says nothing about its process."""
    child = start()
    assert child.evaluate(evaluate_job("wrong")).outcome is Outcome.WRONG_RESULT
    child.evaluate(evaluate_job("good"))
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize("phase", ["load", "first_launch", "verify", "measure"])
def test_child_killed_from_outside_blames_no_candidate(start: Start, tmp_path: Path, phase: str) -> None:
    """A11: whoever sent SIGKILL (an operator, a machine short of memory), the trial is to be tried again."""
    child = start()
    with pytest.raises(WorkerLost, match=f"SIGKILL in phase {phase}"):
        child.evaluate(evaluate_job(f"shot@{phase}"))
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_candidate_that_looks_wrong_by_a_damaged_reference_is_judged_again(start: Start, tmp_path: Path) -> None:
    """B3: the kernel before it wrote over the reference; the healthy one must not pay for it."""
    child = start()
    assert child.evaluate(evaluate_job("damages")).outcome is Outcome.MEASURED
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_candidate_that_damages_the_reference_is_wrong_and_its_child_is_replaced(start: Start, tmp_path: Path) -> None:
    """In a child that has run nothing else there is nobody else to blame."""
    child = start()
    assert child.evaluate(evaluate_job("damages-and-shows")).outcome is Outcome.WRONG_RESULT
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_child_is_replaced_after_max_trials(start: Start, tmp_path: Path) -> None:
    """Whatever modules leave behind cannot pile up."""
    child = start(max_trials=2)
    for _ in range(5):
        assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 3


def test_failed_health_check_is_tried_again_in_a_fresh_child(start: Start, tmp_path: Path) -> None:
    """A card may need a moment after a fault."""
    (tmp_path / "sick").write_text("w")
    child = start()
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_gpu_that_stays_sick_is_unavailable_with_the_reason(start: Start, tmp_path: Path) -> None:
    """That is no fault of a candidate, so it is no outcome of one."""
    (tmp_path / "sick").write_text("wwh")
    child = start(limits=replace(ROOMY, health_s=1.0))
    with pytest.raises(GpuUnavailable, match=r"3 health checks failed.*health within 1 s"):
        child.evaluate(evaluate_job("good"))
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED


def test_child_lost_before_the_candidate_ran_is_tried_again(start: Start, tmp_path: Path) -> None:
    """While inputs and baselines are prepared no candidate is at work: it must not be blamed."""
    child = start()
    assert child.evaluate(evaluate_job("once-in-baseline")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_child_lost_twice_before_the_candidate_ran_makes_the_gpu_unavailable(start: Start) -> None:
    """Two children in a row: the fault lies elsewhere."""
    with pytest.raises(GpuUnavailable, match="while no candidate was at work"):
        start().evaluate(evaluate_job("always-in-baseline"))


def test_no_room_for_inputs_is_tried_again_in_a_fresh_child(start: Start, tmp_path: Path) -> None:
    """A23: what the child still held of another problem is gone in the next one."""
    child = start()
    assert child.evaluate(evaluate_job("once-no-room-in-baseline")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2


def test_problem_without_room_in_two_fresh_children_does_not_fit(start: Start, tmp_path: Path) -> None:
    """A23: only then does the reply say so."""
    child = start()
    reply = child.evaluate(evaluate_job("always-no-room-in-baseline"))
    assert reply.outcome is Outcome.OUT_OF_MEMORY
    assert "the problem does not fit the device" in reply.reason
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 3


def test_hang_in_a_burst_of_a_baseline_is_not_the_candidates(start: Start, tmp_path: Path) -> None:
    """A6: the trial is repeated once, in a fresh child; then it is the GPU that cannot be used."""
    child = start(limits=QUICK)
    assert child.evaluate(evaluate_job("once-hangs-in-burst")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 2
    with pytest.raises(GpuUnavailable, match=r"phase measure within 0\.5 s.*while no candidate was at work"):
        child.evaluate(evaluate_job("always-hangs-in-burst"))
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED


# ---------------------------------------------------------------------- spares


def _recovery_s(child: GpuChild) -> float:
    """Seconds from a sticky error to the next measurement."""
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert child.evaluate(evaluate_job("sticky")).outcome is Outcome.CRASHED
    began = time.monotonic()
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    return time.monotonic() - began


def test_spare_saves_the_import_when_a_child_is_replaced(start: Start, tmp_path: Path) -> None:
    """The import takes 1 s here; with a spare the next candidate does not wait for it."""
    environ = {**os.environ, "FAKE_CHILD_STATE": str(tmp_path), "FAKE_CHILD_IMPORT_S": "1.0"}
    with_spare = start(spares=1, environ=environ)
    with_spare.facts()
    _until(lambda: len(pids(tmp_path, "warm")) == 2)
    assert _recovery_s(with_spare) < 0.8
    with_spare.close()
    assert _recovery_s(start(environ=environ)) > 1.0


def test_spare_is_not_handed_the_gpu_before_it_is_needed(start: Start, tmp_path: Path) -> None:
    """It is warm and has opened nothing: the card has one process of ours."""
    child = start(spares=1)
    child.facts()
    _until(lambda: len(pids(tmp_path, "warm")) == 2)
    child.evaluate(evaluate_job("good"))
    assert len(starts(tmp_path)) == 1
    assert len(pids(tmp_path, "born")) == 2


def test_each_replacement_passes_its_own_health_check(start: Start, tmp_path: Path) -> None:
    """A1: a spare that fails the check is not used; the next one is tried."""
    child = start(spares=1)
    child.facts()
    (tmp_path / "sick").write_text("w")
    assert child.evaluate(evaluate_job("sticky")).outcome is Outcome.CRASHED
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 3


def test_dead_spare_is_noticed_and_replaced(start: Start, tmp_path: Path) -> None:
    """Somebody killed it while it waited."""
    child = start(spares=1)
    child.facts()
    _until(lambda: len(pids(tmp_path, "warm")) == 2)
    spare = next(pid for pid in pids(tmp_path, "warm") if pid not in starts(tmp_path))
    psutil.Process(spare).kill()
    assert _gone(spare)
    _until(lambda: child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED and not psutil.pid_exists(spare))
    _until(lambda: len(pids(tmp_path, "warm")) == 3)
    assert _recovery_s(child) < 2.0
    assert spare not in starts(tmp_path)


def test_spares_that_keep_dying_are_given_up(start: Start, tmp_path: Path) -> None:
    """A machine without the memory for a second import still tunes, and does not import for ever."""
    child = start(spares=1)
    child.facts()
    _until(lambda: len(pids(tmp_path, "warm")) == 2)
    (tmp_path / "stillborn").touch()
    psutil.Process(next(pid for pid in pids(tmp_path, "warm") if pid not in starts(tmp_path))).kill()

    def evaluated_and_given_up() -> bool:
        assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
        return len(pids(tmp_path, "born")) == 1 + MAX_DEATHS

    _until(evaluated_and_given_up)
    time.sleep(0.3)
    assert evaluated_and_given_up()
    (tmp_path / "stillborn").unlink()
    assert _recovery_s(child) > 0


def test_close_ends_the_spare_while_it_imports(start: Start, tmp_path: Path) -> None:
    """No orphan, wherever it is."""
    environ = {**os.environ, "FAKE_CHILD_STATE": str(tmp_path), "FAKE_CHILD_IMPORT_S": "0.5"}
    child = start(spares=2, environ=environ)
    child.facts()
    _until(lambda: len(pids(tmp_path, "born")) == 3)
    child.close()
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path, "born"))


# ---------------------------------------------------------------------- finals, stress builds, closing


def test_final_leaves_out_the_finalist_that_fails_and_measures_the_others(start: Start) -> None:
    """One bad finalist must not cost the final."""
    reply = start(limits=QUICK).final(final_job("good", "hang@measure", "exit", "good@load"))
    assert set(reply.measurements) == {"hash of good", "hash of good@load"}
    assert reply.aa_ratio is not None
    failures = {name: failure.outcome for name, failure in reply.failures.items()}
    assert failures == {"hash of hang@measure": Outcome.TIMED_OUT, "hash of exit": Outcome.CRASHED}
    assert Sm90GemmConfig().key in reply.failures["hash of exit"].reason


def test_final_in_which_all_fail_has_no_measurement(start: Start) -> None:
    """The reply still says where it was tried, and why nothing came of it."""
    reply = start().final(final_job("exit", "segv"))
    assert dict(reply.measurements) == {}
    assert set(reply.failures) == {"hash of exit", "hash of segv"}
    assert reply.environment.gpu_uuid == "GPU-fake"


@pytest.mark.parametrize("fault", ["in-baseline", "no-room-in-baseline", "in-burst", "hangs-in-burst"])
def test_fault_of_no_finalist_repeats_the_final_and_then_blames_the_gpu(
    start: Start, tmp_path: Path, fault: str
) -> None:
    """A11: the first finalist is not to blame for what a baseline did, or for inputs without room."""
    child = start(limits=QUICK)
    reply = child.final(final_job("good", f"once-{fault}"))
    assert set(reply.measurements) == {"hash of good", f"hash of once-{fault}"}
    assert not reply.failures
    assert len(starts(tmp_path)) == 2
    with pytest.raises(GpuUnavailable, match="in two children in a row, while no candidate was at work"):
        child.final(final_job("good", f"always-{fault}"))


def test_finalists_judged_by_data_that_a_trial_damaged_are_judged_again(start: Start, tmp_path: Path) -> None:
    """B3: as trials are."""
    child = start()
    assert child.evaluate(evaluate_job("damages")).outcome is Outcome.MEASURED
    reply = child.final(final_job("good", "good@load"))
    assert set(reply.measurements) == {"hash of good", "hash of good@load"}
    assert not reply.failures
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize("modules", [("damages", "good", "good@load"), ("good", "damages", "good@load"), ("damages",)])
def test_finalist_that_damages_the_data_of_the_others_is_found_and_left_out(
    start: Start, modules: tuple[str, ...]
) -> None:
    """B3: it looks right itself, and those after it wrong; each is tried alone, and only it is refused."""
    reply = start().final(final_job(*modules))
    assert set(reply.failures) == {"hash of damages"}
    assert set(reply.measurements) == {f"hash of {name}" for name in modules} - {"hash of damages"}
    failure = reply.failures["hash of damages"]
    assert failure.outcome is Outcome.WRONG_RESULT
    assert "writes over the inputs or the reference" in failure.reason
    assert Sm90GemmConfig().key in failure.reason


def test_stress_names_the_build_that_failed(start: Start) -> None:
    """Which build fails tells where the race is."""
    builds = tuple(
        StressModule(label=label, problem=PROBLEM, module_path=Path(module), module_sha256="")
        for label, module in (("1 k-block", "good"), ("epilogue delayed", "hang"))
    )
    child = start(limits=QUICK)
    assert child.stress(StressJob(config=Sm90GemmConfig(), builds=builds[:1])).passed
    reply = child.stress(StressJob(config=Sm90GemmConfig(), builds=builds))
    assert reply.outcome is Outcome.TIMED_OUT
    assert reply.failed_build == "epilogue delayed"
    assert "epilogue delayed" in reply.reason


def test_close_during_a_job_ends_it_at_once(start: Start) -> None:
    """A24: cancelling takes effect in the middle of a run, and blames nobody."""
    child = start(limits=replace(ROOMY, verify_s=60.0))
    child.facts()
    ended: list[BaseException] = []

    def run() -> None:
        try:
            child.evaluate(evaluate_job("hang"))
        except WorkerLost as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    began = time.monotonic()
    child.close()
    thread.join(timeout=10)
    assert time.monotonic() - began < 5
    assert "closed" in str(ended[0])
    with pytest.raises(WorkerLost, match="closed"):
        child.evaluate(evaluate_job("good"))


def test_close_while_the_child_is_being_killed_at_its_limit_is_safe(start: Start) -> None:
    """A24: two threads end one child; each file is closed once, or its number might be another's by then."""
    for delay_s in (0.0, 0.02, 0.04, 0.06):
        child = start(limits=replace(ROOMY, verify_s=0.05))
        child.facts()
        ended: list[object] = []

        def run(child: GpuChild = child, ended: list[object] = ended) -> None:
            try:
                ended.append(child.evaluate(evaluate_job("hang")).outcome)
            except WorkerLost as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(delay_s)
        child.close()
        thread.join(timeout=10)
        assert ended


def test_close_twice_and_before_any_start_is_fine(start: Start, tmp_path: Path) -> None:
    """Closing is what one does when in doubt."""
    child = start()
    child.close()
    child.close()
    assert starts(tmp_path) == []


def test_a14_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A14: SIGKILL of the tuner must not leave a hanging kernel on the GPU."""
    script = (
        "from tests.gpu.jobs import evaluate_job\n"
        "from tuner.gpu.host import GpuChild\n"
        "child = GpuChild(0, child_module='tests.gpu.fake_child', uuid='GPU-fake', spares=1)\n"
        "child.facts()\n"
        "print('up', flush=True)\n"
        "child.evaluate(evaluate_job('forks'))\n"
    )
    environ = {**os.environ, "FAKE_CHILD_STATE": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        grandchild = tmp_path / "grandchild"
        _until(lambda: grandchild.exists() and grandchild.read_text() != "")
        _until(lambda: len(pids(tmp_path, "born")) == 2)
        parent.kill()
    assert all(_gone(pid) for pid in pids(tmp_path, "born"))
    assert _gone(int(grandchild.read_text()))


def test_index_of_no_gpu_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the visible GPUs."""
    monkeypatch.setattr("tuner.gpu.host.list_gpus", lambda: ())
    with pytest.raises(GpuUnavailable, match="no supported GPU at index 3; visible are: none"):
        GpuChild(3)


def test_parent_side_imports_no_torch() -> None:
    """F4: the parent can neither hold nor break a CUDA context that it cannot create."""
    script = "import sys, tuner.gpu.host, tuner.gpu.inventory; print('torch' in sys.modules, 'pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def _until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _gone(pid: int, *, within_s: float = 5.0) -> bool:
    """Whether a process that is not our child ends; a zombie has ended, it only waits to be reaped by another."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_file_that_is_not_what_was_stored_is_nobodys_outcome(start: Start, tmp_path: Path) -> None:
    """Neither in a trial nor in a final; the child has loaded nothing and goes on."""
    child = start()
    for run in (lambda: child.evaluate(evaluate_job("changed")), lambda: child.final(final_job("good", "changed"))):
        with pytest.raises(ModuleChanged, match=r"GPU-fake: .*cut short"):
            run()
    assert child.evaluate(evaluate_job("good")).outcome is Outcome.MEASURED
    assert len(starts(tmp_path)) == 1
