"""Process that gets the verdicts on one config: `python -m kernels.verdicts_run JOB`.

In a process of its own because the tools compile and load code for minutes. Each report is one line of output that
begins with MARK; everything else that is printed is talk. Exit status 3: the engine cannot be used or built.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.config import Sm100GemmConfig
from kernels.errors import ToolchainError
from kernels.problem import Dtype
from kernels.verdicts import VerdictStore, verdicts

MARK = "verdict: "
NO_ENGINE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictJob:
    """What to check.

    config: knobs
    dtype: of A, B and D
    store: folder of the verdicts kept
    """

    config: Sm100GemmConfig
    dtype: Dtype
    store: Path

    def to_text(self) -> str:
        """For the command line of the process."""
        values = {"config": self.config.to_dict(), "dtype": self.dtype.value, "store": str(self.store)}
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> VerdictJob:
        """Inverse of to_text."""
        values: dict[str, Any] = json.loads(text)
        config = Sm100GemmConfig.from_dict(values["config"])
        return cls(config=config, dtype=Dtype(values["dtype"]), store=Path(values["store"]))


def main(arguments: list[str]) -> int:
    """Print a line for each report. The process leads a group, which ends when its parent is gone."""
    threading.Thread(target=_die_with_parent, name="parent", daemon=True).start()
    job = VerdictJob.from_text(arguments[0])
    try:
        reports = verdicts(job.config, VerdictStore(job.store), dtype=job.dtype, tell=_say)
    except ToolchainError as error:
        _say(str(error))
        return NO_ENGINE
    for report in reports:
        print(f"{MARK}{json.dumps(report.to_dict())}", flush=True)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _die_with_parent() -> None:
    """Nobody writes to standard input: its end means that the parent is gone. Compilers are of this group."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
