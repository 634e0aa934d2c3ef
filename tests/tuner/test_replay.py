"""Replays: the exact random search, the score, studies that repeat, and nothing known of the landscape itself."""

from __future__ import annotations

import json
import random
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from kernels.problem import GemmProblem
from search_space.starting import SOURCES, Tuned
from tests.tuner import synthetic
from tuner import landscape
from tuner.replay import (
    Arena,
    Course,
    ReplayError,
    ReplayOptions,
    Strategy,
    chance_of,
    cutoff,
    expected_minimum,
    score,
    simulate,
)
from tuner.replay_report import Plan, complete, plots, replay, samples_of
from tuner.search.cost_model import CostModel

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = ("32x2560x5120", "512x4096x4096", "4096x4096x4096")
OPTIONS = ReplayOptions(trials=20, in_flight=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three made-up landscapes."""
    folder = tmp_path_factory.mktemp("landscapes")
    for shape in SHAPES:
        synthetic.write(folder, shape, size=100)
    return folder


@pytest.fixture(scope="module")
def arena(folder: Path) -> Arena:
    """One of them."""
    return Arena(landscape.read_folder(folder)[0])


@pytest.mark.parametrize("draws", [1, 2, 3, 6])
def test_expected_minimum_is_the_mean_over_all_sets(draws: int) -> None:
    """Against every set of 6 values, with two equal ones."""
    values = [5.0, 1.0, 2.5, 2.5, 9.0, 4.0]
    assert expected_minimum(values, draws) == pytest.approx(fmean(map(min, combinations(values, draws))))


def test_expected_minimum_refuses_what_cannot_be_drawn() -> None:
    """None, or more than there are."""
    for draws in (0, 4):
        with pytest.raises(ValueError, match=f"{draws} draws from 3 values"):
            expected_minimum([1.0, 2.0, 3.0], draws)


def test_chance_and_cutoff_of_a_random_search() -> None:
    """One good config in 100: half the draws, half the chance; the cutoff is where 95 % of the way is made."""
    assert chance_of(1, 100, 50) == pytest.approx(0.5)
    times = [float(value) for value in range(1, 101)]
    draws = cutoff(times)
    goal = 50.5 - 0.95 * 49.5
    assert expected_minimum(times, draws) <= goal < expected_minimum(times, draws - 1)


def test_score_is_one_for_the_optimum_at_once_and_zero_for_the_expected_random_search() -> None:
    """And below zero for a search that never moves from the worst."""
    times = [float(value) for value in range(1, 101)]
    draws = 20

    def course(best: list[float]) -> Course:
        return Course(best_us=tuple(best), wall_s=tuple(best), asked=len(best))

    assert score(course([1.0]), times, draws=draws) == 1.0
    expected = [expected_minimum(times, number) for number in range(1, draws + 1)]
    assert score(course(expected), times, draws=draws) == pytest.approx(0.0)
    assert score(course([100.0] * draws), times, draws=draws) < 0


def test_random_strategy_does_as_well_as_is_expected(arena: Arena) -> None:
    """Mean of 60 seeds within 3 % of the exact expectation after 10 candidates."""
    found = fmean(simulate(arena, Strategy("random"), seed, OPTIONS).best_us[9] for seed in range(60))
    assert found == pytest.approx(expected_minimum(arena.times_us.values(), 10), rel=0.03)


@pytest.mark.parametrize("text", ["tpe", "learned", "cmaes", "brute", "random+model"])
def test_replay_repeats_and_counts(arena: Arena, text: str) -> None:
    """The same seed gives the same course; times fall, seconds rise, failed configs are asked and do not count."""
    if text == "cmaes":
        pytest.importorskip("cmaes")
    course = simulate(arena, Strategy.parse(text), 3, OPTIONS)
    assert course == simulate(arena, Strategy.parse(text), 3, OPTIONS)
    assert len(course.best_us) == OPTIONS.trials <= course.asked
    assert list(course.best_us) == sorted(course.best_us, reverse=True)
    assert course.wall_s[0] >= 1.2  # its compile
    assert set(course.best_us) <= set(arena.times_us.values())


def test_learned_sampler_uses_a_space_up(arena: Arena) -> None:
    """Every config once, those that fail too; then it has nothing more to ask."""
    options = ReplayOptions(trials=len(arena.times_us) + 1, in_flight=4)
    course = simulate(arena, Strategy("learned"), 0, options)
    assert course.asked == len(arena.configs)
    assert len(course.best_us) == len(arena.times_us)
    assert course.best_us[-1] == arena.best_us


def test_learned_sampler_beats_a_random_one(arena: Arena) -> None:
    """With nothing but the performance model to start from, on times that only resemble it."""
    learned = simulate(arena, Strategy("learned"), 0, OPTIONS).best_us[-1]
    assert learned < expected_minimum(arena.times_us.values(), OPTIONS.trials)


def test_starts_know_nothing_of_their_own_shape(arena: Arena) -> None:
    """The winner of the very problem among the tuned ones changes nothing."""
    own, sources = arena.landscape, ("neighbours",)
    worst = max(arena.times_us, key=lambda config: arena.times_us[config])
    told = Arena(own, tuned=[Tuned(problem=own.problem, config=worst, device=own.profile.name)])
    assert told.starts(sources) == Arena(own).starts(sources) == ()
    other = Tuned(problem=GemmProblem(m=64, n=2560, k=5120), config=arena.configs[0], device=own.profile.name)
    assert all(config in arena.configs for config in Arena(own, tuned=[other]).starts(sources))


def test_strategies_are_read_and_wrong_ones_named() -> None:
    """In the order of the sources; `starts` is all of them."""
    assert Strategy.parse("tpe+model+presets").name == "tpe+presets+model"
    assert Strategy.parse("random+starts").sources == SOURCES
    with pytest.raises(ReplayError, match="unknown sampler 'magic'"):
        Strategy.parse("magic")
    with pytest.raises(ReplayError, match="unknown source 'luck'"):
        Strategy.parse("tpe+luck")


def test_document_holds_every_strategy_with_intervals_and_pictures(folder: Path) -> None:
    """All landscapes, all seeds; the pictures are SVG that name the strategies and say that times were made up."""
    plan = Plan(folder=folder, strategies=(Strategy("random"), Strategy("learned")), seeds=2, options=OPTIONS)
    said: list[str] = []
    content = json.loads(json.dumps(replay(plan, processes=1, say=said.append)))
    assert len(said) == 2 * len(SHAPES)
    assert content["budgets"] == [8, 16]
    random_found, learned = content["strategies"]
    for one in (random_found, learned):
        for budget in ("8", "16"):
            median = one["at"][budget]["median"]
            assert median["low"] <= median["value"] <= median["high"] <= 1.0
    assert learned["score"]["value"] > random_found["score"]["value"]
    assert [one["shape"] for one in content["landscapes"]] == [one.problem.shape for one in complete(folder)]
    for picture in plots(content).values():
        svg = picture.render()
        assert "learned" in svg
        assert "made up" in svg


def test_unfinished_landscape_is_not_replayed(tmp_path: Path) -> None:
    """Nobody knows its optimum."""
    plain = landscape.unpack(synthetic.write(tmp_path, SHAPES[0], size=40))
    (tmp_path / f"{plain.name}.gz").unlink()
    plain.write_text("".join(line + "\n" for line in plain.read_text().splitlines()[:20]))
    with pytest.raises(landscape.LandscapeError, match="is complete"):
        complete(tmp_path)


def test_cost_model_learns_from_other_problems_and_its_snapshot_is_equal(folder: Path) -> None:
    """Shared bends are learned: closer to the held-out times than the performance model; loaded, it says the same."""
    pytest.importorskip("lightgbm")
    import numpy as np

    own, *others = landscape.read_folder(folder)
    samples = [sample for one in others for sample in samples_of(one)]
    model = CostModel.train(samples)
    assert model is not None
    again = CostModel.load(model.dump())
    known = list(samples_of(own))
    inputs = np.array([sample.features.values for sample in known])
    mean, sd = model.predict(inputs)
    assert np.array_equal(mean, again.predict(inputs)[0])
    assert again.sha256 == model.sha256 == CostModel.train(samples).sha256  # type: ignore[union-attr]
    truth = np.log([sample.time_us / sample.features.model_us for sample in known])
    assert np.std(truth - mean) < np.std(truth)
    assert (sd > 0).all()
    assert np.abs(model.contributions(inputs).sum(axis=1)).max() > 0


def test_too_few_times_teach_nothing(folder: Path) -> None:
    """One problem, or a handful of times."""
    one = landscape.read_folder(folder)[0]
    assert CostModel.train(list(samples_of(one))) is None
    assert CostModel.train(random.Random(0).sample(list(samples_of(one)), 10)) is None
