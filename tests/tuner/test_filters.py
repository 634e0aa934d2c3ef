"""Filters of the search space against recorded landscapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kernels.config import Sm90GemmConfig
from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.checks import MEASURED_FILTERS, rejection
from tests.soak.filters import NOISE, dropped, filters_that_drop, looked_at, show
from tuner.landscape import Landscape, read

FOLDER = Path("results/landscapes")
RECORDED = Path("results/verify/filters.json")
H200 = profile_named("h200")
SHORT = FOLDER / "h200-1x2112x7168-bf16.jsonl.gz"


def test_no_filter_drops_a_config_within_the_noise_of_a_landscapes_best() -> None:
    """Of every recorded landscape; a new limit that hides a winner is found here."""
    content = show(FOLDER)
    assert content["summary"]["landscapes"] >= 12
    assert [row["hidden"] for row in content["landscapes"] if row["hidden"]] == []
    recorded = json.loads(RECORDED.read_text())
    assert recorded["summary"]["hidden"] == 0
    assert recorded["summary"]["recorded_with_filters_off"] == 0


def test_filter_that_hides_the_best_is_named() -> None:
    """The best config of a landscape, as if it were one with a double buffer."""
    landscape = read(SHORT)
    best = min(landscape.times_us, key=lambda index: landscape.times_us[index])
    shallow = replace(landscape.configs[best], pipe_depth=2)
    configs = tuple(shallow if index == best else config for index, config in enumerate(landscape.configs))
    changed: Landscape = replace(landscape, configs=configs)
    hidden = looked_at(changed)["hidden"]
    assert [(row["ratio"], row["filters"]) for row in hidden] == [(1.0, ["bytes in flight"])]
    assert looked_at(landscape)["within_noise"] == sum(
        time_us <= NOISE * landscape.best_us for time_us in landscape.times_us.values()
    )


def test_dropped_configs_are_legal_and_turned_away_by_one_filter_alone() -> None:
    """What a GPU would have to time to judge the filters; the same in every run."""
    problem = GemmProblem(m=512, n=4096, k=4096)
    rows = dropped(problem, H200, each=2, drawn=2000)
    assert rows == dropped(problem, H200, each=2, drawn=2000)
    assert {row["filter"] for row in rows} >= {"bytes in flight", "last wave"}
    for row in rows:
        config = Sm90GemmConfig.from_dict(row["config"])
        assert filters_that_drop(problem, config, H200) == [row["filter"]]
        assert rejection(problem, config, H200) is not None
    assert {row["filter"] for row in rows} <= set(MEASURED_FILTERS)
