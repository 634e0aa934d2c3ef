"""Stored verdicts: found again by source and tools, never trusted unless clean. Compiler and tools are stood in for."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kernels import lowering
from kernels import verdicts as module
from kernels.checkers import CheckReport, Instance
from kernels.config import Sm100GemmConfig
from kernels.errors import ToolchainError
from kernels.verdicts import VerdictStore, verdicts

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = Sm100GemmConfig(cta_group=1, num_consumers=1, blk_n=64, pipe_depth=2)
TOOLS = {"tirx-harness": "1.0", "rustc": "rustc 1.0"}


def _lower(*what: Any) -> Any:
    """A source that differs wherever problem, config or SM count do."""
    return SimpleNamespace(source_hash=hashlib.sha256(repr(what).encode()).hexdigest())


class Tools:
    """Stands in for the checker engine: answers what it is told to and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.race = "clean"
        self.versions = dict(TOOLS)
        monkeypatch.setattr(module, "available", lambda: None)
        monkeypatch.setattr(module, "versions", lambda: dict(self.versions))
        monkeypatch.setattr(module, "check", self.check)
        monkeypatch.setattr(lowering, "lower", _lower)

    def check(self, config: Sm100GemmConfig, instance: Instance, **_: Any) -> CheckReport:
        """One report, as `kernels.checkers.check` makes it."""
        self.asked.append(instance.label)
        return CheckReport(
            config_key=config.key,
            problem=instance.problem,
            sm_count=instance.sm_count,
            source_hash=_lower(instance.problem, config, instance.sm_count).source_hash,
            fault="",
            sync="clean",
            race=self.race,
            numsim="exact",
            findings=(),
            versions=dict(self.versions),
            seconds={"sync": 1.0, "race": 1.0, "numsim": 1.0},
        )


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A pretended engine."""
    return Tools(monkeypatch)


def test_a_clean_verdict_is_kept_and_found_again(tools: Tools, tmp_path: Path) -> None:
    """The second question runs no tool; `force` runs them all."""
    store = VerdictStore(tmp_path)
    first = verdicts(CONFIG, store)
    assert [report.passed for report in first] == [True, True]
    assert verdicts(CONFIG, store) == first
    assert tools.asked == ["ragged", "several clusters"]
    verdicts(CONFIG, store, force=True)
    assert len(tools.asked) == 4


def test_other_tools_or_another_source_are_asked_again(tools: Tools, tmp_path: Path) -> None:
    """A verdict holds for the source and the versions that it names, and earlier ones stay on disk."""
    store = VerdictStore(tmp_path)
    verdicts(CONFIG, store)
    tools.versions["rustc"] = "rustc 2.0"
    verdicts(CONFIG, store)
    verdicts(replace(CONFIG, blk_k=32), store)
    assert len(tools.asked) == 6
    assert len(list(tmp_path.rglob("*.json"))) == 6


@pytest.mark.parametrize("answer", ["incomplete", "error"])
def test_a_verdict_that_is_no_pass_is_never_reused(tools: Tools, tmp_path: Path, answer: str) -> None:
    """It ends the questions, is stored, and the next time the tools run again."""
    tools.race = answer
    store = VerdictStore(tmp_path)
    assert [report.passed for report in verdicts(CONFIG, store)] == [False]
    tools.race = "clean"
    assert [report.passed for report in verdicts(CONFIG, store)] == [True, True]
    assert tools.asked == ["ragged", "ragged", "several clusters"]


def test_a_damaged_file_is_no_verdict(tools: Tools, tmp_path: Path) -> None:
    """Cut short, or moved to the name of another source."""
    store = VerdictStore(tmp_path)
    report = verdicts(CONFIG, store)[0]
    path = store.path(report.source_hash, TOOLS)
    moved = store.path("f" * 64, TOOLS)
    moved.parent.mkdir()
    moved.write_bytes(path.read_bytes())
    path.write_text(path.read_text()[:100])
    assert store.find(report.source_hash, TOOLS) is None
    assert store.find("f" * 64, TOOLS) is None
    assert tools.asked == ["ragged", "several clusters"]


def test_without_the_engine_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is an error, and nothing is stored."""
    monkeypatch.setattr(module, "available", lambda: "no cargo found")
    with pytest.raises(ToolchainError, match="no cargo found"):
        verdicts(CONFIG, VerdictStore(tmp_path))
    assert list(tmp_path.iterdir()) == []
