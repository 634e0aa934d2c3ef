"""Do the filters of the search space hide winners? What they drop, and how near to their limits good configs lie.

    python -m tests.soak.filters show results/landscapes [--out results/verify/filters.json]
    python -m tests.soak.filters dropped 512x4096x4096 7000x2560x2560 [--dtype bf16] [--each 4]

`show` reads recorded landscapes. A landscape holds configs that no filter turned away when it was recorded, so of what
is dropped it knows nothing by itself. It can show two things: that no filter of today drops a config that was within
the noise of the best, and how the best time falls off towards each limit. Where the configs next to a limit are far
behind, what lies beyond it, where the same cause is worse still, is no winner; where they are not, the limit is suspect
("close").

`dropped` lists configs that break no rule and are turned away by one filter alone, for each filter those that the
performance model thinks best. They are what a GPU has to time to judge a filter: a JSON list for whoever times them.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.checks import HOPELESS_BYTES_IN_FLIGHT, HOPELESS_WAVE_EFFICIENCY, MEASURED_FILTERS, rejection
from search_space.model import predict
from search_space.space import random_legal
from search_space.walk import Walk, walk_of
from tests.soak.report import hand_over
from tuner.landscape import Landscape, read_folder
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile

NOISE = 1.02  # a time within it of the best may be the best: trials are stopped early, and cards drift
SAFE = 1.10  # how far the best config next to a limit must lie behind for the limit to be taken as safe
DRAWN = 60_000  # random configs among which `dropped` looks

Json = dict[str, Any]


def _wave_efficiency(config: GemmConfig, walk: Walk, profile: DeviceProfile) -> float | None:
    return walk.wave_efficiency if walk.waves > 1 else None


def _bytes_under_way(config: GemmConfig, walk: Walk, profile: DeviceProfile) -> float | None:
    """None where everything is under way from the start."""
    return None if config.pipe_depth >= walk.stages else (config.pipe_depth - 1) * config.stage_bytes / 1024


def _busy_sms(config: GemmConfig, walk: Walk, profile: DeviceProfile) -> float | None:
    return walk.clusters * config.cluster_size / profile.sm_count


# What each limit is about, and bins that begin at it.
type Measure = Callable[["GemmConfig", Walk, "DeviceProfile"], float | None]
MEASURES: dict[str, tuple[Measure, tuple[float, ...]]] = {
    "last wave": (_wave_efficiency, (HOPELESS_WAVE_EFFICIENCY, 0.65, 0.75, 0.85, 1.01)),
    "bytes in flight": (_bytes_under_way, (HOPELESS_BYTES_IN_FLIGHT / 1024, 64, 96, 128, 256)),
    "idle SMs": (_busy_sms, (0.0, 0.25, 0.5, 0.75, 1.01)),
}


def filters_that_drop(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> list[str]:
    """Names of the filters that turn a legal config away."""
    walk = walk_of(problem, config, profile.sm_count)
    return [name for name, check in MEASURED_FILTERS.items() if check(problem, config, profile, walk)]


def looked_at(landscape: Landscape) -> Json:
    """What one landscape says of the filters."""
    problem, profile, best_us = landscape.problem, landscape.profile, landscape.best_us
    ratios = {landscape.configs[index]: time_us / best_us for index, time_us in landscape.times_us.items()}
    dropped = {config: names for config in ratios if (names := filters_that_drop(problem, config, profile))}
    hidden = [
        {"ratio": round(ratios[config], 3), "filters": names, "config": config.to_dict()}
        for config, names in dropped.items()
        if ratios[config] <= NOISE
    ]
    spilled = sum(row.outcome is Outcome.SPILLED for row in landscape.rows.values())
    return {
        "landscape": landscape.name,
        "space": landscape.space["grid"],
        "configs": len(landscape.configs),
        "timed": len(ratios),
        "spilled_untimed": spilled,
        "best_us": round(best_us, 3),
        "within_noise": sum(ratio <= NOISE for ratio in ratios.values()),
        "dropped_today": len(dropped),
        "fastest_dropped": round(min((ratios[config] for config in dropped), default=0.0), 3) or None,
        "hidden": hidden,
        "edges": {name: _edges(ratios, problem, profile, name) for name in MEASURES},
    }


def _edges(ratios: dict[GemmConfig, float], problem: GemmProblem, profile: DeviceProfile, name: str) -> list[Json]:
    """The best of each bin, the one at the limit first."""
    measure, limits = MEASURES[name]
    values = {config: measure(config, walk_of(problem, config, profile.sm_count), profile) for config in ratios}
    found = []
    for low, high in pairwise(limits):
        inside = [ratios[config] for config, value in values.items() if value is not None and low <= value < high]
        if inside:
            found.append({"from": low, "to": high, "configs": len(inside), "best_ratio": round(min(inside), 3)})
    return found


def summary(rows: Sequence[Json]) -> Json:
    """For each limit: in how many landscapes the bin at it holds configs, and the best of them."""
    limits = {}
    for name, (_measure, bounds) in MEASURES.items():
        first = [edge["best_ratio"] for row in rows for edge in row["edges"][name] if edge["from"] == bounds[0]]
        closest = min(first, default=None)
        limits[name] = {
            "landscapes": len(first),
            "best_ratio_at_limit": closest,
            "close": closest is not None and closest < SAFE,
        }
    return {
        "landscapes": len(rows),
        "timed": sum(row["timed"] for row in rows),
        "hidden": sum(len(row["hidden"]) for row in rows),
        "limits": limits,
        "recorded_with_filters_off": 0,
    }


def show(folder: Path) -> Json:
    """All landscapes of a folder that have times."""
    rows = [looked_at(one) for one in read_folder(folder) if one.times_us and not one.synthetic]
    return {
        "schema": 1,
        "command": f"python -m tests.soak.filters show {folder}",
        "note": "every landscape was recorded with all filters on: only what lies next to what they drop was timed",
        "noise": NOISE,
        "summary": summary(rows),
        "landscapes": rows,
    }


def dropped(problem: GemmProblem, profile: DeviceProfile, each: int, drawn: int = DRAWN) -> list[Json]:
    """For each filter the configs that it alone turns away and that the model thinks best, at most two of one tile."""
    import random

    rng = random.Random(f"filters:{problem.key}")
    found: dict[str, dict[GemmConfig, float]] = {name: {} for name in MEASURED_FILTERS}
    for _ in range(drawn):
        config = random_legal(problem, profile, rng)
        if rejection(problem, config, profile) is None:
            continue
        names = filters_that_drop(problem, config, profile)
        if len(names) == 1 and config not in found[names[0]]:
            found[names[0]][config] = predict(problem, config, profile).time_us
    rows = []
    for name, times in found.items():
        tiles: dict[tuple[int, int, int], int] = {}
        for config in sorted(times, key=lambda one: (times[one], one.key)):
            tile = (config.cta_rows, config.cta_cols, config.blk_k)
            if tiles.get(tile, 0) < 2 and sum(tiles.values()) < each:
                tiles[tile] = tiles.get(tile, 0) + 1
                rows.append({"filter": name, "model_us": round(times[config], 2), "config": config.to_dict()})
    return rows


def main(arguments: Sequence[str]) -> int:
    """1 where a filter hides a config within the noise of the best."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.filters", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show")
    shown.add_argument("folder", type=Path)
    shown.add_argument("--out", type=Path)
    asked = commands.add_parser("dropped")
    asked.add_argument("shapes", nargs="+")
    asked.add_argument("--dtype", default="bf16")
    asked.add_argument("--each", type=int, default=4, help="configs for each filter")
    given = parser.parse_args(arguments)
    if given.command == "show":
        found = show(given.folder)
        hand_over(found, given.out)
        return int(found["summary"]["hidden"] > 0)
    problems = [GemmProblem.parse(shape, dtype=given.dtype) for shape in given.shapes]
    print(json.dumps({one.shape: dropped(one, profile_named("h200"), given.each) for one in problems}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
