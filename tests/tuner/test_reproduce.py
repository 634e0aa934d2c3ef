"""What a stored result claims, when a new measurement agrees with it, and what is measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kernels.artifacts import ArtifactStore
from search_space.request import MeasureProtocol
from tests.tuner.support import ENVIRONMENT, PROBLEM, PROFILE, STARTING, fake
from tuner.engine.base import CompileJob
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.faults import Fault, FaultKind, FaultPlan
from tuner.records import Environment, Outcome, Ratio
from tuner.reproduce import (
    BASELINE,
    Claim,
    ClaimError,
    claim_of_result,
    claim_of_row,
    differences,
    judge,
    reproduce,
)


def ratio(median: float, half: float = 0.002) -> Ratio:
    """A ratio with a symmetric interval."""
    return Ratio(median=median, low=median - half, high=median + half)


def truth(engine: FakeEngine) -> Ratio:
    """What a final on this engine finds for the first starting config."""
    measured = engine._measure(PROBLEM, STARTING[0], MeasureProtocol(), "final")
    return measured.ratio(BASELINE)


def claim(engine: FakeEngine, **changes: Any) -> Claim:
    """A claim that is true on this engine, changed as told."""
    assert engine.device.environment is not None
    made = Claim(
        name="result 1",
        problem=PROBLEM,
        config=STARTING[0],
        ratio=truth(engine),
        protocol=MeasureProtocol(),
        environment=engine.device.environment,
    )
    return replace(made, **changes)


# ---------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("stored", "now", "holds", "why"),
    [
        (ratio(1.020), ratio(1.023), True, "95 % intervals overlap"),
        (
            ratio(1.000, 0.05),
            ratio(1.040, 0.0),
            True,
            "95 % intervals overlap, but one of +-5.0 % meets nearly anything",
        ),
        (ratio(1.020), ratio(1.029), True, "differ by 0.88 %, less than 1 %"),
        (ratio(1.020), ratio(1.011), True, "less than 1 %"),
        (ratio(1.020), ratio(1.040), False, "differ by 1.96 % and the 95 % intervals do not meet"),
        (ratio(1.020), ratio(0.990), False, "do not meet"),
    ],
)
def test_claim_holds_when_intervals_overlap_or_medians_are_within_one_percent(
    stored: Ratio, now: Ratio, holds: bool, why: str
) -> None:
    """E10: the rule, and both intervals in the reason."""
    reproduced, reason = judge(stored, now)
    assert reproduced is holds
    assert why in reason
    assert f"stored {stored.median:.4f} ({stored.low:.4f} to {stored.high:.4f})" in reason
    assert f"now {now.median:.4f} ({now.low:.4f} to {now.high:.4f})" in reason


def test_differences_of_card_driver_and_clock_are_named() -> None:
    """E2, E10: what may explain a change; what one side does not know is none."""
    stored = replace(ENVIRONMENT, gpu_uuid="GPU-1", driver="580.1", sm_clock_mhz=1980.0, power_limit_w=700.0)
    now = replace(
        stored, gpu_uuid="GPU-2", driver="590.2", sm_clock_mhz=1755.0, throttle_reasons=("sw_power_cap",), torch="2.11"
    )
    assert differences(stored, now) == [
        "card was GPU-1, is GPU-2",
        "driver was 580.1, is 590.2",
        "SM clock under load was 1980 MHz, is 1755 MHz",
        "active clock limits were none, are sw_power_cap",
    ]
    assert differences(stored, replace(stored, sm_clock_mhz=1965.0)) == []
    one, other = (replace(stored, packages=((BASELINE, name),)) for name in ("lt1 tile=20", "torch.matmul"))
    assert differences(one, other) == ["the vendor library was best with lt1 tile=20, is with torch.matmul"]
    assert differences(stored, other) == []


# ---------------------------------------------------------------------- claims


def result_body(engine: FakeEngine, **changes: Any) -> dict[str, Any]:
    """A result as the service shows it."""
    measured = engine._measure(PROBLEM, STARTING[0], MeasureProtocol(), "final")
    body = {
        "id": "ab" * 16,
        "problem": {"m": PROBLEM.m, "n": PROBLEM.n, "k": PROBLEM.k, "dtype": "bf16", "layout": "NT"},
        "arch": "sm_90a",
        "config": STARTING[0].to_dict(),
        "ratio": {name: value.to_dict() for name, value in measured.ratios().items()},
        "measurement": {**measured.to_dict(), "phase": "final"},
        "environment": measured.environment.to_dict(),
        "artifact_sha256": "c" * 64,
        "source_hash": "d" * 64,
    }
    return json.loads(json.dumps(body | changes))  # type: ignore[no-any-return]


def test_claim_of_a_result_takes_its_interval_from_the_raw_pairs() -> None:
    """Not from a number that somebody rounded."""
    engine = fake()
    made = claim_of_result(result_body(engine, ratio={BASELINE: 7.0}))
    assert made.ratio == truth(engine)
    assert (made.config, made.problem, made.protocol) == (STARTING[0], PROBLEM, MeasureProtocol())
    assert made.name == f"result {'ab' * 16}"


def test_claim_without_samples_uses_the_stored_interval() -> None:
    """An imported result has no samples."""
    stored = ratio(1.01).to_dict()
    assert claim_of_result(result_body(fake(), measurement=None, ratio={BASELINE: stored})).ratio == ratio(1.01)
    assert claim_of_result(result_body(fake(), measurement=None, ratio={BASELINE: 1.01})).ratio == ratio(1.01, 0.0)


def test_modeled_result_claims_nothing() -> None:
    """There is no measurement to repeat."""
    with pytest.raises(ClaimError, match="has no ratio to cublaslt_best: it was not measured"):
        claim_of_result(result_body(fake(), measurement=None, ratio={}))


def test_withdrawn_result_claims_nothing_any_more() -> None:
    """However fast it still is: "reproduced" would be read as "good"."""
    with pytest.raises(ClaimError, match="was withdrawn, and claims nothing any more: WRONG_RESULT"):
        claim_of_result(result_body(fake()) | {"withdrawn_reason": "WRONG_RESULT: one element is wrong"})


def test_row_of_a_file_is_a_claim_with_and_without_raw_pairs() -> None:
    """Files of earlier versions hold the interval only."""
    engine = fake()
    body = result_body(engine)
    row = {
        **body["problem"],
        "config": body["config"],
        "ratio": {BASELINE: 1.5},
        "ratio_interval": {BASELINE: [1.49, 1.51]},
        "environment": body["environment"],
        "artifact_sha256": "c" * 64,
    }
    old = claim_of_row(row, "dev.json", {"kind": "burst", "rounds": 7})
    assert old.ratio == Ratio(median=1.5, low=1.49, high=1.51)
    assert old.protocol.rounds == 7
    assert old.name.startswith("dev.json 64x7168x4096 bf16")
    samples = body["measurement"]
    new = claim_of_row(
        {**row, "samples_us": samples["samples_us"], "baseline_samples_us": samples["baselines_us"],
         "protocol": {"kind": "sustained"}}, "dev.json", None,
    )  # fmt: skip
    assert new.ratio == truth(engine)
    assert new.protocol == MeasureProtocol.named("sustained")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 0}, "cannot be read: m must be"),
        ({"config": {"warp_dance": 3}}, "cannot be read: unknown knob"),
        ({"ratio": {}}, "has no ratio to cublaslt_best"),
        ({"protocol": {"kind": "forever"}}, "unknown protocol.kind 'forever'"),
        ({"environment": {}}, "cannot be read"),
        ({"environment": []}, "cannot be read"),
        ({"ratio": {BASELINE: float("nan")}}, "its ratio must be finite and above zero"),
        ({"ratio": {BASELINE: -1.0}}, "its ratio must be finite and above zero"),
        ({"samples_us": [0.0] * 6, "baseline_samples_us": {BASELINE: [1.0] * 6}}, "a sample of zero is no time"),
        ({"samples_us": [1.0], "baseline_samples_us": {BASELINE: [1.0, 2.0]}}, "cannot be read"),
    ],
)
def test_row_that_cannot_be_read_is_named_with_what_is_wrong(change: dict[str, Any], message: str) -> None:
    """One line, no traceback."""
    body = result_body(fake())
    row = {**body["problem"], "config": body["config"], "ratio": {BASELINE: 1.5}, "environment": body["environment"]}
    with pytest.raises(ClaimError, match=message):
        claim_of_row(row | change, "dev.json", None)


# ---------------------------------------------------------------------- measuring again


def test_true_claim_is_reproduced_and_a_wrong_one_is_not() -> None:
    """E10: with the measurement of today beside the stored one."""
    engine = fake()
    good, bad = claim(engine), claim(engine, ratio=ratio(truth(engine).median * 1.05))
    seen: list[str] = []
    rows = reproduce([good, bad], engine, on_done=lambda row: seen.append(row.reason))
    assert [row.reproduced for row in rows] == [True, False]
    assert [row.reason for row in rows] == seen
    assert rows[0].warnings == ()
    document = rows[0].to_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["stored"]["ratio"] == good.ratio.to_dict()
    assert document["measured"]["ratio"]["median"] == pytest.approx(good.ratio.median, rel=0.01)
    assert len(document["measured"]["samples_us"]) == MeasureProtocol().rounds


def test_stored_module_is_timed_where_it_is_at_hand_and_built_again_elsewhere(tmp_path: Any) -> None:
    """The very bytes that were published, else the same config."""
    engine = FakeEngine(PROFILE, options=FakeOptions(), artifacts=ArtifactStore(tmp_path))
    job = CompileJob(problem=PROBLEM, config=STARTING[0], sm_count=PROFILE.sm_count)
    kernel = engine.compile(job).result().kernel
    assert kernel is not None
    stored = claim(engine, artifact_sha256=kernel.sha256, source_hash=kernel.source_hash)
    (row,) = reproduce([stored], engine)
    assert (row.module, row.reproduced, row.warnings) == ("stored", True, ())
    file = tmp_path / kernel.sha256[:2] / f"{kernel.sha256}.so"
    file.unlink()
    (row,) = reproduce([stored], engine)
    assert (row.module, row.reproduced, row.warnings) == ("built again", True, ())
    file.unlink()
    (row,) = reproduce([replace(stored, artifact_sha256="0" * 64)], engine)
    assert row.warnings == ("the module that was built now is not the stored one, byte for byte",)
    file.unlink()
    (row,) = reproduce([replace(stored, source_hash="0" * 64)], engine)
    assert row.warnings == ("the template now generates another source for its config",)


def test_claim_of_another_card_is_measured_with_a_warning() -> None:
    """Another card of the kind, and one with fewer SMs, whose module would not fit."""
    engine = fake()
    here = engine.device.environment
    assert isinstance(here, Environment)
    (row,) = reproduce([claim(engine, environment=replace(here, gpu_uuid="GPU-other", sm_count=114))], engine)
    assert row.reproduced
    assert row.module == "built again"
    assert row.warnings == (f"card was GPU-other, is {here.gpu_uuid}", "SM count was 114, is 132")


def test_module_that_cannot_be_built_or_fails_is_not_reproduced_with_the_reason() -> None:
    """The others are measured all the same."""
    plan = FaultPlan(by_key={STARTING[1].key: Fault(kind=FaultKind.COMPILE_ABORTS)})

    class Refuses(FakeEngine):
        """Its referee refuses the third config in the final."""

        def _final(self, job):  # type: ignore[no-untyped-def]
            reply = super()._final(job)
            (candidate,) = job.candidates
            if candidate.config != STARTING[2]:
                return reply
            failure = self._evaluate(candidate)
            failure = replace(failure, outcome=Outcome.WRONG_RESULT, reason="3 of 9 elements wrong", measurement=None)
            return replace(reply, measurements={}, failures={candidate.source_hash: failure})

    engine = Refuses(PROFILE, options=FakeOptions(faults=plan))
    claims = [claim(engine, config=config) for config in (STARTING[1], STARTING[2], STARTING[0])]
    broken, wrong, good = reproduce(claims, engine)
    assert not broken.reproduced
    assert "cannot be built here: COMPILE_FAILED" in broken.reason
    assert not wrong.reproduced
    assert wrong.reason == "WRONG_RESULT: 3 of 9 elements wrong"
    assert good.reproduced
    assert broken.to_dict()["measured"] is None


def test_disturbed_measurement_says_nothing_and_says_so() -> None:
    """E4: a process on the card is no proof against a result, and no proof for it."""

    class Disturbed(FakeEngine):
        """Somebody else uses its card."""

        def _final(self, job):  # type: ignore[no-untyped-def]
            return replace(super()._final(job), measurements={}, disturbed="15 of 15 rounds discarded; process 4711")

    engine = Disturbed(PROFILE)
    (row,) = reproduce([claim(engine)], engine)
    assert not row.reproduced
    assert row.reason == "not measured: 15 of 15 rounds discarded; process 4711"
