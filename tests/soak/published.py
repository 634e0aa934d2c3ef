"""Problems and configs of recorded results, for the soaks that measure published kernels another way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.config import config_from_dict
from kernels.problem import GemmProblem
from tuner import recorded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernels.config import GemmConfig


def published(path: Path, shapes: Sequence[str] = ()) -> list[tuple[GemmProblem, GemmConfig]]:
    """Of the rows named `shapes` ("MxNxK"), in that order; of all rows when none is named. Raises SystemExit."""
    found = {}
    for row in recorded.read(path)["rows"]:
        problem = GemmProblem(m=row["m"], n=row["n"], k=row["k"], dtype=row["dtype"], layout=row["layout"])
        found[problem.shape] = (problem, config_from_dict(row["arch"], row["config"]))
    if missing := [shape for shape in shapes if shape not in found]:
        raise SystemExit(f"{path} has no row for {missing[0]}")
    return [found[shape] for shape in shapes or found]
