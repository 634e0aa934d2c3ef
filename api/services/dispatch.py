"""Which config to use for each M, with N and K fixed: what a program compiles into a table once, in place of asking."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, isqrt
from typing import TYPE_CHECKING, Any

import orjson

from api.services.best import answer_view, bad_m, is_servable, legal_row, shapes_view, submit_body, wish_of
from api.services.problems import checked_problem
from db import queries
from kernels.problem import MAX_EXTENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy.orm import Session

    from api.schemas import DispatchQuery
    from api.services.best import Wish
    from api.services.kept import Known
    from db.queries import Answer

    Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The M for which one result is the nearest, both ends included."""

    first: int
    last: int
    row: Answer


def table(session: Session, query: DispatchQuery, known: Known, nearest_limit_log2: float) -> bytes:
    """The ranges in the order of M, and what lies between them. Raises UnknownTarget, ProblemError."""
    wish = wish_of(query, query.dtype, known.targets.named(query.device), known, nearest_limit_log2)
    which, target = wish.which, wish.target
    # The smallest M is a problem of its own: that N and K can be served at all is a rule for every M.
    checked_problem(m=query.m_min, n=query.n, k=query.k, dtype=which.dtype, layout=which.layout, target=target)
    shapes = [(m, query.n, query.k) for m in queries.tuned_m(session, query.n, query.k, which)]
    rows = list(queries.best_exact_many(session, shapes, which).values()) if shapes else []
    rows.sort(key=lambda row: row.m)
    last = query.m_max or (min(MAX_EXTENT, floor(rows[-1].m * 2.0**nearest_limit_log2)) if rows else query.m_min)
    ranges = _clipped(_harmless(_legal(_ranges(rows, nearest_limit_log2), wish), wish), query.m_min, last)
    gaps = _gaps(ranges, query.m_min, last)
    missing = [
        shape for m in sorted({end for gap in gaps for end in gap}) if is_servable(shape := (m, query.n, query.k), wish)
    ]
    return orjson.dumps(
        {
            "n": query.n,
            "k": query.k,
            "dtype": which.dtype,
            "layout": which.layout,
            "arch": target.arch.name,
            "device": target.device,
            "m_min": query.m_min,
            "m_max": last,
            "ranges": [_range_view(one, known) for one in ranges],
            "gaps": [{"m_min": first, "m_max": end} for first, end in gaps],
            "submit": submit_body(shapes_view(missing, which), target, which.protocol) if missing else None,
        }
    )


def _ranges(rows: Sequence[Answer], limit_log2: float) -> list[Range]:
    """Each result with the M that are nearer to it than to its neighbours, by ratio, and within the limit.

    In the middle of two the smaller M answers, as it does for one question.
    """
    factor = 2.0**limit_log2
    found = []
    for at, row in enumerate(rows):
        first = max(1, ceil(row.m / factor))
        last = min(MAX_EXTENT, floor(row.m * factor))
        if at > 0:
            first = max(first, isqrt(rows[at - 1].m * row.m) + 1)
        if at + 1 < len(rows):
            last = min(last, isqrt(row.m * rows[at + 1].m))
        found.append(Range(first=first, last=last, row=row))
    return found


def _legal(ranges: Sequence[Range], wish: Wish) -> list[Range]:
    """Where a config cannot run for some M of its range, it stays for the M that it was tuned for."""
    found = []
    for one in ranges:
        powers = (1 << exponent for exponent in range(one.first.bit_length(), one.last.bit_length()))
        if all(legal_row(m, one.row, wish) for m in (one.first, *powers, one.last)):
            found.append(one)
        elif legal_row(one.row.m, one.row, wish):
            found.append(Range(first=one.row.m, last=one.row.m, row=one.row))
    return found


def _harmless(ranges: Iterable[Range], wish: Wish) -> Iterator[Range]:
    """Without the M for which a config was found to be bad."""
    for one in ranges:
        first = one.first
        for m in (*bad_m(one.row, wish), one.last + 1):
            if first <= m <= one.last + 1:
                yield Range(first=first, last=m - 1, row=one.row)
                first = m + 1


def _clipped(ranges: Iterable[Range], first: int, last: int) -> list[Range]:
    inside = (Range(first=max(one.first, first), last=min(one.last, last), row=one.row) for one in ranges)
    return [one for one in inside if one.first <= one.last]


def _gaps(ranges: Sequence[Range], first: int, last: int) -> list[tuple[int, int]]:
    """The M between `first` and `last` that no range holds."""
    found, at = [], first
    for one in ranges:
        if at < one.first:
            found.append((at, one.first - 1))
        at = one.last + 1
    return [*found, (at, last)] if at <= last else found


def _range_view(one: Range, known: Known) -> Json:
    shape = one.row.m, one.row.n, one.row.k
    return {"m_min": one.first, "m_max": one.last, "best": answer_view(shape, one.row, known)}
