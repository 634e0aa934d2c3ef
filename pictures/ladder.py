"""The ladder as bars: what each step of the tutorial takes, beside the published times."""

from __future__ import annotations

from typing import Any

from pictures.svg import FAINT, GRID, OURS, THEIRS, LogScale, Picture

Json = dict[str, Any]
_LEFT, _TOP, _STEP, _BAR, _LENGTH = 290, 76, 44, 15, 560


def picture(content: Json) -> Picture:
    """Both times of every rung as bars on a logarithmic axis."""
    rows, problem = content["rows"], content["problem"]
    where = f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']} on {content['device']}"
    drawn = Picture(width=_LEFT + _LENGTH + 110, height=_TOP + _STEP * len(rows) + 64, title=f"GEMM ladder, {where}")
    drawn.text(16, 26, f"The GEMM ladder: {where}", size=17)
    ours = "ours, measured" if content["measured"] else "ours: not measured (no GPU of this kind at hand)"
    drawn.rect(16, 40, 12, 12, OURS)
    drawn.text(34, 51, ours)
    drawn.rect(380, 40, 12, 12, THEIRS)
    drawn.text(398, 51, "published for a B200, 4096x4096x4096 fp16")
    times = [time for row in rows for time in (_ms(row), row["published_ms"]) if time]
    scale = LogScale(low=min(times) / 1.5, high=max(times) * 1.2, start=_LEFT, length=_LENGTH)
    bottom = _TOP + _STEP * len(rows)
    for decade in scale.decades():
        drawn.line(scale.at(decade), _TOP - 8, scale.at(decade), bottom, GRID)
        drawn.text(scale.at(decade), bottom + 16, f"{decade:g} ms", size=11, anchor="middle", fill=FAINT)
    for place, row in enumerate(rows):
        _bars(drawn, scale, _TOP + place * _STEP, row)
    drawn.text(16, bottom + 42, f"published: {content['published']['source']}", size=11, fill=FAINT)
    return drawn


def _ms(row: Json) -> float | None:
    return row["median_us"] / 1000 if row["median_us"] else None


def _bars(drawn: Picture, scale: LogScale, y: float, row: Json) -> None:
    drawn.text(16, y + 14, row["name"], size=13)
    drawn.text(16, y + 29, row["mechanism"], size=10, fill=FAINT)
    for offset, time, colour in ((0, _ms(row), OURS), (_BAR + 2, row["published_ms"], THEIRS)):
        if time is None:
            drawn.text(scale.start + 4, y + offset + 12, "not measured", size=11, fill=FAINT)
            continue
        end = scale.at(time)
        drawn.rect(scale.start, y + offset, end - scale.start, _BAR, colour, tip=f"{row['name']}: {time:.4g} ms")
        drawn.text(end + 5, y + offset + 12, f"{time:.4g} ms", size=11)
