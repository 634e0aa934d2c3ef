"""The configs worth asking, as a sequence."""

from __future__ import annotations

import random
from itertools import product

import pytest

from kernels.config import CONFIG_CLASSES
from kernels.devices import DeviceProfile, profile_named
from kernels.problem import GemmProblem
from search_space.askable import askable_among, askable_configs
from search_space.checks import rejection
from search_space.space import ORDER_KNOBS, Choices, branches_of, choices, count_legal, forms
from search_space.starting import starting_configs

H200, B200 = profile_named("h200"), profile_named("b200")
SMALL = GemmProblem(m=16, n=720, k=2880)

COMMON: Choices = {
    "pipe_depth": (2, 5, 8),
    "cta_group": (1, 2),
    "num_consumers": (1, 2),
    "blk_m": (64, 128),
    "blk_n": (16, 64, 128),
    "blk_k": (64,),
    "epi_n": (16,),
    "epi_stages": (1, 4),
}
REDUCED: dict[str, Choices] = {
    "sm_90a": {
        **COMMON,
        "epi_n": (8, 16),
        "share": ("A", "B"),
        "schedule": ("cooperative",),
        "swap_ab": (False, True),
        "split_k": (1, 4),
        "load": ("tma", "cp_async"),
    },
    "sm_100a": {
        **COMMON,
        "acc_stages": (1, 2),
        "swap_ab": (False, True),
        "split_k": (1, 4),
        "scheduler": ("static", "clc"),
    },
}


@pytest.mark.parametrize("shape", ["4096x4096x4096", "64x7168x4096", "33x264x40"])
@pytest.mark.parametrize("profile", [H200, B200], ids=["h200", "b200"])
def test_askable_configs_are_exactly_those_that_are_not_rejected(shape: str, profile: DeviceProfile) -> None:
    """Checking branches instead of configs loses nothing, against the brute product of a reduced space."""
    problem, arch = GemmProblem.parse(shape), profile.arch.name
    values = REDUCED[arch] | {knob: choices(arch)[knob] for knob in ORDER_KNOBS}
    found = [config.key for config in askable_among(problem, profile, branches_of(arch, values))]
    brute = (
        CONFIG_CLASSES[arch].from_dict(dict(zip(values, point, strict=True)))
        for form in forms(arch, values)
        for point in product(*form.values())
    )
    assert len(found) == len(set(found)) > 0
    assert set(found) == {config.key for config in brute if rejection(problem, config, profile) is None}


def test_askable_configs_are_a_sequence_in_a_fixed_order() -> None:
    """Length, indices from both ends, slices and iteration agree."""
    askable = askable_configs(SMALL, H200)
    listed = list(askable)
    assert len(listed) == len(askable) == len(set(listed))
    assert 1000 < len(askable) < count_legal(SMALL, H200)
    assert [askable[0], askable[-1]] == [listed[0], listed[-1]]
    assert askable[5:50:7] == listed[5:50:7]
    assert list(askable_configs(SMALL, H200)) == listed
    with pytest.raises(IndexError, match=f"config {len(askable)} of {len(askable)}"):
        askable[len(askable)]


def test_starting_configs_and_random_draws_are_among_the_askable_ones() -> None:
    """A draw costs no rejections."""
    askable = askable_configs(SMALL, H200)
    assert set(starting_configs(SMALL, H200)) <= set(askable)
    rng = random.Random(1)
    assert all(rejection(SMALL, rng.choice(askable), H200) is None for _ in range(200))


def test_problem_that_cannot_be_served_has_nothing_to_ask() -> None:
    """An empty sequence, not an exception: the study ends with the rule as its reason."""
    assert len(askable_configs(GemmProblem(m=64, n=36, k=64), B200)) == 0
    assert len(askable_configs(GemmProblem(m=64, n=36, k=64), H200)) > 0
    assert len(askable_configs(GemmProblem(m=2**31 - 1, n=8192, k=8192), B200)) == 0
