"""What is timed and what is not, and what becomes of a candidate's rounds, on a torch that notes what it is asked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol, TuneRequest
from tests.gpu import fake_torch
from tests.gpu.jobs import evaluate_job, final_job
from tests.tuner.support import ENVIRONMENT
from tuner.engine.incumbent import Incumbent
from tuner.gpu.nvml import Reading
from tuner.records import Evidence, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.gpu.fake_torch import Card
    from tuner.engine.base import EvaluateReply, FinalReply

PROBLEM = GemmProblem(m=512, n=512, k=512)
FAST = MeasureProtocol(idle_gap_ms=0.0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """The card behind a torch that is none."""
    monkeypatch.setattr("tuner.gpu.rounds.REST", 0.0)
    yield fake_torch.install(monkeypatch)
    fake_torch.forget()


def kernel_of(card: Card, time_us: float) -> Callable[[Any, Any, Any], None]:
    """A kernel that takes this long on the card and names the operands it was given."""

    def kernel(a: Any, b: Any, d: Any) -> None:
        card.launch((a, b, d), time_us)

    return kernel


def operand_sets(count: int) -> list[tuple[str, str, str]]:
    """Names in place of tensors."""
    return [(f"a{number}", f"b{number}", f"d{number}") for number in range(count)]


# ---------------------------------------------------------------------- what a burst is


def test_e6_short_kernel_is_timed_in_a_graph_and_not_by_launches_from_the_host(card: Card) -> None:
    """E6: 1 us on the card, 5 us for a launch from the host: the graph says 1 us."""
    from tuner.gpu.clock import capture

    burst = capture("a", kernel_of(card, 1.0), operand_sets(90), burst_ms=0.5)
    assert burst.time_us() == pytest.approx(1.0)
    assert burst.launches == 500, "0.5 ms of them, though the first guess from the host said 100"


def test_e6_method_of_timing_is_part_of_the_study_key() -> None:
    """E6: times under different protocols are never taken for answers to the same question."""
    problem = {"m": 1, "n": 1024, "k": 1024}
    keys = {
        TuneRequest.from_dict({"problem": problem, "arch": "sm_90a", "protocol": protocol}).study_key
        for protocol in ({"kind": "burst"}, {"kind": "sustained"}, {"kind": "burst", "burst_ms": 8})
    }
    assert len(keys) == 3


def test_e7_nothing_but_launches_lies_between_the_two_events(card: Card) -> None:
    """E7: no flush, no copy, no poison in the timed part; what covers the graph's launch comes before it."""
    from tuner.gpu.clock import capture

    burst = capture("a", kernel_of(card, 10.0), operand_sets(4), burst_ms=0.08)
    card.log.clear()
    burst.time_us()
    assert card.log[:3] == ["sleep", "event", "replay"]
    assert card.log[-1] == "event"
    timed = card.log[3:-1]
    assert timed == operand_sets(4) * 2, "eight launches, over all operand sets in turn"


def test_e12_twin_and_baseline_walk_over_the_same_buffers_equally_often(card: Card) -> None:
    """E12: where a buffer lies moves a ratio by percents, so each implementation meets each buffer as often."""
    from tuner.gpu.clock import capture

    counts = []
    for name, time_us in (("a", 30.0), ("aa", 30.0), ("torch", 41.0)):
        burst = capture(name, kernel_of(card, time_us), operand_sets(5), burst_ms=1.0)
        card.log.clear()
        burst.replay()
        counts.append([card.log.count(operands) for operands in operand_sets(5)])
    assert counts[0] == counts[1]
    assert all(len(set(count)) == 1 for count in counts), counts


def test_e12_operands_lie_at_random_offsets_that_change_with_the_seed(card: Card) -> None:
    """E12: no kernel is lucky with one placement for ever; the same seed places alike, so a study repeats."""
    from tuner.gpu.context import _offsets

    shapes = [(512, 512)] * 3
    first, size = _offsets(shapes, 8, random.Random(1))
    assert (first, size) == _offsets(shapes, 8, random.Random(1))
    assert first != _offsets(shapes, 8, random.Random(2))[0]
    starts = [start for operands in first for start in operands]
    gaps = {later - start - 512 * 512 for start, later in pairwise(starts)}
    assert len(gaps) > 10, "not a fixed stride"
    assert min(gaps) >= 0, "and no overlap"


def test_sustained_burst_times_the_middle_of_an_unbroken_load(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untimed at first, then timed, then a tail that covers the way to the next implementation."""
    from tuner.gpu.clock import AHEAD, capture

    on_card_time(card, monkeypatch)
    burst = capture("a", kernel_of(card, 10.0), operand_sets(2), burst_ms=0.02)
    card.log.clear()
    time_us = burst.sustained_us(settle_ms=2.0, timed_ms=4.0, look=lambda: None)
    assert time_us == pytest.approx(10.0)
    assert "sleep" not in card.log
    assert card.log[0] == "replay"
    last = max(index for index, entry in enumerate(card.log) if entry == "event")
    assert card.log[last:].count("replay") == AHEAD


# ---------------------------------------------------------------------- candidates and finals


@dataclass(kw_only=True)
class QuietCard:
    """NVML of a card that nobody else uses, unless told."""

    foreign: list[int | None] = field(default_factory=list)
    throttled: list[int] = field(default_factory=list)

    def throttle_bits(self) -> int:
        return self.throttled.pop(0) if self.throttled else 0

    def foreign_process(self) -> int | None:
        return self.foreign.pop(0) if self.foreign else None

    def energy_mj(self) -> None:
        return None

    def read(self) -> Reading:
        return Reading(sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=512, temperature_c=46, throttle_bits=0)


class Judge:
    """A referee that finds everything right."""

    def verify(self, kernel: object, report: object, *, repeats: int, subject: int | None = None) -> Any:
        from tuner.gpu.referee import Verdict

        return Verdict(outcome=None, max_rel_error=0.001, launches=repeats, bits="verified")

    def verify_again(self, launch: Callable[[], object], bits: object) -> Any:
        from tuner.gpu.referee import Verdict

        launch()
        return Verdict(outcome=None, launches=1)


def bench_of(card: Card, nvml: QuietCard, protocol: MeasureProtocol = FAST) -> Any:
    """A bench whose vendor library takes 100 us, and 98 us with its best algorithm."""
    from tuner.gpu.baselines import Baselines
    from tuner.gpu.clock import capture
    from tuner.gpu.evaluate import Bench

    sets = operand_sets(2)
    torch, best = (
        capture(name, kernel_of(card, us), sets, burst_ms=1.0) for name, us in (("torch", 100.0), ("lt1", 98.0))
    )
    baselines = Baselines(
        torch=torch, best=(best, torch), texts={"torch": "torch.matmul", "lt1": "lt1 tile=20"}, screened_us={},
        dropped={},
    )  # fmt: skip
    context = SimpleNamespace(
        problem=PROBLEM,
        protocol=protocol,
        referee=Judge(),
        timing=SimpleNamespace(sets=sets, pool_bytes=10**9),
        baselines=baselines,
    )

    def environment(readings: tuple[Reading, ...] = (), notes: tuple[tuple[str, str], ...] = ()) -> Any:
        return replace(ENVIRONMENT, packages=notes, sm_clock_mhz=readings[0].sm_clock_mhz if readings else 0.0)

    device = SimpleNamespace(card=nvml, profile=profile_named("h200"), environment=environment)
    return Bench(context=context, device=device, report=lambda phase, subject=None: None)  # type: ignore[arg-type]


def evaluated(card: Card, time_us: float, nvml: QuietCard, **job: Any) -> EvaluateReply:
    """Evaluate a kernel of this time."""
    from tuner.gpu.evaluate import evaluate

    return evaluate(kernel_of(card, time_us), evaluate_job("m", protocol=FAST, **job), bench_of(card, nvml))


def test_measured_candidate_carries_pairs_states_and_what_the_best_baseline_was(card: Card) -> None:
    """E2: clocks, power and temperature are stored with the samples that they belong to."""
    reply = evaluated(card, 50.0, QuietCard())
    assert (reply.outcome, reply.evidence) == (Outcome.MEASURED, (Evidence.MEASURED, Evidence.NUMERIC))
    measurement = reply.measurement
    assert measurement is not None
    assert measurement.samples_us == pytest.approx((50.0,) * 6), "known to half a percent after six rounds"
    assert measurement.ratio("torch").median == pytest.approx(2.0)
    assert measurement.ratio("cublaslt_best").median == pytest.approx(1.96)
    assert dict(measurement.environment.packages)["cublaslt_best"] == "lt1 tile=20"
    assert [state.power_w for state in measurement.states] == [512] * 6
    assert measurement.environment.sm_clock_mhz == 1980
    assert measurement.energy_mj == {}


def test_e2_throttled_rounds_are_left_out_counted_and_stored(card: Card) -> None:
    """E2: two of eight rounds met a thermal limit."""
    bits = [0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x20]  # of three bursts a round
    reply = evaluated(card, 50.0, QuietCard(throttled=bits))
    assert reply.measurement is not None
    assert (len(reply.measurement.samples_us), reply.measurement.discarded) == (6, 2)
    assert all(state.throttle_reasons == () for state in reply.measurement.states)


def test_e4_rounds_beside_a_foreign_process_are_left_out_and_counted(card: Card) -> None:
    """E4: and a card that somebody else holds the whole time gives no time at all, with the process named."""
    reply = evaluated(card, 50.0, QuietCard(foreign=[4711, None, 4711]))
    assert reply.measurement is not None
    assert (len(reply.measurement.samples_us), reply.measurement.discarded) == (6, 2)
    busy = evaluated(card, 50.0, QuietCard(foreign=[4711] * 99))
    assert busy.outcome is Outcome.INVALID_TIMING
    assert "only 0 rounds count, 6 are needed" in busy.reason
    assert "process 4711 used the GPU in 15 of them" in busy.reason


def test_slow_candidate_stops_after_two_rounds_and_keeps_them(card: Card) -> None:
    """Racing: no interval is claimed, the outcome says that it was stopped."""
    reply = evaluated(card, 60.0, QuietCard(), incumbent=Incumbent(time_us=50.0, ratio=2.0))
    assert reply.outcome is Outcome.STOPPED_EARLY
    assert reply.measurement is not None
    assert len(reply.measurement.samples_us) == 2
    assert "20.0% slower than the best so far (2.000x torch)" in reply.reason


def test_e9_candidate_beside_a_throttled_torch_is_measured_to_the_end(card: Card) -> None:
    """E9: the incumbent was 1.25x torch when that took 80 us; here torch takes 100 us, and 78 us are good."""
    reply = evaluated(card, 78.0, QuietCard(throttled=[0x20] * 99), incumbent=Incumbent(time_us=64.0, ratio=1.25))
    assert reply.outcome is Outcome.MEASURED, reply.reason
    slower = evaluated(card, 84.0, QuietCard(throttled=[0x20] * 99), incumbent=Incumbent(time_us=64.0, ratio=1.25))
    assert slower.outcome is Outcome.STOPPED_EARLY


def test_time_that_no_kernel_can_reach_is_no_measurement(card: Card) -> None:
    """512^3 takes 0.25 us on an H200 at least."""
    reply = evaluated(card, 0.2, QuietCard())
    assert reply.outcome is Outcome.INVALID_TIMING
    assert "132 SMs need at 4096 FLOP a clock and 1980 MHz" in reply.reason


def finalised(card: Card, nvml: QuietCard, *names: str) -> FinalReply:
    """A final of kernels of 50 us."""
    from tuner.gpu.finals import final

    return final(final_job(*names, protocol=FAST), lambda path, sha256: kernel_of(card, 50.0), bench_of(card, nvml))


def test_final_times_all_finalists_a_twin_and_the_best_baselines_in_the_same_rounds(card: Card) -> None:
    """E1, E12: with an A/A control, and with all rounds of the protocol."""
    reply = finalised(card, QuietCard(), "one", "two")
    assert set(reply.measurements) == {"hash of one", "hash of two"}
    assert all(len(made.samples_us) == FAST.rounds for made in reply.measurements.values())
    assert reply.aa_ratio is not None
    assert reply.aa_ratio.median == pytest.approx(1.0)
    assert reply.measurements["hash of one"].ratio("cublaslt_best").median == pytest.approx(1.96)
    assert not reply.failures
    assert not reply.disturbed


def test_e4_final_waits_for_a_foreign_process_to_go_and_else_blames_no_finalist(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: a disturbed final is taken again; one that stays disturbed says so and refuses nobody."""
    monkeypatch.setattr(import_module("tuner.gpu.finals"), "DISTURBED_PAUSE_S", 0.0)
    gone = finalised(card, QuietCard(foreign=[4711] * 15), "one")
    assert set(gone.measurements) == {"hash of one"}
    assert not gone.disturbed
    stays = finalised(card, QuietCard(foreign=[4711] * 99), "one")
    assert not stays.measurements
    assert not stays.failures
    assert "process 4711 used the GPU in 15 of them" in stays.disturbed


@pytest.mark.parametrize(("noisy", "attempts", "believed"), [(1, 2, True), (9, 3, False)])
def test_e4_final_whose_twin_disagrees_is_taken_again(
    card: Card, monkeypatch: pytest.MonkeyPatch, noisy: int, attempts: int, believed: bool
) -> None:
    """Two bursts of one kernel that differ by percents make nearly everything a tie; the quietest attempt counts."""
    finals = import_module("tuner.gpu.finals")
    honest, taken = finals.measure, []

    def measured(*arguments: Any, **options: Any) -> Any:
        rounds = honest(*arguments, **options)
        taken.append(rounds)
        if len(taken) <= noisy:
            for number, one in enumerate(rounds.rounds):
                one.times_us[finals.TWIN] *= 1 + 0.05 * (number % 3)
        return rounds

    monkeypatch.setattr(finals, "measure", measured)
    monkeypatch.setattr(finals, "DISTURBED_PAUSE_S", 0.0)
    reply = finalised(card, QuietCard(), "one")
    assert len(taken) == attempts
    assert set(reply.measurements) == {"hash of one"}
    assert reply.aa_ratio is not None
    assert (reply.aa_ratio.high < 1.01) is believed
    assert not reply.disturbed


def on_card_time(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock's own waiting follow the card, so that seconds of load take none."""
    times = SimpleNamespace(monotonic=lambda: card.now_us / 1e6, sleep=lambda seconds: None)
    monkeypatch.setattr(import_module("tuner.gpu.clock"), "time", times)


def test_sustained_candidate_is_evaluated_under_its_own_protocol(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of load, and the reply says under which protocol."""
    from tuner.gpu.evaluate import evaluate

    on_card_time(card, monkeypatch)
    protocol = MeasureProtocol.named("sustained")
    bench = bench_of(card, QuietCard(), protocol)
    before_us = card.now_us
    reply = evaluate(kernel_of(card, 5000.0), evaluate_job("m", protocol=protocol), bench)
    assert card.now_us - before_us >= 1e6 * protocol.warm_up_s + 6 * 3 * 1e3 * protocol.burst_ms
    assert reply.outcome is Outcome.MEASURED, reply.reason
    assert reply.measurement is not None
    assert reply.measurement.protocol.kind == "sustained"
