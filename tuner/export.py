"""Bundles: one zip with tuned modules, what is known about each, and how to call them with apache-tvm-ffi alone.

The same results give the same bytes: no clock, no path and no host name goes in. `load_bundle` reads a bundle as it
would a stranger's file: nothing is trusted before its hash agrees.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import zipfile
import zlib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernels.arch import arch_named
from kernels.artifacts import write_atomically
from kernels.config import config_from_dict
from kernels.devices import default_profile, profile_named
from kernels.errors import ConfigError, ProblemError
from kernels.problem import GemmProblem
from kernels.rules import violation
from tuner.records import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.artifacts import ArtifactStore

SCHEMA = 1
ENTRY = "gemm"
LICENSE_ID = "Apache-2.0"
NEEDED_EVIDENCE = ("numeric", "checked")
EVIDENCE = tuple(word.value for word in Evidence)

# The earliest time a zip can hold: a bundle says nothing about when it was written.
FIXED_TIME = (1980, 1, 1, 0, 0, 0)
MANIFEST_NAME = "manifest.json"
SEAL = "sha256"
DESCRIPTION_START = b'{"arch": "'  # of the JSON that kernels.compile puts into a module, keys in order
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_FILE_BYTES = 256 * 2**20


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


def missing_evidence(evidence: Sequence[str]) -> tuple[str, ...]:
    """Evidence that a published result has and this one lacks."""
    return tuple(kind for kind in NEEDED_EVIDENCE if kind not in evidence)


def _refuse_unverified(result: ExportableResult, *, allow_unverified: bool) -> None:
    shape = f"{result.m}x{result.n}x{result.k} {result.dtype} {result.arch}"
    if not result.artifact_sha256:
        raise ExportError(f"result {result.id} ({shape}) has no compiled module: tune it again")
    missing = missing_evidence(result.evidence)
    if missing and not allow_unverified:
        raise ExportError(
            f"result {result.id} ({shape}) is a candidate: it lacks {' and '.join(missing)} (has "
            f"{', '.join(result.evidence) or 'no evidence'}); ask with allow_unverified to export it all the same"
        )


def contradiction(entry: Mapping[str, Any], module: bytes) -> str:
    """Why what a manifest says of a module cannot be true, or nothing.

    Looked at when a bundle is written and again when it is read: rules may have changed since the kernel was tuned, and
    a config must belong to the module that it stands beside.
    """
    try:
        problem = GemmProblem(**entry["problem"])
        config = config_from_dict(entry["arch"], entry["config"])
        broken = violation(problem, config, entry["sm_count"])
    except (ProblemError, ConfigError, KeyError, TypeError) as error:
        return f"its problem or config is not one that this version knows: {error}"
    if broken:
        return f"its config is not legal for {problem} on {entry['sm_count']} SMs: {broken}"
    built = description_in(module)
    for name, told in (("problem", entry["problem"]), ("config", config.to_dict()), ("arch", entry["arch"])):
        if built is not None and _told(name, built) != told:
            return f"its module was built for another {name}: {built.get(name)}, not {told}"
    return ""


def _told(name: str, built: Mapping[str, Any]) -> Any:
    """A member of a module's description. A knob that is newer than the module means its default."""
    if name != "config":
        return built.get(name)
    try:
        return config_from_dict(built["arch"], built["config"]).to_dict()
    except (ConfigError, KeyError, TypeError):
        return built.get(name)


def description_in(module: bytes) -> dict[str, Any] | None:
    """What a module says of itself (kernels.compile), or None. Read without loading it, since loading would run it."""
    start = module.find(DESCRIPTION_START)
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(module[start : module.index(b"\0", start)].decode())
    except (ValueError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


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
        "unverified": bool(missing_evidence(result.evidence)),
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


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the SHA-256 of its other members: a change of any of them shows."""
    content = {name: value for name, value in manifest.items() if name != SEAL}
    return {**content, SEAL: hashlib.sha256(canonical(content)).hexdigest()}


def canonical(manifest: dict[str, Any]) -> bytes:
    """A manifest as it is written: the same content, the same bytes."""
    return (json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


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


# ---------------------------------------------------------------------------------------------------- reading


def load_bundle(path: Path) -> dict[str, Any]:
    """Read a bundle and check every file in it against the manifest. Raises ExportError with what is wrong."""
    return _read(path)[0]


def extract_bundle(path: Path, folder: Path) -> dict[str, Any]:
    """Check a bundle, then write its files under `folder`, which is created. Raises ExportError before writing."""
    manifest, files = _read(path)
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return manifest


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename: info for info in archive.infolist()}
            if len(infos) != len(archive.infolist()):
                raise ExportError(f"{path}: two entries have one name")
            for info in infos.values():
                _check_entry(path, info)
            manifest = _read_manifest(path, archive, infos)
            files = _read_files(path, archive, infos, manifest["files"])
            for module in manifest["modules"]:
                if reason := contradiction(module, files[module["file"]]):
                    raise ExportError(f"{path}: {module['file']!r} cannot be used: {reason}")
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, IndexError) as error:
        # RuntimeError: encrypted entries; NotImplementedError (one of them): unknown compression; ValueError and
        # IndexError: what zipfile raises for some damaged headers.
        if isinstance(error, ExportError):
            raise
        raise ExportError(f"{path} is not a readable bundle: {error}") from error
    return manifest, {MANIFEST_NAME: canonical(manifest), **files}


def _check_entry(path: Path, info: zipfile.ZipInfo) -> None:
    name = info.filename
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise ExportError(f"{path}: entry {name!r} leaves the bundle's folder")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ExportError(f"{path}: entry {name!r} is not a regular file")
    limit = MAX_MANIFEST_BYTES if name == MANIFEST_NAME else MAX_FILE_BYTES
    if info.file_size > limit:
        raise ExportError(f"{path}: entry {name!r} has {info.file_size} bytes, at most {limit} are read")


def _read_manifest(path: Path, archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo]) -> dict[str, Any]:
    if MANIFEST_NAME not in infos:
        raise ExportError(f"{path} holds no {MANIFEST_NAME}: not a bundle of this tool")
    raw = archive.read(MANIFEST_NAME)
    try:
        manifest = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ExportError(f"{path}: {MANIFEST_NAME} is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise ExportError(f"{path}: {MANIFEST_NAME} is not a JSON object")
    schema = manifest.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ExportError(f"{path}: schema {schema!r}, this version reads {SCHEMA}: use a matching gemm-tuner")
    try:
        as_written = raw == canonical(manifest) and manifest.get(SEAL) == sealed(manifest)[SEAL]
    except (ValueError, RecursionError):  # numbers and text that no manifest of ours can hold
        as_written = False
    if not as_written:
        raise ExportError(f"{path}: {MANIFEST_NAME} was edited after it was written")
    _check_manifest(path, manifest)
    return manifest


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    if wrong := _wrong_type(manifest, MANIFEST_TYPES, "manifest"):
        raise ExportError(f"{path}: {MANIFEST_NAME}: {wrong}")
    files, modules = manifest["files"], manifest["modules"]
    if not modules:
        raise ExportError(f"{path}: {MANIFEST_NAME} lists no module")
    for name, facts in files.items():
        if _wrong_type(facts, FILE_TYPES, name) or _SHA256.fullmatch(facts["sha256"]) is None:
            raise ExportError(f"{path}: {MANIFEST_NAME} has no hash for {name!r}")
    for position, module in enumerate(modules):
        wrong = _wrong_type(module, MODULE_TYPES, f"modules[{position}]")
        wrong = wrong or _wrong_type(module["problem"], PROBLEM_TYPES, f"modules[{position}].problem")
        if wrong:
            raise ExportError(f"{path}: {MANIFEST_NAME}: {wrong}")
        if module["file"] not in files:
            raise ExportError(f"{path}: {MANIFEST_NAME} names a module that it does not list as a file")
        if module["sha256"] != files[module["file"]]["sha256"]:
            raise ExportError(f"{path}: two hashes stand for {module['file']!r}")
        _check_claims(path, module)
    if manifest["unverified"] is not any(module["unverified"] for module in modules):
        raise ExportError(f"{path}: {MANIFEST_NAME} does not say what its modules say about being verified")


def _check_claims(path: Path, module: dict[str, Any]) -> None:
    """What a caller acts on: how the module is called, and whether it was verified."""
    if module["entry"] != ENTRY:
        raise ExportError(f"{path}: {module['file']!r} is called {module['entry']!r}, a module of ours {ENTRY!r}")
    if unknown := [word for word in module["evidence"] if word not in EVIDENCE]:
        raise ExportError(f"{path}: {module['file']!r} claims unknown evidence {unknown[0]!r}")
    if module["unverified"] is not bool(missing_evidence(module["evidence"])):
        raise ExportError(f"{path}: {module['file']!r} does not say what its evidence says about being verified")


# Types of the members that a reader relies on; others may be there.
MANIFEST_TYPES: dict[str, tuple[type, ...]] = {
    **{"generator": (str,), "license": (str,), "unverified": (bool,), "requires": (dict,), "how_to_call": (dict,)},
    **{"modules": (list,), "files": (dict,)},
}
FILE_TYPES: dict[str, tuple[type, ...]] = {"sha256": (str,), "size_bytes": (int,)}
MODULE_TYPES: dict[str, tuple[type, ...]] = {
    **{"file": (str,), "entry": (str,), "sha256": (str,), "result": (str,), "revision": (int, type(None))},
    **{"problem": (dict,), "config": (dict,), "arch": (str,), "device": (str, type(None)), "sm_count": (int,)},
    **{"evidence": (list,), "unverified": (bool,), "environment": (dict,), "ratio": (dict,)},
    **{"median_us": (int, float, type(None)), "source_hash": (str, type(None))},
}
PROBLEM_TYPES: dict[str, tuple[type, ...]] = {"m": (int,), "n": (int,), "k": (int,), "dtype": (str,), "layout": (str,)}
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _wrong_type(value: Any, types: Mapping[str, tuple[type, ...]], where: str) -> str:
    """Which member is missing or of a wrong type; empty where none is. A truth value is no number."""
    if not isinstance(value, dict):
        return f"{where} must be an object"
    for name, allowed in types.items():
        if name not in value:
            return f"{where} lacks {name!r}"
        if type(value[name]) not in allowed:
            return f"{where}: {name!r} is of type {type(value[name]).__name__}"
    return ""


def _read_files(
    path: Path, archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo], listed: Mapping[str, Any]
) -> dict[str, bytes]:
    present = set(infos) - {MANIFEST_NAME}
    if missing := sorted(set(listed) - present):
        raise ExportError(f"{path}: {missing[0]!r} is missing")
    if extra := sorted(present - set(listed)):
        raise ExportError(f"{path}: {extra[0]!r} is not in the manifest")
    files = {}
    for name, facts in listed.items():
        data = archive.read(name)
        if len(data) != facts["size_bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise ExportError(f"{path}: {name!r} was changed: its SHA-256 differs from the manifest's")
        files[name] = data
    return files
