"""Artifacts are named by their content and are complete or absent."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from kernels.artifacts import ArtifactError, ArtifactStore, write_atomically

if TYPE_CHECKING:
    from pathlib import Path


def test_stored_bytes_read_back_under_their_hash(tmp_path: Path) -> None:
    """Putting the same bytes twice keeps one file."""
    store = ArtifactStore(tmp_path)
    sha256 = store.put(b"kernel")
    assert sha256 == hashlib.sha256(b"kernel").hexdigest() == store.put(b"kernel")
    assert store.read(sha256) == b"kernel"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{sha256}.so"]


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    """A module that someone edited is never handed out."""
    store = ArtifactStore(tmp_path)
    sha256 = store.put(b"kernel")
    store.path(sha256).write_bytes(b"kernel!")
    with pytest.raises(ArtifactError, match="was changed on disk"):
        store.read(sha256)


def test_file_that_was_cut_short_is_written_anew(tmp_path: Path) -> None:
    """A store that kept the rest would refuse the module for good."""
    store = ArtifactStore(tmp_path)
    sha256 = store.put(b"whole module")
    for damaged in (b"whole", b"whole moduLe"):
        store.path(sha256).write_bytes(damaged)
        assert store.put(b"whole module") == sha256
        assert store.read(sha256) == b"whole module"


def test_missing_artifact_is_an_error_and_deleting_it_is_not(tmp_path: Path) -> None:
    """Deleting twice is harmless."""
    store = ArtifactStore(tmp_path)
    sha256 = store.put(b"x")
    store.delete(sha256)
    store.delete(sha256)
    with pytest.raises(ArtifactError, match="is not in"):
        store.read(sha256)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "AB" * 32, "a" * 63])
def test_name_that_is_no_hash_is_refused(tmp_path: Path, name: str) -> None:
    """A path can never be built from a request."""
    with pytest.raises(ArtifactError, match="is not a sha256"):
        ArtifactStore(tmp_path).path(name)


def test_disk_that_fills_up_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file goes too, and the error names the folder."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kernels.artifacts.os.replace", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        ArtifactStore(tmp_path).put(b"kernel")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_atomic_write_replaces_the_old_file(tmp_path: Path) -> None:
    """Readers see the old bytes or the new ones."""
    target = tmp_path / "file"
    target.write_bytes(b"old")
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_published_is_flushed_and_candidates_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that a loss of power cut short is built again; a flush for each would cost more than its trial."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    store = ArtifactStore(tmp_path)
    sha256 = store.put(b"kernel")
    assert flushed == []
    store.keep(sha256)
    assert len(flushed) == 2  # the file and its folder
    with pytest.raises(ArtifactError, match="cannot keep artifact 0000"):
        store.keep("0" * 64)
