"""What a tuning request accepts, refuses and hashes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.problem import Dtype, GemmProblem
from search_space.request import (
    EFFORT_BUDGETS,
    Budget,
    Effort,
    MeasureProtocol,
    Mode,
    RequestError,
    TuneRequest,
    resolve_target,
)
from search_space.space import choices

SQUARE = {"m": 512, "n": 512, "k": 512}


def _field_of(error: pytest.ExceptionInfo[RequestError]) -> str:
    return error.value.field


def test_request_with_problem_and_arch_alone_gets_the_documented_defaults() -> None:
    """Everything else has a default, and the problem's dtype is bf16."""
    request = TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a"})
    assert request == TuneRequest(problem=GemmProblem(m=512, n=512, k=512, dtype=Dtype.BF16), arch="sm_90a")
    assert (request.mode, request.budget, request.seed) == (Mode.MEASURE, Budget(trials=40, wall_s=600.0), 0)
    assert (request.sampler, request.in_flight, request.device) == ("learned", 8, None)


def test_device_alone_names_the_architecture_and_any_spelling_is_one_study() -> None:
    """`h200` and the driver's name are the same device, so they have the same key."""
    short = TuneRequest.from_dict({"problem": SQUARE, "device": "h200"})
    long = TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a", "device": "NVIDIA H200"})
    assert short.arch == "sm_90a"
    assert short.device == "NVIDIA H200"
    assert short.study_key == long.study_key


def test_profile_is_the_device_asked_for_or_the_default_of_the_architecture() -> None:
    """Model mode needs a profile even when only an architecture was named."""
    assert TuneRequest.from_dict({"problem": SQUARE, "device": "h100-pcie"}).profile.name == "NVIDIA H100 PCIe"
    assert TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_100a"}).profile.name == "NVIDIA B200"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"problem": {"m": 0, "n": 8, "k": 8}}, "m"),
        ({"problem": {"m": -1, "n": 8, "k": 8}}, "m"),
        ({"problem": {"m": 1.5, "n": 8, "k": 8}}, "m"),
        ({"problem": {"m": True, "n": 8, "k": 8}}, "m"),
        ({"problem": {"m": 1, "n": 8}}, "k"),
        ({"problem": {"m": 1, "n": 12, "k": 8}, "arch": "sm_100a"}, "n"),
        ({"problem": {"m": 1, "n": 8, "k": 4}, "arch": "sm_100a"}, "k"),
        ({"problem": {"m": 1, "n": 2**40, "k": 8}}, "n"),
        ({"problem": {"m": 2**31 - 2049, "n": 2**20, "k": 8}}, "problem"),
        ({"problem": {"m": 2**31 - 1, "n": 8, "k": 8}}, "m"),
        ({"problem": {**SQUARE, "dtype": "fp8"}}, "dtype"),
        ({"problem": {**SQUARE, "dtype": 16}}, "dtype"),
        ({"problem": {**SQUARE, "layout": "TN"}}, "layout"),
        ({"problem": {**SQUARE, "batch": 2}}, "problem.batch"),
        ({"problem": [512, 512, 512]}, "problem"),
        ({"arch": "sm_80"}, "arch"),
        ({"arch": None}, "arch"),
        ({"arch": 90}, "arch"),
        ({"device": "A100"}, "device"),
        ({"device": "NVIDIA B200"}, "device"),
        ({"device": 3}, "device"),
        ({"mode": "guess"}, "mode"),
        ({"sampler": "cma-es"}, "sampler"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "0"}, "seed"),
        ({"in_flight": 0}, "in_flight"),
        ({"budget": {"trials": 0}}, "budget.trials"),
        ({"budget": {"trials": 2.0}}, "budget.trials"),
        ({"budget": {"wall_s": -3}}, "budget.wall_s"),
        ({"budget": {"wall_s": 0}}, "budget.wall_s"),
        ({"budget": {"wall_s": float("nan")}}, "budget.wall_s"),
        ({"budget": {"wall_s": float("inf")}}, "budget.wall_s"),
        ({"budget": {"seconds": 3}}, "budget.seconds"),
        ({"budget": 40}, "budget"),
        ({"protocol": {"kind": "forever"}}, "protocol.kind"),
        ({"protocol": {"kind": "steady"}}, "protocol.kind"),
        ({"protocol": "burst"}, "protocol"),
        ({"protocol": {"rounds": 0}}, "protocol.rounds"),
        ({"protocol": {"rounds": 5}}, "protocol.rounds"),
        ({"protocol": {"warm_up_s": 3}}, "protocol.warm_up_s"),
        ({"protocol": {"kind": "sustained", "idle_gap_ms": 5}}, "protocol.idle_gap_ms"),
        ({"protocol": {"kind": "sustained", "burst_ms": 4}}, "protocol.burst_ms"),
        ({"protocol": {"kind": "sustained", "warm_up_s": 0}}, "protocol.warm_up_s"),
        ({"protocol": {"kind": "sustained", "warm_up_s": "3"}}, "protocol.warm_up_s"),
        ({"protocol": {"burst_ms": 0}}, "protocol.burst_ms"),
        ({"protocol": {"idle_gap_ms": -1}}, "protocol.idle_gap_ms"),
        ({"protocol": {"distribution": "zeros"}}, "protocol.distribution"),
        ({"priority": 1}, "priority"),
    ],
)
def test_bad_field_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    """The error carries the field, so that a client can mark it."""
    with pytest.raises(RequestError) as error:
        TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a"} | change)
    assert _field_of(error) == field
    assert str(error.value)


def test_request_without_problem_and_request_that_is_no_object_are_refused() -> None:
    """Nothing is guessed."""
    with pytest.raises(RequestError, match="problem is missing"):
        TuneRequest.from_dict({"arch": "sm_90a"})
    with pytest.raises(RequestError, match="must be an object"):
        TuneRequest.from_dict(["arch"])


def test_unaligned_problem_is_refused_with_the_padding_that_would_help() -> None:
    """The message is the rule with its number and a way out."""
    odd = GemmProblem(m=1, n=8, k=100)
    with pytest.raises(RequestError, match=r"k = 100 is not a multiple of 8.*pad k to 104"):
        TuneRequest(problem=odd, arch="sm_100a")
    assert TuneRequest(problem=GemmProblem(m=1, n=9, k=97), arch="sm_90a").problem.k == 97


def test_problem_larger_than_the_device_is_refused_with_both_sizes() -> None:
    """An 80 GB card refuses what a 141 GB card of the same architecture takes."""
    big = GemmProblem(m=200_000, n=200_000, k=64)
    assert TuneRequest(problem=big, arch="sm_90a", device="h200", mode="model").problem == big
    assert TuneRequest(problem=big, arch="sm_90a", mode="model").problem == big
    with pytest.raises(RequestError, match=rf"needs {big.min_bytes} B .* has 80000000000 B"):
        TuneRequest(problem=big, arch="sm_90a", device="h100")


def test_unknown_effort_is_refused_and_known_ones_grow() -> None:
    """quick < normal < full, in trials and in seconds."""
    with pytest.raises(RequestError, match="unknown effort 'heroic': use one of quick, normal, full") as error:
        Effort.parse("heroic")
    assert _field_of(error) == "effort"
    budgets = [Effort.parse(name).budget for name in ("quick", "normal", "full")]
    assert budgets == list(EFFORT_BUDGETS.values())
    assert [b.trials for b in budgets] == sorted({b.trials for b in budgets})
    assert [b.wall_s for b in budgets] == sorted({b.wall_s for b in budgets})


def test_target_needs_an_arch_or_a_device() -> None:
    """The message lists both, since either will do."""
    with pytest.raises(RequestError, match=r"sm_90a.*NVIDIA H200"):
        resolve_target(None, None)


REQUESTS = st.builds(
    TuneRequest,
    problem=st.builds(
        GemmProblem,
        m=st.integers(1, 5000),
        n=st.integers(1, 600).map(lambda x: 8 * x),
        k=st.integers(1, 600).map(lambda x: 8 * x),
        dtype=st.sampled_from(Dtype),
    ),
    arch=st.just("sm_90a"),
    device=st.sampled_from([None, "h200", "H100"]),
    mode=st.sampled_from(Mode),
    budget=st.builds(Budget, trials=st.integers(1, 500), wall_s=st.floats(0.5, 5000)),
    protocol=st.builds(MeasureProtocol, rounds=st.integers(6, 30), burst_ms=st.floats(0.5, 20)),
    seed=st.integers(0, 2**40),
    sampler=st.sampled_from(["tpe", "random", "brute"]),
    in_flight=st.integers(1, 16),
)


@settings(max_examples=50, deadline=None)
@given(REQUESTS)
def test_request_survives_its_dictionary_with_the_same_key(request: TuneRequest) -> None:
    """What is stored is what was asked."""
    again = TuneRequest.from_dict(request.to_dict())
    assert again == request
    assert again.study_key == request.study_key


@pytest.mark.parametrize(
    "change",
    [
        {"problem": {**SQUARE, "m": 513}},
        {"problem": {**SQUARE, "dtype": "fp16"}},
        {"device": "h200"},
        {"mode": "model"},
        {"budget": {"trials": 41}},
        {"budget": {"wall_s": 601}},
        {"protocol": {"rounds": 7}},
        {"protocol": {"idle_gap_ms": 6}},
        {"protocol": {"kind": "sustained"}},
        {"seed": 1},
        {"sampler": "random"},
        {"in_flight": 5},
    ],
)
def test_study_key_changes_with_everything_that_changes_the_answer(change: dict[str, Any]) -> None:
    """Two requests share a study only if they would get the same answer."""
    base = {"problem": SQUARE, "arch": "sm_90a"}
    assert TuneRequest.from_dict(base | change).study_key != TuneRequest.from_dict(base).study_key


def test_protocol_named_by_its_kind_gets_the_defaults_of_that_kind() -> None:
    """Long bursts without a gap after a warm-up, or short ones with gaps."""
    asked = TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a", "protocol": {"kind": "sustained", "rounds": 7}})
    assert asked.protocol == MeasureProtocol(kind="sustained", burst_ms=300.0, rounds=7, idle_gap_ms=0.0, warm_up_s=2.0)
    assert asked.protocol.is_sustained
    assert MeasureProtocol.from_dict({}) == MeasureProtocol.named("burst") == MeasureProtocol()


def test_protocol_error_says_what_is_possible() -> None:
    """The kinds there are, and the value that a kind demands."""
    with pytest.raises(RequestError, match=r"unknown protocol\.kind 'steady': use one of burst, sustained"):
        MeasureProtocol.from_dict({"kind": "steady"})
    with pytest.raises(RequestError, match=r"protocol\.idle_gap_ms must be 0 under protocol 'sustained', got 5"):
        MeasureProtocol.from_dict({"kind": "sustained", "idle_gap_ms": 5})
    with pytest.raises(RequestError, match=r"protocol\.rounds must be between 6 and 1000, got 3"):
        MeasureProtocol.from_dict({"rounds": 3})


def test_study_key_does_not_depend_on_how_a_number_is_written() -> None:
    """600 s and 600.0 s are one budget."""
    whole = TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a", "budget": {"wall_s": 600}})
    assert whole.study_key == TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a"}).study_key
    assert len(whole.study_key) == 64


def test_study_key_is_the_hash_of_request_and_space_as_canonical_json() -> None:
    """Keys in a store stay valid: the text that is hashed is what json.dumps with sorted keys writes."""
    request = TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a", "seed": 3})
    content = {"request": request.to_dict(), "space": choices("sm_90a")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert request.study_key == hashlib.sha256(text.encode()).hexdigest()


def test_study_key_changes_with_the_choices_of_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that searched fewer choices does not answer for a wider space."""
    request = TuneRequest.from_dict({"problem": SQUARE, "arch": "sm_90a"})
    before = request.study_key
    monkeypatch.setattr("search_space.request.choices", lambda arch: {"pipe_depth": (2,)})
    assert request.study_key != before
