"""A/A pairs on a real GPU: how often the 95 % interval of a kernel over its byte-identical twin holds 1.

    python -m tests.soak.aa_pairs OUT_DIR

Twenty shapes from decode to prefill, ten pairs each. The two modules of a pair are copies of one file, loaded and
captured separately, on buffers placed anew for each pair, and timed by the product's own clock: rounds in random order
until the interval is within half a percent or the protocol's rounds are used. Target: 92 to 98 % of the intervals hold
1, median half-width at most 0.5 %. A run that was cut goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kernels.problem import GemmProblem
from search_space.model import predict
from search_space.request import MeasureProtocol
from search_space.starting import starting_configs
from tests.soak.on_gpu import Json, Module, compile_all, open_first_gpu, quiet, say
from tests.soak.report import write_json
from tuner.gpu.child import load_module
from tuner.gpu.rounds import Rounds, measure, precise
from tuner.records import Ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.referee import Referee

SHAPES = (
    "1x1024x1024", "1x6144x4096", "1x28672x4096", "16x4096x4096", "32x2560x5120", "64x4096x14336", "64x7168x4096",
    "128x4096x7168", "256x3072x4096", "256x5120x6400", "512x4096x4096", "512x7168x4096", "1000x2000x1000",
    "1024x1024x1024", "2048x6144x4096", "4096x4096x4096", "7000x2560x2560", "8192x8192x1024", "12608x2304x768",
    "16384x4096x4096",
)  # fmt: skip
PAIRS = 10
LAUNCHES_COMPARED = 4  # of each twin: a kernel that is wrong would be timed for nothing
SHARE, HALF_WIDTH = (0.92, 0.98), 0.005


def main() -> int:
    """0 when both targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of each shape (default {PAIRS})")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK")
    parser.add_argument("--rounds", type=int, default=MeasureProtocol().rounds, help="most rounds of a pair")
    parser.add_argument("--fixed", action="store_true", help="take all rounds of each pair, to study where to stop")
    parser.add_argument("--limit-s", type=float, default=240.0, help="stop after this time and keep what is done")
    options = parser.parse_args()
    soak = Soak(
        device=open_first_gpu(),
        protocol=MeasureProtocol(rounds=options.rounds),
        adaptive=not options.fixed,
        deadline_s=time.monotonic() + options.limit_s,
    )
    dtypes = cycle(("bf16", "fp16"))
    problems = [GemmProblem.parse(shape, dtype=dtype) for shape, dtype in zip(options.shapes, dtypes, strict=False)]
    profile = soak.device.profile
    modules = compile_all([(problem, sensible(problem, profile)) for problem in problems], profile, options.out_dir)
    say(f"{len(modules)} of {len(problems)} modules compiled")
    target, wanted = options.out_dir / "aa_pairs.json", options.pairs * len(problems)
    pairs: list[Json] = json.loads(target.read_text())["pairs"] if target.exists() else []
    for module in modules:
        done = {pair["pair"] for pair in pairs if pair["shape"] == module.problem.shape}
        pairs += soak.pairs(module, [number for number in range(options.pairs) if number not in done])
        write_json(target, report(pairs, soak, wanted))
    if len(pairs) < wanted:
        say("not complete: run again to go on")
    summary = report(pairs, soak, wanted)["summary"]
    say(json.dumps(summary))
    return 0 if summary["met"] else 1


def sensible(problem: GemmProblem, profile: DeviceProfile) -> GemmConfig:
    """What a person would try first: the starting config that the model expects to be fastest."""
    return min(starting_configs(problem, profile), key=lambda config: predict(problem, config, profile).time_us)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How pairs are timed.

    device: the card
    protocol: with the most rounds of a pair
    adaptive: stop where the product stops
    deadline_s: on the monotonic clock
    """

    device: LiveDevice
    protocol: MeasureProtocol
    adaptive: bool
    deadline_s: float

    def pairs(self, module: Module, numbers: list[int]) -> list[Json]:
        """The pairs of one shape, as far as there is time."""
        from tuner.gpu.context import make_referee, make_timing_sets

        rows: list[Json] = []
        if not numbers or time.monotonic() > self.deadline_s:
            return rows
        began = time.monotonic()
        referee = make_referee(module.problem, self.device, seed=0)
        for number in numbers:
            if time.monotonic() > self.deadline_s:
                break
            sets = make_timing_sets(module.problem, referee, self.device, self.protocol, seed=number).sets
            rows.append(row_of(module, number, self.time_pair(module, number, referee, sets)))
        held = sum(row["holds_1"] for row in rows)
        worst = max(row["half_width"] for row in rows)
        wall_s = time.monotonic() - began
        say(f"{module.problem}: {held} of {len(rows)} hold 1, half-widths to {100 * worst:.2f} %, {wall_s:.1f} s")
        return rows

    def time_pair(self, module: Module, number: int, referee: Referee, sets: Sequence[Any]) -> Rounds:
        """Load two copies of the module, verify both, time them against each other."""
        from tuner.gpu.clock import capture, graph_ms

        bursts = []
        with tempfile.TemporaryDirectory() as folder:
            for name in ("a", "aa"):
                # A library is loaded once for each file: two paths, two modules.
                path = Path(shutil.copyfile(module.path, Path(folder) / f"{name}.so"))
                kernel = load_module(path, module.sha256)
                verdict = referee.verify(kernel, quiet, repeats=LAUNCHES_COMPARED)
                if verdict.outcome is not None:
                    raise SystemExit(f"{module.problem} {module.config.key}: {verdict.outcome}: {verdict.reason}")
                bursts.append(capture(name, kernel, sets, burst_ms=graph_ms(self.protocol)))
            return measure(
                bursts,
                self.protocol,
                card=self.device.card,
                order=random.Random(number),
                report=quiet,
                enough=lambda rounds: self.adaptive and precise(rounds, "a", ["aa"]),
            )


def row_of(module: Module, number: int, rounds: Rounds) -> Json:
    """One pair, with its raw samples."""
    ours, twin = rounds.times_us("a"), rounds.times_us("aa")
    ratio = Ratio.of_pairs(twin, ours)
    return {
        "shape": module.problem.shape,
        "dtype": module.problem.dtype.value,
        "pair": number,
        "config": module.config.key,
        "module": module.sha256,
        "rounds": len(ours),
        "discarded": rounds.discarded,
        "ratio": ratio.median,
        "interval": [ratio.low, ratio.high],
        "half_width": (ratio.high - ratio.low) / 2,
        "holds_1": ratio.low <= 1 <= ratio.high,
        "samples_us": list(ours),
        "twin_us": list(twin),
    }


def report(pairs: list[Json], soak: Soak, wanted: int) -> Json:
    """The file."""
    share = sum(pair["holds_1"] for pair in pairs) / max(1, len(pairs))
    half_width = median([pair["half_width"] for pair in pairs] or [1.0])
    return {
        "schema": 1,
        "command": "python -m tests.soak.aa_pairs OUT_DIR",
        "environment": soak.device.environment().to_dict(),
        "protocol": soak.protocol.to_dict(),
        "summary": {
            "pairs": len(pairs),
            "wanted": wanted,
            "share_that_holds_1": round(share, 4),
            "median_half_width": half_width,
            "mean_rounds": sum(pair["rounds"] for pair in pairs) / max(1, len(pairs)),
            "met": len(pairs) == wanted and SHARE[0] <= share <= SHARE[1] and half_width <= HALF_WIDTH,
        },
        "pairs": pairs,
    }


if __name__ == "__main__":
    sys.exit(main())
