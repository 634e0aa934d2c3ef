"""`ladder MxNxK`: the tutorial's steps built and, on the right GPU, timed, with the published figures beside ours."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.arch import arch_named
from kernels.ladder import step_violation
from kernels.problem import GemmProblem
from tuner.cli.errors import UsageError
from tuner.cli.explain import arch_of_device
from tuner.cli.output import Output

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings
    from tuner.engine.base import Engine
    from tuner.engines import Engines

DEFAULT_ARCH = "sm_100a"  # the tutorial's
NO_TIME = "not measured"


def ladder(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 0 when every rung was built and, on a live GPU, measured; 1 when one was not.

    Raises UsageError for a problem that the simple kernels cannot serve or a file that cannot be read or written.
    """
    output = Output(as_json=args.json)
    content = _recorded(Path(args.recorded)) if args.recorded else _climbed(args, settings, output)
    output.document(content)
    _print(output, content)
    if args.svg:
        from pictures.ladder import picture

        output.picture(picture(content), args.svg)
    wanted = ("MEASURED",) if content["measured"] else (None,)
    return 0 if all(row["outcome"] in wanted for row in content["rows"] if "outcome" in row) else 1


def _climbed(args: argparse.Namespace, settings: Settings, output: Output) -> dict[str, Any]:
    from search_space.request import MeasureProtocol
    from tuner.engines import engines_of
    from tuner.ladder import climb

    if not args.shape:
        raise UsageError("a shape is needed", hint="such as 4096x4096x4096, or --from FILE for a recorded ladder")
    problem = GemmProblem.parse(args.shape, dtype=args.dtype)
    if reason := step_violation(problem):
        raise UsageError(reason)
    settings.create()
    engines = engines_of(settings.tuner)
    try:
        engine, why = _engine(problem, args, engines)
        if why:
            output.text(f"not measured: {why}")
        command = shlex.join(["gemm-tuner", *sys.argv[1:]])
        return climb(problem, engine, protocol=MeasureProtocol(), command=command, tell=output.text)
    finally:
        engines.close()


def _engine(problem: GemmProblem, args: argparse.Namespace, engines: Engines) -> tuple[Engine, str]:
    """A live engine of the wanted kind, or one that only compiles and the reason."""
    from search_space.request import Mode, TuneRequest
    from tuner.engine.base import NoDevice

    live = engines.devices()
    arch = args.arch or arch_of_device(args.device) or (live[0].profile.arch.name if live else DEFAULT_ARCH)
    arch = arch_named(arch).name
    try:
        return engines.engine_for(TuneRequest(problem=problem, arch=arch, device=args.device)), ""
    except NoDevice as error:
        request = TuneRequest(problem=problem, arch=arch, device=args.device, mode=Mode.MODEL)
        return engines.engine_for(request), str(error).partition(": ask for")[0]


def _recorded(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not {"rows", "measured", "published", "problem"} <= set(content):
        raise UsageError(f"{path} holds no ladder", hint="gemm-tuner ladder MxNxK --json > FILE writes one")
    return content


def _print(output: Output, content: dict[str, Any]) -> None:
    problem = content["problem"]
    output.text(f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']} on {content['device']}")
    rows = content["rows"]
    output.table(
        "",
        ("rung", "what it adds", "time", "TFLOP/s", "over step1", "published", "over step1"),
        [
            (
                row["name"],
                row["mechanism"],
                f"{row['median_us'] / 1000:.4g} ms" if row["median_us"] else NO_TIME,
                f"{row['tflops']:.0f}" if row.get("tflops") else None,
                f"{row['speedup']:.1f}x" if row.get("speedup") else None,
                f"{row['published_ms']:g} ms",
                f"{row['published_speedup']:g}x",
            )
            for row in rows
        ],
    )
    output.text(f"published: {content['published']['source']}")
    if not content["published"]["same_problem"]:
        output.text("the published column is for another GPU or problem than ours: compare the shape, not the times")
    built = [row for row in rows if "registers" in row]
    columns = ("compiled rung", "registers", "spilled B", "stack B", "shared memory B", "TMEM columns", "modeled us")
    facts = ("name", "registers", "spill_bytes", "stack_bytes", "smem_bytes", "tmem_columns")
    output.table(
        "",
        columns,
        [(*(row[fact] for fact in facts), f"{row['modeled_us']:.1f}" if row["modeled_us"] else None) for row in built],
    )
    for row in built:
        counts = ", ".join(f"{name} {number}" for name, number in (row["sass"] or {}).items())
        output.text(f"{row['name']}: {counts or row['sass_missing']}")
    for row in rows:
        if row.get("reason"):
            output.text(f"{row['name']}: {row['outcome']}: {row['reason']}")
