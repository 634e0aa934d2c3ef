"""Bundles: one zip with tuned modules, what is known about each, and how to call them with apache-tvm-ffi alone.

The same results give the same bytes: no clock, no path and no host name goes in. Reading is in tuner.bundle.
"""

from __future__ import annotations

import hashlib
import io
import stat
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernels.arch import arch_named
from kernels.artifacts import write_atomically
from kernels.devices import default_profile, profile_named
from kernels.errors import ConfigError
from tuner.manifest import (
    ENTRY,
    MANIFEST_NAME,
    SCHEMA,
    canonical,
    contradiction,
    is_unverified,
    missing_evidence,
    sealed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.artifacts import ArtifactStore

LICENSE_ID = "Apache-2.0"

# The earliest time a zip can hold: a bundle says nothing about when it was written.
FIXED_TIME = (1980, 1, 1, 0, 0, 0)


class ExportError(ValueError):
    """A bundle cannot be built from these results, or a file is not a bundle that can be trusted."""


class ExportableResult(Protocol):
    """What a stored result must tell about itself to be exported; `db.models.Result` does."""

    @property
    def id(self) -> str: ...
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def device_name(self) -> str | None: ...
    @property
    def revision(self) -> int | None: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def evidence(self) -> list[str]: ...
    @property
    def environment(self) -> dict[str, Any] | None: ...
    @property
    def median_us(self) -> float | None: ...
    @property
    def ratio(self) -> dict[str, Any] | None: ...
    @property
    def artifact_sha256(self) -> str | None: ...
    @property
    def source_hash(self) -> str | None: ...
    @property
    def withdrawn_reason(self) -> str | None: ...


# ---------------------------------------------------------------------------------------------------- writing


def build_bundle(
    results: Sequence[ExportableResult], artifacts: ArtifactStore, out_path: Path, *, allow_unverified: bool
) -> dict[str, Any]:
    """Write the bundle to `out_path` (temporary name first, then renamed) and return its manifest.

    Raises ExportError for no results, a result without a module or without the evidence that publication needs, and
    ArtifactError when a stored module is missing or damaged.
    """
    modules, files = collect(results, artifacts, allow_unverified=allow_unverified)
    files["LICENSE"] = license_text().encode()
    files["README.md"] = _readme(modules).encode()
    manifest = manifest_of(modules, files)
    write_zip(out_path, {MANIFEST_NAME: canonical(manifest), **files})
    return manifest


def collect(
    results: Sequence[ExportableResult], artifacts: ArtifactStore, *, allow_unverified: bool
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What a manifest says of each result's module, and the modules by file name. Raises ExportError, ArtifactError."""
    if not results:
        raise ExportError("nothing to export: name at least one result")
    for result in results:
        _refuse_unverified(result, allow_unverified=allow_unverified)
    files: dict[str, bytes] = {}
    modules = []
    for result in sorted(results, key=lambda r: (r.arch, r.dtype, r.m, r.n, r.k, r.id)):
        assert result.artifact_sha256 is not None  # _refuse_unverified looked
        entry = _module_entry(result)
        files[entry["file"]] = artifacts.read(result.artifact_sha256)
        if reason := contradiction(entry, files[entry["file"]]):
            raise ExportError(f"result {result.id} is not exported: {reason}")
        modules.append(entry)
    return modules, files


def _refuse_unverified(result: ExportableResult, *, allow_unverified: bool) -> None:
    shape = f"{result.m}x{result.n}x{result.k} {result.dtype} {result.arch}"
    if result.withdrawn_reason:
        raise ExportError(f"result {result.id} ({shape}) was withdrawn: {result.withdrawn_reason}")
    if not result.artifact_sha256:
        raise ExportError(f"result {result.id} ({shape}) has no compiled module: tune it again")
    missing = missing_evidence(result.evidence)
    if missing and not allow_unverified:
        raise ExportError(
            f"result {result.id} ({shape}) is a candidate: it lacks {' and '.join(missing)} (has "
            f"{', '.join(result.evidence) or 'no evidence'}); ask with allow_unverified to export it all the same"
        )
    if result.revision is None and not allow_unverified:
        raise ExportError(
            f"result {result.id} ({shape}) was never published here, whatever evidence it names; tune its problem, or "
            "ask with allow_unverified to export it all the same"
        )


def _module_entry(result: ExportableResult) -> dict[str, Any]:
    shape = f"{result.m}x{result.n}x{result.k}"
    digest = str(result.artifact_sha256)
    return {
        "file": f"modules/gemm_{shape}_{result.dtype}_{result.arch}_{digest[:12]}.so",
        "entry": ENTRY,
        "sha256": digest,
        "result": result.id,
        "revision": result.revision,
        "problem": {"m": result.m, "n": result.n, "k": result.k, "dtype": result.dtype, "layout": result.layout},
        "config": dict(result.config),
        "arch": result.arch,
        "device": result.device_name,
        "sm_count": _sm_count(result),
        "evidence": list(result.evidence),
        "unverified": is_unverified(result.evidence, result.revision),
        "environment": dict(result.environment or {}),
        "median_us": result.median_us,
        "ratio": dict(result.ratio or {}),
        "source_hash": result.source_hash,
    }


def _sm_count(result: ExportableResult) -> int:
    """SMs the persistent grid was sized for: of the device that measured, else of the profile that was modeled."""
    recorded = (result.environment or {}).get("sm_count")
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    try:
        return profile_named(result.device_name or "").sm_count
    except ConfigError:
        return default_profile(arch_named(result.arch)).sm_count


def manifest_of(modules: list[dict[str, Any]], files: Mapping[str, bytes]) -> dict[str, Any]:
    """The manifest of these modules, with the hash of each file that goes with it."""
    return sealed(
        {
            "schema": SCHEMA,
            "generator": f"gemm-tuner {version()}",
            "license": LICENSE_ID,
            "unverified": any(module["unverified"] for module in modules),
            "requires": {"python": ["apache-tvm-ffi"], "target": "an NVIDIA driver that supports CUDA 13"},
            "how_to_call": {
                "load": f'tvm_ffi.load_module(FILE)["{ENTRY}"]',
                "call": "gemm(A, B, D)",
                "computes": "D[M,N] = A[M,K] @ B[N,K]^T, float32 accumulation",
                "arguments": "row-major tensors on the device, of the problem's dtype: A (M, K), B (N, K), D (M, N)",
            },
            "modules": modules,
            "files": {
                name: {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
                for name, data in sorted(files.items())
            },
        }
    )


def write_zip(out_path: Path, files: Mapping[str, bytes]) -> None:
    """Write a zip, whole or not at all; the same files give the same bytes. Raises ExportError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, FIXED_TIME)
            info.create_system = 3  # Unix, wherever it was written
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    try:
        write_atomically(out_path, buffer.getvalue())
    except OSError as error:
        raise ExportError(f"cannot write {out_path}: {error.strerror or error}") from error


def _readme(modules: list[dict[str, Any]]) -> str:
    first = modules[0]
    problem = first["problem"]
    torch_dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[problem["dtype"]]
    rows = "\n".join(
        f"| {m['problem']['m']} x {m['problem']['n']} x {m['problem']['k']} | {m['problem']['dtype']} | {m['arch']} "
        f"| {', '.join(m['evidence'])}{' (not verified)' if m['unverified'] else ''} | `{m['file']}` |"
        for m in modules
    )
    return f"""# Tuned GEMM modules

Each module computes `D[M, N] = A[M, K] @ B[N, K]^T` for one shape on one architecture. Loading and calling one needs
`pip install apache-tvm-ffi` and an NVIDIA driver: no compiler, no network, no CUDA toolkit.

| M x N x K | dtype | arch | evidence | module |
|---|---|---|---|---|
{rows}

```python
import torch
import tvm_ffi

gemm = tvm_ffi.load_module("{first["file"]}")["{ENTRY}"]
a = torch.randn({problem["m"]}, {problem["k"]}, dtype={torch_dtype}, device="cuda")
b = torch.randn({problem["n"]}, {problem["k"]}, dtype={torch_dtype}, device="cuda")
d = torch.empty({problem["m"]}, {problem["n"]}, dtype={torch_dtype}, device="cuda")
gemm(a, b, d)  # on the current stream
```

`{MANIFEST_NAME}` holds, for each module, the configuration, the device and the number of SMs it was built for, the
environment and the evidence, and the SHA-256 of each file. A module marked `unverified` was not compared with a
reference on the device it is meant for. Licence: {LICENSE_ID}, see `LICENSE`.
"""


def license_text() -> str:
    """The licence that goes with every bundle. Raises ExportError when the installation lacks it."""
    beside_sources = Path(__file__).resolve().parent.parent / "LICENSE"
    if beside_sources.is_file():
        return beside_sources.read_text(encoding="utf-8")
    try:
        installed = metadata.files("gemm-tuner") or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == "LICENSE":
            return file.read_text(encoding="utf-8")
    raise ExportError("this installation lacks its LICENSE file: install gemm-tuner again")


def version() -> str:
    """Version of this distribution, `unknown` when it is run from sources without being installed."""
    try:
        return metadata.version("gemm-tuner")
    except metadata.PackageNotFoundError:
        return "unknown"
