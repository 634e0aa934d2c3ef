"""The `ray` engine: the faces of a cluster, one for each kind of device."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from kernels.artifacts import ArtifactError, ArtifactStore
from tuner.engine.base import EngineError, NoDevice
from tuner.engine.local import sheet_facts
from tuner.engine.ray.dispatch import Dispatcher, DispatchOptions
from tuner.engine.ray.registry import DeviceState, Registry
from tuner.engine.ray.versions import shared_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kernels.devices import DeviceProfile
    from tuner.engine.base import (
        CertifyJob,
        CertifyReply,
        CompileJob,
        CompileReply,
        DeviceFacts,
        EvaluateJob,
        EvaluateReply,
        FinalJob,
        FinalReply,
    )
    from tuner.engine.ray.link import Listener
    from tuner.engine.ray.wire import NodeReport, ToBridge

STORING_THREADS = 4  # writing a module waits for the disk
JOINING_S = 45.0  # nodes and their workers may take so long to start and to tell what they offer


class Channel(Protocol):
    """The way to the nodes, as `tuner.engine.ray.link.Link`."""

    def open(self, listener: Listener) -> None:
        """Start, and tell the listener from now on."""

    def send(self, message: ToBridge) -> bool:
        """False when nobody hears it."""

    def close(self) -> None:
        """End."""


class RayCluster:
    """The connection of this tuner to a cluster. Close it to end it; the nodes go on."""

    def __init__(self, link: Channel, artifacts: ArtifactStore, options: DispatchOptions | None = None) -> None:
        """Starts connecting. An address where nobody answers is tried again for as long as this lives."""
        self.artifacts = artifacts
        self._options = options or DispatchOptions()
        self._link = link
        self._registry = Registry(self._link, shared_versions())
        self.dispatcher = Dispatcher(self._link, artifacts, self._registry, self._options)
        self.storing = ThreadPoolExecutor(STORING_THREADS, "ray-store")
        self._known: dict[str, DeviceFacts] = {}
        self._engines: dict[str, RayEngine] = {}
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="ray-clock", daemon=True)
        self._link.open(self.dispatcher)
        self._clock.start()

    def engine(self, arch: str, device: str | None, serves: str) -> RayEngine:
        """The engine of a device that is asked for; waits for nodes that join. Raises NoDevice.

        device: its exact name, None for any of the architecture
        serves: name of the profile that is meant where no name is asked for; devices that stand for it come first
        """
        found = self._wait(lambda: self._find(arch, device, serves))
        if found is None:
            here = ", ".join(sorted({state.facts.name for state in self.devices()})) or "none"
            raise NoDevice(
                f"no {device or arch} GPU in the Ray cluster (GPUs there: {here}; nodes: {self.troubles()}): "
                "start gemm-tuner node on a machine that has one, or ask for mode 'model'"
            )
        return self._engine_of(found)

    def compiling(self, profile: DeviceProfile) -> RayEngine:
        """The engine that only compiles for a device of which there is a data sheet."""
        return self._engine_of(sheet_facts(profile))

    def report(self) -> NodeReport:
        """What one usable node says of itself. Raises EngineError when none comes."""
        reports = self._wait(self._registry_reports)
        if not reports:
            raise EngineError(f"no node of the Ray cluster can be used ({self.troubles()}): start gemm-tuner node")
        return reports[0]

    def devices(self) -> list[DeviceState]:
        """Every GPU that was seen, and its state."""
        with self.dispatcher.locked():
            return self._registry.devices()

    def troubles(self) -> str:
        """Why nodes cannot be used, in one line."""
        with self.dispatcher.locked():
            return self._registry.troubles()

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._link.close()
        self._clock.join()
        self.storing.shutdown()

    def _registry_reports(self) -> list[NodeReport]:
        with self.dispatcher.locked():
            return self._registry.reports()

    def _find(self, arch: str, device: str | None, serves: str) -> DeviceFacts | None:
        for report in self._registry_reports():
            for facts in report.gpus:
                self._known.setdefault(report.serves[facts.name] + "\n" + facts.name, facts)
        ranked = sorted(self._known.items(), key=lambda item: (not item[0].startswith(serves + "\n"), item[0]))
        for key, facts in ranked:
            if facts.profile.arch.name == arch and device in (None, facts.name, key.partition("\n")[0]):
                return facts
        return None

    def _engine_of(self, facts: DeviceFacts) -> RayEngine:
        key = f"{facts.name}:{facts.is_live}"
        if key not in self._engines:
            self._engines[key] = RayEngine(self, facts)
        return self._engines[key]

    def _wait[Found](self, look: Callable[[], Found]) -> Found:
        deadline_s = time.monotonic() + JOINING_S
        while not (found := look()) and time.monotonic() < deadline_s and not self._closed.is_set():
            self._closed.wait(0.1)
        return found

    def _tick(self) -> None:
        while not self._closed.wait(self._options.tick_s):
            self.dispatcher.tick()


class RayEngine:
    """See `tuner.engine.base.Engine`. The GPUs behind it are of one device name, whichever nodes they are in."""

    def __init__(self, cluster: RayCluster, facts: DeviceFacts) -> None:
        self._cluster, self._facts = cluster, facts

    @property
    def device(self) -> DeviceFacts:
        """See Engine. Facts of one of the cards."""
        return self._facts

    def compile(self, job: CompileJob) -> Future[CompileReply]:
        """See Engine. The module is stored here too: nodes come and go."""
        inner = self._cluster.dispatcher.submit("compile", self._facts.profile, job)
        outer = _Stored(inner)
        inner.add_done_callback(lambda done: self._store(done, outer))
        return outer

    def evaluate(self, job: EvaluateJob) -> Future[EvaluateReply]:
        """See Engine."""
        return self._on_gpu("evaluate", job)

    def final(self, job: FinalJob) -> Future[FinalReply]:
        """See Engine. All finalists are timed on one card."""
        return self._on_gpu("final", job)

    def certify(self, job: CertifyJob) -> Future[CertifyReply]:
        """See Engine. The stress builds are compiled where the GPU is."""
        return self._on_gpu("certify", job)

    def module_path(self, sha256: str) -> Path:
        """See Engine. The folder alone: a job names its modules by hash, and a node puts its own paths in.

        A path of each module would stay in memory for good, here and in the bridge (see `kernels.artifacts`).
        """
        return self._cluster.artifacts.root

    def has_module(self, sha256: str) -> bool:
        """See Engine."""
        return self._cluster.artifacts.holds(sha256)

    def drop(self, futures: Iterable[Future[Any]]) -> None:
        """See Engine."""
        futures = list(futures)
        for future in futures:
            future.cancel()
        self._cluster.dispatcher.drop([future.inner if isinstance(future, _Stored) else future for future in futures])

    def close(self) -> None:
        """The connection is the cluster's."""

    def _on_gpu(self, method: Any, job: EvaluateJob | FinalJob | CertifyJob) -> Future[Any]:
        if not self._facts.is_live:
            raise EngineError(f"{self._facts.name} is known by its data sheet only: only compiling is possible")
        return self._cluster.dispatcher.submit(method, self._facts.profile, job)

    def _store(self, done: Future[CompileReply], outer: _Stored) -> None:
        if done.cancelled():
            outer.cancel()
            return
        with suppress(RuntimeError):  # the cluster was closed: nobody waits
            self._cluster.storing.submit(self._finish, done, outer)

    def _finish(self, done: Future[CompileReply], outer: _Stored) -> None:
        with suppress(InvalidStateError):  # dropped meanwhile
            try:
                reply = done.result()
                if reply.kernel is not None and reply.outcome is None:
                    self._cluster.artifacts.put(reply.kernel.module)
            except ArtifactError as error:
                outer.set_exception(EngineError(f"{error}; free some space or fix the folder, then resume the study"))
            except Exception as error:  # whatever it is belongs to whoever waits for the future
                outer.set_exception(error)
            else:
                outer.set_result(reply)


class _Stored(Future["CompileReply"]):
    """A compile whose module is also stored on this machine."""

    def __init__(self, inner: Future[Any]) -> None:
        super().__init__()
        self.inner = inner
