"""The pages in a browser: submit, watch, cancel, browse, compare, export, in both themes.

Needs Chromium, playwright and axe-core: `make test-browser` brings the latter two. Screenshots lie in build/pages.
"""

from __future__ import annotations

import re
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.browsing import AXE, Site, Visit, browser, chromium, serving, visit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.browser

TRIALS = 2000  # of the large study here; 50,000 of them are timed by tests.soak.pages_speed
FITS = "document.documentElement.scrollWidth <= innerWidth"
SLOW = 0.3  # scale of the fake engine: 30 candidates take long enough to be watched


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service."""
    with serving(tmp_path_factory.mktemp("site") / "home", trials=TRIALS, scale=SLOW) as running:
        yield running


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    """The browser."""
    pytest.importorskip("playwright", reason="make test-browser brings it")
    if chromium() is None:
        pytest.skip("no chromium: apt-get install chromium")
    if not AXE.is_file():
        pytest.skip("no axe-core: make test-browser brings it")
    with browser() as launched:
        yield launched


@pytest.fixture(params=["light", "dark"])
def tab(request: pytest.FixtureRequest, chrome: Any, site: Site) -> Iterator[Visit]:
    """A tab, which has nothing to complain about when the test ends."""
    opened = visit(chrome, site.url, request.param)
    yield opened
    opened.page.context.close()
    assert opened.complaints == []


def test_every_page_is_accessible_and_quiet(tab: Visit, site: Site) -> None:
    """No serious finding of axe, no message on the console; each is kept as a picture."""
    for name, path in site.paths().items():
        tab.page.goto(path)
        tab.page.wait_for_load_state("networkidle")
        tab.keep(name)
        assert tab.problems() == [], name
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{name} is wider than the window"
        )


def test_pages_fit_a_narrow_window(tab: Visit, site: Site) -> None:
    """Wide tables and pictures scroll by themselves."""
    tab.page.set_viewport_size({"width": 400, "height": 800})
    for name, path in site.paths().items():
        tab.page.goto(path)
        assert tab.page.evaluate(FITS), name
    tab.page.goto("/submit")
    tab.keep("submit-narrow")


def test_job_is_submitted_watched_and_cancelled(tab: Visit) -> None:
    """By keyboard where a form is concerned; what is shown changes without a reload."""
    page = tab.page
    page.goto("/submit")
    page.select_option("#model", "Qwen 3 8B")
    page.fill("#tokens", "16")
    page.get_by_role("button", name="Fill in its shapes").press("Enter")
    page.wait_for_function("document.querySelector('#shapes').value.includes('16x6144x4096')")
    page.fill("#shapes", "64x7168x4096\n64x7168x0")
    page.wait_for_selector("#check .problems")
    assert "shape 2, k: must be at least 1" in page.inner_text("#check")
    seed = 1 if tab.theme == "dark" else 2  # another theme, another job
    page.fill("#shapes", "64x7168x4096\n512x4096x4096")
    page.select_option("#target", "arch:sm_90a")
    page.fill("#trials", "40")
    page.get_by_text("Seldom needed").click()
    page.fill("#seed", str(seed))
    page.wait_for_selector("#check .good")
    tab.keep("submit-filled")
    page.get_by_role("button", name="Submit", exact=True).press("Enter")
    page.wait_for_url("**/jobs/*")
    page.wait_for_function("Number(document.querySelector('#trials').innerText) >= 3", timeout=90_000)
    page.wait_for_selector("figure svg[aria-label^='Best time so far']")
    page.wait_for_function("!document.querySelector('#live').innerText.includes('not known yet')")
    tab.keep("job-running")
    assert tab.problems() == []
    page.get_by_role("button", name="Cancel and keep what is done").press("Enter")
    page.wait_for_function("document.querySelector('#job-actions').innerText.includes('Ended')", timeout=120_000)
    assert page.inner_text("#job-status").strip() in ("partial", "cancelled")
    assert page.get_by_role("button", name="Cancel and keep what is done").count() == 0
    tab.keep("job-cancelled")
    assert tab.problems() == []


def test_wrong_form_says_so_and_moves_the_focus(tab: Visit) -> None:
    """A screen reader starts at what is wrong; the browser's own line about the status is all there is to hear."""
    page = tab.page
    page.goto("/submit")
    page.fill("#shapes", "8x8x9")
    page.select_option("#target", "arch:sm_100a")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_selector("#problems")
    assert page.evaluate("document.activeElement.id") == "problems"
    assert "k = 9 is not a multiple of 8" in page.inner_text("#problems")
    tab.keep("submit-wrong")
    assert tab.problems() == []
    assert all("422" in line for line in tab.complaints)
    tab.complaints.clear()


def test_results_are_browsed_by_keyboard(tab: Visit, site: Site) -> None:
    """Skip link, pages, result, study, a filter, the next page, the knobs."""
    page = tab.page
    page.goto("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("link", name="Shape map").press("Enter")
    page.select_option("#device", "NVIDIA H200")
    page.get_by_role("button", name="Show", exact=True).press("Enter")
    page.get_by_role("link", name=re.compile("^8457x35x2560 bf16")).press("Enter")
    page.wait_for_url("**/results/*")
    assert "faster than cublaslt_best" in page.inner_text("main")
    page.goto(f"/studies/{site.study}")
    page.get_by_role("link", name="Next page").press("Enter")
    page.wait_for_url("**after=99*")
    page.select_option("#outcome", "REJECTED")
    page.get_by_role("button", name="Show", exact=True).press("Enter")
    page.wait_for_url("**outcome=REJECTED*")
    assert "a reason that names config 3" in page.inner_text("table")
    page.wait_for_selector("text=Read from")
    tab.keep("study-rejected")
    page.goto("/roofline?device=NVIDIA+H200")
    page.locator("svg a").first.press("Enter")
    page.wait_for_url("**/results/*")


def test_devices_and_revisions_are_compared(tab: Visit, site: Site) -> None:
    """Chosen in the form; from a result to the revision before."""
    page = tab.page
    page.goto("/compare")
    page.select_option("#devices-left", "NVIDIA H200")
    page.select_option("#devices-right", "Slow H200")
    page.get_by_role("button", name="Compare devices").press("Enter")
    page.wait_for_url("**/compare/devices*")
    assert "5 problems have an answer on both sides" in page.inner_text("main")
    page.goto(f"/results/{site.result}")
    page.get_by_role("link", name="with this one").press("Enter")
    page.wait_for_url("**/compare/results*")
    assert "driver differs" in page.inner_text("main")


def test_result_of_a_job_is_exported(tab: Visit, site: Site, tmp_path: Path) -> None:
    """From the end of a job to a bundle on the disk."""
    page = tab.page
    page.goto(f"/submit?shapes=64x{1024 if tab.theme == 'dark' else 2048}x1024&target=arch:sm_90a")
    page.fill("#trials", "2")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/jobs/*")
    page.wait_for_selector("#live a:text-is('result')", timeout=120_000)
    page.get_by_role("link", name="result", exact=True).click()
    page.wait_for_url("**/results/*")
    allow = page.locator("#allow")
    if allow.count():
        allow.check()
    page.get_by_role("button", name="Export").click()
    page.wait_for_url("**/exports/*")
    with page.expect_download(timeout=60_000) as download:
        page.get_by_role("link", name=re.compile("^Download")).click(timeout=60_000)
    bundle = tmp_path / "bundle.zip"
    download.value.save_as(bundle)
    assert "manifest.json" in zipfile.ZipFile(bundle).namelist()
    tab.keep("export")
    assert tab.problems() == []


def test_chosen_theme_stays(tab: Visit) -> None:
    """The button turns the theme around, also for the next page."""
    page = tab.page
    page.goto("/")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    button = page.get_by_role("button", name="Dark theme")
    assert button.get_attribute("aria-pressed") == str(tab.theme == "dark").lower()
    button.press("Space")
    assert page.evaluate(paper) != before
    after = page.evaluate(paper)
    page.goto("/jobs")
    assert page.evaluate(paper) == after
    assert (
        page.get_by_role("button", name="Dark theme").get_attribute("aria-pressed") != str(tab.theme == "dark").lower()
    )
