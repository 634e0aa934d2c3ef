"""`kill -9` of the tuner: a slice of tests.soak.kills."""

from __future__ import annotations

import json
from pathlib import Path

from tests.soak.kills import Nursery, longest_life_s, report_of, run_round


def test_a21_tuner_killed_at_ten_random_moments_loses_no_trial_and_finds_the_same_winner() -> None:
    """A21: studies with TPE and with random search; no finished trial lost, none twice, winners as without a kill."""
    nursery = Nursery()
    rounds = []
    try:
        life_s = longest_life_s(nursery)
        while (left := 10 - sum(one["kills"] for one in rounds)) > 0:
            rounds.append(run_round(len(rounds), left, nursery, life_s))
    finally:
        nursery.close()
    report = report_of(rounds, 10)
    assert report["kills"] == 10
    assert report["problems"] == []


def test_recorded_kills_cover_every_moment_and_left_nothing_amiss() -> None:
    """A21: what the documentation says of results/soak/kills.json."""
    report = json.loads((Path(__file__).parents[2] / "results/soak/kills.json").read_text())
    assert report["kills"] >= 200
    assert report["problems"] == []
    assert report["studies"]["tpe"] == report["studies"]["random"] >= 5
    assert len(report["moments"]) == 5
