"""A soak process that launches nothing: what it says and how it ends is chosen by the module's file name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from tuner.gpu.soak import FIRST, MARK
from tuner.gpu.wire import follow_parent


def say(**message: object) -> None:
    """One line for the parent."""
    print(MARK + json.dumps(message), flush=True)


def main() -> int:
    """Play one script."""
    follow_parent()
    job = json.loads(sys.argv[1])
    script = Path(job["module_path"]).name
    print("a warning of some library", flush=True)
    if script == "never starts":
        time.sleep(60)
    if script == "no memory":
        say(not_run="not enough device memory beside what is in use")
        return 1
    say(way=FIRST, launches=0, gpu_s=0.0)
    if script == "wrong at first":
        say(failed="3 of 64 elements wrong")
        return 1
    for way, wanted in job["launches"].items():
        say(way=way, launches=0, gpu_s=0.5)
        if script == "hangs" and way == "on two streams":
            time.sleep(60)
        if script == "shot" and way == "by graph replay":
            os.kill(os.getpid(), signal.SIGKILL)
        if script == "dies" and way == "by graph replay":
            os.kill(os.getpid(), signal.SIGSEGV)
        say(way=way, launches=wanted // (2 if script == "slow" else 1), gpu_s=1.5)
        if script == "races" and way == "on two streams":
            say(failed="1 launches gave another result; up to 5 of 64 elements")
            return 1
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
