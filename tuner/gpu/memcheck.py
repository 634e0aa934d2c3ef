"""compute-sanitizer over modules, in a process of its own. Touches no GPU itself.

Memcheck sees addresses, not order: it cannot find the races that the stress builds are for. Racecheck does not see the
reads of the copy engine, and slows the kernel down so much that the races it could see do not happen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.gpu.process import killed_when

if TYPE_CHECKING:
    import threading

_PLACES = (Path("/usr/local/cuda/bin/compute-sanitizer"), Path("/opt/cuda/bin/compute-sanitizer"))
_TAIL_CHARS = 600
_SUMMARY = r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SanitizerReport:
    """What a tool of compute-sanitizer said.

    ran: whether it ran to its end at all
    errors: errors or hazards it counted; 0 is clean; meaningless unless it ran
    version: of compute-sanitizer
    detail: why it did not run, or the end of its report
    """

    ran: bool
    errors: int = 0
    version: str = ""
    detail: str = ""

    @property
    def clean(self) -> bool:
        """Ran and found nothing."""
        return self.ran and self.errors == 0


def find_sanitizer() -> Path | None:
    """compute-sanitizer on the PATH or where CUDA installs it, or None."""
    found = shutil.which("compute-sanitizer")
    return Path(found) if found else next((place for place in _PLACES if place.is_file()), None)


def memcheck(
    launches: list[dict[str, Any]],
    *,
    device: str = "0",
    timeout_s: float = 180.0,
    sanitizer: Path | None = None,
    stop: threading.Event | None = None,
) -> SanitizerReport:
    """Launch modules under memcheck; see `sanitize`."""
    return sanitize("memcheck", launches, device=device, timeout_s=timeout_s, sanitizer=sanitizer, stop=stop)


def sanitize(
    tool: str,
    launches: list[dict[str, Any]],
    *,
    device: str = "0",
    timeout_s: float = 180.0,
    sanitizer: Path | None = None,
    stop: threading.Event | None = None,
) -> SanitizerReport:
    """Launch modules under a tool of compute-sanitizer.

    tool: memcheck, racecheck or synccheck
    launches: one entry a module, as `tuner.gpu.launch_once` reads it: path, m, n, k, dtype
    device: UUID or index of the card
    timeout_s: after which the whole process group is killed
    stop: when set, the group is killed at once
    """
    sanitizer = sanitizer or find_sanitizer()
    if sanitizer is None:
        return SanitizerReport(ran=False, detail="compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    command = [str(sanitizer), "--tool", tool, "--print-limit", "5", sys.executable, "-m", "tuner.gpu.launch_once"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    # Stays open to the end: when it closes the run kills itself, so a tuner that is killed leaves nothing on the GPU.
    lifeline, process.stdin = process.stdin, None
    assert lifeline is not None
    try:
        with killed_when(stop, process):
            with contextlib.suppress(BrokenPipeError):  # it ended at once: its output says why
                lifeline.write(json.dumps(launches) + "\n")
                lifeline.flush()
            output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return SanitizerReport(ran=False, detail=f"{tool} did not finish within {timeout_s:g} s")
    finally:
        with contextlib.suppress(BrokenPipeError):  # closing writes what a broken pipe did not take
            lifeline.close()
    if stop is not None and stop.is_set():
        return SanitizerReport(ran=False, detail="cancelled")
    return read_report(output, version=_version(sanitizer))


def read_report(output: str, *, version: str) -> SanitizerReport:
    """Turn the sanitizer's output into a report. A summary without the runner's last line is no clean run."""
    summary = re.search(_SUMMARY, output)
    finished = "launch_once: all launches right" in output
    wrong = re.search(r"launch_once: (?!all launches right)(.*)", output)
    if summary is None:
        return SanitizerReport(ran=False, version=version, detail=output.strip()[-_TAIL_CHARS:])
    errors = int(summary[1])
    if errors == 0 and not finished:
        detail = wrong[1] if wrong else output.strip()[-_TAIL_CHARS:]
        return SanitizerReport(ran=False, version=version, detail=f"the run under the tool did not finish: {detail}")
    return SanitizerReport(ran=True, errors=errors, version=version, detail="" if errors == 0 else _first_error(output))


def _first_error(output: str) -> str:
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=========")]
    start = next((i for i, line in enumerate(lines) if "Invalid" in line or re.search("error|hazard", line.lower())), 0)
    return " | ".join(line.strip() for line in lines[start : start + 4])[:_TAIL_CHARS]


def _version(sanitizer: Path) -> str:
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False, timeout=30)
    found = re.search(r"Version ([\d.]+)", done.stdout)
    return found[1] if found else "unknown"
