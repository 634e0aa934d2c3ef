"""The ray engine on a real Ray cluster of three nodes on this machine. Devices are invented, all else is real."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

from kernels.artifacts import ArtifactStore
from tests.ray_cluster import LocalCluster
from tests.tuner.support import PROFILE, fake, request, told, tune
from tuner.engine.ray.engine import RayCluster
from tuner.engine.ray.link import Link, LinkOptions
from tuner.engine.ray.start_node import REFUSED
from tuner.recorder import MemoryRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.engine.base import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODES = ("n0", "n1", "n2")
WAIT_S = 150.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head and three nodes; each test leaves three."""
    folder = Path(tempfile.mkdtemp(prefix="gemm-ray-", dir="/tmp"))  # paths of sockets must be short
    made = LocalCluster(folder, scale=0.05)
    try:
        made.start_head()
        for name in NODES:
            made.start_node(name)
        made.wait_for(len(NODES) + 1)
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def connected(cluster: LocalCluster) -> Iterator[RayCluster]:
    """The connection of one tuner, with all nodes known."""
    opened = RayCluster(Link(LinkOptions(address=cluster.address)), ArtifactStore(cluster.folder / "tuner"))
    try:
        wait_for(lambda: ready(opened) == len(NODES))
        yield opened
    finally:
        opened.close()


def ready(opened: RayCluster) -> int:
    """Cards that can be used."""
    return sum(device.state == "READY" for device in opened.devices())


def engine_of(opened: RayCluster) -> Engine:
    """For any H200."""
    return opened.engine("sm_90a", None, PROFILE.name)


def wait_for(question: Callable[[], object]) -> None:
    """Until it holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


class KillsNode(MemoryRecorder):
    """Ends a node as a power cut does, with its third trial."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        super().__init__()
        self._cluster, self._name = cluster, name
        self.numbers: list[int] = []

    def save_trial(self, trial: Any, kernel: Any) -> None:
        """See Recorder."""
        self.numbers.append(trial.number)
        if len(self.numbers) == 3:
            self._cluster.kill(self._name)
        super().save_trial(trial, kernel)


def test_study_on_a_real_cluster_has_the_trials_and_the_winner_of_the_local_engine(connected: RayCluster) -> None:
    """For the same seed; the three cards share the work."""
    found, alone = tune(request(), engine_of(connected)), tune(request(), fake())
    assert told(found) == told(alone)
    assert found.winner is not None
    assert alone.winner is not None
    assert found.winner.config == alone.winner.config
    assert len({trial.measurement.environment.gpu_uuid for trial in found.trials if trial.measurement}) == len(NODES)


def test_node_killed_in_mid_study_costs_no_trial_and_is_shown_as_offline(
    cluster: LocalCluster, connected: RayCluster
) -> None:
    """What it was at is tried elsewhere; when it comes back it is the same card."""
    recorder = KillsNode(cluster, "n1")
    found = tune(request(), engine_of(connected), recorder=recorder)
    assert told(found) == told(tune(request(), fake()))
    assert len(recorder.numbers) == len(set(recorder.numbers))
    wait_for(lambda: {device.state for device in connected.devices()} & {"OFFLINE", "SET_ASIDE"})
    cluster.start_node("n1")
    wait_for(lambda: ready(connected) == len(NODES))
    assert len(connected.devices()) == len(NODES)


def test_machine_with_another_toolchain_is_refused_with_the_difference_before_it_joins(cluster: LocalCluster) -> None:
    """The cluster's compiler is the invented one, the machine's is real."""
    options = cluster._options("odd", devices=())
    options = replace(options, plan=replace(options.plan, engine="local", gpus=False))
    command = [sys.executable, "-m", "tuner.engine.ray.start_node", options.to_json()]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert refused.returncode == REFUSED
    assert "node odd does not fit the cluster" in refused.stderr
    assert "engine is local here, fake in the cluster" in refused.stderr
    assert "tvm is" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert len(cluster.wait_for(len(NODES) + 1)) == len(NODES) + 1


def test_two_tuners_share_the_nodes(cluster: LocalCluster, connected: RayCluster) -> None:
    """One worker a node serves both, so a card still measures one candidate at a time."""
    other = RayCluster(Link(LinkOptions(address=cluster.address)), ArtifactStore(cluster.folder / "other"))
    try:
        wait_for(lambda: ready(other) == len(NODES))
        assert {device.facts.uuid for device in other.devices()} == {
            device.facts.uuid for device in connected.devices()
        }
        first, second = tune(request(6), engine_of(connected)), tune(request(6), engine_of(other))
        assert told(first) == told(second)
    finally:
        other.close()


def test_head_that_is_killed_and_started_again_costs_no_trial(cluster: LocalCluster, connected: RayCluster) -> None:
    """No Redis: the new head is empty. Nodes and tuner find it by themselves, and the study goes on where it was."""

    class KillsHead(KillsNode):
        """And starts it again at the same address."""

        def save_trial(self, trial: Any, kernel: Any) -> None:
            """See Recorder."""
            super().save_trial(trial, kernel)
            if len(self.numbers) == 3:
                cluster.start_head()

    recorder = KillsHead(cluster, "head")
    with cluster.mending():
        found = tune(request(), engine_of(connected), recorder=recorder)
        assert told(found) == told(tune(request(), fake()))
        assert len(recorder.numbers) == len(set(recorder.numbers))
        wait_for(lambda: ready(connected) == len(NODES))
