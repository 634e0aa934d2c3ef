"""Reading bundles: `load_bundle` reads one as it would a stranger's file, nothing is trusted before its hash agrees."""

from __future__ import annotations

import hashlib
import stat
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from tuner.export import ExportError
from tuner.manifest import MANIFEST_NAME, ManifestError, canonical, contradiction, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_MANIFEST_BYTES = 64 * 2**20
MAX_FILE_BYTES = 256 * 2**20


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
    try:
        return parse_manifest(archive.read(MANIFEST_NAME))
    except ManifestError as error:
        raise ExportError(f"{path}: {MANIFEST_NAME} {error}") from error


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
