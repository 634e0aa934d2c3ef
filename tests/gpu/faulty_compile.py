"""A compile function that plants real faults in the configs that a file names."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import compile as product
from tests.gpu.plants import PLANTS, compile_planted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem

FUNCTION = "tests.gpu.faulty_compile:compile_variant"
VARIABLE = "GEMM_TUNER_TEST_PLANTS"  # names the file; to be set before the pool starts a worker
BLIND = "blind:"  # before the name of a plant: the structural rules find nothing, so that other gates must


def write_plan(path: Path, plants: Mapping[str, str]) -> None:
    """Plan which config, by its key, gets which plant. Raises KeyError for an unknown plant."""
    for name in plants.values():
        PLANTS[name.removeprefix(BLIND)]
    path.write_text(json.dumps(dict(plants)))
    os.environ[VARIABLE] = str(path)


@functools.cache
def _plan(path: str) -> dict[str, str]:
    plan: dict[str, str] = json.loads(Path(path).read_text())
    return plan


def compile_variant(
    problem: GemmProblem,
    config: GemmConfig,
    sm_count: int,
    delays_ns: dict[str, int] | None = None,
    check_structure: bool = False,
    *rest: Any,
) -> CompiledKernel:
    """See kernels.compile.compile_variant."""
    name = _plan(os.environ[VARIABLE]).get(config.key, "")
    if not name:
        return product.compile_variant(problem, config, sm_count, delays_ns, check_structure, *rest)
    kernel = compile_planted(
        problem, config, sm_count, name.removeprefix(BLIND), delays_ns=delays_ns, check_structure=check_structure
    )
    return replace(kernel, findings=(), unjudged=()) if check_structure and name.startswith(BLIND) else kernel
