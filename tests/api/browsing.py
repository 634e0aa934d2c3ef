"""A service of invented devices with the recorded results, and a browser to look at it with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db.database import Database
from tests.api.stored import store_all, store_large_study
from tests.cli.conftest import free_port
from tuner.cli.remote import wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "build" / "node_modules" / "axe-core" / "axe.min.js"
SCREENSHOTS = ROOT / "build" / "pages"
WIDTH, HEIGHT = 1280, 900


@dataclass(frozen=True, kw_only=True)
class Site:
    """A running service.

    url: its address
    result: id of a published result with two revisions
    earlier: id of the revision before
    study: id of the large study
    """

    url: str
    result: str
    earlier: str
    study: str

    def paths(self) -> dict[str, str]:
        """One address of each kind of page, by name."""
        return {
            "overview": "/",
            "submit": "/submit",
            "jobs": "/jobs",
            "results": "/results",
            "result": f"/results/{self.result}",
            "study": f"/studies/{self.study}",
            "map": "/map?device=NVIDIA+H200",
            "roofline": "/roofline?device=NVIDIA+H200",
            "compare": "/compare/devices?left=NVIDIA+H200&right=Slow+H200",
            "compare-results": f"/compare/results?left={self.earlier}&right={self.result}",
            "login": "/login",
        }


@contextmanager
def serving(home: Path, *, trials: int, scale: float = 0.02) -> Iterator[Site]:
    """`gemm-tuner serve` with the fake engine, on a database with the recorded results and a study of `trials`."""
    home.mkdir(parents=True, exist_ok=True)
    with Database.open(f"sqlite:///{home / 'gemm-tuner.db'}") as database:
        stored = store_all(database)
        study = store_large_study(database, trials)
    port = free_port()
    environment = os.environ | {
        "GEMM_TUNER_HOME": str(home),
        "GEMM_TUNER_ENGINE": "fake",
        "GEMM_TUNER_FAKE_SCALE": str(scale),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tuner.cli.main", "serve", "--port", str(port)]
    with (home / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        assert wait_until_ready(url, timeout_s=90), (home / "serve.log").read_text()
        yield Site(url=url, result=stored.newest, earlier=stored.results[0], study=study)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def chromium() -> str | None:
    """Path of Debian's Chromium."""
    return shutil.which("chromium")


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root in a container has no sandbox; the pages are our own.
        arguments = ["--no-sandbox", "--disable-gpu"]
        launched = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        yield launched
        launched.close()


@dataclass
class Visit:
    """One tab, and what it complained about.

    page: Playwright's
    theme: light or dark
    complaints: errors and warnings of the console, and uncaught exceptions
    """

    page: Any
    theme: str
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} ({message.location.get('url')})")

    def keep(self, name: str) -> None:
        """A screenshot of the whole page, for people to look at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}-{self.theme}.png", full_page=True)

    def problems(self) -> list[str]:
        """What axe finds that is serious, with where."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run()")["violations"]
        return [
            f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]


def visit(browser: Any, url: str, theme: str) -> Visit:
    """A new tab of a browser that prefers a theme. The page's policy is set aside for axe alone, which is injected."""
    context = browser.new_context(
        base_url=url, color_scheme=theme, viewport={"width": WIDTH, "height": HEIGHT}, bypass_csp=True
    )
    context.set_default_timeout(60_000)  # a shared machine may be slow
    return Visit(page=context.new_page(), theme=theme)
