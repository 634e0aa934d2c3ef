"""Small SVG pictures without a plotting library: shapes in the order in which they are drawn, and a log scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FONT = "ui-sans-serif, system-ui, sans-serif"
INK, FAINT, GRID = "#1f2933", "#52606d", "#d9e2ec"


@dataclass(kw_only=True, slots=True)
class Picture:
    """A drawing of `width` x `height` pixels on white.

    title: what it shows; also its accessible name
    """

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, tip: str = "") -> None:
        """A filled rectangle; `tip` appears under the mouse."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        place = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}"'
        self.shapes.append(f'<rect {place} fill="{fill}">{inner}</rect>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = GRID) -> None:
        """A thin line."""
        self.shapes.append(f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}"/>')

    def text(self, x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = INK) -> None:
        """One line of text; y is its base line."""
        place = f'x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}"'
        self.shapes.append(f'<text {place} fill="{fill}">{escape(text)}</text>')

    def render(self) -> str:
        """The whole document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}" role="img" '
            f'aria-label="{escape(self.title, quote=True)}">'
        )
        background = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        return "\n".join((head, f"<title>{escape(self.title)}</title>", background, *self.shapes, "</svg>")) + "\n"

    def write(self, path: Path) -> None:
        """Write the document, complete or not at all. Raises OSError."""
        from kernels.artifacts import write_atomically

        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.render().encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class LogScale:
    """Positions of values on a logarithmic axis.

    low, high: values at both ends, above zero
    start: position of `low`
    length: from `low` to `high`
    """

    low: float
    high: float
    start: float
    length: float

    def at(self, value: float) -> float:
        """Position of a value; outside of the axis it is moved to the nearer end."""
        share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return self.start + self.length * min(1.0, max(0.0, share))

    def decades(self) -> Iterator[float]:
        """Powers of ten on the axis."""
        for exponent in range(ceil(log10(self.low)), floor(log10(self.high)) + 1):
            yield 10.0**exponent
