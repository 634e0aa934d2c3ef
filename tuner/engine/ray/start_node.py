"""Becomes a Ray node of this project: checks that the machine fits the cluster, then turns into `ray start --block`.

Started by `gemm-tuner node` as `python -m tuner.engine.ray.start_node OPTIONS`, again and again: a node whose head is
lost ends, and joins the next head.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from tuner.engine.base import EngineError
from tuner.engine.ray.cluster import Cluster, ClusterUnreachable, mismatch
from tuner.engine.ray.plan import NodePlan, resources_of
from tuner.engine.ray.versions import own_versions, to_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.engine.base import DeviceFacts
    from tuner.engine.ray.wire import NodeRow

REFUSED = 4  # exit status: the machine does not fit, or cannot work; starting again would not help
UNREACHABLE = 3  # exit status: no head answers yet


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """How a node is started.

    plan: what it does
    head: host it starts the head on; empty to join one
    address: host:port of the head
    node_ip: by which others reach this machine; empty for Ray's own choice
    temp_dir: where Ray keeps sockets and logs; empty for Ray's own choice
    object_store_mib: shared memory of Ray, for modules in transit
    extra: further arguments of `ray start`
    """

    plan: NodePlan
    address: str
    head: bool = False
    node_ip: str = ""
    temp_dir: str = ""
    object_store_mib: int = 256
    extra: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """For the child's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeOptions:
        """What `to_json` wrote."""
        values = json.loads(text)
        plan = NodePlan(**{**values["plan"], "fake_devices": tuple(values["plan"]["fake_devices"])})
        return cls(**{**values, "plan": plan, "extra": tuple(values["extra"])})


def command_of(options: NodeOptions, gpus: Sequence[DeviceFacts], versions: dict[str, str]) -> list[str]:
    """The `ray start` that makes the node. Ray is told of no GPU: they are ours to hand out, by name."""
    plan = options.plan
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--num-cpus=0", "--num-gpus=0", "--log-style=record", "--include-log-monitor=false"]
    command += [f"--object-store-memory={options.object_store_mib * 2**20}"]
    command += [f"--resources={json.dumps(resources_of(plan, gpus))}"]
    command += ["--labels=" + ",".join(f"{name}={value}" for name, value in to_labels(versions).items())]
    if options.head:
        command += [
            "--head",
            f"--port={options.address.rpartition(':')[2]}",
            "--include-dashboard=false",
            "--no-monitor",
        ]
    else:
        command += [f"--address={options.address}"]
    command += [f"--node-ip-address={options.node_ip}"] if options.node_ip else []
    command += [f"--temp-dir={options.temp_dir}"] if options.temp_dir and options.head else []
    return [*command, *options.extra]


def refusal(options: NodeOptions, rows: Sequence[NodeRow], versions: dict[str, str]) -> str:
    """Why the machine may not join, or nothing."""
    different = mismatch(rows, versions)
    if not different:
        return ""
    return (
        f"node {options.plan.name} does not fit the cluster at {options.address}: {'; '.join(different)}. "
        "Install the same versions here, or start a cluster of its own"
    )


def main(arguments: list[str]) -> int:
    """Never returns once the node runs."""
    options = NodeOptions.from_json(arguments[0])
    machine = options.plan.machine()
    gpus = machine.gpus
    machine.close()
    driver = next((gpu.environment.driver for gpu in gpus if gpu.environment is not None), "")
    try:
        versions = own_versions(options.plan.engine, driver=driver)
        text = "" if options.head else refusal(options, Cluster(options.address).nodes(), versions)
    except EngineError as error:
        return _say(str(error), REFUSED)
    except ClusterUnreachable as error:
        return _say(str(error), UNREACHABLE)
    if text:
        return _say(text, REFUSED)
    environ = {
        **os.environ,
        **options.plan.to_env(),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray hides every GPU from a worker that asked it for none
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    command = command_of(options, gpus, versions)
    os.execve(command[0], command, environ)
    raise AssertionError("unreachable")


def ip_towards(address: str) -> str:
    """By which a host at `address` reaches this machine, as far as the routes tell; no packet is sent."""
    host, _, port = address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _say(text: str, status: int) -> int:
    print(f"gemm-tuner node: {text}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
