"""Moving configs to other problems, and configs as numbers."""

from __future__ import annotations

import random
from math import isfinite

import pytest

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.askable import askable_configs
from search_space.checks import rejection
from search_space.features import KNOB_NAMES, NAMES, features
from search_space.heuristics import heuristic_configs, is_available
from search_space.starting import Tuned, neighbour_configs, preset, starting_configs
from search_space.translate import translated

H200, B200 = profile_named("h200"), profile_named("b200")
SMALL, LARGE = GemmProblem(m=64, n=7168, k=4096), GemmProblem(m=4096, n=4096, k=4096)


def test_legal_config_stays_as_it_is() -> None:
    """Nothing is moved without need."""
    config = starting_configs(LARGE, H200)[0]
    assert translated(config, LARGE, H200) == config


def test_config_of_a_neighbour_becomes_legal_by_few_steps() -> None:
    """A ring that is deeper than the short K needs is cut, the tile stays."""
    deep = next(c for c in askable_configs(SMALL, H200) if c.pipe_depth >= 10 and c.blk_k == 128)
    moved = translated(deep, GemmProblem(m=64, n=7168, k=128), H200)
    assert moved is not None
    assert rejection(GemmProblem(m=64, n=7168, k=128), moved, H200) is None
    assert (moved.blk_m, moved.blk_n, moved.blk_k) == (deep.blk_m, deep.blk_n, deep.blk_k)
    assert moved.pipe_depth < deep.pipe_depth


def test_config_of_another_architecture_has_no_translation() -> None:
    """Their knobs do not compare."""
    assert translated(preset("step9"), LARGE, H200) is None


def test_neighbours_come_nearest_first_and_never_the_problem_itself() -> None:
    """Half the rows is nearer than another card of the same shape family."""
    own, near, far = (starting_configs(GemmProblem(m=m, n=7168, k=4096), H200)[0] for m in (64, 32, 4096))
    tuned = [
        Tuned(problem=GemmProblem(m=4096, n=7168, k=4096), config=far, device=H200.name),
        Tuned(problem=SMALL, config=own, device=H200.name),
        Tuned(problem=GemmProblem(m=32, n=7168, k=4096), config=near, device=H200.name),
    ]
    found = neighbour_configs(SMALL, H200, tuned)
    assert found
    assert found[0] == translated(near, SMALL, H200)
    assert neighbour_configs(SMALL, H200, tuned[1:2]) == ()
    assert tuned[2].distance(SMALL, H200.name) == 1.0
    assert tuned[2].distance(SMALL, "NVIDIA H100 PCIe") == 3.0


def test_sources_can_be_switched_off_and_wrong_ones_are_named() -> None:
    """The model alone, nothing at all, a typing error."""
    assert starting_configs(LARGE, H200, sources=()) == ()
    alone = starting_configs(LARGE, H200, sources=("model",))
    assert set(alone) <= set(starting_configs(LARGE, H200, sources=("model", "presets"))) | set(alone)
    with pytest.raises(ValueError, match="unknown starting source 'luck'"):
        starting_configs(LARGE, H200, sources=("luck",))


def test_blind_starts_use_nothing_measured_on_the_shape() -> None:
    """4096^3 is named by an entry of the table: without it the list is another one."""
    seen = starting_configs(LARGE, H200, sources=("measured",))
    blind = starting_configs(LARGE, H200, sources=("measured",), blind=True)
    assert seen[0] not in blind
    assert set(blind) - set(seen) != set(blind)


@pytest.mark.parametrize(("problem", "profile"), [(SMALL, H200), (LARGE, H200), (LARGE, B200)], ids=str)
def test_features_are_finite_and_named(problem: GemmProblem, profile: object) -> None:
    """One number a name, for random configs of both architectures."""
    assert profile in (H200, B200)
    device = H200 if profile is H200 else B200
    configs = askable_configs(problem, device)
    for config in random.Random(0).sample(range(len(configs)), 30):
        found = features(problem, configs[config], device)
        assert len(found.values) == len(NAMES)
        assert found.values[: len(KNOB_NAMES)] == found.knobs
        assert all(isfinite(value) for value in found.values)


def test_heuristics_are_legal_or_absent() -> None:
    """With the package, configs that can be asked; without it, none; never for a card that it does not know."""
    found = heuristic_configs(LARGE, H200)
    assert bool(found) == is_available()
    assert all(rejection(LARGE, config, H200) is None for config in found)
    assert heuristic_configs(LARGE, B200) == ()
