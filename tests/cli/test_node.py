"""`node` and `tuner`: what the command line asks of a cluster, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.tuner.support import PROFILE
from tuner.cli import serve
from tuner.cli.errors import UsageError
from tuner.cli.node import options_of
from tuner.cli.parser import build_parser
from tuner.cli.settings import Settings
from tuner.cli.supervisor import Backoff, ChildSpec, Supervisor
from tuner.engine.base import EngineError
from tuner.engine.fake import fake_device
from tuner.engine.ray.cluster import mismatch
from tuner.engine.ray.plan import NodePlan, compile_slots, gpu_slots, resources_of
from tuner.engine.ray.start_node import NodeOptions, command_of, refusal
from tuner.engine.ray.versions import LONGEST_LABEL, differences, label, of_labels, own_versions, to_labels
from tuner.engine.ray.wire import NodeRow

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A home of its own."""
    return Settings.from_env({"GEMM_TUNER_HOME": str(tmp_path), "GEMM_TUNER_COMPILE_PROCESSES": "6"})


def options(settings: Settings, *arguments: str) -> NodeOptions:
    """As the command makes them."""
    return options_of(build_parser().parse_args(["node", *arguments]), settings)


def row(**changes: Any) -> NodeRow:
    """A node of a cluster with the versions that are here."""
    values: dict[str, Any] = {
        "node_id": "a",
        "address": "10.0.0.1",
        "resources": {},
        "labels": to_labels(own_versions("fake")),
        "is_head": False,
        "started_ms": 0,
    }
    return NodeRow(**{**values, **changes})


def test_node_offers_its_compile_places_and_its_gpus_by_architecture_and_exact_name(settings: Settings) -> None:
    """As Ray resources; Ray itself is told of no CPU and no GPU, so that nobody else's work lands there."""
    asked = options(settings, "--address", "10.0.0.1:6379", "--fake-devices", "h200,h200,b200", "--name", "one")
    gpus = asked.plan.machine().gpus
    command = command_of(asked, gpus, own_versions("fake"))
    offered = json.loads(next(part for part in command if part.startswith("--resources=")).partition("=")[2])
    assert offered == {"gemm_compile": 6, "gemm_gpu:sm_90a:Fake H200": 2, "gemm_gpu:sm_100a:Fake B200": 1}
    assert compile_slots(offered) == 6
    assert gpu_slots(offered) == {"Fake H200": 2, "Fake B200": 1}
    assert {"--num-cpus=0", "--num-gpus=0", "--address=10.0.0.1:6379", "--block"} <= set(command)
    labels = next(part for part in command if part.startswith("--labels=")).partition("=")[2]
    assert "gemm-tuner.engine=fake" in labels.split(",")


def test_head_offers_nothing_unless_it_is_asked_to(settings: Settings) -> None:
    """Losing it should cost as little as possible."""
    asked = options(settings, "--head", "--node-ip", "10.0.0.1", "--port", "7000")
    assert asked.address == "10.0.0.1:7000"
    assert resources_of(asked.plan, ()) == {}
    assert not asked.plan.gpus
    assert options(settings, "--head", "--compile-processes", "3").plan.compile_processes == 3


def test_invented_cards_of_one_name_have_identities_of_their_own() -> None:
    """And stay the same when the node is started again."""
    first, second = (fake_device(PROFILE, card=f"n0/{index}") for index in range(2))
    assert first.uuid != second.uuid
    assert first == fake_device(PROFILE, card="n0/0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --head or --address"),
        (["--head", "--address", "10.0.0.1:6379"], "either --head or --address"),
        (["--address", "10.0.0.1"], "is not HOST:PORT"),
        (["--address", "10.0.0.1:6379", "--fake-devices", "h300"], "--fake-devices: unknown device 'h300'"),
    ],
)
def test_options_that_cannot_be_are_named(settings: Settings, arguments: list[str], words: str) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match=words):
        options(settings, *arguments)


def test_options_and_plan_reach_the_node_as_they_were(settings: Settings) -> None:
    """One goes through a command line, the other through the environment of Ray's worker."""
    asked = options(
        settings, "--address", "10.0.0.1:6379", "--fake-devices", "h200", "--ray-option=--min-worker-port=1"
    )
    assert NodeOptions.from_json(asked.to_json()) == asked
    assert NodePlan.from_env(asked.plan.to_env()) == asked.plan
    with pytest.raises(EngineError, match="was not started by gemm-tuner node"):
        NodePlan.from_env({})


def test_machine_that_differs_is_refused_before_it_joins_and_each_difference_is_named(settings: Settings) -> None:
    """With what is here and what is there."""
    asked = options(settings, "--address", "10.0.0.1:6379", "--fake-devices", "h200", "--name", "two")
    here = own_versions("fake", driver="580.95.05")
    other = {**here, "nvcc": "12.8.93", "template": "0123456789abcdef", "driver": "570.10"}
    text = refusal(asked, [row(labels=to_labels(here))], other)
    assert text.startswith("node two does not fit the cluster at 10.0.0.1:6379: ")
    assert f"nvcc is 12.8.93 here, {here['nvcc']} in the cluster" in text
    assert "template is 0123456789abcdef here" in text
    assert "driver is 570.10 here, 580.95.05 in the cluster" in text
    assert refusal(asked, [row(labels=to_labels(here))], here) == ""


def test_drivers_of_one_major_version_fit_together() -> None:
    """As in `environment_key`."""
    here = own_versions("fake", driver="580.95.05")
    assert mismatch([row(labels=to_labels(here))], {**here, "driver": "580.126.1"}) == []


def test_first_node_of_a_cluster_sets_what_the_others_must_have(settings: Settings) -> None:
    """Nodes without a GPU say nothing of drivers, nodes of others nothing at all."""
    mine = own_versions("fake", driver="580.1")
    assert mismatch([], mine) == []
    assert mismatch([row(labels={"ray.io/zone": "x"}), row()], mine) == []
    assert differences({"nvcc": "13.0"}, {"nvcc": "12.8"}) == ["nvcc is 12.8 here, 13.0 in the cluster"]
    assert settings.home.exists()


def test_versions_are_valid_labels_of_ray() -> None:
    """Letters, digits, dashes, dots and underscores, at most 63, beginning and ending with a letter or digit."""
    assert label("NVIDIA H100 80GB HBM3") == "NVIDIA-H100-80GB-HBM3"
    assert label("(none) ") == "none"
    assert len(label("x" * 100)) == LONGEST_LABEL
    versions = own_versions("fake", driver="580.95.05")
    assert of_labels(to_labels(versions)) == versions
    assert all(value == label(value) for value in versions.values())


def test_node_that_is_refused_is_not_started_again() -> None:
    """Nothing that it could do the next time would make it fit."""
    reports: list[str] = []
    spec = ChildSpec(name="ray", command=["sh", "-c", "exit 4"], restart=True, final_status=4)
    assert Supervisor([spec], report=reports.append).run() == 1
    assert reports == ["ray ended (exit status 4): stopping"]


def test_node_that_ends_is_started_again(tmp_path: Path) -> None:
    """Until it is refused, here the second time."""
    reports: list[str] = []
    script = f'test -e "{tmp_path}/once" && exit 4; touch "{tmp_path}/once"; exit 1'
    spec = ChildSpec(name="ray", command=["sh", "-c", script], restart=True, final_status=4)
    assert Supervisor([spec], backoff=Backoff(first_s=0.05), report=reports.append).run() == 1
    assert reports == ["ray ended (exit status 1): starting it again in 0.05 s", "ray ended (exit status 4): stopping"]


def test_tuner_and_serve_hand_the_cluster_on_to_the_tuner_process(settings: Settings) -> None:
    """The address may also come from the environment."""
    args = build_parser().parse_args(["tuner", "--engine", "ray", "--ray-address", "10.0.0.1:6379"])
    assert serve.engine_arguments(args, settings) == ["--engine", "ray", "--ray-address", "10.0.0.1:6379"]
    args = build_parser().parse_args(["serve", "--engine", "ray"])
    with pytest.raises(UsageError, match="engine ray needs the head's address"):
        serve.engine_arguments(args, settings)
    environ = {"GEMM_TUNER_HOME": str(settings.home), "GEMM_TUNER_RAY_ADDRESS": "10.0.0.2:6379"}
    elsewhere = Settings.from_env(environ)
    assert serve.engine_arguments(args, elsewhere)[-1] == "10.0.0.2:6379"
    command = serve.children("127.0.0.1", 8000, serve.engine_arguments(args, elsewhere), elsewhere)[0].command
    at = command.index("--engine")
    assert command[at + 1 : at + 4] == ["ray", "--ray-address", "10.0.0.2:6379"]
