"""The same-seed rule: trial n is a function of the seed, of n, and of the trials up to n - D."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace

import pytest

from kernels.config import GemmConfig, Sm90GemmConfig
from tests.tuner.support import SPACE
from tuner.search.knobs import KnobSpace
from tuner.search.sampler import ConfigSampler, SamplerError, seed_of
from tuner.search.searched import SearchedSpace

KINDS = ("tpe", "random", "brute")
ALL_KINDS = (*KINDS, "learned")


def made(kind: str, *, seed: int = 7, in_flight: int = 3, space: SearchedSpace = SPACE) -> ConfigSampler:
    """A sampler over the whole space of the test problem."""
    return ConfigSampler(kind, space, seed=seed, in_flight=in_flight)


def time_us(config: GemmConfig) -> float | None:
    """A made-up cost; every fifth config fails."""
    draw = random.Random(config.key).random()
    return None if draw < 0.2 else config.blk_n + config.pipe_depth + draw


def drive(sampler: ConfigSampler, numbers: range, history: dict[int, GemmConfig]) -> None:
    """Ask for these numbers, telling each trial at once."""
    for number in numbers:
        config = sampler.ask(number)
        assert config is not None
        history[number] = config
        sampler.tell(number, config, time_us(config))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sampler_rebuilt_from_stored_trials_asks_as_if_it_had_never_stopped(kind: str) -> None:
    """Killed after any trial and rebuilt, the rest of the sequence is identical."""
    whole: dict[int, GemmConfig] = {}
    drive(made(kind), range(40), whole)
    for killed_at in (1, 9, 17, 26, 39):
        sampler = made(kind)
        again = {number: whole[number] for number in range(killed_at)}
        for number, config in again.items():
            sampler.claim(config)
            sampler.tell(number, config, time_us(config))
        drive(sampler, range(killed_at, 40), again)
        assert again == whole


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_order_in_which_trials_finish_changes_nothing(kind: str) -> None:
    """Trial n sees those up to n - D however early the later ones were told."""
    prompt: dict[int, GemmConfig] = {}
    drive(made(kind), range(30), prompt)
    sampler, late, rng = made(kind), {}, random.Random(0)
    for first in range(0, 30, 3):
        batch = []
        for number in range(first, first + 3):
            config = sampler.ask(number)
            assert config is not None
            late[number] = config
            batch.append(number)
        rng.shuffle(batch)
        for number in batch:
            sampler.tell(number, late[number], time_us(late[number]))
    # A window of three that is told only when it is full sees n - 1, n - 2 or n - 3: never more than n - D allows.
    assert late == prompt


def test_trial_waits_until_everything_it_must_see_was_told() -> None:
    """Asked too early it would answer differently, so it refuses."""
    sampler = made("random", in_flight=2)
    first, second = sampler.ask(0), sampler.ask(1)
    assert first is not None
    assert second is not None
    assert not sampler.ready(2)
    with pytest.raises(RuntimeError, match="trial 2 sees the trials up to 0"):
        sampler.ask(2)
    sampler.tell(1, second, 1.0)
    assert not sampler.ready(2)
    sampler.tell(0, first, 1.0)
    assert sampler.ready(2)


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_asks_for_other_configs(kind: str) -> None:
    """Ten trials of two seeds have at most one in common."""
    one: dict[int, GemmConfig] = {}
    other: dict[int, GemmConfig] = {}
    drive(made(kind, seed=1), range(10), one)
    drive(made(kind, seed=2), range(10), other)
    assert len(set(one.values()) & set(other.values())) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_asked_twice_and_a_small_space_is_used_up(kind: str) -> None:
    """G4: a space of 20 configs gives 20 different ones, then None."""
    configs = SPACE.configs[:20]
    sampler = made(kind, space=SearchedSpace.of_configs(configs))
    asked = []
    for number in range(20):
        config = sampler.ask(number)
        assert config is not None
        sampler.tell(number, config, time_us(config))
        asked.append(config)
    assert set(asked) == set(configs)
    assert sampler.ask(20) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_claimed_is_never_suggested(kind: str) -> None:
    """Starting configs and stored trials are not asked again."""
    configs = SPACE.configs[:10]
    sampler = made(kind, space=SearchedSpace.of_configs(configs), in_flight=8)
    for config in configs[:7]:
        sampler.claim(config)
    assert {sampler.ask(number) for number in range(3)} == set(configs[7:])


def test_tpe_finds_the_good_corner_more_often_than_chance() -> None:
    """Told that narrow tiles are fast, its last 20 of 60 proposals are narrower than random ones."""
    widths = {}
    for kind in ("tpe", "random"):
        history: dict[int, GemmConfig] = {}
        drive(made(kind), range(60), history)
        widths[kind] = sum(history[number].blk_n for number in range(40, 60)) / 20
    assert widths["tpe"] < 0.8 * widths["random"]


def test_every_proposal_is_worth_asking() -> None:
    """Proposals of TPE that a check rejects are moved to the nearest one that none does."""
    history: dict[int, GemmConfig] = {}
    drive(made("tpe"), range(50), history)
    assert [SPACE.rejection(config) for config in history.values()] == [None] * 50


def test_preset_outside_the_space_is_not_told_to_the_model() -> None:
    """A knob value that is no choice has no parameter."""
    knobs = KnobSpace("sm_90a", SPACE.choices)
    assert knobs.params(Sm90GemmConfig(blk_n=72)) is None
    inside = SPACE.configs[5]
    params = knobs.params(inside)
    assert params is not None
    assert knobs.config(params) == inside


def test_seed_does_not_depend_on_the_interpreters_hash() -> None:
    """The value is written down here: PYTHONHASHSEED must not change it."""
    assert seed_of(0, 1, 2) == 1968741870


def test_shuffled_yields_every_config_once_without_listing_them() -> None:
    """The lazy shuffle is a permutation."""
    configs = list(SPACE.shuffled(random.Random(3)))
    assert len(configs) == len(SPACE.configs) == len(set(configs))
    assert configs[:50] != list(SPACE.configs[:50])


def test_unknown_sampler_is_refused_with_those_there_are() -> None:
    """The message lists them."""
    with pytest.raises(
        SamplerError, match="unknown sampler 'magic': use one of learned, tpe, gp, cmaes, random, brute"
    ):
        made("magic")


def test_optuna_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No log line for the study in memory; warnings are errors in this suite anyway."""
    with caplog.at_level(logging.INFO):
        drive(made("tpe"), range(15), {})
    assert not caplog.records


def test_suggestion_takes_a_few_milliseconds_at_50_trials() -> None:
    """4 ms of an idle core; the bound leaves room for a machine whose caches others use as well."""
    sampler = made("tpe")
    history: dict[int, GemmConfig] = {}
    drive(sampler, range(50), history)
    costs_s = []
    for number in range(50, 60):
        started_s = time.thread_time()
        config = sampler.ask(number)
        costs_s.append(time.thread_time() - started_s)
        assert config is not None
        sampler.tell(number, config, time_us(config))
    assert sorted(costs_s)[5] < 0.06


def test_nearest_of_some_places_are_sorted_by_the_steps_of_each_knob() -> None:
    """A knob counts up to 1: by its steps where it is a number, else by being another one; ties as they were drawn."""
    rng = random.Random(3)
    config, places = SPACE.configs[5], [rng.randrange(len(SPACE.configs)) for _ in range(60)]

    expected = [
        SPACE.configs[place] for place in sorted(places, key=lambda at: SPACE.distance(config, SPACE.configs[at]))
    ]
    assert list(SPACE.nearest(config, places)) == expected
    listed = replace(SPACE, configs=[SPACE.configs[place] for place in places])
    assert list(listed.nearest(config, range(len(places)))) == expected
