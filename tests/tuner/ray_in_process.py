"""Nodes of a cluster as tasks of one event loop: everything but Ray is real. Nodes can be made to fail in each way."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from tests.tuner.support import PROFILE
from tuner.engine.ray.engine import RayCluster
from tuner.engine.ray.plan import NodePlan, resources_of
from tuner.engine.ray.versions import own_versions, to_labels
from tuner.engine.ray.wire import Broken, Cancel, Forget, NodeRow, Nodes, Replied, Submit
from tuner.engine.ray.worker import NodeWorker
from tuner.engines import RayEngines

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.engine.ray.dispatch import DispatchOptions
    from tuner.engine.ray.link import Listener
    from tuner.engine.ray.wire import ToBridge


class InProcess:
    """Stands in for `tuner.engine.ray.link.Link`, the bridge process and Ray."""

    def __init__(self, folder: Path, *, scale: float = 0.0) -> None:
        self._folder, self._scale = folder, scale
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True)
        self._thread.start()
        self._listener: Listener | None = None
        self._rows: dict[str, NodeRow] = {}
        self._workers: dict[str, NodeWorker] = {}
        self._tasks: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._joined = itertools.count()
        self.connected = True
        self.stalled: set[str] = set()  # of these nodes nothing comes back until they are released
        self._held: list[tuple[str, Replied]] = []
        self.seen: list[Submit] = []

    # ------------------------------------------------------------------ what the dispatcher uses

    def open(self, listener: Listener) -> None:
        """See Link."""
        self._listener = listener
        self._announce()

    def send(self, message: ToBridge) -> bool:
        """See Link."""
        if not self.connected:
            return False
        match message:
            case Submit():
                self.seen.append(message)
                self._loop.call_soon_threadsafe(self._begin, message)
            case Cancel():
                self._loop.call_soon_threadsafe(self._cancel, message.number)
            case Forget():
                pass
        return True

    def close(self) -> None:
        """See Link."""
        self._listener = None
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for worker in self._workers.values():
            worker.close()

    # ------------------------------------------------------------------ what tests do to nodes

    def add(
        self, name: str, *, gpus: int = 1, compiles: int = 2, folder: Path | None = None, **versions: str
    ) -> NodeWorker:
        """A node joins; `versions` differ from ours."""
        plan = NodePlan(
            name=name,
            engine="fake",
            artifacts_dir=str(folder or self._folder / f"modules-{name}"),
            compile_processes=compiles,
            fake_devices=(PROFILE.name,) * gpus,
            fake_scale=self._scale,
        )
        worker = NodeWorker(plan)
        labels = to_labels({**own_versions("fake"), **versions})
        resources = resources_of(plan, worker._machine.gpus)
        self._workers[name] = worker
        self._rows[name] = NodeRow(
            node_id=name, address=name, resources=resources, labels=labels, is_head=False, started_ms=next(self._joined)
        )
        self._announce()
        return worker

    def kill(self, name: str, *, noticed: bool = True) -> None:
        """Everything that it was doing is lost; unnoticed, Ray still lists it."""
        worker = self._workers.pop(name)
        lost = [number for number, (node_id, _) in self._tasks.items() if node_id == name]
        for number in lost:
            self._loop.call_soon_threadsafe(self._cancel, number)
            self._tell(Broken(number=number, reason="the node was killed"))
        worker.close()
        if noticed:
            del self._rows[name]
            self._announce()

    def release(self, name: str) -> None:
        """What a stalled node wanted to say comes now, late."""
        self.stalled.discard(name)
        held, self._held = self._held, []
        for _, message in held:
            self._tell(message)

    def cut(self, reason: str = "the head is gone") -> None:
        """The bridge and all that was running through it are gone."""
        self.connected = False
        for number in list(self._tasks):
            self._loop.call_soon_threadsafe(self._cancel, number)
        if self._listener is not None:
            self._listener.cut(reason)

    def reconnect(self) -> None:
        """The head is back, with the nodes that there are."""
        self.connected = True
        self._announce()

    # ------------------------------------------------------------------ in the loop

    def _announce(self) -> None:
        rows = tuple(sorted(self._rows.values(), key=lambda row: row.started_ms))
        self._tell(Nodes(rows=rows))

    def _tell(self, message: Any) -> None:
        if self._listener is not None and self.connected:
            self._listener.heard(message)

    def _begin(self, message: Submit) -> None:
        task = self._loop.create_task(self._serve(message))
        self._tasks[message.number] = (message.node.node_id, task)

    def _cancel(self, number: int) -> None:
        if (found := self._tasks.pop(number, None)) is not None:
            found[1].cancel()

    async def _serve(self, message: Submit) -> None:
        name = message.node.node_id
        worker = self._workers.get(name)
        if worker is None:
            self._tasks.pop(message.number, None)
            self._tell(Broken(number=message.number, reason="no such node"))
            return
        method = getattr(worker, message.method)
        value = await (method(message.call) if message.method == "run" else method())
        self._tasks.pop(message.number, None)
        reply = Replied(number=message.number, value=value)
        if name in self.stalled:
            self._held.append((name, reply))
        else:
            self._tell(reply)

    async def _end_tasks(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task


class InProcessEngines(RayEngines):
    """What `--engine ray` gives the tuner, with these nodes."""

    def __init__(self, nodes: InProcess, folder: Path, options: DispatchOptions | None = None) -> None:
        self._cluster = RayCluster(nodes, ArtifactStore(folder / "artifacts"), options)
