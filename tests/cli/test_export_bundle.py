"""Bundles: what goes in, what is refused, and that nothing changed is ever trusted."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from kernels.artifacts import ArtifactError, ArtifactStore
from kernels.compile import compile_kernel
from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.problem import GemmProblem
from tests.soak import bundle_fuzz
from tuner.bundle import extract_bundle, load_bundle
from tuner.export import ExportError, build_bundle
from tuner.manifest import canonical, description_in, sealed

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Sm90GemmConfig(num_consumers=1, blk_n=48, epi_n=16, blk_k=32, pipe_depth=2)
MODULE = b"\x7fELF not really a module" * 50


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """A result as the database holds it."""

    id: str = "r1"
    m: int = 64
    n: int = 7168
    k: int = 4096
    dtype: str = "bf16"
    layout: str = "NT"
    arch: str = "sm_90a"
    device_name: str | None = "NVIDIA H200"
    revision: int | None = 3
    config: dict[str, Any] = field(default_factory=lambda: Sm90GemmConfig().to_dict())
    evidence: list[str] = field(default_factory=lambda: ["measured", "numeric", "checked"])
    environment: dict[str, Any] | None = field(default_factory=lambda: {"gpu_name": "NVIDIA H200", "sm_count": 130})
    median_us: float | None = 21.5
    ratio: dict[str, Any] | None = field(default_factory=lambda: {"cublaslt_best": {"median": 1.01}})
    artifact_sha256: str | None = hashlib.sha256(MODULE).hexdigest()
    source_hash: str | None = "ab" * 32
    withdrawn_reason: str | None = None


CANDIDATE = StoredResult(
    id="r2",
    arch="sm_100a",
    config=Sm100GemmConfig(num_consumers=1).to_dict(),
    evidence=["modeled"],
    revision=None,
    environment=None,
    device_name=None,
)


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    """A store that holds the module of every result here."""
    store = ArtifactStore(tmp_path / "artifacts")
    store.put(MODULE)
    return store


@pytest.fixture
def bundle(tmp_path: Path, artifacts: ArtifactStore) -> Path:
    """A good bundle with one verified module."""
    path = tmp_path / "good.zip"
    build_bundle([StoredResult()], artifacts, path, allow_unverified=False)
    return path


def rewritten(bundle: Path, edit: dict[str, bytes | None], *, add: dict[str, bytes] | None = None) -> Path:
    """A copy of a bundle with entries replaced, left out (None) or added."""
    path = bundle.with_name("edited.zip")
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = edit.get(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in (add or {}).items():
            new.writestr(name, data)
    return path


def manifest_bytes(bundle: Path, **changes: Any) -> bytes:
    """The manifest of a bundle with some members replaced, written as the builder writes it."""
    return canonical(sealed(load_bundle(bundle) | changes))


def test_bundle_says_everything_about_its_module(bundle: Path) -> None:
    """Problem, config, device, evidence, environment, ratio, hashes, licence and how to call it are in the manifest."""
    manifest = load_bundle(bundle)
    (module,) = manifest["modules"]
    assert manifest["schema"] == 2
    assert manifest["license"] == "Apache-2.0"
    assert manifest["unverified"] is False
    assert "gemm(A, B, D)" in manifest["how_to_call"]["call"]
    assert module["problem"] == {"m": 64, "n": 7168, "k": 4096, "dtype": "bf16", "layout": "NT"}
    assert module["config"] == Sm90GemmConfig().to_dict()
    assert (module["arch"], module["device"], module["sm_count"]) == ("sm_90a", "NVIDIA H200", 130)
    assert module["evidence"] == ["measured", "numeric", "checked"]
    assert module["ratio"] == {"cublaslt_best": {"median": 1.01}}
    assert module["sha256"] == hashlib.sha256(MODULE).hexdigest()
    assert manifest["files"][module["file"]] == {"sha256": module["sha256"], "size_bytes": len(MODULE)}


def test_bundle_holds_module_readme_and_licence(bundle: Path, tmp_path: Path) -> None:
    """Unpacking gives the module's bytes, a README with the loading call, and the whole licence."""
    manifest = extract_bundle(bundle, tmp_path / "out")
    assert (tmp_path / "out" / manifest["modules"][0]["file"]).read_bytes() == MODULE
    assert 'tvm_ffi.load_module("modules/' in (tmp_path / "out" / "README.md").read_text()
    assert "END OF TERMS AND CONDITIONS" in (tmp_path / "out" / "LICENSE").read_text()


def test_same_results_give_the_same_bytes(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """Neither time nor the order of the results changes a bundle."""
    results = [StoredResult(), replace(StoredResult(), id="r3", m=128)]
    build_bundle(results, artifacts, tmp_path / "a.zip", allow_unverified=False)
    build_bundle(list(reversed(results)), artifacts, tmp_path / "b.zip", allow_unverified=False)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_unverified_result_is_refused_with_its_name_and_what_is_missing(
    tmp_path: Path, artifacts: ArtifactStore
) -> None:
    """A candidate is not exported unless asked for, and nothing is written."""
    with pytest.raises(ExportError, match=r"result r2 .*lacks numeric and checked \(has modeled\)"):
        build_bundle([StoredResult(), CANDIDATE], artifacts, tmp_path / "x.zip", allow_unverified=False)
    assert not (tmp_path / "x.zip").exists()


def test_evidence_alone_does_not_make_a_candidate_verified(artifacts: ArtifactStore, tmp_path: Path) -> None:
    """Words can be written into a database by anybody; what was published here went through the checks."""
    claimed = StoredResult(revision=None)
    with pytest.raises(ExportError, match="was never published here"):
        build_bundle([claimed], artifacts, tmp_path / "x.zip", allow_unverified=False)
    manifest = build_bundle([claimed], artifacts, tmp_path / "x.zip", allow_unverified=True)
    assert manifest["unverified"] is True
    assert load_bundle(tmp_path / "x.zip")["modules"][0]["unverified"] is True
    tampered = {**manifest, "unverified": False, "modules": [{**manifest["modules"][0], "unverified": False}]}
    edited = rewritten(tmp_path / "x.zip", {"manifest.json": canonical(sealed(tampered))})
    with pytest.raises(ExportError, match="does not say of"):
        load_bundle(edited)


def test_allowed_unverified_module_is_marked_in_the_manifest(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """The manifest repeats that a module was not verified; the verified one beside it is not marked."""
    manifest = build_bundle([StoredResult(), CANDIDATE], artifacts, tmp_path / "x.zip", allow_unverified=True)
    assert manifest["unverified"] is True
    assert {module["result"]: module["unverified"] for module in manifest["modules"]} == {"r1": False, "r2": True}


def test_modeled_result_takes_its_sm_count_from_the_data_sheet(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """Without a device, the number of SMs is that of the architecture's default profile."""
    manifest = build_bundle([CANDIDATE], artifacts, tmp_path / "x.zip", allow_unverified=True)
    assert manifest["modules"][0]["sm_count"] == 148


@pytest.mark.parametrize(
    ("results", "message"),
    [([], "nothing to export"), ([replace(StoredResult(), artifact_sha256=None)], "r1 .* has no compiled module")],
)
def test_export_without_a_module_is_refused(
    tmp_path: Path, artifacts: ArtifactStore, results: list[StoredResult], message: str
) -> None:
    """An empty list, and a result that was never compiled, are named as such."""
    with pytest.raises(ExportError, match=message):
        build_bundle(results, artifacts, tmp_path / "x.zip", allow_unverified=True)


def test_damaged_artifact_is_not_exported(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """A module whose bytes changed in the store stops the export."""
    artifacts.path(hashlib.sha256(MODULE).hexdigest()).write_bytes(b"something else")
    with pytest.raises(ArtifactError, match="changed"):
        build_bundle([StoredResult()], artifacts, tmp_path / "x.zip", allow_unverified=False)
    assert not (tmp_path / "x.zip").exists()


DESCRIBED = b"\x7fELF" + json.dumps(
    {
        "arch": "sm_90a",
        "config": Sm90GemmConfig().to_dict(),
        "problem": {"m": 64, "n": 7168, "k": 4096, "dtype": "bf16", "layout": "NT"},
        "sm_count": 130,
    },
    sort_keys=True,
).encode() + b"\0 and code"  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": Sm90GemmConfig().to_dict() | {"pipe_depth": 16}}, "not legal .* shared memory"),
        ({"config": Sm90GemmConfig().to_dict() | {"pipe_depht": 3}}, "unknown knob 'pipe_depht'"),
        ({"config": Sm90GemmConfig().to_dict() | {"blk_n": 20}}, "blk_n = 20"),
        ({"environment": {"sm_count": 1}, "config": Sm90GemmConfig(cta_group=2).to_dict()}, "needs 2 SMs"),
    ],
    ids=["too large", "unknown knob", "no such block", "one SM"],
)
def test_b6_config_that_is_not_legal_is_not_exported(
    change: dict[str, Any], words: str, artifacts: ArtifactStore, tmp_path: Path
) -> None:
    """B6: a stored config is validated again at export, by the rules of this version."""
    path = tmp_path / "out.zip"
    with pytest.raises(ExportError, match=rf"result r1 is not exported: .*{words}"):
        build_bundle([replace(StoredResult(), **change)], artifacts, path, allow_unverified=True)
    assert not path.exists()


@pytest.mark.parametrize(
    "change", [{"config": Sm90GemmConfig(pipe_depth=3).to_dict()}, {"m": 128}, {"dtype": "fp16"}], ids=str
)
def test_b6_module_that_was_built_for_something_else_is_not_exported(
    change: dict[str, Any], artifacts: ArtifactStore, tmp_path: Path
) -> None:
    """B6: what the module says of itself must be what the result says of it."""
    result = StoredResult(artifact_sha256=artifacts.put(DESCRIBED))
    build_bundle([result], artifacts, tmp_path / "right.zip", allow_unverified=False)
    with pytest.raises(ExportError, match=r"built for another (problem|config)"):
        build_bundle([replace(result, **change)], artifacts, tmp_path / "wrong.zip", allow_unverified=False)


def test_b6_bundle_is_validated_again_when_it_is_read(bundle: Path) -> None:
    """B6: hashes agree and the manifest is canonical, and still its config is not one that can run."""
    manifest = load_bundle(bundle)
    manifest["modules"][0]["config"]["pipe_depth"] = 16
    edited = rewritten(bundle, {"manifest.json": canonical(sealed(manifest))})
    with pytest.raises(ExportError, match=r"cannot be used: its config is not legal .* shared memory"):
        load_bundle(edited)


def test_b6_real_module_tells_what_it_was_built_for() -> None:
    """B6: the description that a compile puts into a module is found without loading it."""
    kernel = compile_kernel(GemmProblem(m=64, n=64, k=64), SMALL, 132)
    built = description_in(kernel.module)
    assert built is not None
    assert (built["arch"], built["sm_count"], built["config"]) == ("sm_90a", 132, SMALL.to_dict())
    assert built["problem"] == {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "layout": "NT"}
    assert description_in(b"\x7fELF not really a module") is None


def test_bundle_that_cannot_be_written_leaves_nothing(artifacts: ArtifactStore, tmp_path: Path) -> None:
    """A missing folder is an ExportError, not a traceback."""
    with pytest.raises(ExportError, match="cannot write"):
        build_bundle([StoredResult()], artifacts, tmp_path / "missing" / "x.zip", allow_unverified=False)


def test_changed_module_is_refused(bundle: Path) -> None:
    """One changed byte in a module is found by its hash."""
    name = load_bundle(bundle)["modules"][0]["file"]
    with pytest.raises(ExportError, match="was changed"):
        load_bundle(rewritten(bundle, {name: MODULE[:-1] + b"x"}))


def test_edited_manifest_is_refused(bundle: Path) -> None:
    """A manifest that is not byte for byte what the builder writes, or whose own hash no longer fits, was edited."""
    with zipfile.ZipFile(bundle) as archive:
        raw = archive.read("manifest.json")
    faster = canonical(json.loads(raw) | {"generator": "somebody else"})
    for edited in (raw + b" ", raw.replace(b"21.5", b"20.5"), faster):
        assert edited != raw
        with pytest.raises(ExportError, match="edited"):
            load_bundle(rewritten(bundle, {"manifest.json": edited}))


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_fuzzed_bundles_are_refused_or_the_same_bundle(slots: int, tmp_path: Path) -> None:
    """H2: 102 mutations of bytes, of the zip's structure and of a resealed manifest; 2,000 are `make fuzz-bundle`."""
    report = bundle_fuzz.run(34, seed=slots, folder=tmp_path)
    assert report["mutations"] == 34
    assert report["refused"] > 20
    assert report["violations"] == []


def test_bundle_from_before_the_seal_is_told_from_an_edited_one(bundle: Path) -> None:
    """Schema 1 was written without a hash of the manifest: there is nothing to trust, and what helps is said."""
    with pytest.raises(ExportError, match="schema 1, which carries no hash of its own: export its results again"):
        load_bundle(rewritten(bundle, {"manifest.json": manifest_bytes(bundle, schema=1)}))


@pytest.mark.parametrize("schema", [3, 0, "2", None, True])
def test_unknown_schema_is_refused(bundle: Path, schema: object) -> None:
    """Only schema 2 is read, and the message names what was found."""
    with pytest.raises(ExportError, match=f"schema {schema!r}"):
        load_bundle(rewritten(bundle, {"manifest.json": manifest_bytes(bundle, schema=schema)}))


@pytest.mark.parametrize("name", ["../evil.so", "/etc/evil", "modules/../../evil", "a\\..\\evil", "C:evil", "a//b"])
def test_name_that_leaves_the_folder_is_refused(bundle: Path, name: str, tmp_path: Path) -> None:
    """A traversal is refused before anything is written."""
    with pytest.raises(ExportError, match="leaves the bundle's folder"):
        extract_bundle(rewritten(bundle, {}, add={name: b"evil"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unlisted_and_missing_files_are_refused(bundle: Path) -> None:
    """The manifest lists exactly the files there are."""
    with pytest.raises(ExportError, match="'extra' is not in the manifest"):
        load_bundle(rewritten(bundle, {}, add={"extra": b"x"}))
    with pytest.raises(ExportError, match="'LICENSE' is missing"):
        load_bundle(rewritten(bundle, {"LICENSE": None}))


def test_link_in_a_bundle_is_refused(bundle: Path) -> None:
    """A symbolic link could point anywhere once unpacked."""
    path = bundle.with_name("link.zip")
    path.write_bytes(bundle.read_bytes())
    info = zipfile.ZipInfo("link")
    info.create_system, info.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ExportError, match="not a regular file"):
        load_bundle(path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x05\x06" + bytes(18)])
def test_file_that_is_no_bundle_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty files, other files and empty archives are told apart from bundles."""
    path = tmp_path / "x.zip"
    path.write_bytes(content)
    with pytest.raises(ExportError, match="not a"):
        load_bundle(path)


def test_random_damage_is_refused_or_harmless(bundle: Path) -> None:
    """300 single-byte changes: each is an ExportError, or leaves every byte of content as it was."""
    good, manifest = bundle.read_bytes(), load_bundle(bundle)
    chooser, refused = random.Random(0), 0
    path = bundle.with_name("damaged.zip")
    for _ in range(300):
        data = bytearray(good)
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
        try:
            assert load_bundle(path) == manifest
        except ExportError:
            refused += 1
    assert refused > 200


def test_withdrawn_result_is_in_no_bundle(tmp_path: Path) -> None:
    """Withdrawn after the export was ordered; permission for candidates does not reach so far."""
    bad = replace(StoredResult(), withdrawn_reason="WRONG_RESULT: 1 element is wrong")
    with pytest.raises(ExportError, match="was withdrawn: WRONG_RESULT: 1 element is wrong"):
        build_bundle([bad], ArtifactStore(tmp_path), tmp_path / "b.zip", allow_unverified=True)
