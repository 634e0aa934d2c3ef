"""`node`: this machine as a node of a Ray cluster, started again when it ends."""

from __future__ import annotations

import signal
import socket
import sys
import uuid
from typing import TYPE_CHECKING

from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output, warn
from tuner.cli.supervisor import Backoff, ChildSpec, Supervisor

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings
    from tuner.engine.ray.start_node import NodeOptions

HEAD_PORT = 6379
ELSEWHERE = "192.0.2.1:9"  # an address of no machine: which way the default route goes


def node(args: argparse.Namespace, settings: Settings) -> int:
    """Run until SIGTERM or SIGINT. Raises UsageError for options that do not go together, WorkFailed when refused."""
    from tuner.engine.ray.start_node import REFUSED

    options = options_of(args, settings)
    settings.create()
    command = [sys.executable, "-m", "tuner.engine.ray.start_node", options.to_json()]
    spec = ChildSpec(name="ray", command=command, restart=True, final_status=REFUSED)
    supervisor = Supervisor([spec], backoff=Backoff(first_s=1.0), report=warn)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    output = Output(as_json=args.json)
    role = "head" if options.head else "node"
    output.text(f"{role} {options.plan.name} of the Ray cluster at {options.address}  (Ctrl-C stops)")
    output.document({"name": options.plan.name, "address": options.address, "head": options.head})
    if supervisor.run() != 0:
        raise WorkFailed(f"node {options.plan.name} cannot join the cluster at {options.address}; the reason is above")
    return 0


def options_of(args: argparse.Namespace, settings: Settings) -> NodeOptions:
    """What the command line asks for. Raises UsageError."""
    from kernels.devices import profile_named
    from kernels.errors import ConfigError
    from tuner.engine.ray.plan import NodePlan
    from tuner.engine.ray.start_node import NodeOptions, ip_towards

    if args.head == bool(args.address):
        raise UsageError("a node starts a cluster or joins one: use either --head or --address HOST:PORT")
    address = args.address or f"{args.node_ip or ip_towards(ELSEWHERE)}:{args.port}"
    if not address.rpartition(":")[2].isdecimal():
        raise UsageError(f"--address {address!r} is not HOST:PORT", hint=f"such as {address}:{HEAD_PORT}")
    fake = tuple(name for name in args.fake_devices.split(",") if name)
    try:
        fake = tuple(profile_named(name).name for name in fake)
    except ConfigError as error:
        raise UsageError(f"--fake-devices: {error}") from error
    name = args.name or f"{socket.gethostname()[:40]}-{uuid.uuid4().hex[:6]}"
    tuner = settings.tuner
    processes = tuner.compile_processes if args.compile_processes is None else args.compile_processes
    plan = NodePlan(
        name=name,
        engine="fake" if fake or args.fake else "local",
        artifacts_dir=str(settings.home / "node-modules"),
        artifacts_mib=args.modules_mib,
        compile_processes=0 if args.head and args.compile_processes is None else processes,
        compile_limit_s=tuner.compile_limit_s,
        gpu_spares=tuner.gpu_spares,
        gpus=not (args.no_gpus or args.head),
        fake_devices=fake,
        fake_scale=tuner.fake_scale,
    )
    return NodeOptions(
        plan=plan,
        address=address,
        head=args.head,
        node_ip=args.node_ip or ip_towards(address),
        temp_dir=args.temp_dir,
        object_store_mib=args.object_store_mib,
        extra=tuple(args.ray_option),
    )
