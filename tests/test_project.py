"""The repository as a whole: documents that match the code, imports that point one way, files that stand alone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

import kernels
from tuner import recorded
from tuner.cli.errors import UsageError
from tuner.cli.parser import build_parser, commands_of
from tuner.records import Evidence
from tuner.settings import VARIABLES, Settings

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIGHT_MODULES = (
    "kernels.problem",
    "kernels.arch",
    "kernels.devices",
    "kernels.config",
    "kernels.resources",
    "kernels.rules",
    "kernels.errors",
    "search_space.request",
    "search_space.space",
    "search_space.checks",
    "search_space.model",
    "search_space.starting",
    "tuner.records",
    "tuner.client",
    "tuner.export",
    "tuner.cli.main",
    "tuner.cli.explain",
)
BLOCKER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tvm", "tvm_ffi", "torch", "optuna"}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocked())
"""


def tracked_files() -> list[Path]:
    """Files that belong to the repository: known to git, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def documented_commands() -> list[str]:
    """Every `gemm-tuner ...` in README, without the program's name."""
    return [found.strip() for found in re.findall(r"`gemm-tuner ([a-z][^`|]*)`", README)]


def test_every_command_of_readme_is_understood_by_the_parser() -> None:
    """A command that README shows can be typed as it stands there."""
    commands = documented_commands()
    assert len(commands) > 15
    for command in commands:
        try:
            build_parser().parse_args(shlex.split(command))
        except UsageError as error:
            pytest.fail(f"gemm-tuner {command}: {error}")


def test_every_command_of_the_parser_is_in_readme() -> None:
    """No command is left for people to find by chance."""
    documented = " | ".join(documented_commands())
    missing = [name for name in commands_of(build_parser()) if re.search(rf"(^|\| ){name}\b", documented) is None]
    assert missing == []


def test_every_environment_variable_is_in_readme_with_its_default(tmp_path: Path) -> None:
    """README's table is the list of variables that Settings reads, and Settings reads each of them."""
    rows = re.findall(r"^\| `(GEMM_TUNER_[A-Z_]+)` \| (.+?) \| (.+?) \|$", README, re.MULTILINE)
    assert tuple(rows) == VARIABLES
    changed = {"GEMM_TUNER_HOME": str(tmp_path), "GEMM_TUNER_DATABASE_URL": "sqlite:///x", "GEMM_TUNER_ENGINE": "fake"}
    for name, _, _ in VARIABLES:
        assert Settings.from_env({name: changed.get(name, "77")}) != Settings.from_env({}), name


def test_environment_is_read_nowhere_else() -> None:
    """A variable of ours that is read at depth would be in no table."""
    for path in tracked_files():
        if path.suffix == ".py" and "tests" not in path.relative_to(ROOT).parts:
            text = path.read_text(encoding="utf-8")
            if path != ROOT / "tuner" / "settings.py":
                assert not re.search(r"(environ\.get\(|getenv\()\s*\"GEMM_TUNER_", text), path


def test_every_kind_of_evidence_is_explained_in_readme() -> None:
    """People meet these words in every answer."""
    assert [kind for kind in Evidence if f"| `{kind}` |" not in README] == []


def test_readme_keeps_the_place_of_the_measured_table() -> None:
    """The table of measured results is written between two marks."""
    assert README.count("<!-- measured-results:begin") == 1
    assert README.index("measured-results:begin") < README.index("measured-results:end")


def test_measured_table_of_readme_is_what_the_recorded_file_says() -> None:
    """Every figure comes from a committed measurement with its environment."""
    content = recorded.read(ROOT / "results" / "h200" / "dev.json")
    assert recorded.table(content) in README
    for row in content["rows"]:
        assert row["environment"]["gpu_name"] == "NVIDIA H200"
        assert {"measured", "numeric", "checked"} <= set(row["evidence"])
        assert row["ratio"]["cublaslt_best"] == pytest.approx(
            row["baselines_us"]["cublaslt_best"] / row["median_us"], rel=0.01
        )


def test_links_of_the_documents_lead_somewhere() -> None:
    """Every relative link of a Markdown file names a file of the repository."""
    for path in tracked_files():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
                assert (path.parent / target).exists(), f"{path}: {target}"


def test_make_targets_of_readme_exist() -> None:
    """`make demo` and the others are targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z][a-z-]*)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_decisions_are_listed_and_complete() -> None:
    """Each decision says its context, what was decided and what it costs, and stands in the list."""
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    decisions = sorted(folder.glob("0*.md"))
    assert len(decisions) >= 6
    for path in decisions:
        text = path.read_text(encoding="utf-8")
        assert path.name in listed
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Cost")), path.name


def test_kernels_package_is_ours() -> None:
    """`kernels` is also a name on the package index: ours has to win."""
    assert Path(kernels.__file__ or "") == ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_module_imports_without_heavy_packages(module: str) -> None:
    """Problem, configs, checks, model, client and command line load where tvm, torch and optuna cannot."""
    done = subprocess.run(
        [sys.executable, "-c", f"{BLOCKER}\nimport {module}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_imports_point_one_way() -> None:
    """The contracts of import-linter hold."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    """A stranger's clone must not depend on where this was written."""
    # Written in two parts, so that this file does not name them either.
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "crates" + ".io", "registry.npm" + "js", "deb.debian" + ".org")
    paths = (r"/" + r"root/", r"/home/[a-z]", r"(?<![\w.])/" + r"work/", r"\.\./" + "shared")
    pattern = re.compile("|".join([*map(re.escape, hosts), *paths]))
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert (found := pattern.search(text)) is None, f"{path.relative_to(ROOT)}: {found}"


def test_requirements_are_pinned_and_cover_the_project() -> None:
    """Every line is an exact version, and every dependency that the project names is among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"base": project["dependencies"], "server": project["optional-dependencies"]["server"]}
    wanted |= {name: project["optional-dependencies"][name] for name in ("tuner", "gpu", "verify", "dev")}
    for name, dependencies in wanted.items():
        lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert all(re.match(r"[a-z0-9_.-]+==[^ ]+( ; .+)?$", pin) for pin in pins), name
        pinned = {pin.partition("==")[0] for pin in pins}
        for dependency in dependencies:
            package = re.split(r"[<>=\[]", dependency)[0].lower().replace("_", "-")
            assert package in pinned or package == "gemm-tuner", f"{name}: {package}"


def test_cpu_requirements_hold_no_torch() -> None:
    """Tuning without a GPU must not download gigabytes."""
    for name in ("base", "server", "tuner", "dev"):
        assert "torch==" not in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Dockerfile.api", "Dockerfile.worker"])
def test_dockerfile_copies_what_exists_and_runs_as_a_plain_user(name: str) -> None:
    """No image is built here; at least its sources are there, its pins are used and it drops root."""
    text = (ROOT / "docker" / name).read_text(encoding="utf-8")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert copied
    for sources in copied:
        assert [source for source in sources if not (ROOT / source).exists()] == []
    assert re.search(r"^USER gemm$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
    assert re.search(r"-r requirements/\w+\.txt", text)


def test_compose_file_starts_both_services_on_shared_state() -> None:
    """It parses; API and tuner share the volume, only the tuner reserves GPUs, the port stays on loopback."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    api, tuner = compose["services"]["api"], compose["services"]["tuner"]
    assert api["volumes"] == tuner["volumes"] == ["state:/data"]
    assert tuner["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "deploy" not in api
    assert all(port.startswith("127.0.0.1:") for port in api["ports"])
    for service in (api, tuner):
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_ci_runs_make_test() -> None:
    """The script is executable, strict, and calls what people call."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert re.search(r"^make test$", text, re.MULTILINE)


def test_help_of_every_command_can_be_printed() -> None:
    """A stray percent sign in a help text would only show when someone asks for help."""
    parsers: list[argparse.ArgumentParser] = [build_parser(), *commands_of(build_parser()).values()]
    assert all(parser.format_help() for parser in parsers)


def test_wheel_takes_along_every_file_of_the_pages() -> None:
    """Templates, style sheet and scripts are matched by the patterns of package-data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["api"]
    matched = {path for pattern in patterns for path in (ROOT / "api").glob(pattern)}
    pages = ROOT / "api" / "pages"
    files = {path for folder in (pages / "templates", pages / "static") for path in folder.rglob("*") if path.is_file()}
    assert len(files) > 20
    assert files <= matched
