"""Values as people read them: the filters of the templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from api.services.vendor import BASELINES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from api.views.problems import ProblemView

DASH = "\N{EN DASH}"
BINS = (0.8, 0.95, 0.995, 1.005, 1.05, 1.25)  # of the ratio to the library; outside of the middle the noise is passed


def microseconds(value: float | None) -> str:
    """`175.6`, with more digits for short kernels."""
    if value is None:
        return DASH
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def number(value: float | None, digits: int = 3) -> str:
    """A plain number or a dash."""
    return DASH if value is None else f"{value:.{digits}f}"


def shape(problem: ProblemView) -> str:
    """`4096x4096x4096 bf16`."""
    return f"{problem.m}x{problem.n}x{problem.k} {problem.dtype}"


def ratio_of(ratio: Mapping[str, Any] | None) -> float | None:
    """The library's time over ours, against the best baseline there is. Trials hold numbers, results intervals."""
    found = next((ratio[name] for name in BASELINES if ratio and ratio.get(name)), None)
    if found is None:
        return None
    return float(found["median"] if isinstance(found, dict) else found)


def ratio_interval(ratio: Mapping[str, Any] | None) -> str:
    """`1.002 (0.999 to 1.004)`."""
    found = next((ratio[name] for name in BASELINES if ratio and ratio.get(name)), None)
    if not isinstance(found, dict):
        return number(ratio_of(ratio))
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def ratio_bin(ratio: float | None) -> str:
    """Name of the colour class of a ratio, from `r0` (much slower) over `r3` (level) to `r6` (much faster)."""
    return "none" if ratio is None else f"r{sum(ratio >= edge for edge in BINS)}"


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3 h 5 min`."""
    if seconds is None:
        return DASH
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def moment(when: datetime | None) -> Markup:
    """A time in UTC, readable by programs too."""
    if when is None:
        return Markup(DASH)
    text = f"{when:%Y-%m-%d %H:%M:%S}"
    return Markup('<time datetime="{}">{}</time>').format(when.isoformat(timespec="seconds"), text)


def size(number_of_bytes: int | None) -> str:
    """`1.4 MiB`."""
    if number_of_bytes is None:
        return DASH
    return f"{number_of_bytes / 2**20:.1f} MiB" if number_of_bytes >= 2**20 else f"{number_of_bytes / 2**10:.0f} KiB"


def outcome(name: str) -> str:
    """`wrong result` for `WRONG_RESULT`."""
    return name.replace("_", " ").lower()


def knobs(config: Mapping[str, Any]) -> str:
    """A config in one line."""
    return ", ".join(f"{name} {plain(value)}" for name, value in config.items())


def short(identity: str | None) -> str:
    """The start of an id or a hash."""
    return identity[:8] if identity else DASH


def plain(value: Any) -> str:
    """Any value of a stored document."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return knobs(value)
    if isinstance(value, list | tuple):
        return _listed(value)
    return str(value)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(plain, values)) or DASH


def inline(svg: str) -> Markup:
    """A picture of our own as part of the page: its texts were escaped when it was drawn."""
    return Markup(svg)


FILTERS: dict[str, Callable[..., Any]] = {
    "us": microseconds,
    "number": number,
    "shape": shape,
    "ratio": lambda value: number(ratio_of(value)),
    "ratio_interval": ratio_interval,
    "ratio_bin": lambda value: ratio_bin(ratio_of(value)),
    "duration": duration,
    "moment": moment,
    "size": size,
    "outcome": outcome,
    "knobs": knobs,
    "short": short,
    "plain": plain,
    "svg": inline,
}
