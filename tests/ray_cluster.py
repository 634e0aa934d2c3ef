"""A real Ray cluster on this machine, for as long as a test runs: each node is what `gemm-tuner node` starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.cli.conftest import free_port
from tuner.engine.ray.cluster import Cluster, ClusterUnreachable
from tuner.engine.ray.plan import NodePlan
from tuner.engine.ray.start_node import NodeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tuner.engine.ray.wire import NodeRow

HOST = "127.0.0.1"
START_S = 90.0
# A machine of two cores runs several nodes here: they need no spare workers, and no look at the machine's memory.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a node runs.

    ip: its address
    command: what its command line begins with, such as `ip netns exec NAME`
    """

    ip: str = HOST
    command: tuple[str, ...] = ()


class LocalCluster:
    """A head and nodes with invented devices."""

    def __init__(
        self, folder: Path, *, scale: float = 0.0, address: str = "", places: Mapping[str, Place] | None = None
    ) -> None:
        """`places` by name of the node, for those that do not run straight on this machine."""
        self.folder = folder
        self.address = address or f"{HOST}:{free_port()}"
        self._places = places or {}
        self._scale = scale
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, NodeOptions] = {}

    @property
    def names(self) -> list[str]:
        """Nodes that run, without the head."""
        return sorted(name for name, process in self._nodes.items() if name != "head" and process.poll() is None)

    def processes(self) -> list[psutil.Process]:
        """The first process of each node."""
        return [psutil.Process(process.pid) for process in self._nodes.values() if process.poll() is None]

    def start_head(self) -> None:
        """Start the head and wait until it answers."""
        self._start(self._options("head", head=True))
        self.wait_for(bool)

    def start_node(
        self, name: str, *, devices: tuple[str, ...] = ("NVIDIA H200",), compiles: int = 2, modules: Path | None = None
    ) -> None:
        """Start a node; it may take a while to join."""
        self._start(self._options(name, devices=devices, compiles=compiles, modules=modules))

    def kill(self, name: str) -> None:
        """End a node as a power cut does."""
        process = self._nodes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def freeze(self, name: str, number: signal.Signals = signal.SIGSTOP) -> None:
        """Stop a node's processes without ending them; SIGCONT lets them go on."""
        with suppress(ProcessLookupError):
            os.killpg(self._nodes[name].pid, number)

    def mend(self) -> None:
        """Start again what has ended by itself, as `gemm-tuner node` does: Ray gives a raylet 30 s to start."""
        for name, process in list(self._nodes.items()):
            if process.poll() is not None:
                self._start(self._started[name])

    @contextmanager
    def mending(self) -> Iterator[None]:
        """Keep doing so within the block."""
        stop = threading.Event()

        def mend() -> None:
            while not stop.wait(0.5):
                self.mend()

        thread = threading.Thread(target=mend, name="mend", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def wait_for(self, wanted: object) -> tuple[NodeRow, ...]:
        """The live nodes once `wanted`, a number of them or a question about them, holds."""
        deadline_s = time.monotonic() + START_S
        while True:
            rows: tuple[NodeRow, ...] = ()
            self.mend()
            with suppress(ClusterUnreachable):
                rows = Cluster(self.address).nodes()
            if wanted(rows) if callable(wanted) else len(rows) == wanted:
                return rows
            assert time.monotonic() < deadline_s, f"{len(rows)} nodes after {START_S:g} s; see {self.folder}"
            time.sleep(0.2)

    def close(self) -> None:
        """Nothing of the cluster stays behind."""
        for name in list(self._nodes):
            self.kill(name)

    def _options(
        self,
        name: str,
        *,
        head: bool = False,
        devices: tuple[str, ...] = (),
        compiles: int = 0,
        modules: Path | None = None,
    ) -> NodeOptions:
        plan = NodePlan(
            name=name,
            engine="fake",
            artifacts_dir=str(modules or self.folder / f"modules-{name}"),
            compile_processes=compiles,
            fake_devices=devices,
            fake_scale=self._scale,
        )
        return NodeOptions(
            plan=plan,
            address=self.address,
            head=head,
            node_ip=self._places.get(name, Place()).ip,
            temp_dir=str(self.folder / "ray"),
            object_store_mib=80,
        )

    def _start(self, options: NodeOptions) -> None:
        name = options.plan.name
        self._started[name] = options
        with (self.folder / f"{name}.log").open("ab") as log:
            self._nodes[name] = subprocess.Popen(
                [
                    *self._places.get(name, Place()).command,
                    *("nice", sys.executable, "-m", "tuner.engine.ray.start_node", options.to_json()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )


@contextmanager
def running(*, nodes: int = 2, scale: float = 0.0) -> Iterator[LocalCluster]:
    """A head and so many nodes, each with one invented H200 and two places to compile."""
    folder = Path(tempfile.mkdtemp(prefix="gemm-ray-", dir="/tmp"))
    cluster = LocalCluster(folder, scale=scale)
    try:
        cluster.start_head()
        for index in range(nodes):
            cluster.start_node(f"n{index}")
        cluster.wait_for(nodes + 1)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
