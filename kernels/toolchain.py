"""Finding the compilers: nvcc from the pinned CUDA wheels (a system toolkit is only a fallback) and a C++ compiler."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import ToolchainError

_PROBE_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Compilers and headers that build a module.

    nvcc: CUDA compiler
    nvcc_version: as `nvcc --version` prints it
    cxx: C++ compiler, also nvcc's host compiler
    cxx_version: first line of its `--version`
    cuda_include: folder of cuda.h
    ffi_include: folders of the apache-tvm-ffi headers
    ffi_library: folder of libtvm_ffi
    tvm_version, ffi_version: versions of apache-tvm and apache-tvm-ffi
    """

    nvcc: Path
    nvcc_version: str
    cxx: Path
    cxx_version: str
    cuda_include: Path
    ffi_include: tuple[Path, ...]
    ffi_library: Path
    tvm_version: str
    ffi_version: str

    @property
    def name(self) -> str:
        """What decides whether two builds are comparable; part of an environment's key."""
        return f"nvcc-{self.nvcc_version} tvm-{self.tvm_version} ffi-{self.ffi_version}"

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that can change the launcher object."""
        return hashlib.sha256(f"{self.name} {self.cxx_version}".encode()).hexdigest()


def find_toolchain(nvcc: Path | None = None, cxx: Path | None = None) -> Toolchain:
    """Locate compilers and headers. Raises ToolchainError naming what is missing and how to get it."""
    nvcc = nvcc or _find_nvcc()
    cxx = cxx or _which("g++") or _which("c++")
    if cxx is None:
        raise ToolchainError("no C++ compiler found: install g++ (Debian: apt-get install g++)")
    ffi = importlib.util.find_spec("tvm_ffi")
    if ffi is None or ffi.origin is None:
        raise ToolchainError("apache-tvm-ffi is not installed: pip install 'gemm-tuner[tuner]'")
    ffi_root = Path(ffi.origin).parent
    release = re.search(r"release [\d.]+, V([\d.]+)", _output(nvcc, "--version"))
    if release is None:
        raise ToolchainError(f"{nvcc} does not answer like a CUDA compiler")
    return Toolchain(
        nvcc=nvcc,
        nvcc_version=release[1],
        cxx=cxx,
        cxx_version=_output(cxx, "--version").splitlines()[0],
        cuda_include=_cuda_include(nvcc),
        ffi_include=tuple(
            folder for folder in (ffi_root / "include", ffi_root / "include" / "dlpack") if folder.is_dir()
        ),
        ffi_library=ffi_root / "lib",
        tvm_version=importlib.metadata.version("apache-tvm"),
        ffi_version=importlib.metadata.version("apache-tvm-ffi"),
    )


def _find_nvcc() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        for candidate in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            return candidate
    cuda_home = os.environ.get("CUDA_HOME")
    if cuda_home and (candidate := Path(cuda_home) / "bin" / "nvcc").is_file():
        return candidate
    if (found := _which("nvcc")) is not None:
        return found
    raise ToolchainError("no CUDA compiler found: pip install 'gemm-tuner[tuner]' brings the pinned CUDA wheels")


def _cuda_include(nvcc: Path) -> Path:
    root = nvcc.resolve().parent.parent
    for folder in (root / "include", root / "targets" / "x86_64-linux" / "include"):
        if (folder / "cuda.h").is_file():
            return folder
    raise ToolchainError(f"cuda.h was not found beside {nvcc}: install nvidia-cuda-runtime of the same version")


def _which(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def _output(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ToolchainError(f"{program} cannot be run: {error}") from error
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"{program} did not answer within {_PROBE_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise ToolchainError(f"{program} {' '.join(arguments)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
