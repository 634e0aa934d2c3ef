"""The documents: generated parts that are up to date, commands that can be typed, a tutorial that runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docs.generate import REFERENCE, generated
from tests.cli.conftest import free_port
from tests.soak.pages_speed import table
from tuner.cli.errors import UsageError
from tuner.cli.parser import build_parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PLACEHOLDERS = {"$URL": "http://127.0.0.1:8000", "$GEMM_TUNER_HOME": "home"}
STEP = re.compile(r"<!-- run: (\w+) -->\n```\n(.*?)```", re.DOTALL)
STEPS = ["serve", "tune", "best", "nearest", "explain", "export", "stop"]


def test_generated_parts_are_up_to_date() -> None:
    """`make docs-generated` would change nothing."""
    found = generated()
    assert set(found) == {path.name for path in REFERENCE.glob("*.md")}
    for name, text in found.items():
        assert (REFERENCE / name).read_text() == text, f"{name}: run `make docs-generated`"


def commands(path: Path) -> list[str]:
    """Every `gemm-tuner ...` of a document: lines of its code blocks, and code in its sentences."""
    text = path.read_text()
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    typed = re.findall(r"^(?:\.venv/bin/)?gemm-tuner (\S[^#&>|\n]*)", blocks, re.MULTILINE)
    return [found.strip() for found in [*typed, *re.findall(r"`gemm-tuner ([a-z][^`|]*)`", prose)]]


@pytest.mark.parametrize("path", [path for path in PAGES if path.parent != REFERENCE], ids=lambda path: path.stem)
def test_commands_are_understood_by_the_parser(path: Path) -> None:
    """A command can be typed as it stands there."""
    for command in commands(path):
        text = command.replace("...", "")
        for name, value in PLACEHOLDERS.items():
            text = text.replace(name, value)
        words = ["64x64x64" if word == "SHAPE" else word for word in shlex.split(text)]
        if words == ["export"]:
            continue  # named in a sentence, without its arguments
        try:
            build_parser().parse_args(words)
        except UsageError as error:
            pytest.fail(f"{path.name}: gemm-tuner {command}: {error}")


def test_times_of_the_pages_are_those_of_the_recorded_run() -> None:
    """`python -m tests.soak.pages_speed --table results/host/pages.json` prints the table again."""
    text = (DOCS / "howto" / "pages.md").read_text()
    between = text.partition("<!-- pages:begin -->\n")[2].partition("<!-- pages:end -->")[0]
    assert between.strip() == table(json.loads((ROOT / "results" / "host" / "pages.json").read_text()))


def test_every_page_is_in_the_contents() -> None:
    """And the contents name no page that is not there."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES)
    assert len(listed) == len(set(listed))


def test_make_targets_of_the_documents_exist() -> None:
    """`make setup-gpu` and the others."""
    makefile = (ROOT / "Makefile").read_text()
    for path in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z][a-z-]+)", path.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"


def test_site_builds_strictly(tmp_path: Path) -> None:
    """No dead link, no page left out."""
    pytest.importorskip("mkdocs", reason="make docs brings it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tutorial.html").is_file()
    scripts = re.findall(r'(?:src|href)="(https?://[^"]+)"', (tmp_path / "index.html").read_text())
    assert [link for link in scripts if "squidfunk" not in link] == [], "the site loads nothing from elsewhere"


def test_contents_and_theme_need_no_network() -> None:
    """Fonts come from the reader's machine."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(text)["theme"]["font"] is False


@pytest.mark.slow
def test_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Its blocks, in one shell, in another folder; each step says what it should."""
    steps = dict(STEP.findall((DOCS / "tutorial.md").read_text()))
    assert list(steps) == STEPS
    shell = tmp_path / "bin"
    shell.mkdir()
    command = shell / "gemm-tuner"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tuner.cli.main "$@"\n')
    command.chmod(0o755)
    (shell / "python").symlink_to(sys.executable)
    port = free_port()
    script = "set -e\nset -m\n" + "\n".join(f"printf '\\n== {name}\\n'\n{text}" for name, text in steps.items())
    environment = os.environ | {"PATH": f"{shell}:{os.environ['PATH']}", "COLUMNS": "200"}
    environment.pop("GEMM_TUNER_DATABASE_URL", None)
    done = subprocess.Popen(
        ["bash", "-c", script.replace("8010", str(port))],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = done.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)
        raise
    assert done.returncode == 0, out
    said = dict(zip(STEPS, re.split(r"^== \w+$", out, flags=re.MULTILINE)[1:], strict=True))
    assert '"status":"ok"' in said["serve"]
    assert "64x28672x4096" in said["tune"]
    assert '"match":"exact"' in said["best"]
    assert "nearest" in said["nearest"]
    assert (tmp_path / "tutorial" / "pipeline.svg").is_file()
    assert "manifest.json" in said["export"]
