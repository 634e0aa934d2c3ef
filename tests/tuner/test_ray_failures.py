"""Failures that users of distributed tuners reported (section F of our list), with a cluster in play."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from db import queries
from db.database import Database
from search_space.request import Budget, TuneRequest
from tests.soak.studies import study_of
from tests.tuner.ray_in_process import InProcess, InProcessEngines
from tests.tuner.support import PROBLEM, instant_service
from tuner.service import run_service

if TYPE_CHECKING:
    from pathlib import Path

# Modules that fail to import from now on; what is imported after this line must do without them.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run_without(blocked: set[str], program: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in which these packages cannot be imported."""
    text = BLOCK.format(blocked=sorted(blocked)) + program
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)


def answers(url: str, stop: threading.Event, seen: list[tuple[int, str]]) -> None:
    """A client of one API replica: asks for the shape again and again, notes each answer that is new to it."""
    with Database.open(url) as database:
        while not stop.is_set():
            with database.read() as session:
                found = queries.best_exact(
                    session, PROBLEM.m, PROBLEM.n, PROBLEM.k, PROBLEM.dtype, PROBLEM.layout, arch="sm_90a"
                )
            if found is not None:
                answer = (found.revision or 0, str(found.config))
                if not seen or seen[-1] != answer:
                    seen.append(answer)
            stop.wait(0.02)


def test_f1_two_clients_get_the_same_config_while_a_cluster_tunes_until_a_new_revision(tmp_path: Path) -> None:
    """F1: ranks that pick different kernels deadlock. An answer changes only with a revision, for everybody."""
    settings = instant_service(tmp_path)
    with Database.open(settings.database_url) as database:
        for seed in (0, 1):
            asked = TuneRequest(problem=PROBLEM, arch="sm_90a", budget=Budget(trials=8), seed=seed)
            study_of(database, asked)
    nodes = InProcess(tmp_path)
    for name in ("a", "b"):
        nodes.add(name)
    stop = threading.Event()
    seen: tuple[list[tuple[int, str]], ...] = ([], [])
    clients = [threading.Thread(target=answers, args=(settings.database_url, stop, mine)) for mine in seen]
    for client in clients:
        client.start()
    try:
        run_service(settings, lambda _: InProcessEngines(nodes, tmp_path), threading.Event(), until_idle=True)
    finally:
        stop.wait(0.3)
        stop.set()
        for client in clients:
            client.join()
    with Database.open(settings.database_url) as database, database.read() as session:
        results = queries.results_exact(session, PROBLEM.m, PROBLEM.n, PROBLEM.k, PROBLEM.dtype, PROBLEM.layout)
        published = {result.revision: str(result.config) for result in results if result.revision}
    assert set(published) == {1, 2}
    for mine in seen:
        revisions = [revision for revision, _ in mine]
        assert revisions == sorted(set(revisions)), "an answer changed without a new revision, or went back"
        assert all(published[revision] == config for revision, config in mine)
        assert revisions[-1] == 2


@pytest.mark.parametrize("module", ["tuner.engine.ray.worker", "tuner.engine.ray.engine", "tuner.engine.ray.bridge"])
def test_f4_tuner_bridge_and_node_worker_load_no_cuda_and_start_processes_by_exec_alone(module: str) -> None:
    """F4: CUDA fails in forked workers. Only GPU children import torch, and they are started with exec."""
    program = (
        f"import {module}\n"
        "import os\n"
        "os.fork = None\n"  # whoever forks from here on fails
        "assert not {'torch', 'ray', 'optuna'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = run_without({"torch"}, program)
    assert done.returncode == 0, done.stderr


def test_f4_api_knows_neither_ray_nor_torch() -> None:
    """F4: the API process never opens a GPU, and answers where no Ray is installed."""
    done = run_without({"torch", "ray", "pynvml", "tvm"}, "import api.app, api.__main__\n")
    assert done.returncode == 0, done.stderr


def test_f5_laptop_without_gpu_ray_or_database_submits_to_a_cluster_with_httpx_alone() -> None:
    """F5: wanted is tuning from a laptop. The client's imports are the standard library's, httpx, rich and ours."""
    blocked = {"torch", "ray", "tvm", "tvm_ffi", "optuna", "sqlalchemy", "fastapi", "pynvml", "psutil", "numpy"}
    program = (
        "import tuner.client, tuner.cli.main, tuner.cli.jobs\n"
        "from tuner.cli.parser import build_parser\n"
        "args = build_parser().parse_args(['tune', '64x7168x4096', '--device', 'h200', '--url', 'http://service:8000'])\n"
        "assert args.url == 'http://service:8000'\n"
    )
    done = run_without(blocked, program)
    assert done.returncode == 0, done.stderr


def test_ray_that_is_not_installed_is_named_with_what_to_do(tmp_path: Path) -> None:
    """One line, not a traceback from a child process."""
    program = (
        "from tuner.cli.main import main\n"
        f"import os; os.environ['GEMM_TUNER_HOME'] = {str(tmp_path)!r}\n"
        "sys.exit(main(['tune', '64x7168x4096', '--arch', 'sm_90a', '--trials', '2']))\n"
    )
    environ_program = "import os; os.environ.update(GEMM_TUNER_ENGINE='ray', GEMM_TUNER_RAY_ADDRESS='127.0.0.1:1')\n"
    done = run_without({"ray"}, environ_program + program)
    assert done.returncode == 1
    assert "gemm-tuner[ray]" in done.stderr
    assert "Traceback" not in done.stderr
