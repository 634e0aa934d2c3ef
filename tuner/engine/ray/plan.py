"""What a node is asked to do: handed from `gemm-tuner node` to the worker that Ray starts there, in one variable."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kernels.artifacts import ArtifactStore
from kernels.devices import profile_named
from tuner.engine.base import EngineError
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.engine.ray.fakes import FakeMachine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.devices import DeviceProfile
    from tuner.engine.base import DeviceFacts, Engine

VARIABLE = "GEMM_TUNER_NODE_PLAN"
COMPILE = "gemm_compile"
GPU = "gemm_gpu:"


class Machine(Protocol):
    """The processes of a node, as `tuner.engine.local.LocalMachine`."""

    gpus: tuple[DeviceFacts, ...]

    def engine(self, profile: DeviceProfile, *, live: bool) -> Engine:
        """The engine for GPUs of this name, or, not live, for compiling against a data sheet."""

    def close(self) -> None:
        """End every process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What a node does.

    name: for messages, unique in the cluster
    engine: "local", or "fake" for invented devices
    artifacts_dir: where it keeps modules
    artifacts_mib: MiB that they may take; the least recently used go first
    compile_processes: compiles at a time for the cluster; 0 where it only measures
    certify_processes: compiles at a time of the checks of winners, which run where the GPU is
    compile_limit_s: seconds after which a compile is killed
    gpu_spares: processes a GPU kept in reserve
    gpus: use the GPUs that are here
    fake_devices: names of the profiles that invented GPUs follow
    fake_scale: seconds of the fake engine for each second of a real one
    """

    name: str
    engine: str
    artifacts_dir: str
    artifacts_mib: int = 4096
    compile_processes: int = 2
    certify_processes: int = 2
    compile_limit_s: float = 60.0
    gpu_spares: int = 1
    gpus: bool = True
    fake_devices: tuple[str, ...] = ()
    fake_scale: float = 0.01

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> NodePlan:
        """Raises EngineError on a node that `gemm-tuner node` has not started."""
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        if not text:
            raise EngineError(f"node {socket.gethostname()} was not started by gemm-tuner node: {VARIABLE} is not set")
        values = json.loads(text)
        return cls(**{**values, "fake_devices": tuple(values["fake_devices"])})

    def to_env(self) -> dict[str, str]:
        """The variable that the node's worker reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def artifacts(self) -> ArtifactStore:
        """The node's modules."""
        return ArtifactStore(Path(self.artifacts_dir))

    def machine(self) -> Machine:
        """The processes of this node. Looks for GPUs; starts nothing yet."""
        if self.engine == "fake":
            return FakeMachine(
                [profile_named(name) for name in self.fake_devices],
                node=self.name,
                artifacts=self.artifacts,
                compile_processes=max(1, self.compile_processes),
                scale=self.fake_scale,
            )
        processes = max(self.compile_processes, self.certify_processes if self.gpus else 0, 1)
        options = LocalOptions(
            compile=CompilePoolOptions(processes=processes, limit_s=self.compile_limit_s),
            gpus=self.gpus,
            spares=self.gpu_spares,
            verdicts=Path(self.artifacts_dir).parent / "verdicts",
        )
        return LocalMachine(options, self.artifacts)


def resources_of(plan: NodePlan, gpus: Sequence[DeviceFacts]) -> dict[str, float]:
    """What a node offers, as Ray resources: places to compile, and its GPUs by architecture and exact name."""
    offered: dict[str, float] = {COMPILE: float(plan.compile_processes)} if plan.compile_processes else {}
    for gpu in gpus:
        name = f"{GPU}{gpu.profile.arch.name}:{gpu.name}"
        offered[name] = offered.get(name, 0.0) + 1.0
    return offered


def compile_slots(resources: Mapping[str, float]) -> int:
    """Compiles at a time that a node offers."""
    return int(resources.get(COMPILE, 0))


def gpu_slots(resources: Mapping[str, float]) -> dict[str, int]:
    """GPUs that a node offers, by exact device name."""
    offered = {name.split(":", 2)[2]: int(count) for name, count in resources.items() if name.startswith(GPU)}
    return {name: count for name, count in offered.items() if count}


def ours(resources: Mapping[str, float]) -> dict[str, float]:
    """The part of a node's resources that the tuner uses."""
    return {name: count for name, count in resources.items() if name == COMPILE or name.startswith(GPU)}
