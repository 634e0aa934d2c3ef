"""Starting configs: always some, always legal, always the same."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.devices import PROFILES, DeviceProfile, profile_named
from kernels.errors import ConfigError
from kernels.problem import GemmProblem
from kernels.rules import config_violation
from search_space.checks import rejection
from search_space.model import predict
from search_space.space import choices
from search_space.starting import MEASURED, PRESETS, preset, starting_configs
from tests.search_space.known import WINNERS, Known

H200, B200 = profile_named("h200"), profile_named("b200")
SQUARE = GemmProblem(m=4096, n=4096, k=4096)


def test_presets_are_the_steps_as_points_of_each_space() -> None:
    """All stage blocks of 128 x 128 x 64 and run; only clusters, consumers and depth differ."""
    wanted = {"step7": (1, 1, 2), "step8": (2, 1, 4), "step9": (2, 2, 4)}
    assert list(PRESETS) == [*wanted, *(f"h-{name}" for name in wanted)]
    for name, config in PRESETS.items():
        assert (config.cta_group, config.num_consumers, config.pipe_depth) == wanted[name.removeprefix("h-")]
        assert (config.blk_m, config.blk_n, config.blk_k) == (128, 128, 64)
        assert isinstance(config, Sm90GemmConfig if name.startswith("h-") else Sm100GemmConfig)
        assert config_violation(config) is None
        assert all(getattr(config, knob) in values for knob, values in choices(config.arch).items())
    assert preset("step9").cluster_tile == (512, 256)


def test_unknown_preset_is_refused_with_the_list() -> None:
    """A typing error costs one line."""
    with pytest.raises(ConfigError, match="unknown preset 'step6': presets are step7, step8, step9, h-step7") as error:
        preset("step6")
    assert error.value.knob == "preset"


def test_steps_come_first_on_blackwell() -> None:
    """4096^3: steps 7, 8 and 9 exactly as they are."""
    first = starting_configs(SQUARE, B200)[:3]
    assert first == (preset("step7"), preset("step8"), preset("step9"))


@pytest.mark.parametrize("known", WINNERS[::3], ids=lambda known: str(known.problem))
def test_one_starting_config_is_about_as_good_as_the_measured_best(known: Known) -> None:
    """By the model, within 7 % of the config that won the measurement: the search starts near the best."""
    best = min(predict(known.problem, config, H200).time_us for config in starting_configs(known.problem, H200))
    assert best <= 1.07 * predict(known.problem, known.config, H200).time_us


@pytest.mark.parametrize(
    ("shape", "consumers", "tile"),
    [
        ("4096x4096x4096", 2, (64, 256, 64)),
        ("512x7168x4096", 2, (64, 224, 64)),
        ("64x7168x4096", 1, (64, 64, 128)),
        ("64x4096x7168", 1, (64, 32, 128)),
        ("128x4096x14336", 1, (64, 64, 64)),
    ],
)
def test_measured_config_of_the_shape_class_is_among_the_first(
    shape: str, consumers: int, tile: tuple[int, int, int]
) -> None:
    """What won on a shape is tried on it, ahead of the model's picks."""
    tiles = [(c.num_consumers, (c.blk_m, c.blk_n, c.blk_k)) for c in starting_configs(GemmProblem.parse(shape), H200)]
    assert (consumers, tile) in tiles[:8]


def test_measured_configs_name_where_they_won() -> None:
    """Each entry is a Hopper config with its evidence, for a range of rows."""
    assert len({entry.config for entry in MEASURED}) == len(MEASURED)
    for entry in MEASURED:
        assert entry.where
        assert 1 <= entry.rows[0] <= entry.rows[1]
        assert config_violation(entry.config) is None


def _check(problem: GemmProblem, profile: DeviceProfile) -> tuple[object, ...]:
    found = starting_configs(problem, profile)
    assert len({config.key for config in found}) == len(found)
    assert all(rejection(problem, config, profile) is None for config in found)
    space = choices(profile.arch)
    assert all(getattr(config, knob) in values for config in found for knob, values in space.items())
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(st.integers(1, 300), st.integers(1, 100_000)),
    st.one_of(st.integers(1, 64), st.integers(1, 4000)),
    st.one_of(st.integers(1, 64), st.integers(1, 4000)),
    st.sampled_from([profile.name for profile in PROFILES]),
)
def test_every_servable_problem_has_a_starting_config(m: int, n: int, k: int, name: str) -> None:
    """At least one, none rejected, none twice: N and K multiples of 8 on Blackwell, anything on Hopper."""
    profile = profile_named(name)
    step = 8 if profile.arch.name == "sm_100a" else 1
    assert _check(GemmProblem(m=m, n=step * n, k=step * k), profile)


@pytest.mark.parametrize("profile", [H200, B200], ids=["h200", "b200"])
@pytest.mark.parametrize(
    "shape",
    ["1x8x8", "1x360x360", "64x360x360", "17x360x360", "1x8x100000", "100000x8x8", "2147481599x8x8", "33x264x40"],
)
def test_tiny_ragged_and_extreme_problems_have_starting_configs(shape: str, profile: DeviceProfile) -> None:
    """Shapes with one tile, one k-block, or nothing but rows."""
    assert _check(GemmProblem.parse(shape), profile)


@pytest.mark.parametrize("sm_count", [1, 2, 7, 78])
@pytest.mark.parametrize("profile", [H200, B200], ids=["h200", "b200"])
def test_device_with_few_sms_has_starting_configs(profile: DeviceProfile, sm_count: int) -> None:
    """A slice of a card, or a smaller card of the architecture, is read from the device."""
    small = replace(profile, sm_count=sm_count)
    for shape in ("4096x4096x4096", "1x4096x4096", "64x360x360"):
        assert _check(GemmProblem.parse(shape), small)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("shape", ["4096x4096x4096", "64x7168x4096"])
def test_common_problem_starts_with_12_to_16_configs_in_a_fixed_order(shape: str, profile: DeviceProfile) -> None:
    """Enough to cover the classes, few enough to leave the budget to the search."""
    problem = GemmProblem.parse(shape)
    first = _check(problem, profile)
    assert 12 <= len(first) <= 16
    assert starting_configs(problem, profile) == first


def test_problem_that_cannot_be_served_has_no_starting_config() -> None:
    """N % 8 != 0 on Blackwell, or operands larger than memory: an empty tuple, no exception."""
    assert starting_configs(GemmProblem(m=64, n=36, k=64), B200) == ()
    assert starting_configs(GemmProblem(m=2**31 - 2049, n=8192, k=8192), B200) == ()


def test_starting_configs_are_cheap() -> None:
    """Best of three, once the space is listed: under half a second of processor time."""
    starting_configs(SQUARE, H200)
    times = []
    for _ in range(3):
        start = time.process_time()
        starting_configs(SQUARE, H200)
        times.append(time.process_time() - start)
    assert min(times) < 0.5
