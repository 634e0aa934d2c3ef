"""What a tuner that runs for weeks keeps of problems and studies that it has done with: nothing that grows."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select

from db.database import Database
from db.models import Study
from kernels.artifacts import ArtifactStore
from search_space.checks import _narrowest
from search_space.starting import PICKS_KEPT, model_picks
from search_space.walk import GRIDS_KEPT, plain_order, plain_orders
from tests.tuner.ray_in_process import InProcess, InProcessEngines
from tests.tuner.support import PROFILE, instant_service, request
from tests.tuner.test_service import submit
from tuner.engine.ray.engine import RayCluster
from tuner.search.searched import SPACES_KEPT, listed_configs
from tuner.service import run_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tuner.settings import Settings

WAIT_S = 60.0
OURS = ("tuner.", "search_space.", "kernels.", "db.", "optuna.", "concurrent.", "threading")


def living() -> Counter[str]:
    """Objects by class, of the classes that studies are made of."""
    gc.collect()
    every_s = sys.getswitchinterval()
    sys.setswitchinterval(WAIT_S)  # a tuple that another thread is making must not be held when that goes on
    try:
        kinds = [(str(type(one).__module__), type(one).__qualname__) for one in gc.get_objects()]
    finally:
        sys.setswitchinterval(every_s)
    return Counter(f"{module}.{name}" for module, name in kinds if module.startswith(OURS))


@contextmanager
def serving(settings: Settings, nodes: InProcess, folder: Path) -> Iterator[None]:
    """The tuner process in a thread, with the ray engine."""
    stop = threading.Event()
    engines = InProcessEngines(nodes, folder)
    thread = threading.Thread(target=run_service, args=(settings, lambda _: engines, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def tune_all(settings: Settings, seeds: range) -> None:
    """Queue a study for each seed and wait until the tuner has done them and has let go of their threads."""
    submit(settings, *[request(2, sampler="random", seed=seed) for seed in seeds], force=True)
    deadline_s = time.monotonic() + WAIT_S
    with Database.open(settings.database_url) as database:
        while True:
            with database.read() as session:
                left = session.scalar(select(func.count()).where(Study.finished_at.is_(None)))
            at_work = any(thread.name.startswith("study-") for thread in threading.enumerate())
            if not left and not at_work:
                break
            assert time.monotonic() < deadline_s, f"{left} studies are not done"
            time.sleep(0.05)
    time.sleep(10 * settings.poll_s)


def test_no_object_of_a_study_outlives_it(tmp_path: Path) -> None:
    """Trials, jobs, futures, threads, samplers' stores: there are as many after 9 studies as there were after 3."""
    settings = replace(instant_service(tmp_path), engine="ray", ray_address="in:1", studies=2)
    nodes = InProcess(tmp_path)
    nodes.add("a", gpus=2)
    with serving(settings, nodes, tmp_path):
        tune_all(settings, range(3))
        nodes.seen.clear()
        before = living()
        tune_all(settings, range(3, 9))
        nodes.seen.clear()
        after = living()
    grown = {kind: count - before[kind] for kind, count in after.items() if count >= before[kind] + 6}
    assert not grown


def test_what_is_known_of_grids_of_tiles_does_not_grow_with_the_problems() -> None:
    """A problem has about 130 grids with 24 orders each: kept for good they took 1.5 MB a problem."""
    rng = random.Random(1)

    def ask(grids: int) -> None:
        for _ in range(grids):
            tiles_m, tiles_n = rng.randrange(2, 100_000), rng.randrange(2, 100_000)
            plain_orders("sm_90a", tiles_m, tiles_n)
            plain_order("sm_90a", tiles_m, tiles_n, "m", 8)

    ask(GRIDS_KEPT)
    before = sys.getallocatedblocks()
    ask(1000)
    assert sys.getallocatedblocks() - before < 1000


@pytest.mark.parametrize(
    ("kept", "most"),
    [(listed_configs, SPACES_KEPT), (model_picks, PICKS_KEPT), (plain_orders, GRIDS_KEPT), (_narrowest, 256)],
)
def test_what_is_kept_by_problem_has_a_bound(kept: object, most: int) -> None:
    """A tuner sees thousands of problems: the longest unused ones go."""
    assert kept.cache_info().maxsize == most  # type: ignore[attr-defined]


def test_names_of_modules_are_not_kept(tmp_path: Path) -> None:
    """A `Path` interns its parts, and Python 3.12 keeps those for good: one name or two for every module ever built."""
    store = ArtifactStore(tmp_path)

    def use(modules: range) -> None:
        for number in modules:
            sha256 = store.put(b"module %d" % number)
            assert store.holds(sha256)
            store.delete(sha256)

    use(range(300))
    before = sys.getallocatedblocks()
    use(range(300, 700))
    assert sys.getallocatedblocks() - before < 300


def test_jobs_of_the_ray_engine_hold_no_path_of_a_module(tmp_path: Path) -> None:
    """Pickled, it would be kept in the tuner and in the bridge; a node puts in its own."""
    nodes = InProcess(tmp_path)
    cluster = RayCluster(nodes, ArtifactStore(tmp_path))
    try:
        engine = cluster.compiling(PROFILE)
        assert engine.module_path("0" * 64) == engine.module_path("1" * 64)
    finally:
        cluster.close()


_ARENAS = """
import ctypes, sys, threading
from tuner.allocator import use_few_arenas
if sys.argv[1] == "few" and not use_few_arenas():
    sys.exit(3)
together = threading.Barrier(12)
def work():
    held = [bytearray(1000) for _ in range(2000)]
    together.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def arenas(which: str) -> int:
    """How many arenas of malloc a process with 12 threads at work has; skips where the C library is another one."""
    done = subprocess.run([sys.executable, "-c", _ARENAS, which], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("the C library is not glibc")
    return done.stderr.count("Arena ")


def test_the_threads_of_studies_share_two_arenas_of_malloc() -> None:
    """What one thread freed serves the next one, instead of lying idle in an arena of its own."""
    assert arenas("few") <= 2
