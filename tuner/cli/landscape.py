"""`landscape record`, `list`, `export`: every config of a bounded space timed on a GPU, and what was recorded."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.problem import GemmProblem
from search_space.request import TuneRequest
from tuner import recorded
from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output, warn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kernels.config import GemmConfig
    from tuner.cli.settings import Settings
    from tuner.engine.base import Engine
    from tuner.landscape import Landscape

    Json = dict[str, Any]

MAX_TRIALS = 1000  # of one GPU child: a new one makes inputs and baselines anew, which takes seconds


def record(args: argparse.Namespace, settings: Settings) -> int:
    """Record landscapes. Exit status 0 when all are complete, 1 when the time was over.

    Raises UsageError for a shape, a file or a folder that cannot be used, WorkFailed where there is no GPU.
    """
    from tuner.landscape import LandscapeError, read
    from tuner.landscape_record import RecordOptions
    from tuner.landscape_record import record as record_all

    problems = [problem_of(text) for text in args.shapes]
    winners = published_winners(Path(args.winners)) if args.winners else {}
    settings.create()
    output = Output(as_json=args.json)
    is_fake = settings.tuner.engine == "fake"
    with _engine(problems[0], settings) as engine:
        options = RecordOptions(ahead=4 * settings.tuner.compile_processes, wall_s=args.wall_s)
        try:
            files = record_all(
                engine,
                Path(args.dir),
                [(problem, winners.get(problem, [])) for problem in problems],
                options,
                say=warn,
                synthetic="invented device of the fake engine" if is_fake else "",
            )
        except LandscapeError as error:
            raise UsageError(str(error)) from error
    _print(output, [read(file) for file in files])
    return 0 if all(not read(file).missing for file in files) else 1


def listing(args: argparse.Namespace, settings: Settings) -> None:
    """Print what a folder holds. Raises UsageError for one without landscapes."""
    del settings
    _print(Output(as_json=args.json), landscapes_in(Path(args.dir)))


def export(args: argparse.Namespace, settings: Settings) -> None:
    """Write one landscape for another tuner. Raises UsageError for one that is not there or a file that cannot be."""
    import json

    from tuner.landscape_export import exported

    del settings
    by_name = {one.name: one for one in landscapes_in(Path(args.dir))}
    if args.name not in by_name:
        raise UsageError(f"no landscape {args.name!r} in {args.dir}", hint=f"there are {', '.join(by_name)}")
    content = exported(by_name[args.name], args.format)
    try:
        Path(args.file).write_text(json.dumps(content, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {args.file}: {error.strerror}") from error
    output = Output(as_json=args.json)
    output.document({"file": args.file, "configs": len(by_name[args.name].rows)})
    output.text(f"{args.file}: {len(by_name[args.name].rows)} configs")


def landscapes_in(folder: Path) -> list[Landscape]:
    """Raises UsageError for a folder without landscapes."""
    from tuner.landscape import LandscapeError, read_folder

    try:
        return read_folder(folder)
    except LandscapeError as error:
        raise UsageError(str(error)) from error


def problem_of(text: str) -> GemmProblem:
    """A shape as MxNxK or MxNxK:dtype. Raises ProblemError."""
    shape, _, dtype = text.partition(":")
    return GemmProblem.parse(shape, dtype=dtype or "bf16")


def published_winners(path: Path) -> dict[GemmProblem, list[GemmConfig]]:
    """Winners of a file of recorded measurements by problem. Raises UsageError."""
    from kernels.config import config_from_dict

    try:
        rows = recorded.read(path)["rows"]
    except recorded.RecordError as error:
        raise UsageError(str(error), hint="name a file that `results record` wrote") from error
    found: dict[GemmProblem, list[GemmConfig]] = {}
    for row in rows:
        problem = GemmProblem(m=row["m"], n=row["n"], k=row["k"], dtype=row["dtype"])
        found.setdefault(problem, []).append(config_from_dict(row["arch"], row["config"]))
    return found


@contextmanager
def _engine(problem: GemmProblem, settings: Settings) -> Iterator[Engine]:
    """The engine of this machine's GPU; modules go to a folder that is removed afterwards."""
    from kernels.artifacts import ArtifactStore
    from tuner.engine.compile_pool import CompilePoolOptions
    from tuner.engine.local import LocalMachine, LocalOptions
    from tuner.engines import FakeEngines

    with tempfile.TemporaryDirectory(prefix="gemm-tuner-landscape-") as folder:
        tuner = replace(settings.tuner, artifacts_dir=Path(folder))
        if tuner.engine == "fake":
            engines = FakeEngines(tuner)
            try:
                yield engines.engine_for(TuneRequest(problem=problem, arch="sm_90a"))
            finally:
                engines.close()
            return
        options = LocalOptions(
            compile=CompilePoolOptions(processes=tuner.compile_processes, limit_s=tuner.compile_limit_s),
            spares=tuner.gpu_spares,
            max_trials=MAX_TRIALS,
        )
        machine = LocalMachine(options, ArtifactStore(tuner.artifacts_dir))
        try:
            if not machine.gpus:
                raise WorkFailed(
                    "no supported GPU on this machine: a landscape is measured", hint="see gemm-tuner doctor"
                )
            yield machine.engine(machine.gpus[0].profile, live=True)
        finally:
            machine.close()


def _print(output: Output, landscapes: list[Landscape]) -> None:
    summaries = [_summary(one) for one in landscapes]
    output.document({"landscapes": summaries})
    columns = ("landscape", "configs", "rows", "with a time", "best us", "within 1 %", "within 3 %", "median/best")
    keys = ("name", "configs", "rows", "timed", "best_us", "within_1", "within_3", "median_ratio")
    output.table("", columns, [[_cell(one[key]) for key in keys] for one in summaries])


def _cell(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _summary(one: Landscape) -> Json:
    times = sorted(one.times_us.values())
    best = times[0] if times else None
    return {
        "name": one.name,
        "configs": len(one.configs),
        "rows": len(one.rows),
        "timed": len(times),
        "best_us": best,
        "within_1": sum(time <= 1.01 * best for time in times) / len(times) if best else None,
        "within_3": sum(time <= 1.03 * best for time in times) / len(times) if best else None,
        "median_ratio": times[len(times) // 2] / best if best else None,
        "synthetic": one.synthetic,
    }
