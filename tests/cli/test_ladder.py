"""`ladder`: its table, its record and its picture, on invented devices and without any."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from kernels.devices import default_profile
from kernels.ladder import PUBLISHED
from tuner import engines
from tuner.engine.base import Engine, NoDevice
from tuner.engine.fake import FakeEngine, FakeOptions
from tuner.engine.faults import Fault, FaultKind, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from search_space.request import TuneRequest
    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]

SQUARE = ("ladder", "4096x4096x4096", "--dtype", "fp16")
NAMES = ["step1", "step3", "step4", "step7", "step8", "step9", "library"]


class OneEngine:
    """Engines of a machine: one invented device, or none that could measure."""

    def __init__(self, options: FakeOptions, arch: str) -> None:
        self.options, self.arch = options, arch

    def engine_for(self, request: TuneRequest) -> Engine:
        """The device, or NoDevice when a live one is asked for and there is none."""
        if request.mode == "measure" and not self.options.live:
            raise NoDevice(f"no {request.arch} GPU on this machine (GPUs here: none): ask for mode 'model'")
        return FakeEngine(request.profile, options=self.options)

    def devices(self) -> tuple[Any, ...]:
        """The live ones."""
        profile = default_profile_of(self.arch)
        return (FakeEngine(profile, options=self.options).device,) if self.options.live else ()

    def close(self) -> None:
        """Nothing to end."""


def default_profile_of(arch: str) -> Any:
    """The data sheet of an architecture."""
    from kernels.arch import arch_named

    return default_profile(arch_named(arch))


def _here(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_100a", **options: Any) -> None:
    monkeypatch.setattr(engines, "engines_of", lambda settings: OneEngine(FakeOptions(**options), arch))


def test_without_a_gpu_the_rungs_are_compiled_and_said_to_be_unmeasured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time is shown that nobody took; the published ones and the compiled facts are."""
    _here(monkeypatch, live=False)
    ran = cli(*SQUARE)
    assert ran.status == 0, ran.err
    assert "not measured: no sm_100a GPU on this machine (GPUs here: none)" in ran.out
    assert ran.out.count("not measured") == 1 + len(NAMES) + 6  # the reason, the table, and a line for each build
    assert "70 ms" in ran.out
    content = cli(*SQUARE, "--json").document
    assert [row["name"] for row in content["rows"]] == NAMES
    assert [row["median_us"] for row in content["rows"]] == [None] * len(NAMES)
    assert content["measured"] is False
    assert content["published"]["same_problem"] is True
    assert content["rows"][5]["registers"] > 0
    assert content["rows"][5]["modeled_us"] > 0
    assert content["rows"][0]["modeled_us"] is None


def test_on_a_gpu_every_rung_has_a_time_and_a_speed_up(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's time is the one measured beside the last rung; the arch is the device's."""
    _here(monkeypatch, arch="sm_90a")
    ran = cli(*SQUARE, "--json")
    assert ran.status == 0, ran.err
    content = ran.document
    assert content["arch"] == "sm_90a"
    assert content["environment"]["gpu_name"] == "Fake H200"
    first, *_, last, library = content["rows"]
    assert first["speedup"] == 1.0
    assert last["speedup"] == pytest.approx(first["median_us"] / last["median_us"])
    assert library["median_us"] == last["baselines_us"]["cublaslt_best"]
    assert library["tflops"] == pytest.approx(2 * 4096**3 / library["median_us"] / 1e6)
    assert content["published"]["same_problem"] is False
    text = cli(*SQUARE).out
    assert "compare the shape, not the times" in text


def test_a_rung_that_fails_is_named_and_the_status_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep their times."""
    from search_space.starting import preset

    fault = Fault(kind=FaultKind.WRONG_ELEMENT)
    _here(monkeypatch, faults=FaultPlan(by_key={preset("step8").key: fault}))
    ran = cli(*SQUARE, "--json")
    assert ran.status == 1
    by_name = {row["name"]: row for row in ran.document["rows"]}
    assert by_name["step8"]["outcome"] == "WRONG_RESULT"
    assert by_name["step8"]["median_us"] is None
    assert by_name["step9"]["median_us"] > 0


def test_recorded_ladder_is_printed_and_drawn_again(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The picture is a well-formed document that holds every time."""
    _here(monkeypatch)
    record, drawn = tmp_path / "ladder.json", tmp_path / "pictures" / "ladder.svg"
    record.write_text(cli(*SQUARE, "--json").out)
    again = cli("ladder", "--from", str(record), "--svg", str(drawn))
    assert again.status == 0, again.err
    assert all(name in again.out for name in NAMES)
    texts = [node.text or "" for node in ElementTree.fromstring(drawn.read_text()).iter() if node.tag.endswith("text")]
    for row in json.loads(record.read_text())["rows"]:
        assert f"{row['median_us'] / 1000:.4g} ms" in texts
        assert f"{PUBLISHED[row['name']][0]:.4g} ms" in texts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("4096x4096x100",), "k = 100 is not a multiple of 64"),
        (("64x64",), "MxNxK"),
        ((), "a shape is needed"),
        (("--from", "nothing.json"), "nothing.json cannot be read"),
        (("256x256x256", "--arch", "sm_80"), "unknown arch"),
    ],
)
def test_what_no_rung_can_compute_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    """Status 2, before anything is built."""
    _here(monkeypatch, live=False)
    ran = cli("ladder", *arguments)
    assert ran.status == 2, ran.out
    assert words in ran.error_line
