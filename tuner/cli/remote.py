"""One client for both ways of working: over the network with --url, else the same API inside this process.

Embedded commands go through the routes too, so a wrong request gets the same answer in the same words either way.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tuner.cli.errors import CommandError, UsageError, WorkFailed
from tuner.cli.words import in_commands
from tuner.client import Client, ClientError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tuner.cli.settings import Settings

POLL_S = 0.2
# Errors of the service that say nothing about the request: what was asked for is not there yet.
NOT_TO_BE_HAD = {"NoResult", "WithdrawnResult", "WaitTimeout", "ExportFailed", "BundleCorrupt"}


@contextmanager
def connected(args: argparse.Namespace, settings: Settings) -> Iterator[Client]:
    """A client of the service at --url, else of this machine's own database. Raises CommandError, DatabaseError."""
    try:
        if getattr(args, "url", None):
            with Client(args.url, token=settings.tuner.token) as client:
                yield client
        else:
            from tuner.cli.embedded import embedded_client

            with embedded_client(settings) as client:
                yield client
    except ClientError as error:
        raise as_command_error(error) from error


def as_command_error(error: ClientError) -> CommandError:
    """Exit status 2 when the request was wrong, 1 when the service could not do it."""
    wrong = error.error == "InvalidAddress" or (400 <= error.status < 500 and error.error not in NOT_TO_BE_HAD)
    return (UsageError if wrong else WorkFailed)(in_commands(error.detail), hint=in_commands(error.hint))


def wait_until_ready(url: str, *, timeout_s: float) -> bool:
    """Whether the service at `url` answered in time."""
    deadline = time.monotonic() + timeout_s
    with Client(url, timeout_s=2.0) as client:
        while time.monotonic() < deadline:
            try:
                client.health()
            except ClientError:
                time.sleep(POLL_S)
            else:
                return True
    return False


def live_gpus(client: Client, args: argparse.Namespace, settings: Settings) -> list[tuple[str, str]]:
    """Name and architecture of each GPU that can be measured on: the service's, or this machine's without --url."""
    if args.url:
        rows = client.devices()["devices"]
        return [(str(row["name"]), str(row["arch"])) for row in rows if row["state"] != "OFFLINE"]
    from tuner.engines import engines_of

    engines = engines_of(settings.tuner)
    try:
        return [(facts.name, facts.profile.arch.name) for facts in engines.devices()]
    finally:
        engines.close()


def target(gpus: list[tuple[str, str]], *, arch: str | None, device: str | None) -> dict[str, str]:
    """`arch` and `device` as asked, else the one kind of GPU there is. Raises UsageError."""
    if asked := {key: value for key, value in (("arch", arch), ("device", device)) if value}:
        return asked
    names = sorted({name for name, _ in gpus})
    if len(names) == 1:
        return {"device": names[0]}
    found = f"there are {', '.join(names)}" if names else "there is no GPU to take it from"
    raise UsageError(f"no arch or device named, and {found}", hint="add --arch sm_90a, --arch sm_100a or --device NAME")


def has_live(gpus: list[tuple[str, str]], wanted: dict[str, str]) -> bool:
    """Whether a GPU of this kind can be measured on."""
    from kernels.devices import profile_named
    from kernels.errors import ConfigError

    if "device" not in wanted:
        return any(arch == wanted["arch"] for _, arch in gpus)
    names = {wanted["device"].lower()}
    with suppress(ConfigError):  # a device without a profile may still be live under exactly this name
        names.add(profile_named(wanted["device"]).name.lower())
    return any(name.lower() in names for name, _ in gpus)
