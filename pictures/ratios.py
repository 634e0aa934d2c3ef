"""The ratio to the vendor library by class of shape, from a file of recorded measurements."""

from __future__ import annotations

from collections import defaultdict
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from pictures.svg import FAINT, GRID, INK, OURS, THEIRS, LogScale, Picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json = dict[str, Any]

# By the rows of A, which decide what a GEMM of inference is limited by: first the stream of B, at last the tensor
# cores. Shapes whose N the library's kernels for aligned rows cannot take are a class of their own: their ratios are no
# measure for the others.
CLASSES = ((16, "M up to 16"), (128, "M 17 to 128"), (1024, "M 129 to 1024"), (16384, "M 1025 to 16384"))
LARGEST, UNALIGNED = "M above 16384", "N no multiple of 8"
ALIGNMENT = 8
BASELINE = "cublaslt_best"
_LEFT, _TOP, _STEP, _LENGTH, _RIGHT = 170, 84, 46, 620, 60


def class_of(m: int, n: int) -> str:
    """Name of the class that a shape belongs to."""
    if n % ALIGNMENT:
        return UNALIGNED
    return next((name for last, name in CLASSES if m <= last), LARGEST)


def by_class(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by class, classes from small to large M, those without rows left out."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["n"] % ALIGNMENT > 0, row["m"], row["n"], row["k"])):
        found[class_of(row["m"], row["n"])].append(row)
    return dict(found)


def picture(content: Mapping[str, Any]) -> Picture:
    """One dot a shape, one tick the geometric mean of a class; right of the line at 1 we are faster."""
    classes = by_class(content["rows"])
    ratios = [row["ratio"][BASELINE] for row in content["rows"]]
    device = content["environment"].get("gpu_name", "unknown device")
    drawn = Picture(
        width=_LEFT + _LENGTH + _RIGHT,
        height=_TOP + _STEP * len(classes) + 56,
        title=f"Speed over the library's best choice by class of shape, {len(ratios)} shapes on {device}",
    )
    drawn.text(16, 26, f"Speed over cuBLAS's best choice, by class of shape: {device}", size=17)
    drawn.text(16, 46, _protocol(content), fill=FAINT)
    drawn.dot(22, 62, OURS)
    drawn.text(34, 66, "one shape")
    drawn.rect(120, 55, 3, 14, THEIRS)
    drawn.text(130, 66, "geometric mean of the class")
    scale = LogScale(low=min(0.9, *ratios) / 1.02, high=max(1.1, *ratios) * 1.05, start=_LEFT, length=_LENGTH)
    bottom = _TOP + _STEP * len(classes)
    for mark in scale.marks():
        drawn.line(scale.at(mark), _TOP - 4, scale.at(mark), bottom, GRID)
        drawn.text(scale.at(mark), bottom + 17, f"{mark:g}", size=11, anchor="middle", fill=FAINT)
    drawn.line(scale.at(1), _TOP - 8, scale.at(1), bottom, INK)
    drawn.text(_LEFT + _LENGTH, bottom + 38, "times as fast as the library", size=11, anchor="end", fill=FAINT)
    for place, (name, rows) in enumerate(classes.items()):
        _row(drawn, scale, _TOP + place * _STEP + _STEP / 2, name, rows)
    return drawn


def _row(drawn: Picture, scale: LogScale, y: float, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    ratios = [float(row["ratio"][BASELINE]) for row in rows]
    mean = geometric_mean(ratios)
    drawn.text(16, y, name, size=13)
    drawn.text(16, y + 15, f"{len(rows)} shape{'s' * (len(rows) > 1)}, mean {mean:.3f}", size=11, fill=FAINT)
    for row, ratio in zip(rows, ratios, strict=True):
        tip = f"{row['m']}x{row['n']}x{row['k']} {row['dtype']}: {ratio:.3f}"
        drawn.dot(scale.at(ratio), y, OURS, radius=5, tip=tip)
    drawn.rect(scale.at(mean) - 1.5, y - 14, 3, 28, THEIRS, tip=f"{name}: geometric mean {mean:.3f}")


def _protocol(content: Mapping[str, Any]) -> str:
    environment, protocol = content["environment"], content["protocol"]
    return (
        f"driver {environment.get('driver')}, CUDA {environment.get('cuda')}, protocol {protocol['kind']}, "
        "medians of paired rounds in one process"
    )
