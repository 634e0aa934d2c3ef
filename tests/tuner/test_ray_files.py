"""Files that run a cluster elsewhere: compose, KubeRay, SLURM. Nothing is started; their commands must be real ones."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuner.cli.parser import build_parser
from tuner.settings import VARIABLES

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
KNOWN = {name for name, _, _ in VARIABLES}


def commands_of(text: str) -> list[list[str]]:
    """Arguments of each gemm-tuner command in a shell text, with variables set to something."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"gemm-tuner\"? ((?:node|tuner|serve|doctor)\b[^\n&\]']*)", joined)
    return [shlex.split(re.sub(r"\$\{?[\w%:*-]+\}?", "1", re.sub(r'[\\"]', "", line))) for line in found]


def check(arguments: list[str]) -> None:
    """It parses; a command line that does not ends the program."""
    build_parser().parse_args(arguments)


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Every container of a manifest."""
    spec = document["spec"]
    if document["kind"] == "Deployment":
        return list(spec["template"]["spec"]["containers"])
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


@pytest.mark.parametrize("name", ["Dockerfile.cluster", "Dockerfile.gpu-node"])
def test_image_of_a_cluster_copies_what_exists_uses_pins_and_drops_root(name: str) -> None:
    """No image is built here."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert copied
    assert [source for sources in copied for source in sources if not (ROOT / source).exists()] == []
    assert re.search(r"^USER gemm$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
    pins = re.search(r"-r (requirements/\w+\.txt)", text)
    assert pins is not None
    assert re.search(r"^ray==", (ROOT / pins[1]).read_text(encoding="utf-8"), re.MULTILINE)
    for arguments in commands_of(text):
        check(arguments)


def test_compose_of_a_cluster_runs_each_part_with_a_command_that_exists() -> None:
    """API, tuners, PostgreSQL, head, nodes that compile, nodes that measure."""
    compose = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"postgres", "api", "ray-head", "tuner", "compile-node", "gpu-node"}
    for service in services.values():
        for name in service.get("environment", {}):
            assert name in KNOWN or name.startswith("POSTGRES_"), name
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        command = service.get("command", [])
        if command[:1] == ["gemm-tuner"]:
            check(command[1:])
    assert services["tuner"]["deploy"]["replicas"] == 2
    assert services["api"]["volumes"] == services["tuner"]["volumes"] == ["state:/data"]
    assert services["gpu-node"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert [port for service in services.values() for port in service.get("ports", [])] == ["127.0.0.1:8000:8000"]
    assert all("password" not in str(value).lower() or "${" in str(value) for value in services["postgres"].values())


def test_kuberay_manifest_starts_nodes_through_our_command_and_gives_each_the_cards_it_asks_for() -> None:
    """KubeRay's own `ray start` would set neither resources nor labels."""
    documents = list(yaml.safe_load_all((DOCKER / "kuberay.yaml").read_text(encoding="utf-8")))
    cluster, tuner = documents
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    pinned = re.search(r"^ray==(.+)$", (ROOT / "requirements/ray.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned[1]
    for container in [*containers(cluster), *containers(tuner)]:
        command = container["command"]
        found = commands_of(shlex.join(command)) if command[0] != "gemm-tuner" else [command[1:]]
        assert found, command
        for arguments in found:
            check(arguments)
        for variable in container.get("env", []):
            assert variable["name"] in KNOWN
    gpu = cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_slurm_script_is_shell_and_its_commands_exist() -> None:
    """Under `set -euo pipefail`, with each variable it needs demanded by name."""
    script = DOCKER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    found = commands_of(text)
    assert [arguments[0] for arguments in found] == ["node", "node", "tuner"]
    for arguments in found:
        check(arguments)
    used = set(re.findall(r"GEMM_TUNER_[A-Z_]+", text)) - {"GEMM_TUNER_BIN", "GEMM_TUNER_RAY_PORT"}
    assert used <= KNOWN
