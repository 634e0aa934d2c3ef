"""`results record` and `results table`: published results as a file that docs and tests read, and its table."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictures import ratios
from tuner import recorded
from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output
from tuner.cli.remote import connected

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings
    from tuner.client import Client

PAGE = 100


def record(args: argparse.Namespace, settings: Settings) -> None:
    """Write the newest published result of each problem; rows that the file has for other problems stay.

    Raises WorkFailed when nothing is published, UsageError for a file that is not one of ours.
    """
    path = Path(args.file)
    try:
        earlier = recorded.read(path) if path.exists() else None
    except recorded.RecordError as error:
        raise UsageError(str(error), hint="name a new file, or one that `results record` wrote") from error
    with connected(args, settings) as client:
        results = newest_published(client, args.device)
        if not results:
            raise WorkFailed("no published result to record", hint="tune first: checked winners are published")
        protocol = client.study(results[0]["study_id"])["request"]["protocol"]
    content = recorded.document(
        [recorded.row_of(result) for result in results],
        command=shlex.join(["gemm-tuner", *sys.argv[1:]]),
        protocol=protocol,
        earlier=earlier,
    )
    try:
        recorded.write(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    output = Output(as_json=args.json)
    output.document({"file": str(path), "rows": len(content["rows"]), "new": len(results)})
    output.text(f"{path}: {len(content['rows'])} rows, {len(results)} of them new")


def table(args: argparse.Namespace, settings: Settings) -> None:
    """Print a file of recorded measurements as a Markdown table, and draw its ratios. Raises UsageError."""
    del settings
    try:
        content = recorded.read(Path(args.file))
    except recorded.RecordError as error:
        raise UsageError(str(error)) from error
    output = Output(as_json=args.json)
    output.document(content)
    output.text(recorded.summary(content, args.by) if args.by else recorded.table(content))
    if args.svg:
        if not content["rows"]:
            raise UsageError(f"{args.file} has no rows to draw")
        output.picture(ratios.picture(content), args.svg)


def newest_published(client: Client, device: str | None) -> list[dict[str, Any]]:
    """The highest revision of each problem on each device that stands, problems in a fixed order."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    after: str | None = None
    while page := client.results(device=device, published=True, limit=PAGE, after=after):
        for result in page:
            if result["withdrawn_at"] is not None:
                continue
            problem = result["problem"]
            key = (*(problem[name] for name in ("m", "n", "k", "dtype", "layout")), result["device"])
            if key not in newest or result["revision"] > newest[key]["revision"]:
                newest[key] = result
        after = page[-1]["id"]
    return [newest[key] for key in sorted(newest)]
