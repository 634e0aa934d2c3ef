"""The pages as a browser gets them: content, errors, paging, and what may not be done from elsewhere."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from api.access import COOKIE
from api.app import create_app
from api.pages.presets import MODELS, shapes_of
from api.pages.replies import STATIC, static_url, with_query
from api.pages.static_files import FILES
from api.settings import ApiSettings
from db import queries
from search_space.knob_effects import effects, pair
from tests.api.conftest import SM90_CONFIG, Service, job_body
from tests.api.stored import few_rows, recorded_rows, store_all, store_large_study, store_row

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = {"m": 4096, "n": 4096, "k": 4096}
LINKS_OF_A_KIND = 2
FORM = {"shapes": "4096x4096x4096", "target": "arch:sm_90a", "mode": "measure", "nonce": "1"}


class Links(HTMLParser):
    """Addresses and forms of a page, and ids of its fields and labels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fields: set[str] = set()
        self.labels: set[str] = set()
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        given = dict(attrs)
        for name in ("href", "src", "action", "hx-get", "hx-post", "sse-connect"):
            if value := given.get(name):
                self.links.append(value)
        if tag in ("input", "select", "textarea") and given.get("type") != "hidden":
            self.fields.add(given.get("id") or "")
        if tag == "label":
            self.labels.add(given.get("for") or "")
        self.inline += [name for name in given if name == "style" or name.startswith(("on", "hx-on"))]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def page(service: Service, path: str, status: int = 200) -> str:
    """The text of a page."""
    response = service.http.get(path, headers={"Accept": "text/html"})
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return response.text


def plain(text: str) -> str:
    """A page without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def post(service: Service, path: str, **fields: Any) -> httpx.Response:
    """Send a form, as the service's own page does."""
    return service.http.post(path, data=fields, headers={"Accept": "text/html", "Sec-Fetch-Site": "same-origin"})


@pytest.fixture
def stored(service: Service) -> Service:
    """The service with the recorded results of an H200."""
    store_all(service.db)
    return service


# ---------------------------------------------------------------------- all pages


def paths_of(service: Service) -> list[str]:
    """One address of every page."""
    results = service.http.get("/v1/results", params={"limit": 100}).json()["items"]
    newest = next(one for one in results if one["revision"] == 2)
    first = next(one for one in results if one["problem"] == newest["problem"] and one["id"] != newest["id"])
    job = service.http.get("/v1/jobs").json()["items"][0]["id"]
    pair_of = {"left": first["id"], "right": newest["id"]}
    made_in = sorted(queries_of_environments(service))
    return [
        *("/", "/submit", "/jobs", "/results", "/map", "/roofline", "/compare", "/login"),
        f"/jobs/{job}",
        f"/jobs/{job}/live",
        f"/studies/{newest['study_id']}",
        f"/studies/{newest['study_id']}/knobs",
        f"/results/{newest['id']}",
        with_query("/map", device="NVIDIA H200", dtype="bf16"),
        with_query("/roofline", device="Slow H200"),
        with_query("/compare/devices", left="NVIDIA H200", right="Slow H200"),
        with_query("/compare/environments", left=made_in[0], right=made_in[-1]),
        with_query("/compare/results", pair_of),
    ]


def queries_of_environments(service: Service) -> list[str]:
    """Environments with revisions."""
    with service.db.read() as session:
        return list(queries.published_environments(session))


def test_every_link_and_file_of_every_page_is_served(stored: Service) -> None:
    """Nothing comes from elsewhere, no script or style is inline, and every field has a label."""
    seen: dict[str, int] = {}
    kinds: Counter[str] = Counter()
    for path in paths_of(stored):
        text = page(stored, path)
        found = Links(text)
        assert found.inline == [], path
        assert found.fields <= found.labels, path
        assert all(link.startswith(("/", "#")) and not link.startswith("//") for link in found.links), path
        for link in set(found.links) - seen.keys():
            kind = re.sub(r"[0-9a-f]{32}", "ID", link)
            kinds[kind] += 1
            if link.startswith("/") and "/events" not in link and kinds[kind] <= LINKS_OF_A_KIND:
                seen[link] = stored.http.get(link).status_code
    forms = {link for link, status in seen.items() if status == 405}  # they take POST
    assert {re.sub(r"[0-9a-f]{32}", "ID", form) for form in forms} <= {
        *("/logout", "/submit/check", "/submit/fill", "/results/ID/export", "/results/ID/pin"),
    }
    asks = {f"/compare/{kind}" for kind in ("devices", "environments", "results")}  # forms that add what they ask
    assert {link for link, status in seen.items() if status not in (200, 405)} == asks
    assert len(seen) > 30


def test_headers_of_a_page_allow_its_own_files_and_nothing_else(service: Service) -> None:
    """No inline code, no frames, no other site; programs keep their stricter policy."""
    headers = service.http.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert service.http.get("/v1/jobs").headers["content-security-policy"] == (
        "default-src 'none'; frame-ancestors 'none'"
    )


def test_files_may_be_kept_under_the_address_with_their_hash(service: Service) -> None:
    """For good there; elsewhere they are asked for again, and 304 says that they are as before."""
    assert {path.name for path in STATIC.iterdir()} == set(FILES)
    hashed = service.http.get(static_url("pages.css"))
    assert "immutable" in hashed.headers["cache-control"]
    assert hashed.headers["content-type"].startswith("text/css")
    again = service.http.get("/static/pages.css", headers={"If-None-Match": hashed.headers["etag"]})
    assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")
    assert service.http.get("/static/..%2freplies.py").status_code == 404
    assert service.http.get("/static/nothing.js").status_code == 404


def test_files_of_others_name_their_licence() -> None:
    """Each vendored file stands in the list, with its version."""
    text = (STATIC / "LICENSES.txt").read_text()
    vendored = [name for name in FILES if name.endswith(".min.js")]
    assert vendored
    assert all(name in text for name in vendored)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/jobs/nothing", 404, "no job 'nothing'"),
        ("/studies/" + "0" * 32, 404, "no study"),
        ("/results/<script>alert(1)<", 404, "no result"),
        ("/exports/" + "0" * 32, 404, "no export"),
        ("/jobs?limit=many", 422, "must be an integer"),
        ("/jobs?state=LATE", 422, "must be"),
        ("/studies/" + "0" * 32 + "?after=1&after=2", 422, "given more than once"),
        ("/compare/devices?left=a", 422, "right: is required"),
        ("/results?device=toaster", 422, "unknown device"),
    ],
)
def test_error_is_a_page(service: Service, path: str, status: int, words: str) -> None:
    """What is wrong, in words, and nothing of the address as markup."""
    text = page(service, path, status)
    assert words in plain(text)
    assert "<script>alert" not in text


def test_text_of_others_is_never_markup(service: Service) -> None:
    """Reasons, device names and knobs come from tuners and imports."""
    evil = "<script>alert('x')</script>"
    job = service.submit()
    study = job["studies"][0]["id"]
    with service.db.write() as session:
        queries.save_trial(
            session, study, 0, config=SM90_CONFIG | {"raster": evil}, config_key="k", outcome="REJECTED", reason=evil
        )
    result = service.add_result(device_name=evil)
    for path in (f"/studies/{study}", f"/results/{result}", "/results", "/map", "/roofline", "/compare", "/"):
        assert evil not in page(service, path), path


# ---------------------------------------------------------------------- overview, jobs


def test_overview_shows_devices_live_jobs_and_results(service: Service) -> None:
    """And says so where there are none."""
    assert "No GPU has been announced" in page(service, "/")
    service.add_device()
    job, result = service.submit(), service.add_result()
    text = page(service, "/")
    assert f'href="/jobs/{job["id"]}"' in text
    assert f'href="/results/{result}"' in text
    assert "NVIDIA H200" in plain(text)


def test_jobs_are_paged_and_filtered(service: Service) -> None:
    """Newest first."""
    ids = [service.submit(seed=seed)["id"] for seed in range(3)]
    first = page(service, "/jobs?limit=2")
    assert ids[2] in first
    assert ids[0] not in first
    following = re.search(r'rel="next" href="([^"]+)"', first)
    assert following is not None
    assert ids[0] in page(service, unescape(following[1]))
    assert "No such job" in page(service, "/jobs?state=FAILED")


def test_job_shows_its_best_time_and_ratio_and_follows_events(service: Service) -> None:
    """The part that changes is asked for when an event arrives."""
    job = service.submit()
    study = job["studies"][0]["id"]
    text = page(service, f"/jobs/{job['id']}")
    assert f'sse-connect="/v1/jobs/{job["id"]}/events"' in text
    assert "not known yet" in text
    service.save_trials(study, 6)
    part = page(service, f"/jobs/{job['id']}/live")
    assert "<html" not in part
    assert 'hx-swap-oob="innerHTML"' in part
    assert "195.0 us, 0.950 of the library" in plain(part)
    assert "Best time so far over 6 trials: 200.00 us at trial 0, 195.00 us at 5" in part
    service.finish(study)
    ended = page(service, f"/jobs/{job['id']}")
    assert "sse-connect" not in ended
    assert "/cancel" not in ended


def test_job_is_cancelled_by_its_button(service: Service) -> None:
    """Back to the page, which says so."""
    job = service.submit()["id"]
    assert f'action="/jobs/{job}/cancel"' in page(service, f"/jobs/{job}")
    reply = post(service, f"/jobs/{job}/cancel")
    assert (reply.status_code, reply.headers["location"]) == (303, f"/jobs/{job}")
    assert "cancelled" in plain(page(service, f"/jobs/{job}"))


def test_job_of_many_studies_is_paged(service: Service) -> None:
    """Fifty at a time."""
    job = service.submit(problems=[{**SHAPE, "m": 8 * m} for m in range(1, 61)])["id"]
    first, second = page(service, f"/jobs/{job}"), page(service, f"/jobs/{job}?start=50")
    assert first.count('id="study-') == 50
    assert second.count('id="study-') == 10
    assert "51 to 60 of 60" in second


# ---------------------------------------------------------------------- submit


def test_form_is_checked_while_it_is_filled_in(service: Service) -> None:
    """By the rules of POST /v1/jobs; each message names its line."""
    asked = {"effort": "normal", "seed": "0", "priority": "0", "protocol": "burst", "dtype": "bf16"}
    good = post(service, "/submit/check", **FORM, **asked).text
    assert "1 problem, each with up to 40 trials or 10 min" in plain(good)
    assert "No shapes yet" in post(service, "/submit/check", **FORM | {"shapes": " \n"}, **asked).text
    for fields, words in (
        ({"shapes": "64x64x64\n64x64x0"}, "shape 2, k: must be at least 1"),
        ({"shapes": "64x64"}, "shape 1: '64x64' is no shape"),
        ({"shapes": "0x64x64"}, "shape 1, m: must be at least 1"),
        ({"trials": "many"}, "trials: must be an integer, got 'many'"),
        ({"trials": "0"}, "budget.trials: must be at least 1"),
        ({"wall_s": "soon"}, "wall_s: must be a number of seconds"),
        ({"wall_s": "nan"}, "budget.wall_s"),
        ({"dtype": "fp8"}, "shape 1, dtype"),
        ({"target": "device:toaster"}, "unknown device"),
        ({"target": "arch:sm_80"}, "unknown arch"),
        ({"seed": "-1"}, "seed: must be at least 0"),
    ):
        problems = post(service, "/submit/check", **FORM | fields).text
        assert 'class="problems"' in problems, fields
        assert words in plain(problems), fields


def test_form_submits_a_job_once(service: Service) -> None:
    """Sent twice it is one job; a changed form is another."""
    replies = [post(service, "/submit", **FORM) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [303, 303]
    assert replies[0].headers["location"] == replies[1].headers["location"]
    other = post(service, "/submit", **FORM | {"shapes": "64x4096x4096 * 3", "trials": "7", "force": "on"})
    assert other.headers["location"] != replies[0].headers["location"]
    job = service.http.get("/v1" + other.headers["location"]).json()
    assert (job["force"], job["studies"][0]["weight"]) == (True, 3.0)
    assert service.study(job["studies"][0]["id"]).request["budget"]["trials"] == 7


def test_wrong_form_comes_back_as_it_was_with_what_is_wrong(service: Service) -> None:
    """Nothing that was typed is lost, nothing is stored."""
    reply = post(service, "/submit", **FORM | {"shapes": "8x8x8\n64x64x0", "trials": "12"})
    assert reply.status_code == 422
    assert "64x64x0</textarea>" in reply.text
    assert 'value="12"' in reply.text
    assert 'role="alert"' in reply.text
    assert service.http.get("/v1/jobs").json()["items"] == []


def test_shapes_of_a_model_fill_the_form(service: Service) -> None:
    """The layers of the model, cut for tensor parallelism, for each number of tokens."""
    reply = post(service, "/submit/fill", model="Llama 3.1 8B", tokens="16, 4096", gpus="2", target="arch:sm_90a")
    assert reply.status_code == 200
    filled = re.search(r"<textarea[^>]*>([^<]*)", reply.text)
    assert filled is not None
    assert filled[1].split() == [
        *("16x3072x4096", "4096x3072x4096", "16x4096x2048", "4096x4096x2048"),
        *("16x14336x4096", "4096x14336x4096", "16x4096x7168", "4096x4096x7168"),
    ]
    wrong = post(service, "/submit/fill", model="Llama 3.1 8B", tokens="few", gpus="2")
    assert "tokens: must be an integer" in plain(wrong.text)


def test_presets_are_shapes_that_can_be_tuned(service: Service) -> None:
    """Every model at every number of GPUs."""
    for model in MODELS:
        for gpus in (1, 2, 4, 8):
            shapes = shapes_of(model, [1, 64], gpus)
            assert shapes
            problems = [{"m": m, "n": n, "k": k} for m, n, k in shapes]
            assert service.http.post("/v1/jobs", json=job_body(problems=problems)).status_code == 202, model


def test_form_offers_what_is_at_hand_first(service: Service) -> None:
    """And measures there by default; without a GPU it estimates."""
    text = page(service, "/submit")
    assert re.search(r'<option value="model" selected>', text)
    service.add_device()
    text = page(service, "/submit")
    assert re.search(r'<option value="device:NVIDIA H200" selected>NVIDIA H200 \(at hand\)', text)
    assert re.search(r'<option value="measure" selected>', text)


# ---------------------------------------------------------------------- study


def numbers(text: str) -> list[int]:
    """Trials of a study's table."""
    return [int(found) for found in re.findall(r'<tr[^>]*>\s*<td class="num">(\d+)</td>', text)]


def follow(service: Service, text: str, rel: str) -> str:
    """The page behind a pager's link."""
    found = re.search(rf'rel="{rel}" href="([^"#]+)', text)
    assert found is not None
    return page(service, unescape(found[1]))


def test_trials_are_paged_in_both_directions(service: Service) -> None:
    """Every trial once, whatever the order; the ends have no further link."""
    study = store_large_study(service.db, 250)
    for order, total in (("number", 250), ("fastest", 188)):
        text = page(service, f"/studies/{study}?order={order}")
        assert 'rel="prev"' not in text
        seen = [numbers(text)]
        while 'rel="next"' in text:
            text = follow(service, text, "next")
            seen.append(numbers(text))
        assert len({number for some in seen for number in some}) == total
        while 'rel="prev"' in text:
            text = follow(service, text, "prev")
            seen.append(numbers(text))
        assert seen[-1] == seen[0]
        assert seen[-2] == seen[1]


def test_curve_of_a_long_study_comes_after_its_page(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page does not wait for it."""
    study = store_large_study(service.db, 40)
    assert "Best time so far over 40 trials" in page(service, f"/studies/{study}")
    monkeypatch.setattr("api.pages.studies.MOST_AT_ONCE", 39)
    assert f'hx-get="/studies/{study}/curve"' in page(service, f"/studies/{study}")
    assert "Best time so far over 40 trials" in page(service, f"/studies/{study}/curve")


def test_trials_are_filtered_by_outcome_and_reason(service: Service) -> None:
    """A percent sign in the text is a percent sign."""
    study = store_large_study(service.db, 40)
    assert numbers(page(service, f"/studies/{study}?outcome=REJECTED")) == list(range(3, 40, 4))
    assert numbers(page(service, f"/studies/{study}?reason=NAMES+config+7")) == [7]
    assert "No such trial" in page(service, f"/studies/{study}?reason=%25")


def test_study_tells_knobs_that_vary_from_those_that_do_not(service: Service) -> None:
    """What is common stands above the table."""
    study = store_large_study(service.db, 40)
    text = plain(page(service, f"/studies/{study}"))
    assert "The same in all rows: cta_group 1" in text
    part = plain(page(service, f"/studies/{study}/knobs"))
    assert "Read from 30 timed trials" in part
    assert "pipe_depth against blk_n" in part or "blk_n against pipe_depth" in part
    few = store_large_study(service.db, 4)
    assert "there is something to tell" in page(service, f"/studies/{few}/knobs")


def test_effect_of_a_knob_is_its_share_of_the_spread() -> None:
    """A knob that decides the time has all of it, one that does nothing none; one value is no knob."""
    trials = [
        ({"deep": depth, "idle": idle, "fixed": 1}, 10.0 * depth)
        for depth in (1, 2)
        for idle in ("a", "b")
        for _ in "xyz"
    ]
    found = effects(trials)
    assert [effect.name for effect in found] == ["deep", "idle"]
    assert [round(effect.share, 9) for effect in found] == [1.0, 0.0]
    assert [(one.value, one.trials, one.best_us) for one in found[0].slices] == [(1, 6, 10.0), (2, 6, 20.0)]
    both = pair(trials[:-3], "deep", "idle")
    assert (both.rows, both.columns) == ((1, 2), ("a", "b"))
    assert both.best_us == ((10.0, 10.0), (20.0, None))
    assert effects(trials[:3]) == []


# ---------------------------------------------------------------------- results


def test_result_says_what_is_known_of_it(service: Service) -> None:
    """Evidence, protocol, clocks, samples, ties, revisions, checks, and how to use and repeat it."""
    row = recorded_rows()[0]
    with service.db.write() as session:
        old = store_row(session, row)
        new = store_row(session, row, factor=0.9)
    text = page(service, f"/results/{new}")
    words = plain(text)
    for expected in (
        *("measured numeric checked", "2, current", "SM clock 1980 MHz", "kind burst", "l2_policy rotate"),
        *("structure clean", "faster than cublaslt_best", f"gemm-tuner reproduce {new} --url http://127.0.0.1"),
        *("modeled, not measured", "Roles and barriers", "2415 launches right and bitwise equal"),
    ):
        assert expected in words, expected
    assert f"Samples of {len(row['samples_us'])} paired rounds" in text
    assert f'href="/results/{old}"' in text
    assert with_query("/compare/results", left=old, right=new).replace("&", "&amp;") in text


def test_result_without_evidence_is_exported_on_request_only(service: Service) -> None:
    """The box must be ticked; the export's page follows it to the end."""
    candidate = service.add_result(publish=False, evidence=["modeled"], median_us=None, modeled_us=12.0)
    assert "I know that it lacks numeric and checked" in plain(page(service, f"/results/{candidate}"))
    refused = post(service, f"/results/{candidate}/export", format="zip")
    assert refused.status_code == 409
    assert "lacks numeric and checked" in plain(refused.text)
    ordered = post(service, f"/results/{candidate}/export", format="wheel", allow_unverified="on")
    path = ordered.headers["location"]
    assert 'hx-trigger="every 1s"' in page(service, path)
    export = service.http.get("/v1" + path).json()
    assert (export["format"], export["allow_unverified"]) == ("wheel", True)
    with service.db.write() as session:
        queries.claim_next_export(session, "tuner")
        queries.finish_export(session, export["id"], state="FAILED", reason="the disk is full")
    ended = page(service, f"{path}?part=true")
    assert "the disk is full" in ended
    assert "hx-trigger" not in ended


def test_revision_is_pinned_and_let_go(service: Service) -> None:
    """By the button of its page."""
    result = service.add_result()
    for answer, pinned in (("yes", True), ("no", False)):
        assert post(service, f"/results/{result}/pin", pinned=answer).status_code == 303
        assert service.result(result).pinned is pinned


def test_config_of_another_version_is_shown_without_an_explanation(service: Service) -> None:
    """A knob that is not known any more must not hide the result."""
    result = service.add_result(config=SM90_CONFIG | {"long_gone": 3})
    text = page(service, f"/results/{result}")
    assert "long_gone" in text
    assert "Pipeline of one CTA" not in text


def test_map_sets_m_against_n_and_k(stored: Service) -> None:
    """One cell a result, with its class of colour; every shape of one card."""
    text = page(stored, with_query("/map", device="NVIDIA H200"))
    shapes = len(few_rows())
    assert f"{shapes} results on NVIDIA H200" in text
    assert len(re.findall(r'aria-label="\d+x\d+x\d+ ', text)) == shapes
    cell = re.search(r'<td class="num ratio (r\d)"><a href="/results/\w+" aria-label="8457x35x2560 bf16: 5.057">', text)
    assert cell is not None
    assert cell[1] == "r6"
    assert "5 results on Slow H200" in page(stored, with_query("/map", device="Slow H200"))
    assert "No such results" in page(stored, with_query("/map", device="NVIDIA H200", modeled="true"))


def test_roofline_names_whose_roof_it_is(stored: Service) -> None:
    """A device without a data sheet gets that of its architecture, and the page says so."""
    assert "has no data sheet" not in page(stored, with_query("/roofline", device="NVIDIA H200"))
    text = plain(page(stored, with_query("/roofline", device="Slow H200")))
    assert "Slow H200 has no data sheet here: the roof is that of NVIDIA H200" in text


def test_comparison_tells_real_differences_from_noise(stored: Service) -> None:
    """Ratios of the times; bold only where the intervals do not touch."""
    text = page(stored, with_query("/compare/devices", left="NVIDIA H200", right="Slow H200"))
    assert "5 problems have an answer on both sides" in text
    assert "<strong>0.800</strong>" in text
    same = page(stored, with_query("/compare/devices", left="NVIDIA H200", right="NVIDIA H200"))
    assert f"{len(few_rows())} problems have an answer on both sides" in same
    assert "<strong>1.000" not in same
    environments = queries_of_environments(stored)
    newer = next(one for one in environments if "|590|" in one)
    older = next(one for one in environments if "|580|" in one and one.startswith("NVIDIA"))
    both = page(stored, with_query("/compare/environments", left=older, right=newer))
    assert "1 problem has an answer on both sides" in both
    assert "<strong>1.031</strong>" in both


# ---------------------------------------------------------------------- who may ask


class Browser:
    """A browser that others than this machine's people use: it keeps cookies, and the service wants tokens."""

    def __init__(self, folder: Path) -> None:
        settings = ApiSettings(
            database_url=f"sqlite:///{folder / 'tuner.db'}", exports_dir=folder, artifacts_dir=folder, host="0.0.0.0"
        )
        self.app = create_app(settings)
        self.cookies = httpx.Cookies()
        self._runner = asyncio.Runner()

    def token(self, name: str, scope: str) -> str:
        """A new token."""
        with self.app.state.database.write() as session:
            return queries.create_token(session, name, scope)[1]

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """One request, with what a browser adds to it."""

        async def send() -> httpx.Response:
            headers = {"Accept": "text/html,*/*", "Sec-Fetch-Site": "same-origin"} | request.pop("headers", {})
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://service.example", headers=headers, cookies=self.cookies
            ) as client:
                response = await client.request(method, path, **request)
                self.cookies = client.cookies
                return response

        return self._runner.run(send())

    def close(self) -> None:
        """Let go of the database."""
        self._runner.close()
        self.app.state.database.close()


@pytest.fixture
def browser(tmp_path: Path) -> Any:
    """A service that is bound to every address, and a browser."""
    made = Browser(tmp_path)
    yield made
    made.close()


def test_browser_brings_its_token_once(browser: Browser) -> None:
    """Every page leads to the form, the form sets a cookie that scripts cannot read, and the pages open."""
    asked = browser.ask("GET", "/results?limit=5")
    assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=/results%3Flimit%3D5")
    assert browser.ask("GET", asked.headers["location"]).status_code == 200
    assert browser.ask("GET", static_url("pages.css")).status_code == 200
    wrong = browser.ask("POST", "/login", data={"token": "gt_wrong"})
    assert wrong.status_code == 401
    assert COOKIE not in browser.cookies
    token = browser.token("ana", "read")
    brought = browser.ask("POST", "/login", data={"token": token, "next": "/results?limit=5"})
    assert (brought.status_code, brought.headers["location"]) == (303, "/results?limit=5")
    flags = brought.headers["set-cookie"].lower()
    assert "httponly" in flags
    assert "samesite=strict" in flags
    assert browser.ask("GET", "/results?limit=5").status_code == 200
    assert browser.ask("GET", "/v1/jobs").status_code == 200
    browser.ask("POST", "/logout")
    assert browser.ask("GET", "/").status_code == 303


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example", "/\\evil.example", ""])
def test_login_leads_to_pages_of_this_service_alone(browser: Browser, target: str) -> None:
    """Whatever the link says."""
    token = browser.token("ana", "read")
    brought = browser.ask("POST", "/login", data={"token": token, "next": target})
    assert brought.headers["location"] == "/"


def test_scope_of_a_token_limits_its_browser(browser: Browser) -> None:
    """Looking needs read, submitting submit, pinning admin; the refusal is a page."""
    for scope, allowed in (("read", 0), ("submit", 2), ("admin", 3)):
        browser.ask("POST", "/login", data={"token": browser.token(scope, scope)})
        assert browser.ask("POST", "/submit/check", data=FORM).status_code == 200
        changes = [
            browser.ask("POST", "/submit", data=FORM | {"nonce": scope}),
            browser.ask("POST", "/jobs/" + "0" * 32 + "/cancel"),
            browser.ask("POST", "/results/" + "0" * 32 + "/pin", data={"pinned": "yes"}),
        ]
        assert [reply.status_code != 403 for reply in changes] == [True] * allowed + [False] * (3 - allowed), scope
        assert all("ScopeTooSmall" in reply.text for reply in changes[allowed:])


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
def test_other_sites_cannot_change_anything(service: Service, headers: dict[str, str]) -> None:
    """Not by a form, not by a script; reading is no change."""
    for path, sent in (("/submit", {"data": FORM}), ("/v1/jobs", {"json": job_body()})):
        reply = service.http.post(path, headers=headers, **sent)
        assert (reply.status_code, reply.json()["error"]) == (403, "ForeignSite")
    assert service.http.get("/v1/jobs").json()["items"] == []
    own = {"Origin": service.url} if "Origin" in headers else {"Sec-Fetch-Site": "same-origin"}
    assert service.http.post("/submit", headers=own, data=FORM).status_code == 303


def test_form_is_read_strictly(service: Service) -> None:
    """A field twice, or bytes that are no form, are refused."""
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    twice = service.http.post("/submit", content="seed=1&seed=2", headers=kind)
    assert twice.status_code == 422
    assert "given more than once" in twice.text
    assert service.http.post("/submit", content=b"\xff\xfe", headers=kind).status_code == 422
