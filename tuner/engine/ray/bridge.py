"""Child process of the tuner that is Ray's driver: passes requests on to the workers of nodes, and their answers back.

It decides nothing. When it loses the head it ends, or Ray ends it; the tuner starts another one.

Started as `python -m tuner.engine.ray.bridge PIPE LIFELINE ADDRESS`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tuner.engine.lifeline import die_with
from tuner.engine.ray.cluster import Cluster, ClusterUnreachable
from tuner.engine.ray.plan import ours
from tuner.engine.ray.start_node import ip_towards
from tuner.engine.ray.wire import Broken, Cancel, Forget, Nodes, Refused, Replied, Submit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.engine.ray.wire import FromBridge, NodeRow, ToBridge

NAMESPACE = "gemm-tuner"
LOOK_EVERY_S = 1.0
# The head may be restarted within this time and nothing is lost but what was running; a GCS without storage of its own
# comes back empty, so waiting longer gains nothing.
HEAD_SILENT_S = 15.0
JOIN_S = 60.0
LOST_HEAD = 3  # exit status


class Bridge:
    """The driver. One thread reads requests, one looks at the nodes; Ray calls back from threads of its own."""

    def __init__(self, pipe: Connection, cluster: Cluster) -> None:
        import ray

        from tuner.engine.ray.worker import NodeWorker

        self._ray = ray
        self._pipe, self._cluster = pipe, cluster
        self._worker_class = ray.remote(NodeWorker)
        self._workers: dict[str, Any] = {}
        self._refs: dict[int, Any] = {}
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Until the tuner closes its end of the pipe."""
        threading.Thread(target=self._look, name="nodes", daemon=True).start()
        while True:
            try:
                message: ToBridge = self._pipe.recv()
            except (EOFError, OSError):
                return
            match message:
                case Submit():
                    self._submit(message)
                case Cancel():
                    if (ref := self._refs.pop(message.number, None)) is not None:
                        with suppress(self._ray.exceptions.RayError):
                            self._ray.cancel(ref)
                case Forget():
                    self._workers.pop(message.node_id, None)

    def send(self, message: FromBridge) -> None:
        """Tell the tuner; a tuner that is gone needs no telling."""
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    def _submit(self, message: Submit) -> None:
        number = message.number
        try:
            worker = self._worker(message.node)
            method = getattr(worker, message.method)
            ref = method.remote(message.call) if message.method == "run" else method.remote()
        except Exception as error:  # Ray's errors of submitting are many; each means that this node is of no use now
            self._workers.pop(message.node.node_id, None)
            self.send(Broken(number=number, reason=_text(error)))
            return
        self._refs[number] = ref
        ref.future().add_done_callback(lambda done: self._finished(number, message.node.node_id, done))

    def _finished(self, number: int, node_id: str, done: Any) -> None:
        if self._refs.pop(number, None) is None:
            return  # cancelled: nobody waits
        error = done.exception()
        if error is None:
            self.send(Replied(number=number, value=done.result()))
            return
        if isinstance(error, self._ray.exceptions.ActorDiedError):
            self._workers.pop(node_id, None)
        self.send(Broken(number=number, reason=_text(error)))

    def _worker(self, node: NodeRow) -> Any:
        """The worker of a node, which all tuners share; started when there is none."""
        if node.node_id not in self._workers:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            self._workers[node.node_id] = self._worker_class.options(
                name=f"node-{node.node_id}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",  # a tuner that ends must not take the jobs of others with it
                num_cpus=0,
                resources=ours(node.resources),  # all of them: no second worker fits on the node
                max_concurrency=10_000,  # the tuner bounds what it sends, see Dispatcher
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            ).remote()
        return self._workers[node.node_id]

    def _look(self) -> None:
        """Tell the tuner about nodes that come and go. Ends the process when the head is silent."""
        known: tuple[NodeRow, ...] | None = None
        heard_s = time.monotonic()
        while True:
            try:
                rows = self._cluster.nodes()
            except ClusterUnreachable:
                if time.monotonic() - heard_s > HEAD_SILENT_S:
                    os._exit(LOST_HEAD)  # Ray's own threads may hang on the head, so no orderly end
            else:
                heard_s = time.monotonic()
                if rows != known:
                    known = rows
                    self.send(Nodes(rows=rows))
            time.sleep(LOOK_EVERY_S)


def connect(address: str) -> subprocess.Popen[bytes] | None:
    """Become a driver of the cluster; where no node of it runs on this machine, start one that offers nothing.

    Returns that node's process. Raises ClusterUnreachable.
    """
    import ray

    options: Mapping[str, Any] = {
        "address": address,
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError):
        pass
    else:
        return None
    node = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"),
            *("--num-cpus=0", "--num-gpus=0", "--disable-usage-stats", "--log-style=record"),
            *("--include-log-monitor=false", f"--node-ip-address={ip_towards(address)}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    deadline_s = time.monotonic() + JOIN_S
    while True:
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError) as error:
            if node.poll() is not None or time.monotonic() > deadline_s:
                raise ClusterUnreachable(f"cannot join the Ray cluster at {address}: {error}") from error
            time.sleep(0.5)
        else:
            return node


def main(arguments: list[str]) -> int:
    """Serve until the tuner is gone. Exit status 3: the head cannot be reached."""
    pipe, lifeline, address = Connection(int(arguments[0])), int(arguments[1]), arguments[2]
    die_with(lifeline)
    try:
        cluster = Cluster(address)
        cluster.nodes()  # ray.init would wait for a minute
        node = connect(address)
    except ClusterUnreachable as error:
        with suppress(OSError):
            pipe.send(Refused(reason=str(error)))
        return LOST_HEAD
    try:
        Bridge(pipe, cluster).serve()
    finally:
        if node is not None:
            node.terminate()
    os._exit(0)  # an orderly end of Ray's driver takes seconds and gains nothing


def _text(error: BaseException) -> str:
    """First line of Ray's error, which may hold pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:500]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
