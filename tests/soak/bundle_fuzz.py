"""Changed bundles: each must be refused with an ExportError, or be, file for file, the bundle that it was.

    python -m tests.soak.bundle_fuzz --mutations 2000 --out results/soak/bundle_fuzz.json

Three kinds in turn. `bytes`: flipped, cut, repeated or inserted bytes of the file. `zip`: entries doubled, dropped,
renamed to lead out of the folder, turned into links or swapped. `manifest`: a member dropped, of another type or with
another value, and the manifest's own hash made right again, as someone would who means it; such a bundle may pass only
where it says nothing untrue about its files, which its reader can check.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from kernels.config import Sm90GemmConfig
from tests.soak.report import hand_over
from tuner.bundle import load_bundle
from tuner.export import ExportError, build_bundle
from tuner.manifest import canonical, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANIFEST = "manifest.json"
VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 2**70, 1.5, "", "x", "../x", "\x00", [], {}, [1], {"a": 1})
NAMES = (
    "../evil",
    "/etc/evil",
    "a/../../evil",
    "C:\\evil",
    "modules",
    "manifest.json ",
    "README.md/x",
    "",
    ".",
    "é" * 300,
)


class StoredResult:
    """A result as the database holds it."""

    id, m, n, k, dtype, layout, arch = "r1", 64, 7168, 4096, "bf16", "NT", "sm_90a"
    device_name, revision, median_us = "NVIDIA H200", 3, 21.5
    config = Sm90GemmConfig().to_dict()
    evidence = ("measured", "numeric", "checked")
    environment = {"gpu_name": "NVIDIA H200", "sm_count": 132}  # noqa: RUF012
    ratio = {"cublaslt_best": {"median": 1.01}}  # noqa: RUF012
    source_hash = "ab" * 32
    withdrawn_reason = None

    def __init__(self, artifact_sha256: str) -> None:
        self.artifact_sha256 = artifact_sha256


def good_bundle(folder: Path) -> Path:
    """A bundle of one verified module."""
    store = ArtifactStore(folder / "artifacts")
    module = store.put(b"\x7fELF not really a module" * 50)
    path = folder / "good.zip"
    result: Any = StoredResult(module)
    build_bundle([result], store, path, allow_unverified=False)
    return path


def changed_bytes(good: bytes, rng: random.Random) -> bytes:
    """Damage as disks and networks do it."""
    data, at = bytearray(good), rng.randrange(len(good))
    kind = rng.randrange(5)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at:at] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 3:
        data[at : at + 64] = data[at - 64 : at] if at >= 64 else bytes(64)
    else:
        del data[at : at + rng.randrange(1, 64)]
    return bytes(data)


def changed_zip(path: Path, rng: random.Random, out: Path) -> None:
    """Another archive of the same content, or nearly."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at, kind = rng.randrange(len(entries)), rng.randrange(6)
    name, data = entries[at]
    attributes = 0o100644
    if kind == 0:
        entries.append((name, data + b"!"))
    elif kind == 1:
        del entries[at]
    elif kind == 2:
        entries[at] = (rng.choice(NAMES), data)
    elif kind == 3:
        entries.append((rng.choice(NAMES), b"evil"))
    elif kind == 4:
        attributes = 0o120777
    else:
        other = rng.randrange(len(entries))
        entries[at], entries[other] = (name, entries[other][1]), (entries[other][0], data)
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as archive:
        warnings.simplefilter("ignore")  # about two entries of one name, which is the point
        for place, (entry, content) in enumerate(entries):
            info = zipfile.ZipInfo(entry or "empty")
            info.filename, info.create_system = entry, 3
            info.external_attr = (attributes if place == at else 0o100644) << 16
            archive.writestr(info, content)


def changed_manifest(manifest: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One member somewhere dropped or replaced."""
    made = copy.deepcopy(manifest)
    places = list(_places(made))
    owner, key = places[rng.randrange(len(places))]
    if rng.randrange(3) == 0:
        del owner[key]
    else:
        owner[key] = copy.deepcopy(rng.choice(VALUES))
    return made


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member of every object and list."""
    members: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in members:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def tells_the_truth(found: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Whether a manifest that was accepted names the same files and problems for the same modules."""

    def core(one: dict[str, Any]) -> Any:
        modules = [{name: entry[name] for name in ("file", "sha256", "entry")} for entry in one["modules"]]
        return one["files"], modules

    return bool(core(found) == core(manifest))


def run(mutations: int, seed: int, folder: Path) -> dict[str, Any]:
    """That many mutations in turn; gives the counts and what was accepted and should not have been."""
    began, rng = time.monotonic(), random.Random(seed)
    path = good_bundle(folder)
    good, manifest = path.read_bytes(), load_bundle(path)
    target = folder / "changed.zip"
    kinds: tuple[tuple[str, Callable[[], None]], ...] = (
        ("bytes", lambda: _write(target, changed_bytes(good, rng))),
        ("zip", lambda: changed_zip(path, rng, target)),
        ("manifest", lambda: _with_manifest(path, target, changed_manifest(manifest, rng))),
    )
    outcomes: Counter[str] = Counter()
    violations: list[str] = []
    for number in range(mutations):
        name, change = kinds[number % len(kinds)]
        change()
        outcome = _outcome(target, manifest, name)
        outcomes[f"{name} {outcome.partition(':')[0]}"] += 1
        if outcome.startswith("violation"):
            violations.append(f"mutation {number} of seed {seed}, {name}: {outcome}")
    return {
        "mutations": mutations,
        "seed": seed,
        "refused": sum(count for name, count in outcomes.items() if name.endswith("refused")),
        "outcomes": dict(sorted(outcomes.items())),
        "violations": violations,
        "wall_s": round(time.monotonic() - began, 1),
    }


def _outcome(target: Path, manifest: dict[str, Any], kind: str) -> str:
    try:
        found = load_bundle(target)
    except ExportError as error:
        return "refused" if str(error) else "violation: refused without a word"
    except Exception as error:  # what this is looking for
        return f"violation: {type(error).__name__}: {error}"
    if found == manifest:
        return "the same"
    if kind == "manifest" and tells_the_truth(found, manifest):
        return "harmless"
    return f"violation: accepted as {json.dumps(found)[:200]}"


def _write(target: Path, data: bytes) -> None:
    target.write_bytes(data)


def _with_manifest(path: Path, target: Path, manifest: dict[str, Any]) -> None:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data = canonical(sealed(manifest)) if info.filename == MANIFEST else old.read(info)
            new.writestr(info, data)


def main() -> int:
    """0 when nothing was accepted that should not have been."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = run(options.mutations, options.seed, Path(name))
    command = f"python -m tests.soak.bundle_fuzz --mutations {options.mutations} --seed {options.seed}"
    hand_over({"schema": 1, "command": command, **found}, options.out)
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
