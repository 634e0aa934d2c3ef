"""The recorded run as tables in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GATES = ("comparison", "repeat", "stress", "structure", "soak", "memcheck", "racecheck")
NOTHING = "-"
NOT_RUN = "(not run)"


def table(found: Mapping[str, Any]) -> str:
    """What each gate said of each row, and what it costs."""
    lines = ["| planted bug | " + " | ".join(GATES) + " |", "|---" * (len(GATES) + 1) + "|"]
    for name, row in found["rows"].items():
        cells = [_cell(gate, row) for gate in GATES]
        lines.append(f"| {name}: {row['meaning']} | " + " | ".join(cells) + " |")
    lines.append(
        "| seconds, healthy kernel | " + " | ".join(_seconds(found["rows"]["healthy"], g) for g in GATES) + " |"
    )
    return "\n".join(lines) + "\n"


def caught_by(row: Mapping[str, Any]) -> list[str]:
    """Gates that found something."""
    return [gate for gate in GATES if (said := _cell(gate, row)) != NOTHING and not said.startswith("(")]


def _cell(gate: str, row: Mapping[str, Any]) -> str:
    """What one gate said. A run that was cut has not come to all of them."""
    stage = "comparison" if gate == "repeat" else gate
    return CELLS[gate](row) if stage in row else NOT_RUN


def _stopped(stage: Mapping[str, Any]) -> str:
    if "hung" in stage:
        return "hangs"
    return "crashes" if "crashed" in stage else ""


def _comparison(row: Mapping[str, Any]) -> str:
    stage = row["comparison"]
    if stopped := _stopped(stage):
        return stopped
    (build,) = stage["builds"]
    wrong = [name for name, count in build["wrong_elements"].items() if count]
    if wrong:
        return f"{len(wrong)} of {len(build['wrong_elements'])} inputs"
    return "writes outside D" if build["damage"] else NOTHING


def _repeat(row: Mapping[str, Any]) -> str:
    stage = row["comparison"]
    if _stopped(stage):
        return NOT_RUN
    (build,) = stage["builds"]
    return f"{build['changing_launches']} of {build['launches']}" if build["changing_launches"] else NOTHING


def _stress(row: Mapping[str, Any]) -> str:
    stage = row["stress"]
    if "not_run" in stage:
        return NOT_RUN
    if stopped := _stopped(stage):
        return f"{stopped} in build {len(stage['builds']) + 1}"
    failed = [build for build in stage["builds"] if build["outcome"] != "clean"]
    if not failed:
        return NOTHING
    most = max(build["wrong_launches"] for build in failed)
    return f"{len(failed)} of {len(stage['builds'])} builds, up to {most} of 100"


def _structure(row: Mapping[str, Any]) -> str:
    return ", ".join(row["structure"]["rules"]) or NOTHING


def _soak(row: Mapping[str, Any]) -> str:
    if "not_run" in row["soak"]:
        return NOT_RUN
    return NOTHING if row["soak"]["verdict"] == "clean" else row["soak"]["verdict"]


def _sanitizer(tool: str, row: Mapping[str, Any]) -> str:
    stage = row[tool]
    if "not_run" in stage:
        return NOT_RUN
    if stage["errors"]:
        return f"{stage['errors']} errors"
    if stage["ran"]:
        return NOTHING
    if "is wrong by" in stage["detail"]:
        return "(no error; wrong product)"
    return "(no end)" if "did not finish within" in stage["detail"] else "(crashes)"


CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "comparison": _comparison,
    "repeat": _repeat,
    "stress": _stress,
    "structure": _structure,
    "soak": _soak,
    "memcheck": lambda row: _sanitizer("memcheck", row),
    "racecheck": lambda row: _sanitizer("racecheck", row),
}


def _seconds(row: Mapping[str, Any], gate: str) -> str:
    if gate == "repeat":
        return "in comparison"
    return f"{row[gate]['wall_s']:.1f}" if gate in row else NOT_RUN
