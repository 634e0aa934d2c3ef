"""`explain` and `doctor`: facts about a config and about a machine, without compiling or running anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from sqlalchemy import select

from db.database import Database
from db.models import Result
from kernels.config import Sm90GemmConfig
from kernels.errors import ToolchainError
from search_space.starting import PRESETS
from tests.cli.test_recorded import publish
from tuner.cli.explain import read_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Ran

    Cli = Callable[..., Ran]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_explained(cli: Cli, name: str) -> None:
    """Needs stay within limits, no rule is broken, and the time is said to be modeled."""
    ran = cli("explain", name, "--json")
    assert ran.status == 0, ran.err
    document = ran.document
    assert document["violation"] is None
    assert all(document["resources"][key] <= document["limits"][key] for key in document["resources"])
    assert document["prediction"]["time_us"] > 0
    assert "modeled, not measured" in cli("explain", name).out


def test_step9_has_the_published_cluster_tile(cli: Cli) -> None:
    """Two CTAs with two consumers of 128 rows and 128 columns each: 512 x 256."""
    assert cli("explain", "step9", "--json").document["geometry"]["cluster_tile"] == [512, 256]


def test_illegal_config_is_explained_with_its_numbers_and_status_2(cli: Cli) -> None:
    """The whole explanation is printed all the same; the rule that is broken is the error."""
    knobs = json.dumps(Sm90GemmConfig(pipe_depth=16).to_dict())
    ran = cli("explain", knobs, "--arch", "sm_90a")
    assert ran.status == 2
    assert "cannot run: needs" in ran.out
    assert "232448" in ran.error_line


def test_shape_that_no_template_serves_is_status_2(cli: Cli) -> None:
    """As for every other command; with --json the document says why too."""
    ran = cli("explain", "h-step9", "--shape", "4096x4096x100", "--json")
    assert ran.status == 2
    assert "k = 100 is not a multiple of 8" in ran.error_line
    assert ran.document["violation"].startswith("k = 100")


def test_parts_of_a_config_are_named_as_the_template_names_them(cli: Cli) -> None:
    """Scope, layout and dispatch: who runs what, where it lies, which hardware path it takes."""
    document = cli("explain", "step9", "--json").document
    rings = {ring["name"]: ring for ring in document["anatomy"]["barriers"]}
    assert [rings[name]["arrivals"] for name in ("tma2mma", "mma2tma", "mma2ld", "ld2mma")] == [1, 2, 1, 256]
    assert rings["ld2mma"]["protects"] == "an accumulator slot that is still being read"
    assert document["tiles"]["waves"] == 2
    assert document["tiles"]["tiles_in_last_wave"] == 54
    assert document["tiles"]["idle_in_last_wave"] == pytest.approx(20 / 74)
    assert document["roofline"]["bound"] == "compute"
    assert "compiled" not in document
    text = cli("explain", "step9").out
    for words in ("warpgroup 2, warp 3 of both CTAs: one elected thread", "tcgen05.mma.cta_group::2 of 256 x 256 x 16",
                  "128-byte swizzle", "consumer 1, slot 0", "waves and tail", "roofline"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("name", ["step8", "h-step9"])
def test_timeline_says_that_it_is_modeled_and_shows_each_slot(cli: Cli, tmp_path: Path, name: str) -> None:
    """One lane for each slot of the ring, the MMA, the accumulator and the writeback."""
    drawn = tmp_path / "timeline.svg"
    ran = cli("explain", name, "--svg", str(drawn))
    assert (ran.status, f"picture: {drawn}" in ran.out) == (0, True)
    texts = [node.text or "" for node in ElementTree.fromstring(drawn.read_text()).iter() if node.tag.endswith("text")]
    assert any(text.startswith("modeled, not measured") for text in texts)
    assert {"slot 0", "slot 3", "MMA", "accumulator 0", "writeback"} <= set(texts)
    assert any("24 of the 64 blocks of K" in text for text in texts)


def test_compiled_facts_come_from_the_compilers(cli: Cli) -> None:
    """Registers, no spill, and the machine instructions of a CTA pair."""
    knobs = json.dumps({"num_consumers": 1, "blk_n": 32, "epi_n": 16, "pipe_depth": 2, "acc_stages": 2})
    ran = cli("explain", knobs, "--shape", "512x256x256", "--compile", "--json")
    assert ran.status == 0, ran.err
    facts = ran.document["compiled"]
    assert facts["registers"] > 16
    assert (facts["spill_bytes"], facts["stack_bytes"], facts["findings"]) == (0, 0, [])
    if facts["sass"] is None:
        pytest.skip(facts["sass_missing"])
    families = {name.split(".")[0] for name in facts["sass"]}
    assert {"UTCHMMA", "UTMALDG", "UTMASTG", "UTCBAR", "LDTM"} <= families
    assert any(name.startswith("UTCHMMA.2CTA") for name in facts["sass"])


def test_stored_result_is_explained_by_its_id(cli: Cli, home: Path) -> None:
    """Problem, config and device are those of the result; a module that lies elsewhere is said to be missing."""
    publish(home)
    with Database.open(f"sqlite:///{home / 'gemm-tuner.db'}") as database, database.read() as session:
        identity = session.scalars(select(Result.id)).one()
    ran = cli("explain", identity, "--json")
    assert ran.status == 0, ran.err
    assert (ran.document["device"], ran.document["problem"]["n"]) == ("NVIDIA H200", 128)
    assert ran.document["result"]["median_us"] == 5.5
    assert f"result {identity}: 5.5 us on NVIDIA H200" in cli("explain", identity).out
    assert "no result" in cli("explain", "0" * 32).error_line.lower()


def test_config_is_read_from_text_file_or_record(tmp_path: Path) -> None:
    """The knobs alone, or with their architecture as results store them."""
    config = Sm90GemmConfig(pipe_depth=5)
    knobs = json.dumps(config.to_dict())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"arch": "sm_90a", "config": config.to_dict()}))
    assert read_config(knobs) == config
    assert read_config(knobs, arch="sm_90a") == config
    assert read_config(str(file)) == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step9", "--device", "h200"), "preset step9 is for sm_100a"),
        (("[1, 2]",), "no preset"),
        (('{"config": 3}', "--arch", "sm_90a"), "object of knobs"),
        (("x" * 5000,), "no preset"),
        (("step9", "--shape", "64x64"), "MxNxK"),
        (("step9", "--device", "toaster"), "toaster"),
    ],
)
def test_what_is_no_config_is_refused(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """Status 2 and what would be right."""
    ran = cli("explain", *arguments)
    assert ran.status == 2, ran.err
    assert words in ran.error_line


def test_doctor_finds_what_tuning_needs_here(cli: Cli, home: Path) -> None:
    """The environment of the tests can tune; looking creates nothing."""
    ran = cli("doctor", "--json")
    checks = {check["name"]: check for check in ran.document["checks"]}
    assert ran.status == 0
    assert ran.document["ok"] is True
    assert {"python", "g++", "toolchain", "driver", "database", "apache-tvm"} <= set(checks)
    assert "nvcc-" in checks["toolchain"]["detail"]
    assert not home.exists()


def test_doctor_says_how_to_get_a_missing_compiler(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1, the verdict, and what to do."""

    def nothing(*_: object) -> None:
        raise ToolchainError("no CUDA compiler found: install the extra")

    monkeypatch.setattr("kernels.toolchain.find_toolchain", nothing)
    monkeypatch.setattr("shutil.which", lambda name: None)
    ran = cli("doctor")
    assert ran.status == 1
    assert "apt-get install g++" in ran.out
    assert "no CUDA compiler found" in ran.out
    assert "cannot work on this machine" in ran.out


def test_doctor_reports_a_foreign_database(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named, and it is left alone."""
    file = tmp_path / "x.db"
    file.write_bytes(b"not a database" * 100)
    monkeypatch.setenv("GEMM_TUNER_DATABASE_URL", f"sqlite:///{file}")
    ran = cli("doctor")
    assert ran.status == 1
    assert "is not a SQLite database" in ran.out
    assert file.read_bytes() == b"not a database" * 100


def test_password_of_the_database_is_not_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` output ends up in bug reports."""
    monkeypatch.setenv("GEMM_TUNER_DATABASE_URL", "postgresql+psycopg://me:secret@127.0.0.1:1/tuner")
    ran = cli("doctor")
    assert "secret" not in ran.out + ran.err
