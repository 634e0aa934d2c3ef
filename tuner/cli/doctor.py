"""`doctor`: what this machine has of what tuning needs, and what to do about what it lacks."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from tuner.cli.output import Output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from tuner.cli.settings import Settings

LEAST_FREE_BYTES = 2 * 2**30  # a study of 2,000 trials keeps about 1 GB of modules until its final
# (distribution, needed for tuning, extra that brings it)
PACKAGES = (
    ("gemm-tuner", False, ""),
    ("httpx", True, ""),
    ("fastapi", True, "server"),
    ("sqlalchemy", True, "server"),
    ("apache-tvm", True, "tuner"),
    ("apache-tvm-ffi", True, "tuner"),
    ("optuna", True, "tuner"),
    ("torch", False, "gpu"),
    ("tirx-harness", False, "verify"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at.

    name: what
    ok: whether it is as it should be
    required: whether tuning cannot work without it
    detail: what was found
    hint: what to do, empty when nothing
    """

    name: str
    ok: bool
    required: bool
    detail: str
    hint: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `missing` (tuning cannot work) or `absent` (something optional is not there)."""
        return "ok" if self.ok else "missing" if self.required else "absent"


def doctor(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 1 when something that tuning needs is missing."""
    checks = [check for look in LOOKS for check in look(settings)]
    healthy = all(check.ok or not check.required for check in checks)
    output = Output(as_json=args.json)
    output.document({"ok": healthy, "checks": [asdict(check) for check in checks]})
    output.table("", ("check", "verdict", "found"), [(c.name, c.verdict, c.detail) for c in checks])
    for check in checks:
        if not check.ok and check.hint:
            output.text(f"{check.name}: {check.hint}")
    output.text("everything that tuning needs is here" if healthy else "tuning cannot work on this machine yet")
    return 0 if healthy else 1


def _python(settings: Settings) -> list[Check]:
    supported = (3, 12) <= sys.version_info[:2] < (3, 14)
    detail = f"{platform.python_version()} on {platform.platform(terse=True)}"
    return [Check(name="python", ok=supported, required=True, detail=detail, hint="use Python 3.12 or 3.13")]


def _packages(settings: Settings) -> list[Check]:
    checks = []
    for name, required, extra in PACKAGES:
        hint = f"pip install 'gemm-tuner[{extra}]'" if extra else "pip install gemm-tuner"
        try:
            detail, ok = metadata.version(name), True
        except metadata.PackageNotFoundError:
            detail, ok = "not installed", False
        checks.append(Check(name=name, ok=ok, required=required, detail=detail, hint=hint))
    return checks


def _compilers(settings: Settings) -> list[Check]:
    from kernels.errors import ToolchainError
    from kernels.toolchain import find_toolchain

    cxx = shutil.which("g++") or shutil.which("c++")
    checks = [
        Check(
            name="g++",
            ok=cxx is not None,
            required=True,
            detail=cxx or "not found",
            hint="install it (Debian and Ubuntu: apt-get install g++); it builds the launcher of every module",
        )
    ]
    try:
        found = find_toolchain()
    except ToolchainError as error:
        return [*checks, Check(name="toolchain", ok=False, required=True, detail="incomplete", hint=str(error))]
    return [*checks, Check(name="toolchain", ok=True, required=True, detail=f"{found.name} at {found.nvcc}")]


def _driver(settings: Settings) -> list[Check]:
    """The driver library alone: no CUDA context is made, so this is safe beside a running measurement."""
    version = ctypes.c_int(0)
    try:
        known = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    except (OSError, AttributeError):
        known = False
    detail = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}" if known else "no NVIDIA driver"
    hint = "needed to measure; without it only --mode model works"
    return [Check(name="driver", ok=known, required=False, detail=detail, hint=hint)]


def _gpus(settings: Settings) -> list[Check]:
    from tuner.gpu.inventory import list_gpus

    gpus = list_gpus()
    if not gpus:
        hint = "sm_90a (H100, H200) and sm_100a (B200) can be measured; without one, only --mode model works"
        return [Check(name="gpu", ok=False, required=False, detail="none that a template serves", hint=hint)]
    return [
        Check(name=f"gpu {index}", ok=True, required=False, detail=f"{facts.name}, {facts.profile.arch.name}")
        for index, facts in enumerate(gpus)
    ]


def _home(settings: Settings) -> list[Check]:
    """Whether state can be kept there. Looking must not create anything."""
    folder = settings.home
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    detail = f"{settings.home}, {free / 2**30:.0f} GiB free"
    if not os.access(folder, os.W_OK):
        hint = "point GEMM_TUNER_HOME at a folder you may write"
        return [Check(name="home", ok=False, required=True, detail=f"{folder} cannot be written", hint=hint)]
    hint = "free some space: modules need about 2 GiB"
    return [Check(name="home", ok=free >= LEAST_FREE_BYTES, required=True, detail=detail, hint=hint)]


def _database(settings: Settings) -> list[Check]:
    try:
        from db.database import Database
        from db.errors import DatabaseError, MissingDatabase
    except ModuleNotFoundError as error:
        hint = "pip install 'gemm-tuner[server]'"
        return [Check(name="database", ok=False, required=True, detail=f"{error.name} is not installed", hint=hint)]
    from tuner.cli.database import shown_url

    place = shown_url(settings.database_url)
    try:
        Database.open(settings.database_url, create=False, migrate=False).close()
    except MissingDatabase:
        return [Check(name="database", ok=True, required=True, detail=f"{place}: will be created on first use")]
    except DatabaseError as error:
        return [Check(name="database", ok=False, required=True, detail=place, hint=str(error))]
    return [Check(name="database", ok=True, required=True, detail=place)]


LOOKS: tuple[Callable[[Settings], list[Check]], ...] = (
    _python,
    _packages,
    _compilers,
    _driver,
    _gpus,
    _home,
    _database,
)
