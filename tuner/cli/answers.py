"""`best` and `export`: asking what is known, and taking it away as a bundle."""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.problem import GemmProblem
from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output, microseconds
from tuner.cli.remote import connected, live_gpus, target
from tuner.client import ClientError

if TYPE_CHECKING:
    import argparse

    from tuner.answers import Best
    from tuner.cli.settings import Settings
    from tuner.client import Client

SHAPE = re.compile(r"-?\d+[xX].*")


def best(args: argparse.Namespace, settings: Settings) -> None:
    """Raises WorkFailed when nothing answers the question."""
    problem = GemmProblem.parse(args.shape, dtype=args.dtype)
    with connected(args, settings) as client:
        answer = ask(
            client,
            problem,
            args,
            settings,
            evidence=args.evidence,
            allow_default=args.allow_default,
            allow_stale=args.allow_stale,
            protocol=args.protocol,
            environment=args.environment,
            revision=args.revision,
        )
    output = Output(as_json=args.json)
    output.document(answer)
    _print(output, answer)


def ask(
    client: Client,
    problem: GemmProblem,
    args: argparse.Namespace,
    settings: Settings,
    *,
    evidence: str | None,
    **options: Any,
) -> Best:
    """One question about one problem on the device or architecture that was named; options are those of the client."""
    # The route takes either name as `device`; of two, the device says more.
    device = args.device or args.arch or target(live_gpus(client, args, settings), arch=None, device=None)["device"]
    return client.best(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype.value,
        layout=problem.layout.value,
        device=device,
        evidence=evidence,
        **options,
    )


def export(args: argparse.Namespace, settings: Settings) -> None:
    """Write the bundle; nothing is written when one of the results cannot be exported."""
    path = _export_path(args)
    with connected(args, settings) as client:
        results = [_result_id(client, item, args, settings) for item in args.result]
        order = client.create_export(results, format=args.format, allow_unverified=args.allow_unverified)
        if not args.url:
            from tuner.cli.embedded import build_export

            build_export(settings, order["id"])
        done = client.wait_export(order["id"])
        if path.is_dir():
            path /= str(done["file_name"])
        client.download_bundle(done["id"], path)
    output = Output(as_json=args.json)
    document: dict[str, Any] = {**done, "file": str(path)}
    output.document(document)
    output.text(f"{path}: {len(results)} module(s), {done['size_bytes']} bytes, sha256 {done['bundle_sha256']}")
    if args.allow_unverified:
        output.text("candidates may be in it: manifest.json marks each module that is unverified")


def _export_path(args: argparse.Namespace) -> Path:
    """Where to write: a file; for a wheel a folder, since its name says what it is. Raises UsageError."""
    path = Path(args.output)
    if args.format == "wheel" and not path.is_dir():
        raise UsageError(f"{path} is no folder: a wheel has a name of its own, say with -o where it shall lie")
    if path.is_dir() and args.format != "wheel":
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no such folder")
    return path


def _result_id(client: Client, item: str, args: argparse.Namespace, settings: Settings) -> str:
    """A result's id as it stands; a shape stands for its best result."""
    if SHAPE.fullmatch(item) is None:
        return item
    problem = GemmProblem.parse(item, dtype=args.dtype)
    evidence = "modeled" if args.allow_unverified else None
    try:
        answer = ask(client, problem, args, settings, evidence=evidence)
    except ClientError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        candidates = "" if args.allow_unverified else ", or add --allow-unverified to export a candidate"
        wanted = "result" if args.allow_unverified else "published result"
        hint = f"tune it first: gemm-tuner tune {item}{candidates}"
        raise WorkFailed(f"{problem} has no {wanted}", hint=hint) from error
    if answer["match"] != "exact" or answer["result_id"] is None:
        raise UsageError(
            f"{problem} is not tuned: the nearest is another shape", hint=f"tune it first: gemm-tuner tune {item}"
        )
    return answer["result_id"]


def _print(output: Output, answer: Best) -> None:
    problem, tuned = answer["problem"], answer["tuned_for"]
    shape = f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']}"
    output.text(f"{shape} on {answer['device'] or answer['arch']}: {answer['match']}")
    if answer["match"] == "nearest" and tuned is not None:
        output.text(f"tuned for {tuned['m']}x{tuned['n']}x{tuned['k']}, distance {answer['distance']:.3f}")
    evidence = ", ".join(answer["evidence"])
    if "measured" not in answer["evidence"]:
        evidence += ", not checked"
    rows = [
        ("time", f"{microseconds(answer['median_us'])} us"),
        ("evidence", evidence),
        ("revision", _revision(answer)),
        *((f"ratio to {name}", _ratio(value)) for name, value in answer["ratio"].items()),
        ("verdict", answer["verdict"]),
        ("stale", answer["stale_reason"] if answer["stale"] else "no"),
        *((f"revision {one['revision']}", f"withdrawn: {one['reason']}") for one in answer["withdrawn"]),
        ("result", answer["result_id"]),
        ("module", answer["artifact_sha256"]),
    ]
    output.table("", ("", "answer"), rows)
    output.table("", ("knob", "value"), answer["config"].items())


def _revision(answer: Best) -> str:
    if answer["revision"] is None:
        return "candidate, not published"
    return f"{answer['revision']}{', pinned' if answer['pinned'] else ''}"


def _ratio(value: object) -> object:
    """A ratio is a number, or a median with its interval."""
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.3f} ({value.get('low', 0):.3f} to {value.get('high', 0):.3f})"
    return value
