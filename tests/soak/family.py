"""The second job of a family: the same N and K at another M. How many trials it needs where the first one's are stored.

    python -m tests.soak.family --seeds 50 --out results/replay/family.json

By replay over the recorded landscapes that share N, K and dtype. The first job knows nothing; the second knows the
times of one sibling: `learned` has trained on them, `random` starts with the winner (source `neighbours`); in a service
that has tuned other problems too, it knows those as well. Counted is the first trial whose best is within 1 % of the
optimum; None where no trial of the budget was.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.soak.on_gpu import say
from tests.soak.report import hand_over
from tuner.replay import Arena, ReplayOptions, Strategy, simulate
from tuner.replay_report import complete, samples_of, winner_of
from tuner.search.cost_model import CostModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.landscape import Landscape
    from tuner.replay import Course

    Json = dict[str, Any]

GOAL = 0.99
TRIALS = 48
FIRST = {"learned": "learned", "random": "random"}
SECOND = {"learned": "learned", "random": "random+neighbours"}


def families(folder: Path) -> list[list[Landscape]]:
    """Complete landscapes that differ in M alone, at least two of them."""
    found: dict[Any, list[Landscape]] = defaultdict(list)
    for one in complete(folder):
        found[one.problem.n, one.problem.k, one.problem.dtype].append(one)
    return [family for family in found.values() if len(family) > 1]


def arena(own: Landscape, known: Sequence[Landscape]) -> Arena:
    """What a job on a landscape knows: times and winners of these."""
    return Arena(
        own,
        tuned=[winner_of(one) for one in known],
        learn=lambda: CostModel.train([sample for one in known for sample in samples_of(one)]),
    )


def needed(course: Course, best_us: float) -> int | None:
    """Number of the first trial within the goal."""
    return next((number for number, us in enumerate(course.best_us, 1) if best_us / us >= GOAL), None)


def median_needed(place: Arena, strategy: str, seeds: int) -> float | None:
    """Over the seeds; one that never got there counts as the whole budget and more."""
    options, parsed = ReplayOptions(trials=TRIALS), Strategy.parse(strategy)
    counts = [needed(simulate(place, parsed, seed, options), place.best_us) for seed in range(seeds)]
    middle = median(TRIALS + 1 if count is None else count for count in counts)
    return None if middle > TRIALS else middle


def row_of(own: Landscape, family: Sequence[Landscape], others: Sequence[Landscape], seeds: int) -> Json:
    """One member as the first job, as the second after each sibling, and after a sibling in a service with others."""
    siblings = [one for one in family if one is not own]
    row: Json = {"shape": own.problem.shape, "first": needs(arena(own, []), FIRST, seeds)}
    row["after"] = {one.problem.shape: needs(arena(own, [one]), SECOND, seeds) for one in siblings}
    row["after_beside_others"] = {
        one.problem.shape: needs(arena(own, [one, *others]), SECOND, seeds) for one in siblings
    }
    say(str(row))
    return row


def needs(place: Arena, strategies: dict[str, str], seeds: int) -> Json:
    """Trials that each sampler needs."""
    return {name: median_needed(place, strategy, seeds) for name, strategy in strategies.items()}


def main() -> None:
    """Every family of the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("results/landscapes"))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    everything = complete(options.dir)
    rows = []
    for family in families(options.dir):
        names = {one.name for one in family}
        others = [one for one in everything if one.name not in names]
        rows += [row_of(own, family, others, options.seeds) for own in family]
    command = f"python -m tests.soak.family --seeds {options.seeds}"
    hand_over({"schema": 1, "command": command, "goal": GOAL, "trials": TRIALS, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
