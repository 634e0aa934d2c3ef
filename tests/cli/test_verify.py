"""`verify`: which gates run, what counts as a pass, and what is said where the checkers cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kernels import compile as compiling
from kernels import verdicts as module
from kernels.checkers import CheckReport, reduced_instances
from kernels.config import Sm100GemmConfig
from kernels.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernels.compile import CompiledKernel
    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]

SMALL = Sm100GemmConfig(cta_group=1, num_consumers=1, blk_n=64, epi_n=16, pipe_depth=2)
KNOBS = json.dumps({"arch": "sm_100a", "config": SMALL.to_dict()})
SHAPE = "256x128x256"


@pytest.fixture(scope="module")
def compiled() -> CompiledKernel:
    """The config, really compiled once."""
    return compiling.compile_kernel(GemmProblem.parse(SHAPE), SMALL, 148, check_structure=True)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch, compiled: CompiledKernel) -> None:
    """Give every command that one kernel: the gate behind the compiler is what these tests are about."""
    monkeypatch.setattr(compiling, "compile_kernel", lambda *_, **__: compiled)


def _answering(monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Stand in for the engine with these answers on every instance."""
    given = {"sync": "clean", "race": "clean", "numsim": "exact"} | answers

    def verdicts(config: Sm100GemmConfig, store: Any, **options: Any) -> tuple[CheckReport, ...]:
        options["tell"]("sync on something ...")
        return tuple(
            CheckReport(
                config_key=config.key,
                problem=instance.problem,
                sm_count=instance.sm_count,
                source_hash="0" * 64,
                fault="",
                findings=("race: error data_race: two writes",),
                versions={"tirx-harness": "1"},
                seconds={"sync": 1.0, "race": 1.0, "numsim": 1.0},
                **given,
            )
            for instance in reduced_instances(config, options["dtype"])
        )

    monkeypatch.setattr(module, "verdicts", verdicts)


@pytest.mark.usefixtures("once")
def test_a_clean_sm100_config_passes_every_gate(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiler, structural rules, and three tools on each of two reduced instances, with the tools' versions."""
    _answering(monkeypatch)
    ran = cli("verify", KNOBS, SHAPE, "--json")
    assert ran.status == 0, ran.err
    document = ran.document
    assert document["verdict"] == "clean"
    assert [gate["name"] for gate in document["gates"]] == [
        "compile", "structure", *("synccheck", "racecheck", "numsim") * 2,
    ]  # fmt: skip
    assert document["gates"][0]["detail"].endswith("0 B spilled, 0 B stack")
    assert document["gates"][-1]["versions"] == {"tirx-harness": "1"}


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(
    ("answers", "verdict", "said"),
    [
        ({"race": "error"}, "failed", "two writes"),
        ({"race": "incomplete"}, "incomplete", "incomplete"),
        ({"numsim": "3 of 64 wrong"}, "failed", "3 of 64 wrong"),
        ({"race": "incomplete", "numsim": "3 of 64 wrong"}, "failed", "3 of 64 wrong"),
    ],
)
def test_anything_short_of_clean_is_no_pass(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], verdict: str, said: str
) -> None:
    """Status 1, and the table says which gate and why."""
    _answering(monkeypatch, **answers)
    ran = cli("verify", KNOBS, SHAPE)
    assert ran.status == 1
    assert said in ran.out
    assert f"verdict: {verdict}, not a pass" in ran.out


@pytest.mark.usefixtures("once")
def test_a_dirtier_gate_keeps_the_checkers_from_running(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, compiled: CompiledKernel
) -> None:
    """A kernel that spills or breaks a rule is not worth their minutes."""
    dirty = replace(compiled, spill_bytes=8, findings=("tcgen05 fence: line 7: missing",))
    monkeypatch.setattr(compiling, "compile_kernel", lambda *_, **__: dirty)
    ran = cli("verify", KNOBS, SHAPE, "--json")
    assert ran.status == 1
    verdicts = {gate["name"]: (gate["verdict"], gate["detail"]) for gate in ran.document["gates"]}
    assert verdicts["compile"] == ("failed", f"{compiled.registers} registers, 8 B spilled, 0 B stack")
    assert verdicts["structure"] == ("failed", "tcgen05 fence: line 7: missing")
    assert verdicts["checkers"][0] == "incomplete"


@pytest.mark.usefixtures("once")
def test_without_the_engine_the_config_stays_unverified(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheaper gates ran, the reason is said, and the status is no success."""
    monkeypatch.setattr(module, "available", lambda: "no cargo found: install it")
    ran = cli("verify", KNOBS, SHAPE)
    assert ran.status == 1
    assert "stays unverified: no cargo found: install it" in ran.out
    assert "all rules hold" in ran.out
    assert "verdict: incomplete, not a pass" in ran.out


def test_a_hopper_config_is_compiled_and_its_rules_are_checked(cli: Cli, home: Path) -> None:
    """The checkers do not know wgmma; stress builds and memcheck need a GPU."""
    knobs = json.dumps({"num_consumers": 1, "blk_n": 16, "epi_n": 16, "pipe_depth": 2, "share": "B"})
    ran = cli("verify", knobs, SHAPE, "--json")
    assert ran.status == 0, ran.err
    assert [(gate["name"], gate["verdict"]) for gate in ran.document["gates"]] == [
        ("compile", "clean"),
        ("structure", "clean"),
    ]
    assert not (home / "verdicts").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step9", "64x64x12"), "not a multiple of 8"),
        (("step9", "64x64"), "MxNxK"),
        (('{"pipe_depth": 5}', "--arch", "sm_100a"), "279552 B"),
        (("step10",), "presets are"),
    ],
)
def test_what_cannot_be_verified_is_refused(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """Status 2 and the rule: nothing was compiled."""
    ran = cli("verify", *arguments)
    assert ran.status == 2, ran.out
    assert words in ran.error_line
