"""The measured part of the knobs' reference, on a landscape small enough to reckon by hand."""

from __future__ import annotations

import pytest

from docs.knob_effects import Timed, alone, costs, recorded, rows
from kernels.config import Sm90GemmConfig

SHALLOW, DEEP = Sm90GemmConfig(pipe_depth=2), Sm90GemmConfig(pipe_depth=4)
DEEP_AND_NARROW = Sm90GemmConfig(pipe_depth=4, blk_n=128)


def timed(times_us: dict[Sm90GemmConfig, float]) -> Timed:
    """A landscape of these configs."""
    return Timed(problem="1x1x1 bf16", device="NVIDIA H200", arch="sm_90a", times_us=dict(times_us))


SMALL = timed({SHALLOW: 15.0, DEEP: 12.0, DEEP_AND_NARROW: 10.0})
OTHER = timed({SHALLOW: 20.0, DEEP: 22.0})


def test_value_costs_what_its_best_config_loses() -> None:
    """Everything else may be chosen anew: the deep pipeline is judged by its best tile."""
    shallow, deep = costs("pipe_depth", [SMALL, OTHER])
    assert (shallow.value, shallow.landscapes, deep.value) == (2, 2, 4)
    assert (shallow.least, shallow.middle, shallow.most) == pytest.approx((1.0, 1.25, 1.5))
    assert (deep.least, deep.most) == pytest.approx((1.0, 1.1))


def test_knob_alone_compares_configs_that_differ_in_nothing_else() -> None:
    """The narrow tile differs in two knobs from the shallow pipeline, so it is in no set of pipe_depth."""
    found = alone("pipe_depth", [SMALL, OTHER])
    assert found is not None
    assert found.sets == 2
    assert (found.middle, found.most) == pytest.approx((1.175, 1.25))
    assert alone("raster", [SMALL]) is None


def test_every_knob_of_the_recorded_landscapes_has_a_measured_effect() -> None:
    """Or says where else it was measured."""
    found = rows(Sm90GemmConfig.knobs(), recorded())
    assert [name for name, _, _ in found] == [f"`{knob}`" for knob in Sm90GemmConfig.knobs()]
    assert all(text for _, _, text in found)
    assert sum(len(one.times_us) for one in recorded()) > 4_000
