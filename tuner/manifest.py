"""The manifest of a bundle: what it may hold, its seal, and whether it can be true.

A reader trusts nothing of a stranger's bundle before its hash agrees; what a caller acts on must also agree with the
module that it stands beside.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from kernels.config import config_from_dict
from kernels.errors import ConfigError, ProblemError
from kernels.problem import GemmProblem
from kernels.rules import violation
from tuner.records import Evidence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEMA = 2
UNSEALED_SCHEMA = 1  # of manifests that could be edited without a trace
ENTRY = "gemm"
NEEDED_EVIDENCE = ("numeric", "checked")
EVIDENCE = tuple(word.value for word in Evidence)
MANIFEST_NAME = "manifest.json"
SEAL = "sha256"
DESCRIPTION_START = b'{"arch": "'  # of the JSON that kernels.compile puts into a module, keys in order


class ManifestError(ValueError):
    """What is wrong with a manifest, as the end of a sentence that begins with its name."""


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the SHA-256 of its other members: a change of any of them shows."""
    content = {name: value for name, value in manifest.items() if name != SEAL}
    return {**content, SEAL: hashlib.sha256(canonical(content)).hexdigest()}


def canonical(manifest: dict[str, Any]) -> bytes:
    """A manifest as it is written: the same content, the same bytes."""
    return (json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def missing_evidence(evidence: Sequence[str]) -> tuple[str, ...]:
    """Evidence that a published result has and this one lacks."""
    return tuple(kind for kind in NEEDED_EVIDENCE if kind not in evidence)


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


def parse_manifest(raw: bytes) -> dict[str, Any]:
    """A manifest as it was written by `canonical`. Raises ManifestError with what is wrong."""
    try:
        manifest = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ManifestError(f"is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise ManifestError("is not a JSON object")
    schema = manifest.get("schema")
    if type(schema) is int and schema == UNSEALED_SCHEMA:
        raise ManifestError(f"has schema {schema}, which carries no hash of its own: export its results again")
    if type(schema) is not int or schema != SCHEMA:
        raise ManifestError(f"has schema {schema!r}, this version reads {SCHEMA}: use a matching gemm-tuner")
    try:
        as_written = raw == canonical(manifest) and manifest.get(SEAL) == sealed(manifest)[SEAL]
    except (ValueError, RecursionError):  # numbers and text that no manifest of ours can hold
        as_written = False
    if not as_written:
        raise ManifestError("was edited after it was written")
    _check(manifest)
    return manifest


def _check(manifest: dict[str, Any]) -> None:
    if wrong := _wrong_type(manifest, MANIFEST_TYPES, "manifest"):
        raise ManifestError(f"is malformed: {wrong}")
    files, modules = manifest["files"], manifest["modules"]
    if not modules:
        raise ManifestError("lists no module")
    for name, facts in files.items():
        if _wrong_type(facts, FILE_TYPES, name) or _SHA256.fullmatch(facts["sha256"]) is None:
            raise ManifestError(f"has no hash for {name!r}")
    for position, module in enumerate(modules):
        wrong = _wrong_type(module, MODULE_TYPES, f"modules[{position}]")
        wrong = wrong or _wrong_type(module["problem"], PROBLEM_TYPES, f"modules[{position}].problem")
        if wrong:
            raise ManifestError(f"is malformed: {wrong}")
        if module["file"] not in files:
            raise ManifestError("names a module that it does not list as a file")
        if module["sha256"] != files[module["file"]]["sha256"]:
            raise ManifestError(f"has two hashes for {module['file']!r}")
        _check_claims(module)
    if manifest["unverified"] is not any(module["unverified"] for module in modules):
        raise ManifestError("does not say what its modules say about being verified")


def _check_claims(module: dict[str, Any]) -> None:
    """What a caller acts on: how the module is called, and whether it was verified."""
    if module["entry"] != ENTRY:
        raise ManifestError(f"calls {module['file']!r} by {module['entry']!r}, a module of ours is called by {ENTRY!r}")
    if unknown := [word for word in module["evidence"] if word not in EVIDENCE]:
        raise ManifestError(f"claims unknown evidence {unknown[0]!r} for {module['file']!r}")
    if module["unverified"] is not bool(missing_evidence(module["evidence"])):
        raise ManifestError(f"does not say of {module['file']!r} what its evidence says about being verified")


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
