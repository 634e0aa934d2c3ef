"""The space: its choices, its size, and the legal configs among them."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import islice, product
from math import prod

import pytest

from kernels.arch import ARCHES
from kernels.config import CONFIG_CLASSES, GemmConfig, Sm90GemmConfig
from kernels.devices import PROFILES, DeviceProfile, profile_named
from kernels.errors import ConfigError
from kernels.problem import GemmProblem
from kernels.resources import resources_of
from kernels.rules import config_violation, violation
from search_space.space import (
    Choices,
    NoLegalConfigError,
    choices,
    count_legal,
    enumerate_configs,
    forms,
    is_legal,
    is_searched,
    legal_configs,
    loads_plainly,
    random_legal,
    size,
)

SQUARE = GemmProblem(m=4096, n=4096, k=4096)
H200, B200 = profile_named("h200"), profile_named("b200")

REDUCED: dict[str, Choices] = {
    "sm_90a": {
        "pipe_depth": (2, 5, 16),
        "cta_group": (1, 2),
        "num_consumers": (1, 2, 3),
        "blk_m": (64, 128, 192),
        "blk_n": (16, 24, 48, 208, 256),
        "blk_k": (32, 128),
        "l2_group_size": (32,),
        "raster": ("m",),
        "epi_n": (8, 16, 48, 64, 128),
        "epi_stages": (1, 4),
        "share": ("A", "B"),
        "schedule": ("cooperative",),
        "swap_ab": (False, True),
        "split_k": (1, 2, 8),
        "load": ("tma", "cp_async"),
    },
    "sm_100a": {
        "pipe_depth": (2, 4, 8),
        "cta_group": (1, 2),
        "num_consumers": (1, 2),
        "blk_m": (64, 128),
        "blk_n": (16, 48, 128, 144, 256),
        "blk_k": (32, 64, 128),
        "l2_group_size": (8,),
        "raster": ("m", "n-serpentine"),
        "epi_n": (16, 32, 128),
        "epi_stages": (1, 4),
        "acc_stages": (1, 2),
        "swap_ab": (False, True),
        "split_k": (1, 3),
        "scheduler": ("static", "clc"),
    },
}


@pytest.mark.parametrize("arch", ARCHES)
def test_every_knob_has_choices_and_the_default_config_is_a_point_of_the_space(arch: str) -> None:
    """The space names exactly the knobs of the config class, in its order."""
    space = choices(arch)
    assert tuple(space) == CONFIG_CLASSES[arch].knobs()
    assert all(getattr(CONFIG_CLASSES[arch](), knob) in values for knob, values in space.items())
    assert all(len(set(values)) == len(values) for values in space.values())


@pytest.mark.parametrize("arch", ARCHES)
def test_size_is_the_exact_product_and_space_is_found_by_name_or_architecture(arch: str) -> None:
    """Counted, not estimated."""
    assert size(arch) == prod(len(values) for values in choices(arch).values())
    assert choices(ARCHES[arch]) == choices(arch)
    assert size("sm_90a") == 15 * 2 * 3 * 3 * 20 * 3 * 6 * 4 * 9 * 4 * 2 * 2 * 2 * 10 * 2 * 2


def test_unknown_architecture_has_no_space() -> None:
    """The error lists those there are."""
    with pytest.raises(ConfigError, match="unknown arch 'sm_80': use one of sm_90a, sm_100a"):
        choices("sm_80")


@pytest.mark.parametrize("arch", ARCHES)
def test_pruned_enumeration_yields_what_the_rules_leave_of_the_full_product(arch: str) -> None:
    """Cutting branches early loses nothing and lets nothing through, checked against the brute product."""
    space = REDUCED[arch]
    everything = (
        CONFIG_CLASSES[arch].from_dict(dict(zip(space, point, strict=True)))
        for form in forms(arch, space)
        for point in product(*form.values())
    )
    legal = {config.key for config in everything if config_violation(config) is None}
    found = [config.key for config in enumerate_configs(arch, space)]
    assert len(found) == len(set(found))
    assert set(found) == legal
    assert len(legal) > 100


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_enumeration_is_lazy_and_starts_at_once(profile: DeviceProfile) -> None:
    """A million configs are not built to look at the first ones."""
    first = list(islice(legal_configs(SQUARE, profile), 500))
    assert len({config.key for config in first}) == 500
    assert all(violation(SQUARE, config, profile.sm_count) is None for config in first)


def _legal_points(space: Choices, profile: DeviceProfile, tries: int) -> list[GemmConfig]:
    """The legal ones among random points of a product: an estimate that shares no code with the pruning."""
    rng = random.Random(11)
    points = (
        CONFIG_CLASSES[profile.arch.name].from_dict({knob: rng.choice(values) for knob, values in space.items()})
        for _ in range(tries)
    )
    return [
        config
        for config in points
        if violation(SQUARE, config, profile.sm_count) is None and loads_plainly(SQUARE, config)
    ]


@pytest.mark.parametrize("profile", [H200, B200], ids=["h200", "b200"])
def test_count_of_legal_configs_agrees_with_random_points_of_the_forms(profile: DeviceProfile) -> None:
    """Counted without listing, within the error of the sample."""
    tries, estimate, variance = 2000, 0.0, 0.0
    for form in forms(profile.arch.name, choices(profile.arch)):
        points = prod(len(values) for values in form.values())
        share = len(_legal_points(form, profile, tries)) / tries
        estimate += points * share
        variance += points**2 * share * (1 - share) / tries
    assert count_legal(SQUARE, profile) == pytest.approx(estimate, abs=4 * variance**0.5)


def test_forms_are_disjoint_and_every_legal_config_of_one_is_searched() -> None:
    """A config that two forms hold would be drawn twice as often."""
    rng = random.Random(2)
    for _ in range(200):
        config = random_legal(SQUARE, H200, rng)
        assert is_searched(config)
        holding = [
            form
            for form in forms("sm_90a", choices("sm_90a"))
            if all(getattr(config, knob) in values for knob, values in form.items())
        ]
        assert len(holding) == 1
    assert not is_searched(Sm90GemmConfig(swap_ab=True, cta_group=2))


def test_all_forms_of_the_hopper_template_are_drawn() -> None:
    """Turns, swapped operands and parts of K are there beside the plain form."""
    rng = random.Random(4)
    draws = [random_legal(SQUARE, H200, rng) for _ in range(600)]
    assert {(d.swap_ab, d.schedule, d.split_k > 1) for d in draws if isinstance(d, Sm90GemmConfig)} == {
        (False, "cooperative", False), (False, "cooperative", True), (False, "pingpong", False),
        (True, "cooperative", False), (True, "cooperative", True),
    }  # fmt: skip


@pytest.mark.parametrize("shape", ["64x36x64", "1x705x704", "999x1001x1000", "5x3x8"])
def test_problem_whose_d_has_no_16_byte_rows_is_served_on_hopper_alone(shape: str) -> None:
    """With either operand on the wide side: threads store D."""
    problem, rng = GemmProblem.parse(shape), random.Random(9)
    assert 0 < count_legal(problem, H200) <= count_legal(SQUARE, H200)
    draws = [random_legal(problem, H200, rng) for _ in range(400)]
    assert all(is_legal(problem, draw, H200) for draw in draws)
    assert {draw.to_dict()["swap_ab"] for draw in draws} == {False, True}
    assert count_legal(problem, B200) == 0


@pytest.mark.parametrize("shape", ["64x64x63", "1x705x705", "999x1000x1001", "5x3x1"])
def test_problem_whose_rows_tma_cannot_load_is_served_by_copies(shape: str) -> None:
    """And nothing else is: nobody asks for copies where TMA can load."""
    problem, rng = GemmProblem.parse(shape), random.Random(9)
    draws = [random_legal(problem, H200, rng) for _ in range(50)]
    assert all(is_legal(problem, draw, H200) and draw.to_dict()["load"] == "cp_async" for draw in draws)
    assert count_legal(problem, B200) == 0
    assert {random_legal(SQUARE, H200, rng).to_dict()["load"] for _ in range(50)} == {"tma"}


def test_problem_with_few_blocks_of_k_is_split_no_further() -> None:
    """Each part needs a block: K = 128 has two of 64."""
    problem, rng = GemmProblem(m=64, n=64, k=128), random.Random(9)
    draws = [random_legal(problem, H200, rng) for _ in range(300)]
    assert max(d.split_k for d in draws if isinstance(d, Sm90GemmConfig)) == 2


@pytest.mark.parametrize("profile", [H200, B200], ids=["h200", "b200"])
def test_device_without_room_for_a_pair_has_configs_of_single_ctas_only(profile: DeviceProfile) -> None:
    """With one SM no cluster of two can run; the count follows without listing."""
    single = replace(profile, sm_count=1)
    rng = random.Random(5)
    assert {random_legal(SQUARE, single, rng).cta_group for _ in range(200)} == {1}
    assert 0 < count_legal(SQUARE, single) < count_legal(SQUARE, profile)


def test_problem_that_no_template_serves_has_no_legal_config() -> None:
    """Zero, and an error with the rule where one config is wanted."""
    odd = GemmProblem(m=64, n=36, k=64)
    assert count_legal(odd, B200) == 0
    with pytest.raises(NoLegalConfigError, match="n = 36 is not a multiple of 8"):
        random_legal(odd, B200, random.Random(0))
    with pytest.raises(NoLegalConfigError):
        next(legal_configs(odd, B200))
    with pytest.raises(NoLegalConfigError, match="0 SMs"):
        random_legal(SQUARE, replace(H200, sm_count=0), random.Random(0))


@pytest.mark.parametrize("profile", [H200, B200], ids=["h200", "b200"])
def test_random_draws_are_legal_within_resources_and_repeat_with_the_seed(profile: DeviceProfile) -> None:
    """Equal generators draw equal configs; every one fits the SM."""
    draws = [random_legal(SQUARE, profile, rng) for rng in [random.Random(7)] for _ in range(300)]
    again = random.Random(7)
    assert draws == [random_legal(SQUARE, profile, again) for _ in range(300)]
    assert len(set(draws)) > 290
    for config in draws:
        assert is_legal(SQUARE, config, profile)
        assert resources_of(config).smem_bytes <= profile.arch.smem_bytes
        assert all(getattr(config, knob) in values for knob, values in choices(profile.arch).items())


def test_random_draws_are_uniform_over_the_legal_configs() -> None:
    """Shares of a knob among draws match its shares among legal points of the product (not among its choices)."""
    rng = random.Random(3)
    draws = Counter(random_legal(SQUARE, B200, rng).num_consumers for _ in range(1500))
    points = Counter(config.num_consumers for config in _legal_points(choices("sm_100a"), B200, 6000))
    assert draws[2] / draws.total() == pytest.approx(points[2] / points.total(), abs=0.08)


def test_random_draw_takes_well_under_a_millisecond() -> None:
    """Processor time, best of several batches, so that a busy machine does not decide."""
    rng = random.Random(0)
    random_legal(SQUARE, H200, rng)
    batches = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(50):
            random_legal(SQUARE, H200, rng)
        batches.append((time.process_time() - start) / 50)
    assert min(batches) < 1e-3


def test_search_space_imports_neither_compiler_nor_gpu_nor_optimizer() -> None:
    """The API imports it, so it must stay light."""
    code = (
        "import sys\n"
        "heavy = ('tvm', 'tvm_ffi', 'torch', 'optuna', 'numpy', 'fastapi', 'sqlalchemy')\n"
        "sys.modules.update(dict.fromkeys(heavy))\n"
        "import search_space.request, search_space.starting, search_space.askable, search_space.model\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
