"""Wheels: what goes in, and what `matmul` does with a product, with a stub in the place of torch."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import json
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from db import queries
from db.database import Database
from kernels.artifacts import ArtifactStore
from tests.cli.test_export_bundle import StoredResult
from tests.db.rows import publish
from tests.tuner.torch_stub import Device, Parameter, Properties, Stub, Tensor, tensor
from tuner.export import ExportError
from tuner.exporting import run_export
from tuner.wheel.build import build_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

M, N, K = 64, 48, 32


def elf(machine: int = 0x3E, text: str = "a module") -> bytes:
    """Bytes that say which processor they are for, and are no module."""
    return b"\x7fELF" + bytes(14) + struct.pack("<H", machine) + text.encode()


@pytest.fixture
def artifacts(tmp_path: Path) -> ArtifactStore:
    """A store of modules."""
    return ArtifactStore(tmp_path / "artifacts")


def result(artifacts: ArtifactStore, data: bytes = elf(), **changes: Any) -> StoredResult:
    """A checked result of an H200 with its module in the store."""
    base = StoredResult(m=M, n=N, k=K, environment={"gpu_name": "NVIDIA H200", "sm_count": 132})
    return replace(base, artifact_sha256=artifacts.put(data), **changes)


@pytest.fixture
def wheel(tmp_path: Path, artifacts: ArtifactStore) -> Path:
    """A wheel of one kernel."""
    return build_wheel([result(artifacts)], artifacts, tmp_path / "out", allow_unverified=False)


# ------------------------------------------------------------------------------------------------ the file


def test_wheel_is_one_that_pip_installs_offline(wheel: Path, tmp_path: Path) -> None:
    """Name, version, platform and the list of files are as pip wants them; it says what it needs."""
    assert wheel.name.startswith("tuned_gemms-1.0.0+g")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name for path in (target / "tuned_gemms").iterdir()} >= {"__init__.py", "manifest.json", "modules"}
    (info,) = target.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "Requires-Dist: torch>=" in metadata
    assert "Requires-Dist: apache-tvm-ffi>=" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert (info / "licenses" / "LICENSE").is_file()


def test_record_lists_every_file_with_its_hash(wheel: Path) -> None:
    """PEP 427: SHA-256 in URL-safe base 64, the record itself without."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(name).decode().splitlines())}
        assert set(rows) == set(archive.namelist())
        for one in set(rows) - {name}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(one)).digest()).rstrip(b"=").decode()
            assert rows[one] == [f"sha256={digest}", str(len(archive.read(one)))]
        assert rows[name] == ["", ""]


def test_same_results_give_the_same_wheel_and_others_another_version(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """The version is a hash of the content, so an older wheel is replaced by pip and not kept."""
    results = [result(artifacts), result(artifacts, m=128, id="r9")]
    first = build_wheel(results, artifacts, tmp_path / "a", allow_unverified=False)
    again = build_wheel(results[::-1], artifacts, tmp_path / "b", allow_unverified=False)
    other = build_wheel(results[:1], artifacts, tmp_path / "c", allow_unverified=False)
    assert (first.name, first.read_bytes()) == (again.name, again.read_bytes())
    assert other.name != first.name


def test_what_no_wheel_can_hold_is_refused(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """Two kernels for one product, two processors, no library at all, a candidate that was not asked for."""
    good = result(artifacts)
    cases: list[tuple[list[StoredResult], str]] = [
        ([], "nothing to export"),
        ([good, result(artifacts, id="r7")], "results r1 and r7 both serve 64x48x32 bf16 on NVIDIA H200"),
        ([good, result(artifacts, elf(0xB7), m=8, id="r8")], "different processors"),
        ([result(artifacts, b"not a module")], "no shared library"),
        ([result(artifacts, evidence=["measured"])], "lacks numeric and checked"),
    ]
    for results, words in cases:
        with pytest.raises(ExportError, match=words):
            build_wheel(results, artifacts, tmp_path / "out", allow_unverified=False)
    assert not (tmp_path / "out").exists()


def test_wheel_that_was_ordered_keeps_its_name(tmp_path: Path, artifacts: ArtifactStore) -> None:
    """A zip is named by its export, a wheel by its content: pip reads version and platform from the name."""
    config = StoredResult().config
    with Database.open(f"sqlite:///{tmp_path / 'tuner.db'}") as database:
        with database.write() as session:
            artifact = artifacts.put(elf())
            row = publish(session, m=M, n=N, k=K, config=config, artifact_sha256=artifact)
            order = {"results": [row.id], "format": "wheel", "allow_unverified": False}
            identity = queries.create_export(session, order).id
        run_export(database, identity, order, artifacts=artifacts, exports_dir=tmp_path / "exports")
        with database.read() as session:
            done = queries.export(session, identity)
    assert done is not None
    assert (done.state, done.reason) == ("DONE", "")
    assert done.bundle_path is not None
    assert done.bundle_path.startswith(str(tmp_path / "exports" / identity / "tuned_gemms-1.0.0+g"))
    assert zipfile.is_zipfile(done.bundle_path)


# ------------------------------------------------------------------------------------------------ matmul


@pytest.fixture
def stub(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """The wheel's package, importable, with a stub of torch."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    made = Stub()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "tuned_gemms"]:
        del sys.modules[name]


@pytest.fixture(params=[2, 1, 0], ids=["modules of today", "modules without `route`", "modules without `product`"])
def gemms(stub: Stub, request: pytest.FixtureRequest) -> Any:
    """The imported package."""
    stub.has_product, stub.has_route = request.param > 0, request.param > 1
    return importlib.import_module("tuned_gemms")


def product(gemms: Any, a: Tensor, b: Tensor) -> Tensor:
    """a @ b, checked against numpy."""
    made: Tensor = gemms.matmul(a, b)
    np.testing.assert_allclose(made.array, a.array @ b.array, rtol=1e-4, atol=1e-5)
    return made


def weight(n: int = N, k: int = K, **options: Any) -> Tensor:
    """A transposed row-major weight, as `w.t()` gives it."""
    return tensor(n, k, **options).t()


def test_tuned_product_runs_on_its_kernel(gemms: Any, stub: Stub) -> None:
    """Loaded once, when first needed, after its hash was compared; the output has the operands' dtype and device."""
    assert stub.loaded == []
    made = product(gemms, tensor(M, K), weight())
    assert made.computed_by.endswith(".so")
    assert (made.dtype, made.device) == ("bfloat16", Device("cuda", 0))
    product(gemms, tensor(M, K), weight())
    assert len(stub.loaded) == 1
    assert gemms.counts() == gemms.Counts(tuned=2, fallback={})


def test_leading_dimensions_are_folded_into_m(gemms: Any) -> None:
    """A batch of sequences times a weight, as layers of a network have it."""
    made = product(gemms, tensor(4, M // 4, K), weight())
    assert made.shape == (4, M // 4, N)
    assert made.computed_by.endswith(".so")


def test_weight_of_a_network_is_served_without_gradients(gemms: Any, stub: Stub) -> None:
    """Under `no_grad` a Parameter is a plain operand."""
    parameter = Parameter(tensor(N, K).array, requires_grad=True)
    with stub.set(grad=False):
        assert product(gemms, tensor(M, K), parameter.t()).computed_by.endswith(".so")
        assert product(gemms, Parameter(tensor(M, K).array, requires_grad=True), weight()).computed_by.endswith(".so")


@pytest.mark.parametrize(
    ("reason", "operands", "switches"),
    [
        ("NO_KERNEL", (lambda: tensor(M + 1, K), weight), {}),
        ("NO_KERNEL", (lambda: tensor(M, K, dtype="float16"), lambda: weight(dtype="float16")), {}),
        ("NO_KERNEL", (lambda: tensor(2, M, K), weight), {}),
        ("NO_CUDA", (lambda: tensor(M, K, device=Device("cpu")), lambda: weight(device=Device("cpu"))), {}),
        ("LAYOUT", (lambda: tensor(M, K), lambda: tensor(K, N)), {}),
        ("LAYOUT", (lambda: tensor(K, M).t(), weight), {}),
        ("MISALIGNED", (lambda: tensor(M, K, offset=1), weight), {}),
        ("MISALIGNED", (lambda: tensor(M, K), lambda: weight(offset=2)), {}),
        ("AUTOGRAD", (lambda: tensor(M, K, requires_grad=True), weight), {}),
        ("AUTOGRAD", (lambda: tensor(M, K), lambda: weight(requires_grad=True)), {}),
        ("AUTOGRAD", (lambda: tensor(M, K), weight), {"forward_level": 0}),
        ("AUTOCAST", (lambda: tensor(M, K), weight), {"autocast": "float16"}),
        ("MIXED", (lambda: tensor(M, K), lambda: weight(dtype="float16")), {}),
        ("MIXED", (lambda: tensor(M, K), lambda: weight(device=Device("cuda", 1))), {}),
        ("SUBCLASS", (lambda: type("Odd", (Tensor,), {})(tensor(M, K).array), weight), {}),
        ("SUBCLASS", (lambda: tensor(M, K), weight), {"transforms": True}),
        ("CAPTURE", (lambda: tensor(M, K), weight), {"capturing": True}),
    ],
)
def test_what_no_kernel_serves_goes_to_torch_and_is_counted(
    gemms: Any, stub: Stub, reason: str, operands: tuple[Any, Any], switches: dict[str, Any]
) -> None:
    """Never an error, never a wrong result; the count says why."""
    a, b = operands
    with stub.set(**switches):
        assert product(gemms, a(), b()).computed_by == "torch"
    words = getattr(importlib.import_module("tuned_gemms._dispatch"), reason)
    assert gemms.counts() == gemms.Counts(tuned=0, fallback={words: 1})
    gemms.reset_counts()
    assert gemms.counts() == gemms.Counts(tuned=0, fallback={})


@pytest.mark.parametrize(
    ("reason", "operands", "switches"),
    [
        ("NO_KERNEL", (lambda: tensor(M + 1, K), weight), {}),
        ("LAYOUT", (lambda: tensor(M, K), lambda: tensor(K, N)), {}),
        ("MISALIGNED", (lambda: tensor(M, K), lambda: weight(offset=2)), {}),
        ("AUTOGRAD", (lambda: tensor(M, K, requires_grad=True), weight), {}),
        ("AUTOGRAD", (lambda: tensor(M, K), weight), {"forward_level": 0}),
        ("AUTOCAST", (lambda: tensor(M, K), weight), {"autocast": "float16"}),
        ("MIXED", (lambda: tensor(M, K), lambda: weight(device=Device("cuda", 1))), {}),
        ("SUBCLASS", (lambda: type("Odd", (Tensor,), {})(tensor(M, K).array), weight), {}),
        ("SUBCLASS", (lambda: tensor(M, K), weight), {"transforms": True}),
    ],
)
def test_the_quick_way_leaves_to_torch_what_the_long_way_does(
    gemms: Any, stub: Stub, reason: str, operands: tuple[Any, Any], switches: dict[str, Any]
) -> None:
    """The kernel has run, so its route is open; the conditions are the same."""
    product(gemms, tensor(M, K), weight())
    product(gemms, tensor(M, K), weight())
    assert stub.routed == (1 if stub.has_route else 0)
    a, b = operands
    with stub.set(**switches):
        assert product(gemms, a(), b()).computed_by == "torch"
    words = getattr(importlib.import_module("tuned_gemms._dispatch"), reason)
    assert gemms.counts() == gemms.Counts(tuned=2, fallback={words: 1})
    assert stub.routed == (1 if stub.has_route else 0)


def test_what_has_no_kernel_is_remembered_and_counted_each_time(gemms: Any) -> None:
    """The second time one look into a table tells; shapes without end do not fill the memory."""
    dispatch = importlib.import_module("tuned_gemms._dispatch")
    for rows in (M + 1, M + 1, M + 2):
        assert product(gemms, tensor(rows, K), weight()).computed_by == "torch"
    assert len(dispatch._unserved) == 2
    assert gemms.counts().fallback == {dispatch.NO_KERNEL: 3}
    dispatch._MOST_UNSERVED = 2
    product(gemms, tensor(M + 3, K), weight())
    assert len(dispatch._unserved) == 2
    assert product(gemms, tensor(M, K), weight()).computed_by.endswith(".so")


def test_autocast_to_the_operands_own_dtype_changes_nothing(gemms: Any, stub: Stub) -> None:
    """It would cast nothing."""
    with stub.set(autocast="bfloat16"):
        assert product(gemms, tensor(M, K), weight()).computed_by.endswith(".so")


def test_a_kernel_that_was_called_before_serves_a_graph_capture(gemms: Any, stub: Stub) -> None:
    """Its code is on the device by then; the very first call would load it inside the capture."""
    product(gemms, tensor(M, K), weight())
    with stub.set(capturing=True):
        assert product(gemms, tensor(M, K), weight()).computed_by.endswith(".so")


@pytest.mark.parametrize(
    "properties",
    [Properties(name="NVIDIA H100 80GB HBM3"), Properties(multi_processor_count=114), Properties(major=10)],
)
def test_another_device_is_served_by_torch(gemms: Any, stub: Stub, properties: Properties) -> None:
    """H2: another model, a slice of the same model, another architecture."""
    with stub.set(properties=properties):
        assert product(gemms, tensor(M, K), weight()).computed_by == "torch"
    assert stub.loaded == []


def test_compiled_product_is_one_operator_with_a_fake_kernel(gemms: Any, stub: Stub) -> None:
    """Traced it is the operator, which decides when it runs; what the compiler can do itself is left to it."""
    with stub.set(compiling=True):
        assert product(gemms, tensor(M, K), weight()).computed_by.endswith(".so")
        for a, b in ((tensor(M, K, device=Device("cpu")), weight()), (tensor(M, K, requires_grad=True), weight())):
            assert gemms.matmul(a, b).computed_by == "torch"
    assert gemms.counts().tuned == 1
    fake = stub.operators["tuned_gemms::matmul fake"]
    assert fake(tensor(2, M, K), weight()).shape == (2, M, N)
    with pytest.raises(RuntimeError, match="cannot multiply"):
        fake(tensor(M, K + 1), weight())


def test_changed_module_is_never_loaded(gemms: Any, stub: Stub, tmp_path: Path) -> None:
    """The error names the file; nothing of it has run."""
    (module,) = (tmp_path / "site" / "tuned_gemms" / "modules").iterdir()
    module.write_bytes(module.read_bytes() + b"!")
    with pytest.raises(gemms.CorruptPackage, match="was changed"):
        gemms.matmul(tensor(M, K), weight())
    module.unlink()
    with pytest.raises(gemms.CorruptPackage, match="cannot be read"):
        gemms.matmul(tensor(M, K), weight())
    assert stub.loaded == []


def test_package_says_what_it_holds(gemms: Any, tmp_path: Path) -> None:
    """From its manifest, which it reads once."""
    (kernel,) = gemms.kernels()
    assert (kernel.m, kernel.n, kernel.k, kernel.dtype, kernel.device) == (M, N, K, "bf16", "NVIDIA H200")
    assert kernel.evidence == ("measured", "numeric", "checked")


def test_package_with_a_broken_manifest_says_so(stub: Stub, tmp_path: Path) -> None:
    """No traceback of the JSON parser."""
    (tmp_path / "site" / "tuned_gemms" / "manifest.json").write_text(json.dumps({"modules": [{}]}))
    gemms = importlib.import_module("tuned_gemms")
    with pytest.raises(gemms.CorruptPackage, match="install the package again"):
        gemms.kernels()
