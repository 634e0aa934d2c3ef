"""Starts tuner processes quickly: imports everything once, then forks one for each line of its standard input.

Only for the kill tests, which would otherwise spend most of their time importing. A line is a JSON list of arguments;
the answer is the number of the process. Nobody waits for the children, so a dead one is gone at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import optuna.samplers  # noqa: F401  (imported here so that no child has to)

from tuner.service import main

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            os._exit(main(json.loads(line)))
        print(pid, flush=True)
