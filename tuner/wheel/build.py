"""Wheels: `pip install tuned_gemms-*.whl`, then `from tuned_gemms import matmul`.

Written without a build backend: a wheel is a zip with four files of metadata. The same results give the same bytes and
the same version, which is a hash of the content.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.export import (
    LICENSE_ID,
    ExportError,
    collect,
    license_text,
    manifest_of,
    version,
    write_zip,
)
from tuner.manifest import MANIFEST_NAME, canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernels.artifacts import ArtifactStore
    from tuner.export import ExportableResult

PACKAGE = "tuned_gemms"
RUNTIME = Path(__file__).resolve().parent / "runtime"
BASE_VERSION = "1.0.0"
# The runtime uses `torch.library.custom_op` (2.4) and hands torch tensors to modules that were built against this ABI.
REQUIRES = ("torch>=2.4", "apache-tvm-ffi>=0.1.14,<0.2")
PYTHON = ">=3.10"
ELF_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
_ELF_MACHINE_OFFSET = 18


def build_wheel(
    results: Sequence[ExportableResult], artifacts: ArtifactStore, folder: Path, *, allow_unverified: bool
) -> Path:
    """Write the wheel into `folder` under the name that its content gives it.

    Raises ExportError for no results, results that may not be exported or that serve one problem twice, and modules of
    different machines; ArtifactError when a stored module is missing or damaged.
    """
    modules, files = collect(results, artifacts, allow_unverified=allow_unverified)
    _refuse_rivals(modules)
    manifest = manifest_of(modules, files)
    package = {f"{PACKAGE}/{name}": data for name, data in files.items()}
    package |= {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sorted(RUNTIME.glob("*.py"))}
    package[f"{PACKAGE}/{MANIFEST_NAME}"] = canonical(manifest)
    package[f"{PACKAGE}/py.typed"] = b""
    number = f"{BASE_VERSION}+g{_digest(package)[:12]}"
    tag = f"py3-none-linux_{_machine(files)}"
    info = f"{PACKAGE}-{number}.dist-info"
    contents = package | {
        f"{info}/METADATA": _metadata(number, modules).encode(),
        f"{info}/WHEEL": _wheel_file(tag).encode(),
        f"{info}/licenses/LICENSE": license_text().encode(),
    }
    contents[f"{info}/RECORD"] = _record(contents, f"{info}/RECORD").encode()
    path = folder / f"{PACKAGE}-{number}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    write_zip(path, contents)
    return path


def _refuse_rivals(modules: Iterable[dict[str, Any]]) -> None:
    """Two kernels for one product on one device: which one to run would be a guess."""
    seen: dict[tuple[Any, ...], str] = {}
    for module in modules:
        problem = module["problem"]
        place = (*(problem[name] for name in ("m", "n", "k", "dtype")), module["device"], module["sm_count"])
        if place in seen:
            shape = f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']}"
            raise ExportError(
                f"results {seen[place]} and {module['result']} both serve {shape} on {module['device']}: "
                "name one of them"
            )
        seen[place] = module["result"]


def _machine(modules: Mapping[str, bytes]) -> str:
    """The processor that all modules were built for, from their ELF headers."""
    found = {name: _elf_machine(data) for name, data in modules.items()}
    if unknown := sorted(name for name, machine in found.items() if machine is None):
        raise ExportError(f"{unknown[0]} is no shared library of a known processor: it cannot go into a wheel")
    if len(set(found.values())) > 1:
        raise ExportError("the modules were built for different processors: make one wheel for each")
    return next(iter(found.values())) or platform.machine()


def _elf_machine(data: bytes) -> str | None:
    if len(data) < _ELF_MACHINE_OFFSET + 2 or not data.startswith(b"\x7fELF"):
        return None
    return ELF_MACHINES.get(struct.unpack_from("<H", data, _ELF_MACHINE_OFFSET)[0])


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _record(contents: Mapping[str, bytes], own_name: str) -> str:
    """The list of files with their hashes, as PEP 427 has it; its own line has none."""
    lines = []
    for name, data in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{own_name},,\n"])


def _wheel_file(tag: str) -> str:
    return f"Wheel-Version: 1.0\nGenerator: gemm-tuner {version()}\nRoot-Is-Purelib: false\nTag: {tag}\n"


def _metadata(number: str, modules: Sequence[dict[str, Any]]) -> str:
    requires = "".join(f"Requires-Dist: {one}\n" for one in REQUIRES)
    return (
        f"Metadata-Version: 2.4\nName: {PACKAGE.replace('_', '-')}\nVersion: {number}\n"
        f"Summary: {len(modules)} tuned GEMM kernels behind torch.matmul's contract\n"
        f"License-Expression: {LICENSE_ID}\nLicense-File: LICENSE\nRequires-Python: {PYTHON}\n{requires}"
        f"Description-Content-Type: text/markdown\n\n{_readme(modules)}"
    )


def _readme(modules: Sequence[dict[str, Any]]) -> str:
    rows = "\n".join(
        f"| {one['problem']['m']} x {one['problem']['n']} x {one['problem']['k']} | {one['problem']['dtype']} "
        f"| {one['device']} | {', '.join(one['evidence'])}{' (not verified)' if one['unverified'] else ''} |"
        for one in modules
    )
    return f"""# Tuned GEMM kernels

```python
from tuned_gemms import counts, matmul

y = matmul(x, w.t())  # x (M, K), w (N, K), both row-major, on the GPU: y = x @ w.t()
print(counts())       # how many products a tuned kernel served, and why the others went to torch.matmul
```

A product runs on a kernel of this package where one was tuned for its shape, dtype and device, `x` has strides (K, 1),
the second operand strides (1, K), and no gradient is needed; any other goes to `torch.matmul`. Kernels run on torch's
current stream. Before a CUDA graph is captured, call each product once. Under `torch.compile` it is one operator.

| M x N x K | dtype | device | evidence |
|---|---|---|---|
{rows}
"""
