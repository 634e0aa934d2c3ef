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

REPLAY_KIND, TABLE_KIND = "replay", "replay table"


def replay(args: argparse.Namespace, settings: Settings) -> None:
    """Replay and sum up, or print what was recorded; then draw.

    Raises UsageError for a strategy, a folder or a file that cannot be used.
    """
    from tuner.landscape import LandscapeError
    from tuner.replay import ReplayError

    output = Output(as_json=args.json)
    try:
        if args.recorded:
            content = _recorded(Path(args.recorded))
        elif args.table:
            content = _table(args, settings)
        else:
            content = _replayed(args, settings)
        # What took an hour is shown before anything can go wrong with a file.
        _show(output, content)
        if args.output:
            Path(args.output).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        _draw(args, content, output)
    except (LandscapeError, ReplayError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or args.table}: {error.strerror}") from error


def _show(output: Output, content: Json) -> None:
    output.document(content)
    if content["kind"] == REPLAY_KIND:
        _print(output, content)
        return
    from tuner.replay_table import markdown

    output.text(markdown(content))
    for row, why in content["missing"].items():
        warn(f"left out: {row}: {why}")


def _replayed(args: argparse.Namespace, settings: Settings) -> Json:
    from tuner.replay_report import replay as replay_all

    content = replay_all(_plan(args), processes=args.processes or settings.tuner.compile_processes, say=warn)
    return {"command": shlex.join(["gemm-tuner", *sys.argv[1:]]), **content}


def _table(args: argparse.Namespace, settings: Settings) -> Json:
    """Make what is missing of the whole table."""
    from kernels.artifacts import write_atomically
    from tuner.replay_table import TABLE, make_table

    folder, processes = Path(args.table), args.processes or settings.tuner.compile_processes
    content = make_table(_plan(args), folder, processes=processes, say=warn, only=args.only, slow_seeds=args.slow_seeds)
    content = {"command": shlex.join(["gemm-tuner", *sys.argv[1:]]), **content}
    write_atomically(folder / TABLE, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    return content


def _recorded(path: Path) -> Json:
    try:
        content: Json = json.loads(path.read_text(encoding="utf-8"))
        kind = content["kind"]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        kind = None
    if kind not in (REPLAY_KIND, TABLE_KIND):
        raise UsageError(
            f"{path} is no recorded replay", hint="`gemm-tuner replay -o FILE` or `--table DIR` writes one"
        )
    return content


def _draw(args: argparse.Namespace, content: Json, output: Output) -> None:
    """The pictures that were asked for. Raises UsageError for curves of a table, which holds none."""
    if not (args.svg or args.plots):
        return
    from tuner.replay_report import PICTURES, plots

    if content["kind"] == TABLE_KIND and (args.plots or args.picture != "budgets"):
        raise UsageError("a table holds no curves", hint="take --picture budgets --svg FILE, or a replay's own file")
    if args.plots:
        for name, picture in plots(content).items():
            output.picture(picture, str(Path(args.plots) / name))
    if args.svg:
        output.picture(PICTURES[args.picture](content), args.svg)


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
