"""Shapes with which other tuners crashed or ran for a day."""

from __future__ import annotations

import pytest

from kernels.compile import compile_kernel
from kernels.problem import GemmProblem
from search_space.request import Budget, TuneRequest
from search_space.starting import starting_configs
from tests.tuner.support import PROFILE, fake
from tests.tuner.test_loop import Clock
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.records import State


@pytest.mark.parametrize("shape", ["1536x256x2048", "128x512x147456"])
def test_a17_shape_that_faulted_elsewhere_compiles_and_keeps_every_structural_rule(shape: str) -> None:
    """A17: the first starting config; tests/gpu runs it on a card, under memcheck too."""
    problem = GemmProblem.parse(shape)
    kernel = compile_kernel(problem, starting_configs(problem, PROFILE)[0], PROFILE.sm_count, check_structure=True)
    assert (kernel.findings, kernel.unjudged, kernel.spill_bytes) == ((), (), 0)


def test_a19_job_of_17_rows_ends_with_its_wall_budget_and_its_best_so_far() -> None:
    """A19: 1,000 trials do not fit into its 5 minutes."""
    problem = GemmProblem(m=17, n=7168, k=4096)
    asked = TuneRequest(problem=problem, arch="sm_90a", budget=Budget(trials=1000, wall_s=300.0), sampler="random")
    result = tune_study(asked, fake(), MemoryRecorder(), clock=Clock(2.0))
    assert result.state is State.PARTIAL
    assert "300 s, the wall budget" in result.reason
    assert result.winner is not None
    assert 0 < len(result.trials) < 1000
