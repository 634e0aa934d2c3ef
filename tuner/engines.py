"""Which engine serves a request: those of this machine, or invented ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels.artifacts import ArtifactStore
from kernels.devices import PROFILES, invented_name
from search_space.request import Mode, TuneRequest
from tuner.engine.base import DeviceFacts, Engine, NoDevice
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.fake import FAKE_CUDA, FAKE_TOOLCHAIN, FakeEngine, FakeOptions, FakeTimes, fake_device
from tuner.engine.local import LocalMachine, LocalOptions, toolchain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.engine.ray.engine import RayCluster
    from tuner.settings import Settings


class Engines(Protocol):
    """Engines by request. Thread-safe."""

    def engine_for(self, request: TuneRequest) -> Engine:
        """The engine that serves a request. Raises NoDevice when none can, EngineError when nothing works here."""

    def toolchain(self) -> str:
        """The compilers in one line. Raises EngineError when there are none."""

    def cuda(self) -> str:
        """CUDA version of the compiler. Raises EngineError when there is none."""

    def devices(self) -> Sequence[DeviceFacts]:
        """The live devices."""

    def troubled(self) -> Mapping[str, tuple[str, str]]:
        """State and reason of the devices that cannot be used now, by uuid: SET_ASIDE or OFFLINE."""

    def close(self) -> None:
        """End all engines."""


class LocalEngines:
    """The CPUs and GPUs of this machine."""

    def __init__(self, settings: Settings) -> None:
        """Looks for GPUs; starts nothing yet."""
        options = LocalOptions(
            compile=CompilePoolOptions(processes=settings.compile_processes, limit_s=settings.compile_limit_s),
            spares=settings.gpu_spares,
            verdicts=settings.verdicts_dir,
        )
        self._machine = LocalMachine(options, ArtifactStore(settings.artifacts_dir))

    def engine_for(self, request: TuneRequest) -> Engine:
        """See Engines."""
        if request.mode is Mode.MODEL:
            return self._machine.engine(request.profile, live=False)
        for gpu in self._machine.gpus:
            if gpu.profile.arch.name == request.arch and request.device in (None, gpu.name):
                return self._machine.engine(gpu.profile, live=True)
        here = ", ".join(sorted({gpu.name for gpu in self._machine.gpus})) or "none"
        raise NoDevice(
            f"no {request.device or request.arch} GPU on this machine (GPUs here: {here}): "
            "ask for mode 'model', or tune on a machine that has one"
        )

    def toolchain(self) -> str:
        """See Engines."""
        return toolchain().name

    def cuda(self) -> str:
        """See Engines."""
        return toolchain().nvcc_version

    def devices(self) -> Sequence[DeviceFacts]:
        """See Engines."""
        return self._machine.gpus

    def troubled(self) -> Mapping[str, tuple[str, str]]:
        """See Engines. A GPU that fails is tried again by itself."""
        return {}

    def close(self) -> None:
        """See Engines."""
        self._machine.close()


class FakeEngines:
    """Invented devices, one for each profile, for tests and load generators."""

    def __init__(self, settings: Settings, options: FakeOptions | None = None) -> None:
        """`options` decide about noise and faults; times are scaled by the settings."""
        self._options = options or FakeOptions(
            times=FakeTimes(scale=settings.fake_scale, compile_workers=settings.compile_processes)
        )
        artifacts, database = ArtifactStore(settings.artifacts_dir), settings.sqlite_file
        self._engines = {
            invented_name(profile): FakeEngine(profile, options=self._options, artifacts=artifacts, database=database)
            for profile in PROFILES
        }

    def engine_for(self, request: TuneRequest) -> Engine:
        """See Engines."""
        return self._engines[invented_name(request.profile)]

    def toolchain(self) -> str:
        """See Engines."""
        return FAKE_TOOLCHAIN

    def cuda(self) -> str:
        """See Engines."""
        return FAKE_CUDA

    def devices(self) -> Sequence[DeviceFacts]:
        """See Engines."""
        return tuple(fake_device(profile) for profile in PROFILES)

    def troubled(self) -> Mapping[str, tuple[str, str]]:
        """See Engines."""
        return {}

    def close(self) -> None:
        """See Engines."""
        for engine in self._engines.values():
            engine.close()


class RayEngines:
    """The nodes of a Ray cluster."""

    def __init__(self, settings: Settings) -> None:
        """Starts connecting. Raises ModuleNotFoundError without Ray."""
        import ray  # noqa: F401  (fails here, where a person sees it, and not in the child process that uses it)

        from tuner.engine.ray.engine import RayCluster
        from tuner.engine.ray.link import Link, LinkOptions

        link = Link(LinkOptions(address=settings.ray_address))
        self._cluster: RayCluster = RayCluster(link, ArtifactStore(settings.artifacts_dir))

    def engine_for(self, request: TuneRequest) -> Engine:
        """See Engines."""
        if request.mode is Mode.MODEL:
            return self._cluster.compiling(request.profile)
        return self._cluster.engine(request.arch, request.device, request.profile.name)

    def toolchain(self) -> str:
        """See Engines. Of the nodes, which all have the same."""
        return self._cluster.report().toolchain

    def cuda(self) -> str:
        """See Engines."""
        return self._cluster.report().cuda

    def devices(self) -> Sequence[DeviceFacts]:
        """See Engines."""
        return [device.facts for device in self._cluster.devices()]

    def troubled(self) -> Mapping[str, tuple[str, str]]:
        """See Engines."""
        return {device.facts.uuid: (device.state, device.reason) for device in self._cluster.devices() if device.reason}

    def close(self) -> None:
        """See Engines."""
        self._cluster.close()


def engines_of(settings: Settings) -> Engines:
    """The engines that the settings name."""
    if settings.engine == "ray":
        return RayEngines(settings)
    return FakeEngines(settings) if settings.engine == "fake" else LocalEngines(settings)
