"""Nodes as hosts of their own, in network namespaces, with the network of one cut for 10 s while a study runs.

    python -m tests.soak.ray_network --out results/soak/ray_network.json        # as root, on Linux

The script moves into a network namespace of its own first, so the machine's network stays as it is. Head, two nodes
and the tuner have addresses of their own; the tuner's machine joins the cluster by itself. Trials and winner must be
those of the local engine, and the node must be used again after the cut.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from tests.ray_cluster import LocalCluster, Place
from tests.soak.report import hand_over
from tests.tuner.support import PROFILE, fake, request, told, tune
from tuner.engine.ray.engine import RayCluster
from tuner.engine.ray.link import Link, LinkOptions
from tuner.recorder import MemoryRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

INSIDE = "GEMM_TUNER_SOAK_IN_NAMESPACE"
NAMES = ("head", "n0", "n1")
NETWORK = "10.77.0"
TUNER_IP = f"{NETWORK}.1"
WAIT_S = 180.0


def ip(*arguments: str) -> None:
    """Run `ip`. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True)


def build_network(at_exit: ExitStack) -> dict[str, Place]:
    """A bridge here, and a namespace on it for each node."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "hub", "type", "bridge")
    ip("address", "add", f"{TUNER_IP}/24", "dev", "hub")
    ip("link", "set", "hub", "up")
    places = {}
    for index, name in enumerate(NAMES):
        space, address = f"gemm-{os.getpid()}-{name}", f"{NETWORK}.{10 + index}"
        ip("netns", "add", space)
        at_exit.callback(ip, "netns", "delete", space)
        ip("link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", f"v-{name}", "master", "hub", "up")
        ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        places[name] = Place(ip=address, command=("ip", "netns", "exec", space))
    return places


class Cutter(MemoryRecorder):
    """Cuts a node's network with the third trial; notes when trials were saved."""

    def __init__(self, name: str, cut_s: float) -> None:
        super().__init__()
        self._name, self._cut_s = name, cut_s
        self.numbers: list[int] = []
        self.during = 0  # trials that were saved while the network was cut
        self._back_s = 0.0

    def save_trial(self, trial: Any, kernel: Any) -> None:
        """See Recorder."""
        self.numbers.append(trial.number)
        self.during += time.monotonic() < self._back_s
        if len(self.numbers) == 3:
            ip("link", "set", f"v-{self._name}", "down")
            self._back_s = time.monotonic() + self._cut_s
            subprocess.Popen(["sh", "-c", f"sleep {self._cut_s}; ip link set v-{self._name} up"])
        super().save_trial(trial, kernel)


def wait_for(question: Callable[[], object], what: str) -> float:
    """Seconds until it holds."""
    began_s = time.monotonic()
    while not question():
        if time.monotonic() - began_s > WAIT_S:
            raise SystemExit(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.1)
    return time.monotonic() - began_s


def run(options: argparse.Namespace, folder: Path, at_exit: ExitStack) -> dict[str, Any]:
    """The soak; the report."""
    places = build_network(at_exit)
    cluster = LocalCluster(folder, scale=options.scale, address=f"{NETWORK}.10:6379", places=places)
    at_exit.callback(cluster.close)
    cluster.start_head()
    for name in NAMES[1:]:
        cluster.start_node(name)
    cluster.wait_for(len(NAMES))
    opened = RayCluster(Link(LinkOptions(address=cluster.address)), ArtifactStore(folder / "tuner"))
    at_exit.callback(opened.close)
    at_exit.enter_context(cluster.mending())

    def ready() -> bool:
        return sum(device.state == "READY" for device in opened.devices()) == len(NAMES) - 1

    wait_for(ready, "all nodes ready")
    print("all nodes are ready: the study starts", flush=True)
    recorder = Cutter("n1", options.cut_s)
    began_s = time.monotonic()
    found = tune(request(options.trials), opened.engine("sm_90a", None, PROFILE.name), recorder=recorder)
    wall_s = time.monotonic() - began_s
    back_s = wait_for(ready, "all nodes ready again")
    alone = tune(request(options.trials), fake())
    assert found.winner is not None
    assert alone.winner is not None
    problems = []
    if told(found) != told(alone):
        problems.append("trials differ from those of the local engine")
    if found.winner.config != alone.winner.config:
        problems.append("another winner")
    if len(recorder.numbers) != len(set(recorder.numbers)):
        problems.append("a trial was counted twice")
    return {
        "schema": 1,
        "command": f"python -m tests.soak.ray_network --trials {options.trials} --cut-s {options.cut_s:g}"
        f" --scale {options.scale:g}",
        "environment": {"python": sys.version.split()[0], "load_1min": round(os.getloadavg()[0], 1)},
        "cut_s": options.cut_s,
        "trials": len(recorder.numbers),
        "trials_saved_during_the_cut": recorder.during,
        "jobs_tried_elsewhere": opened.dispatcher.retries,
        "study_wall_s": round(wall_s, 1),
        "node_used_again_s_after_the_study": round(back_s, 1),
        "problems": problems,
    }


def main() -> int:
    """0 when all went as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--cut-s", type=float, default=10.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if INSIDE not in os.environ:
        command = ["unshare", "--net", sys.executable, "-m", "tests.soak.ray_network", *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="gemm-rn-", dir="/tmp"))  # paths of sockets must be short
    with ExitStack() as at_exit:
        at_exit.callback(shutil.rmtree, folder, ignore_errors=True)
        report = run(options, folder, at_exit)
    hand_over(report, options.out)
    print(json.dumps(report["problems"]))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
