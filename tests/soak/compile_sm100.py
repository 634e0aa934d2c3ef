"""Random legal sm_100a configs all compile without spills; refused ones are tried with the checks off, and what happens
is recorded.

    python -m tests.soak.compile_sm100 --count 400 --refused 50 --out results/verify/sm_100a.json

Resumes where it was stopped: a row is kept as long as the toolchain and the template's source are the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kernels.arch import SM_100A
from kernels.compile import compile_kernel, ptxas_flags
from kernels.config import Sm100GemmConfig
from kernels.devices import default_profile
from kernels.lowering import lower
from kernels.problem import GemmProblem
from kernels.rules import violation
from kernels.toolchain import find_toolchain
from search_space.space import choices, random_legal
from tests.soak.compile_random import build, is_clean
from tests.soak.one_by_one import Row, Rows, command_line, in_process, say

if TYPE_CHECKING:
    from collections.abc import Iterator

# decode, tall, square, prefill, long K, one tile, and ragged in M, N and K
SHAPES = (
    "1x6144x4096",
    "16x2880x360",
    "64x7168x4096",
    "128x512x16384",
    "128x128x64",
    "256x5120x6400",
    "333x776x520",
    "1000x1000x1000",
    "2048x2048x2048",
    "4096x4096x4096",
    "7000x2560x2568",
    "16384x1536x7168",
)
LEGAL, REFUSED = "legal", "refused"
PROFILE = default_profile(SM_100A)
LIMIT_S = 120.0
OF_ONE_RULE = 10


def legal(seed: int) -> Iterator[tuple[GemmProblem, Sm100GemmConfig]]:
    """Pairs without end, shape by shape, all different."""
    rng, drawn = random.Random(seed), set()
    while True:
        for shape in SHAPES:
            problem = GemmProblem.parse(shape, dtype=rng.choice(("bf16", "fp16")))
            config = random_legal(problem, PROFILE, rng)
            assert isinstance(config, Sm100GemmConfig)
            if (problem.key, config.key) not in drawn:
                drawn.add((problem.key, config.key))
                yield problem, config


def refused(seed: int) -> Iterator[tuple[GemmProblem, Sm100GemmConfig, str]]:
    """Random points of the whole product that a rule refuses, with its reason; no rule more than OF_ONE_RULE times."""
    rng, values, told = random.Random(seed), choices(SM_100A), Counter[str]()
    while True:
        problem = GemmProblem.parse(rng.choice(SHAPES), dtype=rng.choice(("bf16", "fp16")))
        config = Sm100GemmConfig.from_dict({knob: rng.choice(allowed) for knob, allowed in values.items()})
        reason = violation(problem, config, PROFILE.sm_count)
        if reason is not None and told[_rule(reason)] < OF_ONE_RULE:
            told[_rule(reason)] += 1
            yield problem, config, reason


def _rule(reason: str) -> str:
    """A reason without its numbers."""
    return " ".join("".join(" " if c.isdigit() else c for c in reason).split())[:24]


def _unchecked(problem: GemmProblem, config: Sm100GemmConfig) -> Row:
    """Compile although a rule objects. An exception is the answer."""
    with patch("kernels.gemm_sm100.violation", lambda *_: None):
        kernel = compile_kernel(problem, config, PROFILE.sm_count)
    facts = {"registers": kernel.registers, "spill_bytes": kernel.spill_bytes, "warnings": list(kernel.warnings)}
    return {"happened": "compiled", **facts}


def try_refused(problem: GemmProblem, config: Sm100GemmConfig, reason: str) -> Row:
    """One refused config, in a process of its own: TVM may abort."""
    answer = in_process(_unchecked, problem, config, limit_s=LIMIT_S)
    happened: Row = {"happened": answer} if isinstance(answer, str) else answer
    return _place(REFUSED, problem, config) | {"reason": reason} | happened


def _place(kind: str, problem: GemmProblem, config: Sm100GemmConfig) -> Row:
    return {"kind": kind, "shape": problem.shape, "dtype": problem.dtype.value, "config": config.to_dict()}


def summary(rows: list[Row]) -> dict[str, Any]:
    """What the rows amount to."""
    compiled = [row for row in rows if row["kind"] == LEGAL]
    tried = [row for row in rows if row["kind"] == REFUSED]
    return {
        "legal": f"{sum(map(is_clean, compiled))} of {len(compiled)} compiled without spills, stack or warnings",
        "shapes": len({row["shape"] for row in compiled}),
        "most registers": max((row.get("registers", 0) for row in compiled), default=0),
        "refused": dict(Counter("compiled" if row["happened"] == "compiled" else "refused too" for row in tried)),
    }


def main() -> int:
    """0 when every legal config compiled clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/verify/sm_100a.json"))
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--refused", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wall-s", type=float, default=0.0, help="begin no compile after this long (default: no end)")
    arguments = parser.parse_args()
    rows, began = Rows(arguments.out, command_line("tests.soak.compile_sm100")), time.monotonic()
    toolchain = f"{find_toolchain().name} {ptxas_flags(SM_100A.name)}"
    for number, (problem, config, reason) in enumerate(_tasks(arguments)):
        if arguments.wall_s and time.monotonic() - began > arguments.wall_s:
            break
        place = _place(REFUSED if reason else LEGAL, problem, config)
        made_of: Row = {"toolchain": toolchain}
        if not reason:
            made_of["source_hash"] = lower(problem, config, PROFILE.sm_count).source_hash
        row = rows.find(**place)
        if row is None or any(row.get(name) != value for name, value in made_of.items()):
            built = try_refused(problem, config, reason) if reason else place | _plain(build(_task(problem, config)))
            rows.put(built | made_of, **place)
        if number % 10 == 9:
            say(f"{number + 1}: {summary(rows.rows)}", began)
    for name, value in summary(rows.rows).items():
        print(f"{name}: {value}", flush=True)
    return 0 if all(is_clean(row) for row in rows.rows if row["kind"] == LEGAL) else 1


def _tasks(arguments: argparse.Namespace) -> Iterator[tuple[GemmProblem, Sm100GemmConfig, str]]:
    """The refused ones, spread evenly among the legal ones."""
    good, bad, done = legal(arguments.seed), refused(arguments.seed), 0
    for number in range(arguments.count):
        if done * arguments.count < arguments.refused * (number + 1):
            done += 1
            yield next(bad)
        problem, config = next(good)
        yield problem, config, ""


def _task(problem: GemmProblem, config: Sm100GemmConfig) -> tuple[str, GemmProblem, dict[str, Any]]:
    return SM_100A.name, problem, config.to_dict()


def _plain(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("shape", "dtype", "config")}


if __name__ == "__main__":
    sys.exit(main())
