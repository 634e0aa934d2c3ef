"""Small SVG pictures without a plotting library: shapes in the order in which they are drawn, and scales.

A colour is named by what it stands for. A file gets the light colours; inside a page a picture refers to the page's
style sheet, so that it follows the light or dark theme.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

FONT = "ui-sans-serif, system-ui, sans-serif"
INK, FAINT, GRID, PAPER = "ink", "faint", "grid", "paper"
OURS, THEIRS, THIRD = "ours", "theirs", "third"

# Light and dark. Blue, orange and green of Okabe and Ito (2008): told apart with any of the usual kinds of colour
# blindness; darkened or lightened until text-sized marks have a contrast of 3 to the paper.
PALETTE: dict[str, tuple[str, str]] = {
    INK: ("#1f2933", "#e4e7eb"),
    FAINT: ("#52606d", "#9aa5b1"),
    GRID: ("#d9e2ec", "#323f4b"),
    PAPER: ("#ffffff", "#16202b"),
    OURS: ("#0072b2", "#56b4e9"),
    THEIRS: ("#b86e00", "#e69f00"),
    THIRD: ("#00795a", "#1fbf92"),
    "load": ("#93c5fd", "#3b6ea5"),
    "full": ("#dbeafe", "#27405e"),
    "multiply": ("#16a34a", "#22c55e"),
    "held": ("#bbf7d0", "#1d5a3a"),
    "accumulate": ("#22c55e", "#34d399"),
    "drain": ("#f59e0b", "#fbbf24"),
}

_COLOUR = re.compile(r'="@([a-z]+)"')


def variable(name: str) -> str:
    """The CSS custom property that a page defines for a colour."""
    return f"--chart-{name}"


@dataclass(kw_only=True, slots=True)
class Picture:
    """A drawing of `width` x `height` pixels.

    title: what it shows; also its accessible name
    """

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, tip: str = "") -> None:
        """A filled rectangle; `tip` appears under the mouse."""
        place = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}"'
        self.shapes.append(f'<rect {place} fill="{_paint(fill)}">{_tip(tip)}</rect>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = GRID, *, dashed: bool = False) -> None:
        """A thin line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        place = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
        self.shapes.append(f'<line {place} stroke="{_paint(stroke)}"{dash}/>')

    def path(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 2) -> None:
        """A line through points."""
        places = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        style = f'fill="none" stroke="{_paint(stroke)}" stroke-width="{width}"'
        self.shapes.append(f'<polyline points="{places}" {style}/>')

    def steps(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 2) -> None:
        """A line that stays level until the next point and then goes there upright."""
        corners = list(points[:1])
        for (_, before), (x, y) in pairwise(points):
            corners += [(x, before), (x, y)] if y != before else [(x, y)]
        self.path(corners, stroke, width=width)

    def dot(self, x: float, y: float, fill: str, *, radius: float = 4, tip: str = "", link: str = "") -> None:
        """A filled circle, which may lead somewhere."""
        ring = f'stroke="@{PAPER}" stroke-width="1"'
        drawn = f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" fill="{_paint(fill)}" {ring}>{_tip(tip)}</circle>'
        label = escape(tip, quote=True)
        self.shapes.append(f'<a href="{escape(link, quote=True)}" aria-label="{label}">{drawn}</a>' if link else drawn)

    def text(self, x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = INK) -> None:
        """One line of text; y is its base line."""
        place = f'x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}"'
        self.shapes.append(f'<text {place} fill="{_paint(fill)}">{escape(text)}</text>')

    def render(self) -> str:
        """A document of its own, light on white."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" {self._head()}>'
        background = f'<rect width="{self.width}" height="{self.height}" fill="@{PAPER}"/>'
        text = "\n".join((head, f"<title>{escape(self.title)}</title>", background, *self.shapes, "</svg>")) + "\n"
        return _COLOUR.sub(lambda found: f'="{PALETTE[found[1]][0]}"', text)

    def fragment(self) -> str:
        """The same for inside a page: as wide as there is room, in the colours of the page's theme."""
        text = "\n".join((f'<svg class="chart" {self._head()}>', *self.shapes, "</svg>"))
        return _COLOUR.sub(lambda found: f'="var({variable(found[1])})"', text)

    def _head(self) -> str:
        # Assistive technology hides what an image holds; a picture with links is a group.
        role = "group" if any(shape.startswith("<a ") for shape in self.shapes) else "img"
        label = escape(self.title, quote=True)
        return f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}" role="{role}" aria-label="{label}"'

    def write(self, path: Path) -> None:
        """Write the document, complete or not at all. Raises OSError."""
        from kernels.artifacts import write_atomically

        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.render().encode())


def _paint(colour: str) -> str:
    """A name of the palette, which the theme decides, or a colour like "#0072b2", which stays as it is."""
    return colour if colour.startswith("#") else f"@{colour}"


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogScale:
    """Positions of values on a logarithmic axis.

    low, high: values at both ends, above zero
    start: position of `low`
    length: from `low` to `high`; negative on an axis that goes up
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

    def marks(self) -> list[float]:
        """Round values to write beside the axis: decades where there are enough of them, else finer steps."""
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [step * 10.0**exponent for exponent in decades for step in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 4:
                return found
        return LinearScale(low=self.low, high=self.high, start=self.start, length=self.length).marks(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScale:
    """Positions of values on a linear axis; the fields are those of `LogScale`, `low` and `high` may be anything."""

    low: float
    high: float
    start: float
    length: float

    def at(self, value: float) -> float:
        """Position of a value; outside of the axis it is moved to the nearer end."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + self.length * min(1.0, max(0.0, share))

    def marks(self, most: int = 7) -> list[float]:
        """Round values to write beside the axis, at most about `most`."""
        rough = (self.high - self.low) / most
        unit = 10.0 ** floor(log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
        first = ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, floor(self.high / step + 1e-9) + 1)]
