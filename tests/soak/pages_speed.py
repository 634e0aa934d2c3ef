"""How quick the pages are: the server's time for a study of 50,000 trials, and the first paint in a browser.

    python -m tests.soak.pages_speed --out results/host/pages.json

The API runs alone on loopback, as users start it. Pages are painted in one tab, with the browser's cache turned off.
Exit status 1 when a limit is passed at the median; `--limits-on min` judges by the quickest visit,
for a machine that others use meanwhile (the load is recorded).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from db.database import Database
from tests.api.browsing import Site, Visit, browser, visit
from tests.api.stored import store_all, store_large_study
from tests.soak.best_latency import cpu_s, machine, serving, spread_ms, timed_ms
from tests.soak.report import hand_over

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = 1
LIMIT_STUDY_MS = 500.0
LIMIT_PAINT_MS = 300.0
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def questions(study: str, trials: int) -> dict[str, str]:
    """Pages of the large study: both ends, the middle, both orders, filters, and the part about the knobs."""
    path = f"/studies/{study}"
    return {
        "first page": path,
        "middle": f"{path}?after={trials // 2}",
        "last, backwards": f"{path}?before={trials}",
        "fastest first": f"{path}?order=fastest",
        "one outcome": f"{path}?outcome=REJECTED&after={trials // 2}",
        "a reason that is nowhere": f"{path}?reason=nowhere",
        "curve": f"{path}/curve",
        "knobs": f"{path}/knobs",
    }


def study_times(url: str, pid: int, site: Site, trials: int, rounds: int) -> dict[str, Any]:
    """Time of each question on a kept connection, and the server's CPU time for it."""
    found = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for name, path in questions(site.study, trials).items():
            before_s = cpu_s(pid)
            times_ms = [timed_ms(partial(client.get, path)) for _ in range(rounds)]
            server_cpu_ms = (cpu_s(pid) - before_s) / rounds * 1e3
            found[name] = {
                "min_ms": round(min(times_ms), 1),
                **spread_ms(times_ms),
                "server_cpu_ms": round(server_cpu_ms, 1),
            }
            print(name, found[name], file=sys.stderr, flush=True)
    return found


def paint_times(site: Site, rounds: int) -> dict[str, Any]:
    """First contentful paint of each page."""
    found: dict[str, Any] = {}
    with browser() as chrome:
        tab = visit(chrome, site.url, "light")
        tab.page.context.new_cdp_session(tab.page).send("Network.setCacheDisabled", {"cacheDisabled": True})
        for name, path in site.paths().items():
            times_ms = [_painted_ms(tab, path) for _ in range(rounds)]
            found[name] = {"min_ms": round(min(times_ms), 1), **spread_ms(times_ms)}
            print(name, found[name], file=sys.stderr, flush=True)
    return found


def _painted_ms(tab: Visit, path: str) -> float:
    tab.page.goto(path)
    tab.page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
    return float(tab.page.evaluate(PAINT))


def measured(trials: int, rounds: int) -> dict[str, Any]:
    """Everything."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        database_url = f"sqlite:///{home / 'tuner.db'}"
        with Database.open(database_url) as database:
            stored, study = store_all(database), store_large_study(database, trials)
        with serving(home, database_url) as (url, pid):
            site = Site(url=url, result=stored.newest, earlier=stored.results[0], study=study)
            asked = study_times(url, pid, site, trials, rounds)
            painted = paint_times(site, rounds)
    return {
        "schema": SCHEMA,
        "command": "python -m tests.soak.pages_speed --out results/host/pages.json",
        "machine": machine(),
        "trials": trials,
        "limits_ms": {"study": LIMIT_STUDY_MS, "first_paint": LIMIT_PAINT_MS},
        "study": asked,
        "first_paint": painted,
    }


def table(report: dict[str, Any]) -> str:
    """The times as Markdown, with how busy the machine was."""
    machine = report["machine"]
    busy = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} at the end of the run."
    lines = [busy, "", "| | median ms | quickest ms | server CPU ms |", "|---|---|---|---|"]
    for name, one in report["study"].items():
        what = f"study of {report['trials']:,} trials, {name}"
        lines.append(f"| {what} | {one['p50_ms']:.0f} | {one['min_ms']:.0f} | {one['server_cpu_ms']:.0f} |")
    for name, one in report["first_paint"].items():
        lines.append(f"| first paint, {name} | {one['p50_ms']:.0f} | {one['min_ms']:.0f} | |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every page keeps its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limits-on", choices=("p50", "min"), default="p50")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a report's times as a table, measure nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    report = measured(options.trials, options.rounds)
    which = f"{options.limits_on}_ms"
    kept = {
        "study": all(one[which] <= LIMIT_STUDY_MS for one in report["study"].values()),
        "first_paint": all(one[which] <= LIMIT_PAINT_MS for one in report["first_paint"].values()),
    }
    hand_over({**report, "judged_by": which, "kept": kept}, options.out)
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
