"""Random legal configs really compile, and none spills: the checks are right or this fails.

python -m tests.soak.compile_random --arch sm_90a --count 200 --out results/verify/compile_sm_90a.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kernels.arch import arch_named
from kernels.artifacts import write_atomically
from kernels.compile import compile_kernel
from kernels.config import config_from_dict
from kernels.devices import default_profile
from kernels.errors import CompileError
from kernels.problem import GemmProblem
from kernels.toolchain import find_toolchain
from search_space.space import random_legal

# decode, tall, square, prefill, and ragged in M, N and K
SHAPES = (
    "1x6144x4096",
    "64x7168x4096",
    "256x5120x6400",
    "333x776x520",
    "4096x4096x4096",
    "7000x2560x2568",
    "16x2880x360",
)


def draw(arch: str, count: int, seed: int) -> list[tuple[GemmProblem, dict[str, Any]]]:
    """`count` pairs of problem and legal config, all different."""
    rng, profile = random.Random(seed), default_profile(arch_named(arch))
    drawn: dict[tuple[str, str], tuple[GemmProblem, dict[str, Any]]] = {}
    while len(drawn) < count:
        problem = GemmProblem.parse(rng.choice(SHAPES), dtype=rng.choice(("bf16", "fp16")))
        config = random_legal(problem, profile, rng)
        if config is not None:
            drawn[problem.key, config.key] = (problem, config.to_dict())
    return list(drawn.values())


def build(task: tuple[str, GemmProblem, dict[str, Any]]) -> dict[str, Any]:
    """Compile one; a failure is a row, not an exception."""
    arch, problem, knobs = task
    sm_count = default_profile(arch_named(arch)).sm_count
    row: dict[str, Any] = {"shape": problem.shape, "dtype": problem.dtype, "config": knobs}
    try:
        kernel = compile_kernel(problem, config_from_dict(arch, knobs), sm_count)
    except CompileError as error:
        return row | {"error": f"{error} {error.log_tail[-300:]}"}
    return row | {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "stack_bytes": kernel.stack_bytes,
        "warnings": kernel.warnings,
        "compile_s": round(kernel.compile_s, 3),
    }


def run(arch: str, count: int, seed: int, processes: int) -> list[dict[str, Any]]:
    """Compile `count` random legal configs in `processes` spawned processes."""
    tasks = [(arch, problem, knobs) for problem, knobs in draw(arch, count, seed)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(build, tasks))


def is_clean(row: dict[str, Any]) -> bool:
    """Whether the row compiled without spills, stack or ptxas performance warnings."""
    return "error" not in row and not row["spill_bytes"] and not row["stack_bytes"] and not row["warnings"]


def main() -> int:
    """0 when every config compiled clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    rows = run(arguments.arch, arguments.count, arguments.seed, arguments.processes)
    bad = [row for row in rows if not is_clean(row)]
    wall_s = time.monotonic() - started
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "schema": 1,
            "command": "python -m tests.soak.compile_random "
            f"--arch {arguments.arch} --count {arguments.count} --seed {arguments.seed}",
            "toolchain": find_toolchain().name,
            "processes": arguments.processes,
            "wall_s": round(wall_s, 1),
            "clean": len(rows) - len(bad),
            "rows": rows,
        }
        write_atomically(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
    for row in bad:
        print(json.dumps(row))
    print(f"{len(rows) - len(bad)} of {len(rows)} compiled clean in {wall_s:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
