"""A gate process that launches nothing: what it says is chosen by the label of each build."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tuner.gpu.soak import MARK

CLEAN: dict[str, Any] = {
    "outcome": "clean",
    "reason": "",
    "verify_s": 0.1,
    "launches": 100,
    "wrong_launches": 0,
    "changing_launches": 0,
    "most_wrong_elements": 0,
    "wrong_elements": {"normal": 0, "small integers": 0},
    "damage": "",
}


def say(**message: Any) -> None:
    """One line for the parent."""
    print(MARK + json.dumps(message), flush=True)


def main() -> int:
    """Play the job: the path of a module says what its build does."""
    say(ready=True, environment={"gpu_name": "none"})
    job = json.loads(sys.stdin.readline())
    for build in job["builds"]:
        say(begin=build["label"])
        does = build["module"]["path"]
        if does == "hangs":
            time.sleep(60)
        if does == "crashes":
            say(crashed="an illegal memory access was encountered")
            return 3
        if does == "dies":
            return 7
        wrong = {"outcome": "WRONG_RESULT", "wrong_launches": 7, "wrong_elements": {"normal": 3, "small integers": 0}}
        say(build=build["label"], **(CLEAN | (wrong if does == "wrong" else {})))
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
