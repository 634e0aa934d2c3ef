"""Child, referee, baselines and clock on a real GPU, with kernels made of torch calls."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol
from tests.gpu.jobs import evaluate_job, final_job
from tuner.engine.incumbent import Incumbent
from tuner.gpu.host import GpuChild, PhaseLimits, list_gpus
from tuner.records import Evidence, Outcome, Ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.engine.base import EvaluateReply
    from tuner.gpu.context import ProblemContext
    from tuner.gpu.evaluate import Bench
    from tuner.gpu.jobs import Phase

pytestmark = pytest.mark.gpu

SMALL = GemmProblem(m=64, n=2048, k=1024)
TINY = GemmProblem(m=1, n=1024, k=1024)
CUBE = GemmProblem(m=4096, n=4096, k=4096)
LIMITS = PhaseLimits(first_launch_s=3.0, verify_s=10.0)


def _reason_to_skip() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if list_gpus() else "no GPU of a supported kind"


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    if reason := _reason_to_skip():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def contexts() -> Iterator[Any]:
    """Contexts of this process."""
    from tuner.gpu.context import Contexts
    from tuner.gpu.device import open_device

    made = Contexts(open_device())
    yield made
    made.release()


@pytest.fixture(scope="module")
def bench(contexts: Any) -> Callable[..., Bench]:
    """A bench for a problem; problems take turns in memory."""
    from tuner.gpu.evaluate import Bench

    def silent(phase: Phase, subject: int | None = None) -> None:
        """No parent listens."""

    def of(problem: GemmProblem, protocol: MeasureProtocol | None = None) -> Bench:
        context: ProblemContext = contexts.get(problem, protocol or MeasureProtocol(), 0, silent)
        return Bench(context=context, device=contexts.device, report=silent)

    return of


@pytest.fixture(scope="module")
def child() -> Iterator[GpuChild]:
    """The real child, with planted kernels."""
    with GpuChild(0, limits=LIMITS, child_module="tests.gpu.planted_child") as started:
        yield started


def run(kernel: Any, bench: Bench, **options: Any) -> EvaluateReply:
    """Evaluate a callable in this process."""
    from tuner.gpu.evaluate import evaluate

    return evaluate(kernel, evaluate_job("planted", problem=bench.context.problem, **options), bench)


def test_library_product_is_measured_verified_and_costs_less_than_a_second(bench: Any) -> None:
    """The cost of a candidate at 4096^3: verifying and measuring under 1 s."""
    from tests.gpu import planted

    reply = run(planted.right, bench(CUBE))
    assert reply.outcome is Outcome.MEASURED, reply.reason
    assert reply.evidence == (Evidence.MEASURED, Evidence.NUMERIC)
    assert reply.gpu_s < 1.0
    assert reply.measurement is not None
    assert reply.measurement.ratio("torch").median == pytest.approx(1.0, abs=0.015)
    assert reply.measurement.ratio("cublaslt_best").median <= reply.measurement.ratio("torch").median * 1.01
    assert reply.measurement.environment.sm_clock_mhz > 0


def test_a_a_pair_is_within_the_noise(child: GpuChild) -> None:
    """E1, E12: two graphs of one kernel differ by no more than the noise that is published with a final."""
    reply = child.final(final_job("right#1", "right#2", problem=CUBE))
    assert reply.aa_ratio is not None
    assert reply.aa_ratio.median == pytest.approx(1.0, abs=0.01)
    assert set(reply.measurements) == {"hash of right#1", "hash of right#2"}
    assert not reply.failures


def test_e6_short_kernel_takes_less_in_a_graph_than_launched_from_the_host(bench: Any) -> None:
    """E6: M = 1, N = K = 1024: launches from the host measure the host."""
    import torch

    from tests.gpu import planted
    from tuner.gpu.clock import capture

    sets = bench(TINY).context.timing.sets
    graph_us = capture("tiny", planted.right, sets, burst_ms=2.0).time_us()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for number in range(100):
        planted.right(*sets[number % len(sets)])
    end.record()
    end.synchronize()
    assert graph_us < float(begin.elapsed_time(end)) * 1000.0 / 100


def test_e12_two_captures_of_a_tiny_kernel_agree_on_rotating_buffers(bench: Any) -> None:
    """E12: placement alone must not move the ratio by more than the half percent that a ratio is known to."""
    import random

    from tests.gpu import planted
    from tuner.gpu.clock import capture
    from tuner.gpu.rounds import measure

    made = bench(TINY)
    sets = made.context.timing.sets
    pair = [capture(name, planted.right, sets, burst_ms=4.0) for name in ("a", "aa")]
    rounds = measure(
        pair, MeasureProtocol(), card=made.device.card, order=random.Random(0), report=made.report,
        enough=lambda _: False,
    )  # fmt: skip
    assert Ratio.of_pairs(rounds.times_us("aa"), rounds.times_us("a")).median == pytest.approx(1.0, abs=0.005)


def test_sustained_load_reaches_the_power_limit_and_tells_the_energy_of_a_product(bench: Any) -> None:
    """E2: the clocks under load are in the record, each implementation with its own energy."""
    from tests.gpu import planted

    protocol = MeasureProtocol.named("sustained")
    reply = run(planted.right, bench(CUBE, protocol), protocol=protocol)
    assert reply.outcome is Outcome.MEASURED, reply.reason
    measurement = reply.measurement
    assert measurement is not None
    assert measurement.environment.power_w > 0.85 * measurement.environment.power_limit_w
    assert len(measurement.states) == len(measurement.samples_us)
    watts = {name: energy / measurement.median_us() * 1000 for name, energy in measurement.energy_mj.items()}
    assert set(watts) == {"ours", "torch", "cublaslt_best"}
    assert all(0.5 < power / measurement.environment.power_limit_w < 1.2 for power in watts.values()), watts


def test_baselines_are_the_whole_heuristic_list_and_are_right(bench: Any) -> None:
    """A ratio to torch.matmul alone flatters: the list must have been asked, and checked."""
    import torch

    from tuner.gpu.referee import is_plausible

    context = bench(SMALL).context
    screened = context.baselines.screened_us
    assert {"torch", "torch_cublaslt"} <= set(screened)
    assert sum(name.startswith("lt") for name in screened) >= 3, context.baselines.dropped
    assert "split_k=" in next(text for name, text in context.baselines.texts.items() if name.startswith("lt"))
    judge = context.referee
    for burst in context.baselines.bursts(finalists=True):
        judge.output.poison()
        burst.replay()
        torch.cuda.synchronize()
        assert is_plausible(judge.cases[0], judge.output.d, SMALL.dtype), burst.name


@pytest.mark.parametrize(
    "name",
    [
        "one_wrong_element",
        "missing_k_block",
        "no_op",
        "adds_to_output",
        "unwritten_tail",
        "writes_past_the_end",
        "writes_before_the_start",
        "rounds_sums_to_16_bits",
    ],
)
def test_wrong_kernel_is_refused_on_the_device(bench: Any, name: str) -> None:
    """B1, B3, B5: no wrong kernel is ever timed."""
    from tests.gpu import planted

    reply = run(planted.WRONG[name], bench(SMALL))
    assert reply.outcome is Outcome.WRONG_RESULT
    assert reply.measurement is None


def test_kernel_that_differs_between_launches_is_refused_on_the_device(bench: Any) -> None:
    """B2: bitwise repeat, because the template has no atomics."""
    from tests.gpu import planted

    assert run(planted.Flaky(), bench(SMALL)).outcome is Outcome.NONDETERMINISTIC


def test_slow_kernel_stops_early_and_keeps_its_samples(bench: Any) -> None:
    """Racing saves measuring time; what was measured stays."""
    from tests.gpu import planted

    fast = run(planted.right, bench(CUBE)).measurement
    assert fast is not None
    best = Incumbent.of(fast)
    reply = run(planted.slow, bench(CUBE), incumbent=best)
    assert reply.outcome is Outcome.STOPPED_EARLY
    assert reply.measurement is not None
    assert len(reply.measurement.samples_us) == 2


def test_hanging_kernel_is_killed_and_the_next_trial_runs(child: GpuChild) -> None:
    """A6: within its limit, and the card is usable at once."""
    reply = child.evaluate(evaluate_job("hang", problem=SMALL))
    assert reply.outcome is Outcome.TIMED_OUT
    assert "first_launch within 3 s" in reply.reason
    assert child.evaluate(evaluate_job("right", problem=SMALL)).outcome is Outcome.MEASURED


def test_kernel_that_loses_the_context_is_named_and_the_next_trial_runs(child: GpuChild) -> None:
    """A1, A2: the fault is the candidate's own, the next one gets a fresh context."""
    reply = child.evaluate(evaluate_job("illegal_address", problem=SMALL))
    assert reply.outcome is Outcome.CRASHED
    assert "first_launch" in reply.reason or "CUDA" in reply.reason
    assert child.evaluate(evaluate_job("right", problem=SMALL)).outcome is Outcome.MEASURED


def test_kernel_that_wants_too_much_memory_is_out_of_memory(child: GpuChild) -> None:
    """A23: its own outcome, and the next trial runs."""
    assert child.evaluate(evaluate_job("too_much_memory", problem=SMALL)).outcome is Outcome.OUT_OF_MEMORY
    assert child.evaluate(evaluate_job("right", problem=SMALL)).outcome is Outcome.MEASURED


def test_kernel_that_refuses_its_arguments_keeps_the_child(child: GpuChild) -> None:
    """A plain exception breaks nothing."""
    child.evaluate(evaluate_job("right", problem=SMALL))
    before = child.replacements
    reply = child.evaluate(evaluate_job("refuses", problem=SMALL))
    assert reply.outcome is Outcome.CRASHED
    assert "refused its arguments" in reply.reason
    assert child.replacements == before


def test_live_facts_agree_with_the_inventory(child: GpuChild) -> None:
    """NVML and torch see the same card."""
    found, live = list_gpus()[0], child.facts()
    assert (found.name, found.uuid) == (live.name, live.uuid)
    assert found.profile.sm_count == live.profile.sm_count


def test_selfcheck_finds_nothing_wrong() -> None:
    """The command that people run first on a new machine."""
    command = [sys.executable, "-m", "tuner.gpu.selfcheck", "64x2048x1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert json.loads(done.stdout)["problems"] == []
    assert done.returncode == 0
