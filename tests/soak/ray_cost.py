"""What the ray engine adds to a trial, how many trials one tuner gets through, and how busy many GPUs would be.

    python -m tests.soak.ray_cost overhead --studies 24 --out results/host/ray_cost.json
    python -m tests.soak.ray_cost scale --studies 96 --scale 3 --out results/host/ray_scale.json

`overhead`: instant invented trials on a real cluster of 2 nodes, against the same studies on the engine of this
process. Reported in wall time and in processor time, for the machine is often busy with other work. Memory is looked at
after each eighth of the studies.

`scale`: 2 nodes that announce 32 GPUs and 256 compile places each; trials take `--scale` times what the invented engine
thinks (0.8 s on the GPU, 2 s to compile, 3 s for a final and for a check). GPU time over GPUs x wall time is how busy
they were, counted from the moment when all studies run until the first has nothing more to start.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kernels.artifacts import ArtifactStore
from tests.ray_cluster import LocalCluster
from tests.soak.ray_kills import SHAPES, requests_of
from tests.soak.report import hand_over, host
from tests.tuner.support import PROFILE
from tuner.engine.fake import FakeEngine
from tuner.engine.ray.engine import RayCluster
from tuner.engine.ray.link import Link, LinkOptions
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.search.sampler import ConfigSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from search_space.request import TuneRequest
    from tuner.engine.base import Engine
    from tuner.records import Trial

MIB = 2**20
SHAPES_USED = 8  # listing a problem's space is done once and is not the engine's cost


@dataclass(slots=True)
class SamplerTime:
    """Seconds of all threads inside the sampler."""

    total_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def timed_sampler() -> Iterator[SamplerTime]:
    """Count what `ask` and `tell` take within the block."""
    spent = SamplerTime()
    methods = {name: getattr(ConfigSampler, name) for name in ("ask", "tell")}

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*arguments)
            finally:
                with spent.lock:
                    spent.total_s += time.thread_time() - began_s

        return timed

    for name, method in methods.items():
        setattr(ConfigSampler, name, wrapped(method))
    try:
        yield spent
    finally:
        for name, method in methods.items():
            setattr(ConfigSampler, name, method)


class GpuTime(MemoryRecorder):
    """Notes when trials ended and how long each had the GPU."""

    def __init__(self, ends: list[tuple[float, float]]) -> None:
        super().__init__()
        self._ends = ends

    def save_trial(self, trial: Trial, kernel: Any) -> None:
        """See Recorder."""
        super().save_trial(trial, kernel)
        self._ends.append((time.monotonic(), trial.gpu_s))


def processes(cluster: LocalCluster) -> dict[str, list[psutil.Process]]:
    """This process, its bridge, and the workers of the nodes."""
    bridge = [child for child in psutil.Process().children() if "tuner.engine.ray.bridge" in " ".join(child.cmdline())]
    workers = []
    for process in cluster.processes():
        workers += [
            child for child in process.children(recursive=True) if "ray::NodeWorker" in " ".join(child.cmdline())
        ]
    return {"tuner": [psutil.Process()], "bridge": bridge, "workers": workers}


def cpu_s(of: Sequence[psutil.Process]) -> float:
    """Processor seconds so far."""
    return float(sum(sum(process.cpu_times()[:2]) for process in of))


def rss_mib(of: Sequence[psutil.Process]) -> float:
    """Resident memory."""
    return round(float(sum(process.memory_info().rss for process in of)) / MIB, 1)


def run_studies(requests: Sequence[TuneRequest], engine: Callable[[], Engine], at_a_time: int) -> int:
    """Trials of all studies together."""
    with ThreadPoolExecutor(at_a_time) as pool:
        results = pool.map(lambda request: tune_study(request, engine(), MemoryRecorder()), requests)
        return sum(len(result.trials) for result in results)


def warm(requests: Sequence[TuneRequest]) -> None:
    """What is listed once for each problem is not the engine's cost."""
    from functools import cache

    from tuner import loop
    from tuner.search.searched import SearchedSpace

    loop.starting_configs = cache(loop.starting_configs)  # type: ignore[assignment, attr-defined]
    SearchedSpace.of = cache(SearchedSpace.of)  # type: ignore[method-assign]
    for problem in {request.problem for request in requests}:
        loop.starting_configs(problem, fake_profile())  # type: ignore[attr-defined]
        SearchedSpace.of(problem, fake_profile())


def fake_profile() -> Any:
    """Of the invented H200."""
    return FakeEngine(PROFILE).device.profile


def overhead(options: argparse.Namespace, cluster: LocalCluster, opened: RayCluster) -> dict[str, Any]:
    """The same studies on both engines."""
    shapes = min(SHAPES_USED, len(SHAPES))
    base = requests_of(shapes, options.trials, ["tpe"])
    requests = [base[index % shapes] for index in range(options.studies)]
    warm(requests)
    engine = opened.engine("sm_90a", None, PROFILE.name)
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(Path(folder))
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        with timed_sampler() as local_sampler:
            trials = run_studies(requests, lambda: FakeEngine(PROFILE, artifacts=store), options.at_a_time)
        local_s, local_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    parts = processes(cluster)
    memory = [{name: rss_mib(of) for name, of in parts.items()}]
    before = {name: cpu_s(of) for name, of in parts.items()}
    began_s, ray_trials = time.monotonic(), 0
    with timed_sampler() as ray_sampler:
        step = max(1, len(requests) // 8)
        for first in range(0, len(requests), step):
            ray_trials += run_studies(requests[first : first + step], lambda: engine, options.at_a_time)
            memory.append({name: rss_mib(of) for name, of in parts.items()})
    ray_s = time.monotonic() - began_s
    used = {name: cpu_s(of) - before[name] for name, of in parts.items()}
    assert ray_trials == trials
    ms = 1000.0 / trials
    return {
        "trials": trials,
        "studies": options.studies,
        "at_a_time": options.at_a_time,
        "local_wall_ms_a_trial": round(local_s * ms, 2),
        "ray_wall_ms_a_trial": round(ray_s * ms, 2),
        "added_wall_ms_a_trial": round((ray_s - local_s) * ms, 2),
        "local_cpu_ms_a_trial": round(local_cpu_s * ms, 2),
        "ray_cpu_ms_a_trial": {name: round(spent * ms, 2) for name, spent in used.items()},
        "added_cpu_ms_a_trial": round((sum(used.values()) - local_cpu_s) * ms, 2),
        "sampler_cpu_ms_a_trial": {
            "local": round(local_sampler.total_s * ms, 2),
            "ray": round(ray_sampler.total_s * ms, 2),
        },
        "trials_a_minute": round(trials / ray_s * 60),
        "memory_mib": memory,
        "lost_jobs": opened.dispatcher.retries,
    }


def scale(options: argparse.Namespace, cluster: LocalCluster, opened: RayCluster) -> dict[str, Any]:
    """Many studies at the same time on many GPUs that take their time."""
    base = requests_of(min(SHAPES_USED, len(SHAPES)), options.trials, ["tpe"])
    requests = [base[index % len(base)] for index in range(options.studies)]
    warm(requests)
    engine = opened.engine("sm_90a", None, PROFILE.name)
    ends: list[tuple[float, float]] = []
    parts = processes(cluster)
    before = {name: cpu_s(of) for name, of in parts.items()}
    began_s = time.monotonic()
    stop_s = began_s + options.max_seconds

    def study(request: TuneRequest) -> None:
        tune_study(request, engine, GpuTime(ends), should_stop=lambda: time.monotonic() > stop_s)

    with timed_sampler() as sampler, ThreadPoolExecutor(options.studies) as pool:
        list(pool.map(study, requests))
    wall_s = time.monotonic() - began_s
    used = {name: cpu_s(of) - before[name] for name, of in parts.items()}
    # The first trials wait for their compiles, the last ones for stragglers.
    first_s, last_s = began_s + 0.3 * (stop_s - began_s), min(stop_s, max(end_s for end_s, _ in ends))
    counted = [gpu_s for end_s, gpu_s in ends if first_s <= end_s <= last_s]
    busy = sum(counted) * options.scale / (options.gpus * (last_s - first_s))
    return {
        "gpus": options.gpus,
        "compile_places": options.compiles,
        "studies": options.studies,
        "trials": len(ends),
        "trials_a_s_in_window": round(len(counted) / (last_s - first_s), 1),
        "window_s": round(last_s - first_s, 1),
        "gpu_busy": round(busy, 3),
        "cores_used": {name: round(spent / wall_s, 2) for name, spent in used.items()},
        "sampler_cpu_ms_a_trial": round(sampler.total_s / max(1, len(ends)) * 1000, 2),
        "wall_s": round(wall_s, 1),
        "lost_jobs": opened.dispatcher.retries,
    }


def command_of(options: argparse.Namespace) -> str:
    """What reprints the report."""
    shown = ("studies", "trials", "at_a_time") if options.what == "overhead" else ("studies", "trials", "scale")
    words = [f"--{name.replace('_', '-')} {getattr(options, name):g}" for name in shown]
    return f"python -m tests.soak.ray_cost {options.what} {' '.join(words)}"


def main() -> int:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "scale"))
    parser.add_argument("--studies", type=int, default=24)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--compiles", type=int, default=512)
    parser.add_argument("--max-seconds", type=float, default=180.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended in any case
    folder = Path(tempfile.mkdtemp(prefix="gemm-rc-", dir="/tmp"))  # paths of sockets must be short
    is_scale = options.what == "scale"
    cluster = LocalCluster(folder, scale=options.scale if is_scale else 0.0)
    try:
        cluster.start_head()
        cards, compiles = (options.gpus // 2, options.compiles // 2) if is_scale else (4, 8)
        for index in range(2):
            cluster.start_node(f"n{index}", devices=("NVIDIA H200",) * cards, compiles=compiles)
        cluster.wait_for(3)
        opened = RayCluster(Link(LinkOptions(address=cluster.address)), ArtifactStore(folder / "tuner"))
        try:
            while sum(device.state == "READY" for device in opened.devices()) < 2 * cards:
                time.sleep(0.2)
            found = (scale if is_scale else overhead)(options, cluster, opened)
        finally:
            opened.close()
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "schema": 1,
        "command": command_of(options),
        "environment": host(),
        **found,
    }
    hand_over(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
