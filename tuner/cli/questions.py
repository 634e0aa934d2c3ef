"""`dispatch`, `revisions`, `pin`, `unpin`, `regressions`: more questions about stored results."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output, microseconds
from tuner.cli.remote import connected, live_gpus, target

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings

FAMILY = re.compile(r"([0-9]{1,10})[xX]([0-9]{1,10})")


def dispatch(args: argparse.Namespace, settings: Settings) -> None:
    """Print which result answers for which M."""
    match = FAMILY.fullmatch(args.family)
    if match is None:
        raise UsageError(f"{args.family!r} is no family of shapes: write NxK, for example 4096x4096")
    with connected(args, settings) as client:
        device = args.device or args.arch or target(live_gpus(client, args, settings), arch=None, device=None)["device"]
        table = client.dispatch(
            n=int(match[1]),
            k=int(match[2]),
            device=device,
            dtype=args.dtype,
            m_min=args.m_min,
            m_max=args.m_max,
            evidence=args.evidence,
            allow_stale=args.allow_stale,
            protocol=args.protocol,
        )
    if not table["ranges"]:
        where = f"N = {table['n']}, K = {table['k']} on {table['device'] or table['arch']}"
        hint = f"tune some of its M: gemm-tuner tune Mx{args.family}, with a number for M"
        raise WorkFailed(f"nothing is tuned for {where}", hint=hint)
    output = Output(as_json=args.json)
    output.document(table)
    output.text(f"N = {table['n']}, K = {table['k']}, {table['dtype']} on {table['device'] or table['arch']}")
    rows = [_range_row(one) for one in table["ranges"]]
    output.table("", ("M from", "to", "tuned for M", "us", "revision", "evidence", "result"), rows)
    for gap in table["gaps"]:
        output.text(f"nothing answers for M from {gap['m_min']} to {gap['m_max']}")


def _range_row(one: dict[str, Any]) -> tuple[object, ...]:
    best = one["best"]
    tuned, evidence = best["tuned_for"]["m"], ", ".join(best["evidence"])
    time_us = microseconds(best["median_us"])
    return one["m_min"], one["m_max"], tuned, time_us, best["revision"], evidence, best["result_id"]


def revisions(args: argparse.Namespace, settings: Settings) -> None:
    """Print what was published for the problem and device of a result."""
    with connected(args, settings) as client:
        rows = client.revisions(args.id)
    output = Output(as_json=args.json)
    output.document(rows)
    output.table(
        "",
        ("revision", "answers", "us", "published", "environment", "result"),
        [
            (
                row["revision"],
                _answers(row),
                microseconds(row["median_us"]),
                row["published_at"],
                row["environment_key"],
                row["id"],
            )
            for row in rows
        ],
    )


def _answers(row: dict[str, Any]) -> str:
    if row["withdrawn_at"] is not None:
        return f"withdrawn: {row['withdrawn_reason']}"
    return ("pinned" if row["pinned"] else "yes") if row["current"] else ""


def pin(args: argparse.Namespace, settings: Settings) -> None:
    """Let a revision stay the answer."""
    _pin(args, settings, pinned=True)


def unpin(args: argparse.Namespace, settings: Settings) -> None:
    """Let the newest revision answer again."""
    _pin(args, settings, pinned=False)


def _pin(args: argparse.Namespace, settings: Settings, *, pinned: bool) -> None:
    with connected(args, settings) as client:
        result = client.pin(args.id, pinned=pinned)
    output = Output(as_json=args.json)
    output.document(result)
    problem = result["problem"]
    shape = f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']} on {result['device']}"
    output.text(f"{shape}: revision {result['revision']} is {'pinned' if pinned else 'not pinned any more'}")


def regressions(args: argparse.Namespace, settings: Settings) -> None:
    """Print answers beside what was measured before the driver, CUDA or toolchain changed."""
    with connected(args, settings) as client:
        report = client.regressions(device=args.device, verdict=args.verdict)
    output = Output(as_json=args.json)
    output.document(report)
    rows = [_regression_row(one) for one in report["items"]]
    output.table("", ("problem", "device", "verdict", "time now / before", "us", "what changed", "result"), rows)
    if report["stale"]:
        output.text(f"{report['stale']} answers were not measured again since: tune them with --force")


def _regression_row(one: dict[str, Any]) -> tuple[object, ...]:
    problem, ratio = one["problem"], one["time_ratio"]
    return (
        f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']}",
        one["device"],
        one["verdict"],
        None if ratio is None else f"{ratio:.3f}",
        microseconds(one["after"]["median_us"]),
        one["change"],
        one["after"]["result"],
    )
