"""Finding one row by the id in a request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from api.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

_ID = re.compile(r"[0-9a-f]{32}")


def found[Row](
    query: Callable[[Session, str], Row | None],
    session: Session,
    identity: str,
    noun: str,
    *,
    hint: str,
    field: str = "",
) -> Row:
    """The row, or NotFound. `field` says where the id stood when it came in a body.

    Text that is no id never reaches the database: drivers refuse some of it (a NUL, a lone surrogate) with errors of
    their own.
    """
    row = query(session, identity) if _ID.fullmatch(identity) else None
    if row is None:
        raise NotFound(f"{field}no {noun} {identity!a}", hint=hint)
    return row
