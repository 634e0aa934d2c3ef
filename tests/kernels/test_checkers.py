"""The checker gate: what it runs, what counts as a pass, and (marker `verify`) what it finds in real kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from kernels import checkers
from kernels.checkers import CheckReport, Instance, check, reduced_instances
from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.devices import profile_named
from kernels.errors import ConfigError, ToolchainError
from kernels.problem import Dtype, GemmProblem
from kernels.rules import violation
from search_space.space import random_legal

if TYPE_CHECKING:
    from pathlib import Path


def test_reduced_instances_take_every_hand_over_of_a_legal_config() -> None:
    """More tiles than accumulator slots, more stages than the rings; one cluster with ragged sides, then several."""
    rng = random.Random(7)
    for _ in range(300):
        config = random_legal(GemmProblem(m=4096, n=4096, k=4096), profile_named("b200"), rng)
        assert isinstance(config, Sm100GemmConfig)
        rows, cols = config.cluster_tile
        for number, instance in enumerate(reduced_instances(config, Dtype.FP16)):
            problem = instance.problem
            tiles_m, tiles_n = config.cluster_tiles(problem)
            clusters = config.clusters(problem, instance.sm_count)
            assert violation(problem, config, instance.sm_count) is None
            assert problem.dtype is Dtype.FP16
            assert clusters == 1 if number == 0 else clusters > 1
            assert tiles_m * tiles_n > config.acc_stages * clusters
            assert config.k_blocks(problem) == config.split_k * config.pipe_depth + 1
            ragged = [problem.m % rows, problem.n % cols, problem.k % config.blk_k]
            assert not any(ragged) if number else all(ragged)


def _report(**answers: str) -> CheckReport:
    values = {"sync": "clean", "race": "clean", "numsim": "exact"} | answers
    config = Sm100GemmConfig()
    instance = reduced_instances(config)[0]
    return CheckReport(
        config_key=config.key,
        problem=instance.problem,
        sm_count=instance.sm_count,
        source_hash="0" * 64,
        fault="",
        findings=("race: error data_race",),
        versions={"tirx-harness": "1"},
        seconds={"sync": 1.5},
        **values,
    )


def test_report_survives_storing() -> None:
    """Through JSON and back, with nothing lost."""
    report = _report(race="error")
    assert CheckReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_three_clean_answers_pass() -> None:
    """And nothing else does, see below."""
    assert _report().passed


@pytest.mark.parametrize(
    "answer",
    [
        {"sync": "incomplete"},
        {"race": "incomplete"},
        {"race": "review"},
        {"sync": "error"},
        {"numsim": "1 of 64 wrong"},
        {"numsim": "failed: deadlock"},
    ],
)
def test_anything_short_of_clean_is_not_a_pass(answer: dict[str, str]) -> None:
    """`incomplete` means the tool did not see everything."""
    assert not _report(**answer).passed


def test_missing_checkers_are_a_reason_and_never_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "install the extra 'verify'" in (checkers.available() or "")
    with pytest.raises(ToolchainError, match="extra 'verify'"):
        check(Sm100GemmConfig(), reduced_instances(Sm100GemmConfig())[0])


def test_a_machine_without_rust_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine is compiled on first use."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name in ("NUMSIM_CARGO", "NUMSIM_RUSTC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no cargo found" in (checkers.available() or "")


LAUNCH_CONTROL = Sm100GemmConfig(scheduler="clc", num_consumers=1, blk_n=64, pipe_depth=2)


def _payload(**changes: Any) -> dict[str, Any]:
    """What a checker says of a partial launch that is clean but for being partial."""
    return {
        "verdict": "incomplete",
        "execution_model": "direct_fixed_sync_state",
        "incomplete": [{"kind": "analysis_incomplete", "reason": "subset_execution"}],
        "findings": [],
        "coverage": {"eligible_for_clean": True},
        "execution_error": None,
    } | changes


def test_a_partial_launch_of_stolen_tiles_is_clean_when_nothing_else_is_open() -> None:
    """The clusters that do not run are those whose tiles are taken over."""
    assert checkers._partial_answer(_payload()) == ("clean", ())


@pytest.mark.parametrize(
    "changes",
    [
        {"incomplete": [{"reason": "subset_execution"}, {"reason": "unregistered raw call"}]},
        {"incomplete": [{"reason": "unregistered raw call"}]},
        {"incomplete": []},
        {"coverage": {"eligible_for_clean": False}},
        {"execution_error": {"message": "stopped"}},
        {"verdict": "review"},
        {"verdict": "error", "findings": [{"kind": "data_race"}]},
        {"findings": [{"kind": "data_race"}]},
        {"advisories": [{"kind": "late"}]},
    ],
)
def test_anything_else_that_is_open_in_a_partial_launch_is_no_pass(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool's own verdict counts then."""
    monkeypatch.setattr(checkers, "_own_verdict", lambda payload: (payload["verdict"], ()))
    answer, _ = checkers._partial_answer(_payload(**changes))
    assert answer == changes.get("verdict", "incomplete")


def test_clusters_with_launch_control_are_checked_with_fewer_resident_than_launched() -> None:
    """One, then two or more, each of which takes over several tiles; static clusters all run."""
    ragged, several = reduced_instances(LAUNCH_CONTROL)
    assert checkers._resident(LAUNCH_CONTROL, ragged) == (0,)
    assert len(checkers._resident(LAUNCH_CONTROL, several) or ()) == 2
    for instance in (ragged, several):
        tiles_m, tiles_n = LAUNCH_CONTROL.cluster_tiles(instance.problem)
        assert tiles_m * tiles_n >= 2 * len(checkers._resident(LAUNCH_CONTROL, instance) or ())
    assert checkers._resident(ONE_CTA, _ragged(ONE_CTA)) is None


@pytest.mark.skipif(checkers.available() is not None, reason="no Rust toolchain or no tirx-harness")
def test_the_engine_sees_one_path_from_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is keyed on PATH: an activated virtual environment must not cost a rebuild of minutes."""
    seen = set()
    for folder in ("/one", "/two"):
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
        with checkers._steady_path():
            seen.add(os.environ["PATH"])
        assert os.environ["PATH"] == f"{folder}:/usr/bin"
    assert len(seen) == 1


# ---------------------------------------------------------------------- the real engine

SMALL: dict[str, Any] = {"num_consumers": 1, "blk_n": 64, "pipe_depth": 2}
ONE_CTA = Sm100GemmConfig(cta_group=1, **SMALL)
PAIR = Sm100GemmConfig(**SMALL)


def _ragged(config: Sm100GemmConfig, dtype: Dtype = Dtype.BF16) -> Instance:
    return reduced_instances(config, dtype)[0]


@pytest.fixture(scope="module")
def engine() -> None:
    """Skips, with the reason, where the engine cannot be used or built."""
    if reason := checkers.available():
        pytest.skip(reason)
    try:
        check(ONE_CTA, _ragged(ONE_CTA))
    except ToolchainError as error:
        pytest.skip(str(error))


# The engine's first build takes minutes on two cores.
pytest_engine = [pytest.mark.verify, pytest.mark.timeout(2400), pytest.mark.usefixtures("engine")]


class TestWithTheEngine:
    """Real kernels through synccheck, racecheck and numsim."""

    pytestmark = pytest_engine

    @pytest.mark.parametrize(
        ("config", "dtype"),
        [
            (ONE_CTA, Dtype.FP16),
            (LAUNCH_CONTROL, Dtype.BF16),
            (LAUNCH_CONTROL, Dtype.FP16),
            (Sm100GemmConfig(cta_group=1, swap_ab=True, split_k=3, **SMALL), Dtype.FP16),
            (Sm100GemmConfig(pipe_depth=2, raster="n-serpentine", l2_group_size=1), Dtype.BF16),
            (
                Sm100GemmConfig(
                    num_consumers=1, blk_n=64, blk_k=128, pipe_depth=2, acc_stages=2, epi_n=32, epi_stages=2,
                    raster="m-serpentine", l2_group_size=1,
                ),
                Dtype.FP16,
            ),
        ],
        ids=["one_cta", "clc", "clc_fp16", "swapped_parts_of_k", "two_consumers", "two_accumulators"],
    )  # fmt: skip
    def test_the_template_is_clean_and_exact(self, config: Sm100GemmConfig, dtype: Dtype) -> None:
        """No finding, and every bit right."""
        report = check(config, _ragged(config, dtype))
        assert report.passed, (report.sync, report.race, report.numsim, report.findings)
        assert set(report.versions) == {"tirx-harness", "apache-tvm", "rustc"}

    @pytest.mark.parametrize(
        ("config", "fault"), [(ONE_CTA, "no_full_wait"), (ONE_CTA, "no_store_wait"), (PAIR, "no_cluster_sync")]
    )
    def test_a_planted_fault_is_found(self, config: Sm100GemmConfig, fault: str) -> None:
        """The second passes synccheck and numsim, so racecheck has to see it."""
        report = check(config, _ragged(config), fault=fault)
        assert not report.passed
        assert report.findings

    def test_an_illegal_config_is_refused_before_the_engine_runs(self) -> None:
        """With the rule that it breaks."""
        illegal = Sm100GemmConfig(pipe_depth=5)
        with pytest.raises(ConfigError, match="shared memory"):
            check(illegal, _ragged(illegal))

    def test_a_hopper_config_is_refused(self) -> None:
        """The tools reject wgmma, which must not read as a verdict."""
        with pytest.raises(ConfigError, match="sm_100a kernels only"):
            check(Sm90GemmConfig(), _ragged(ONE_CTA))  # type: ignore[arg-type]
