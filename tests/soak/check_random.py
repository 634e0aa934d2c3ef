"""Random legal sm_100a configs through synccheck, racecheck, numsim and the structural rules: all must pass.

    python -m tests.soak.check_random --count 60 --out results/verify/checkers.json      resumes where it was stopped

The draws go round the forms of the template, so that each gets its share, and both dtypes. A recorded config is kept
and run again only where its source or the tools have changed. Each runs on its ragged reduced instance: one cluster,
every side cut short, more tiles than accumulator slots, a ring that wraps within a tile.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.checkers import CheckReport, available, check, reduced_instances, versions
from kernels.config import Sm100GemmConfig
from kernels.devices import profile_named
from kernels.errors import ConfigError
from kernels.lowering import lower
from kernels.problem import Dtype, GemmProblem
from kernels.rules import config_violation
from kernels.structure import structural_findings
from search_space.space import random_legal
from tests.soak.one_by_one import Row, Rows, command_line, in_process, say, versions_match

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 1200.0
FORMS: dict[str, Callable[[Sm100GemmConfig], bool]] = {
    "launch control": lambda c: c.scheduler == "clc",
    "swap_ab and split_k above 2": lambda c: c.swap_ab and c.split_k > 2,
    "pair of CTAs": lambda c: c.cta_group == 2,
    "split_k": lambda c: not c.swap_ab and c.split_k > 1,
    "one CTA": lambda c: c.cluster_size == 1 and not c.swap_ab,
    "swap_ab": lambda c: c.swap_ab and c.split_k == 1,
}
# Drawn for a problem that every config of the space can serve.
PROBLEM = GemmProblem(m=4096, n=4096, k=4096)


def draws(seed: int) -> Iterator[tuple[Sm100GemmConfig, Dtype]]:
    """Configs without end, form by form, the dtypes in turn; each form begins its next round with the other dtype."""
    rng, profile = random.Random(seed), profile_named("b200")
    for number, form in enumerate(itertools.cycle(FORMS.values())):
        while True:
            config = random_legal(PROBLEM, profile, rng)
            assert isinstance(config, Sm100GemmConfig)
            if form(config):
                break
        yield config, (Dtype.BF16, Dtype.FP16)[(number + number // len(FORMS)) % 2]


def form_of(config: Sm100GemmConfig) -> str:
    """The form that a config counts for."""
    return next((name for name, belongs in FORMS.items() if belongs(config)), "other")


def examine(config: Sm100GemmConfig, dtype: Dtype, limit_s: float = LIMIT_S) -> Row:
    """One config through the rules and the three tools."""
    instance = reduced_instances(config, dtype)[0]
    lowered = lower(instance.problem, config, instance.sm_count)
    row: Row = {
        "form": form_of(config),
        "config": config.to_dict(),
        "dtype": dtype.value,
        "shape": [instance.problem.m, instance.problem.n, instance.problem.k],
        "sm_count": instance.sm_count,
        "source_hash": lowered.source_hash,
        "structure": [found.text for found in structural_findings(lowered, instance.problem, config)],
    }
    report = in_process(_check, config, dtype, limit_s=limit_s)
    if isinstance(report, str):
        row |= {"sync": report, "race": report, "numsim": report, "findings": [], "versions": versions()}
    else:
        row |= {"sync": report.sync, "race": report.race, "numsim": report.numsim}
        row |= {"findings": list(report.findings), "versions": report.versions, "seconds": report.seconds}
    return row | {"passed": not isinstance(report, str) and report.passed and not row["structure"]}


def _check(config: Sm100GemmConfig, dtype: Dtype) -> CheckReport:
    return check(config, reduced_instances(config, dtype)[0], workers=1)


def planned(rows: list[Row], count: int, seed: int) -> list[tuple[Sm100GemmConfig, Dtype]]:
    """What to look at: the recorded configs that are still legal, then new draws up to `count`."""
    wanted: dict[tuple[str, Dtype], tuple[Sm100GemmConfig, Dtype]] = {}
    recorded = (pair for row in rows if (pair := _recorded(row)) is not None)
    for config, dtype in itertools.chain(recorded, draws(seed)):
        if len(wanted) >= count:
            break
        wanted.setdefault((config.key, dtype), (config, dtype))
    return list(wanted.values())


def _recorded(row: Row) -> tuple[Sm100GemmConfig, Dtype] | None:
    try:
        config = Sm100GemmConfig.from_dict(row["config"])
    except ConfigError:
        return None
    return None if config_violation(config) else (config, Dtype(row["dtype"]))


def summary(rows: list[Row]) -> dict[str, Any]:
    """How many passed, in all and for each form and dtype."""
    by_form = {form: f"{_passed(rows, form=form)} of {_counted(rows, form=form)}" for form in FORMS}
    by_dtype = {
        dtype.value: f"{_passed(rows, dtype=dtype.value)} of {_counted(rows, dtype=dtype.value)}" for dtype in Dtype
    }
    return {"passed": f"{_passed(rows)} of {len(rows)}", **by_form, **by_dtype}


def _counted(rows: list[Row], **wanted: str) -> int:
    return sum(all(row[name] == value for name, value in wanted.items()) for row in rows)


def _passed(rows: list[Row], **wanted: str) -> int:
    return _counted([row for row in rows if row["passed"]], **wanted)


def main() -> int:
    """0 when all have passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/verify/checkers.json"))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wall-s", type=float, default=0.0, help="begin no config after this long (default: no end)")
    arguments = parser.parse_args()
    if reason := available():
        print(f"the checkers cannot run: {reason}", file=sys.stderr)
        return 1
    rows, began, tools = Rows(arguments.out, command_line("tests.soak.check_random")), time.monotonic(), versions()
    for row in rows.rows:  # recorded before a knob was added: it had the default
        row["config"] = Sm100GemmConfig.from_dict(row["config"]).to_dict() if _recorded(row) else row["config"]
    for config, dtype in planned(rows.rows, arguments.count, arguments.seed):
        if arguments.wall_s and time.monotonic() - began > arguments.wall_s:
            break
        instance = reduced_instances(config, dtype)[0]
        place = {"config": config.to_dict(), "dtype": dtype.value}
        known = rows.find(**place)
        source_hash = lower(instance.problem, config, instance.sm_count).source_hash
        if known is not None and versions_match(known, source_hash, tools):
            row = known
        else:
            row = examine(config, dtype)
            rows.put(row, **place)
        answers = "passed" if row["passed"] else f"{row['structure']} {row['sync']} {row['race']} {row['numsim']}"
        say(f"{len(rows.rows)} {form_of(config)} {dtype.value} {row['shape']}: {answers}", began)
    for name, value in summary(rows.rows).items():
        print(f"{name}: {value}", flush=True)
    return 0 if all(row["passed"] for row in rows.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
