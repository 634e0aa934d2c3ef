"""`devices`: GPUs that a tuner has announced, and device models that mode `model` knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cli.output import Output
from tuner.cli.remote import connected

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings


def devices(args: argparse.Namespace, settings: Settings) -> None:
    """List both."""
    with connected(args, settings) as client:
        answer = client.devices()
    output = Output(as_json=args.json)
    output.document(answer)
    if answer["devices"]:
        columns = ("device", "arch", "SMs", "state", "uuid", "reason")
        rows = [(d["name"], d["arch"], d["sm_count"], d["state"], d["uuid"], d["reason"]) for d in answer["devices"]]
        output.table("GPUs", columns, rows)
    else:
        output.text("no tuner has announced a GPU")
    profiles = [(p["name"], p["arch"], p["sm_count"], ", ".join(p["aliases"])) for p in answer["profiles"]]
    output.table("models that --mode model knows", ("device", "arch", "SMs", "also called"), profiles)
