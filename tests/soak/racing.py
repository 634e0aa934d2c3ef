"""What racing saves on a real GPU: the same candidates timed with all rounds each, and as a study times them.

    python -m tests.soak.racing OUT_DIR

Three shapes, 24 random configs worth asking each, in the order a random search would ask. Racing stops a candidate when
it cannot reach the best of those told when it was asked (eight are in flight), and takes no further round once a ratio
is known to half a percent. Target: at least half of the measuring time saved, and the winners of both equal within the
noise when they are timed against each other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kernels.problem import GemmProblem
from search_space.askable import askable_configs
from search_space.request import MeasureProtocol
from tests.soak.on_gpu import Json, Module, compile_all, open_first_gpu, quiet, say
from tests.soak.report import write_json
from tuner.engine.incumbent import BASELINE, Incumbent, best_of
from tuner.gpu.child import load_module
from tuner.gpu.rounds import Rounds, enough_for, hopeless, measure
from tuner.records import Ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.config import GemmConfig
    from tuner.gpu.clock import Burst
    from tuner.gpu.context import Contexts, ProblemContext
    from tuner.gpu.device import LiveDevice

SHAPES = ("64x7168x4096", "512x7168x4096", "4096x4096x4096")
CANDIDATES = 24
IN_FLIGHT = 8  # of a study by default
SAVED = 0.5
SAME = 0.005  # of the ratio of the two winners


def main() -> int:
    """0 when both targets are met at every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help=f"of each shape (default {CANDIDATES})")
    parser.add_argument("--limit-s", type=float, default=120.0, help="stop after this time and keep what is done")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.limit_s
    device = open_first_gpu()
    from tuner.gpu.context import Contexts

    contexts = Contexts(device)
    target = options.out_dir / "racing.json"
    rows: list[Json] = json.loads(target.read_text())["rows"] if target.exists() else []
    wanted = {shape: _configs(shape, options.candidates, device) for shape in options.shapes}
    everything = compile_all([pair for pairs in wanted.values() for pair in pairs], device.profile, options.out_dir)
    say(f"{len(everything)} modules compiled")
    for shape in options.shapes:
        if shape in [row["shape"] for row in rows] or time.monotonic() > deadline_s:
            continue
        rows.append(race([module for module in everything if module.problem.shape == shape], contexts, device))
        say(json.dumps({name: value for name, value in rows[-1].items() if name != "candidates"}))
        write_json(target, _report(rows, device))
    return 0 if len(rows) == len(options.shapes) and all(row["met"] for row in rows) else 1


def _configs(shape: str, count: int, device: LiveDevice) -> list[tuple[GemmProblem, GemmConfig]]:
    problem = GemmProblem.parse(shape, dtype="bf16")
    configs = askable_configs(problem, device.profile)
    return [(problem, config) for config in random.Random(shape).sample(configs, count)]


def race(modules: Sequence[Module], contexts: Contexts, device: LiveDevice) -> Json:
    """All candidates of one shape, each timed in full and then as a study would, and the two winners compared."""
    from tuner.gpu.clock import capture, graph_ms

    protocol = MeasureProtocol()
    context = contexts.get(modules[0].problem, protocol, 0, quiet)
    baselines = context.baselines.bursts(finalists=False)
    names = [burst.name for burst in baselines]
    candidates: list[Json] = []
    bursts: dict[str, Burst] = {}
    kernels = []
    told: list[Incumbent | None] = []  # none for a candidate that was stopped
    for number, module in enumerate(modules):
        # As in a study: the best of those that were told when this one was asked.
        incumbent = best_of(told[: max(0, number - IN_FLIGHT + 1)])
        kernel = load_module(module.path, module.sha256)
        verdict = context.referee.verify(kernel, quiet, repeats=2)
        if verdict.outcome is not None:
            say(f"{module.config.key}: {verdict.outcome}: {verdict.reason}")
            told.append(None)
            continue
        kernels.append(kernel)
        burst = capture(f"candidate {number}", kernel, context.timing.sets, burst_ms=graph_ms(protocol))
        bursts[burst.name] = burst
        fixed, fixed_s = _timed([burst, *baselines], context, device, number, lambda _: False)
        raced, raced_s = _timed([burst, *baselines], context, device, number, enough_for(burst, names, incumbent))
        stopped = hopeless(raced, burst.name, incumbent)
        row = {
            "name": burst.name,
            "config": module.config.to_dict(),
            "fixed": {"rounds": len(fixed.kept()), "seconds": fixed_s, "ratio": _ratio(fixed, burst.name)},
            "raced": {"rounds": len(raced.kept()), "seconds": raced_s, "ratio": _ratio(raced, burst.name)},
            "stopped": stopped,
        }
        candidates.append(row)
        told.append(None if stopped else _told(raced, burst.name))
    return _compared(candidates, bursts, context, device)


def _timed(bursts, context: ProblemContext, device: LiveDevice, seed: int, enough) -> tuple[Rounds, float]:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    rounds = measure(bursts, context.protocol, card=device.card, order=random.Random(seed), report=quiet, enough=enough)
    return rounds, time.perf_counter() - began


def _told(rounds: Rounds, name: str) -> Incumbent:
    return Incumbent(time_us=median(rounds.times_us(name)), ratio=_ratio(rounds, name))


def _ratio(rounds: Rounds, name: str) -> float:
    return Ratio.of_pairs(rounds.times_us(BASELINE), rounds.times_us(name)).median


def _compared(candidates: list[Json], bursts: dict[str, Burst], context: ProblemContext, device: LiveDevice) -> Json:
    best_fixed = max(candidates, key=lambda row: row["fixed"]["ratio"])["name"]
    best_raced = max((row for row in candidates if not row["stopped"]), key=lambda row: row["raced"]["ratio"])["name"]
    fixed_s = sum(row["fixed"]["seconds"] for row in candidates)
    raced_s = sum(row["raced"]["seconds"] for row in candidates)
    saved = 1 - raced_s / fixed_s
    same = {"median": 1.0, "low": 1.0, "high": 1.0}
    if best_fixed != best_raced:
        pair = [bursts[best_fixed], bursts[best_raced]]
        rounds, _ = _timed(pair, context, device, 0, lambda _: False)
        same = Ratio.of_pairs(rounds.times_us(best_raced), rounds.times_us(best_fixed)).to_dict()
    return {
        "shape": context.problem.shape,
        "dtype": context.problem.dtype.value,
        "saved": round(saved, 4),
        "fixed_s": round(fixed_s, 3),
        "raced_s": round(raced_s, 3),
        "stopped_early": sum(bool(row["stopped"]) for row in candidates),
        "winner_fixed": best_fixed,
        "winner_raced": best_raced,
        "raced_over_fixed": same,
        "met": saved >= SAVED and same["low"] <= 1 + SAME,
        "candidates": candidates,
    }


def _report(rows: list[Json], device: LiveDevice) -> Json:
    return {
        "schema": 1,
        "command": "python -m tests.soak.racing OUT_DIR",
        "environment": device.environment().to_dict(),
        "protocol": MeasureProtocol().to_dict(),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
