"""How a soak hands over what it found."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kernels.artifacts import write_atomically

if TYPE_CHECKING:
    from pathlib import Path


def host() -> dict[str, Any]:
    """What a figure of this machine needs beside it: Python, cores, and how busy it is now."""
    return {"python": sys.version.split()[0], "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def hand_over(report: Any, out: Path | None) -> None:
    """Print a report, and write it where a file was asked for."""
    print(json.dumps(report, indent=1))
    if out:
        write_json(out, report)
