"""What the soaks on a real GPU share: modules compiled side by side and kept, a card opened here, a file that grows."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from kernels.toolchain import find_toolchain
from tests.soak.report import write_json
from tuner.engine.base import CompileJob
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.gpu.inventory import list_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.jobs import Phase

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One built kernel.

    problem, config: what it computes and how
    path: file of the module
    sha256: of the file
    source_hash: of the generated source
    """

    problem: GemmProblem
    config: GemmConfig
    path: Path
    sha256: str
    source_hash: str


def compile_all(wanted: Sequence[tuple[GemmProblem, GemmConfig]], profile: DeviceProfile, folder: Path) -> list[Module]:
    """Build every kernel with all cores, or find it where an earlier run left it. One that fails is left out."""
    store, index = ArtifactStore(folder / "modules"), folder / "modules.json"
    known: dict[str, list[str]] = json.loads(index.read_text()) if index.exists() else {}
    missing = [pair for pair in wanted if _key(*pair) not in known]
    if missing:
        compile_options = CompilePoolOptions(processes=min(16, os.cpu_count() or 1))
        machine = LocalMachine(LocalOptions(compile=compile_options, gpus=False), store)
        try:
            engine = machine.engine(profile, live=False)
            futures = [
                engine.compile(CompileJob(problem=problem, config=config, sm_count=profile.sm_count))
                for problem, config in missing
            ]
            for pair, future in zip(missing, futures, strict=True):
                reply = future.result()
                if reply.outcome is not None or reply.kernel is None:
                    say(f"{pair[0]}: {reply.outcome}: {reply.reason}")
                    continue
                known[_key(*pair)] = [reply.kernel.sha256, reply.kernel.source_hash]
        finally:
            machine.close()
        write_json(index, known)
    return [
        Module(problem=p, config=c, path=store.path(sha256), sha256=sha256, source_hash=source_hash)
        for p, c in wanted
        for sha256, source_hash in [known.get(_key(p, c), ("", ""))]
        if sha256
    ]


def _key(problem: GemmProblem, config: GemmConfig) -> str:
    return f"{problem.key} {config.key}"


def open_first_gpu() -> LiveDevice:
    """The first supported GPU, opened in this process. Raises SystemExit where there is none."""
    gpus = list_gpus()
    if not gpus:
        raise SystemExit("no supported GPU is visible: run this where there is one")
    from tuner.gpu.device import check_health, open_device

    compilers = find_toolchain()
    device = open_device(uuid=gpus[0].uuid, toolchain=compilers.name, cuda=compilers.nvcc_version)
    check_health()
    return device


def quiet(phase: Phase, subject: int | None = None) -> None:
    """Nobody watches the phases of this process."""


def say(line: str) -> None:
    """Progress, seen at once."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
