"""What must be equal on all machines of a cluster, and how to say what differs.

Ray carries it as labels of nodes, so that a machine can be refused before it joins.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.engine.fake import FAKE_CUDA
from tuner.engine.local import toolchain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX = "gemm-tuner."
ROOT = Path(__file__).resolve().parents[3]
LONGEST_LABEL = 63  # Ray's limit for a label's value
# What the tuner and every node must share: they exchange pickled jobs and records.
SHARED = ("python", "ray", "template", "code")
DRIVER = "driver"


def own_versions(engine: str, *, driver: str = "") -> dict[str, str]:
    """Versions of this machine by name, fit for labels. Raises EngineError when there are no compilers.

    engine: "local", or "fake", whose compiler is invented
    driver: of the GPUs, empty without any
    """
    compilers = {"nvcc": FAKE_CUDA, "tvm": "fake", "ffi": "fake"}
    if engine == "local":
        found = toolchain()
        compilers = {"nvcc": found.nvcc_version, "tvm": found.tvm_version, "ffi": found.ffi_version}
    versions = {**shared_versions(), "engine": engine, **compilers}
    if driver:
        versions[DRIVER] = driver
    return {name: label(value) for name, value in versions.items()}


@cache
def shared_versions() -> dict[str, str]:
    """The part that does not depend on compilers and GPUs."""
    return {
        "python": platform.python_version(),
        "ray": _ray_version(),
        "template": _digest("kernels"),
        "code": _digest("tuner", "search_space"),
    }


def differences(reference: Mapping[str, str], node: Mapping[str, str], *, names: Iterable[str] = ()) -> list[str]:
    """Where a node differs from the cluster, for people; empty where it fits.

    names: what is compared; default: everything that both have. Of drivers only the major version counts, as in
        `environment_key`
    """
    compared = tuple(names) or tuple(name for name in reference if name in node)
    return [
        f"{name} is {node.get(name, 'not told')} here, {reference.get(name, 'not told')} in the cluster"
        for name in compared
        if _significant(name, reference.get(name)) != _significant(name, node.get(name))
    ]


def to_labels(versions: Mapping[str, str]) -> dict[str, str]:
    """As labels of a Ray node."""
    return {PREFIX + name: value for name, value in versions.items()}


def of_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The versions that a node's labels tell; empty for a node that is none of ours."""
    return {name.removeprefix(PREFIX): value for name, value in labels.items() if name.startswith(PREFIX)}


def label(text: str) -> str:
    """Text as the value of a Ray label: letters, digits, dashes, dots and underscores, at most 63."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:LONGEST_LABEL] or "none"


def _ray_version() -> str:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _significant(name: str, value: str | None) -> str | None:
    return value.split(".")[0] if name == DRIVER and value else value


def _digest(*folders: str) -> str:
    """Hash of the sources below these folders, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cc", ".h"):
                digest.update(f"{path.relative_to(ROOT)}:".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
