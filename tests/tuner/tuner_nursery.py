"""Starts tuner processes quickly: imports everything once, tunes once, then forks one for each line of its input.

Only for the kill tests, which would otherwise spend most of their time importing and listing configs. A line is a JSON
list of arguments; the answer is the number of the process. Nobody waits for children, so a dead one is gone at once.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import optuna.samplers  # noqa: F401  (imported here so that no child has to)

from db.database import Database
from search_space.request import Budget, TuneRequest
from tests.soak.studies import study_of
from tests.tuner.problems import KILL_PROBLEMS
from tuner import loop
from tuner.engines import FakeEngines
from tuner.search.searched import SearchedSpace
from tuner.service import main, run_service
from tuner.settings import Settings


def warm_up() -> None:
    """Tune each problem once, and keep what the search knows of it: the same in every process, and slow to list."""
    loop.starting_configs = functools.cache(loop.starting_configs)
    SearchedSpace.of = functools.cache(SearchedSpace.of)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'tuner.db'}"
        with Database.open(url) as database:
            for problem in KILL_PROBLEMS:
                study_of(database, TuneRequest(problem=problem, arch="sm_90a", budget=Budget(trials=3)))
        settings = Settings(
            database_url=url, artifacts_dir=folder, exports_dir=folder, engine="fake", fake_scale=0.0, poll_s=0.01
        )
        run_service(settings, FakeEngines, threading.Event(), until_idle=True)


if __name__ == "__main__":
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            os._exit(main(json.loads(line)))
        print(pid, flush=True)
