"""`replay`: samplers and starting configs against recorded landscapes, without a GPU."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.errors import UsageError
from tuner.cli.output import Output, warn

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings
    from tuner.replay_report import Plan

    Json = dict[str, Any]


def replay(args: argparse.Namespace, settings: Settings) -> None:
    """Replay and sum up. Raises UsageError for a strategy or a folder that cannot be used."""
    from tuner.landscape import LandscapeError
    from tuner.replay import ReplayError
    from tuner.replay_report import plots
    from tuner.replay_report import replay as replay_all

    output = Output(as_json=args.json)
    if args.table:
        _table(args, settings, output)
        return
    try:
        plan = _plan(args)
        content = replay_all(plan, processes=args.processes or settings.tuner.compile_processes, say=warn)
    except (LandscapeError, ReplayError) as error:
        raise UsageError(str(error)) from error
    content = {"command": shlex.join(["gemm-tuner", *sys.argv[1:]]), **content}
    output.document(content)
    _print(output, content)
    try:
        if args.output:
            Path(args.output).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if args.plots:
            for name, picture in plots(content).items():
                picture.write(Path(args.plots) / name)
            output.text(f"pictures: {args.plots}")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error


def _table(args: argparse.Namespace, settings: Settings, output: Output) -> None:
    """Make what is missing of the whole table, and print it. Raises UsageError."""
    from kernels.artifacts import write_atomically
    from tuner.landscape import LandscapeError
    from tuner.replay import ReplayError
    from tuner.replay_table import TABLE, make_table, markdown

    folder, processes = Path(args.table), args.processes or settings.tuner.compile_processes
    try:
        content = make_table(
            _plan(args), folder, processes=processes, say=warn, only=args.only, slow_seeds=args.slow_seeds
        )
        content = {"command": shlex.join(["gemm-tuner", *sys.argv[1:]]), **content}
        write_atomically(folder / TABLE, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    except (LandscapeError, ReplayError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    output.document(content)
    output.text(markdown(content))
    for row, why in content["missing"].items():
        warn(f"left out: {row}: {why}")


def _plan(args: argparse.Namespace) -> Plan:
    from search_space.starting import Tuned
    from tuner.cli.landscape import published_winners
    from tuner.replay import ReplayOptions, Strategy
    from tuner.replay_report import Plan

    options = ReplayOptions(trials=args.trials, in_flight=args.in_flight, compile_processes=args.compile_processes)
    winners = published_winners(Path(args.winners)) if args.winners else {}
    return Plan(
        folder=Path(args.dir),
        strategies=tuple(Strategy.parse(text) for text in args.strategy),
        seeds=args.seeds,
        train=Path(args.train) if args.train else None,
        options=options,
        tuned=tuple(
            Tuned(problem=problem, config=config, device=args.winners_device)
            for problem, configs in winners.items()
            for config in configs
        ),
    )


def _print(output: Output, content: Json) -> None:
    budgets = [str(budget) for budget in content["budgets"]]
    columns = ["strategy", *(f"median at {b}" for b in budgets), f"worst decile at {budgets[-1]}", "score", "seconds"]
    rows = [
        [
            one["name"],
            *(_text(one["at"][budget]["median"]) for budget in budgets),
            _text(one["at"][budgets[-1]]["worst_decile"]),
            _text(one["score"]),
            f"{one['wall_s'][budgets[-1]]:.0f}",
        ]
        for one in content["strategies"]
    ]
    expected = content["random"]["at"]
    rows.append(["random, expected mean", *(f"{expected[budget]:.3f}" for budget in budgets), None, None, None])
    output.table("share of the optimum (95 % interval)", columns, rows)
    columns = ["landscape", "timed", "best us", "within 1 %", "within 3 %", *(f"random at {b}" for b in budgets)]
    output.table(
        "",
        columns,
        [
            [
                f"{one['name']}{' (made up)' if one['synthetic'] else ''}",
                one["timed"],
                f"{one['best_us']:.2f}",
                f"{one['within_1']:.1%}",
                f"{one['within_3']:.1%}",
                *(f"{one['random'][budget]:.3f}" for budget in budgets),
            ]
            for one in content["landscapes"]
        ],
    )


def _text(found: Json) -> str:
    return f"{found['value']:.3f} ({found['low']:.3f}-{found['high']:.3f})"
