"""What the questions about results keep in memory, and when they let go of it.

Nothing is kept past a change: each question first reads a number that every publication, pin and changed device counts
up, so all processes that serve one database give the same answers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from api.services.freshness import Today
from api.services.targets import Targets
from db import queries
from db.database import ANSWERS
from kernels.config import config_from_dict
from kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from sqlalchemy.orm import Session

    from db.database import Database
    from kernels.config import GemmConfig

MAX_ANSWERS = 16_384  # of 2 to 4 KB each


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One state of what questions need beside the results themselves.

    number: of the change after which it was read
    targets: what requests may name
    today: environments of the devices
    stale: `made_in` of results that no device matches any more
    withdrawn: revisions that were found to be bad, by what they were answers for (`queries.place_of`)
    bad: configs that were found to be bad, by problem, architecture and device
    answers: finished bodies by question, the one asked for last at the end
    """

    number: int
    targets: Targets
    today: Today
    stale: tuple[str, ...]
    withdrawn: Mapping[tuple[str | int, ...], list[queries.Withdrawn]] = field(default_factory=dict)
    bad: Mapping[tuple[str | int, ...], frozenset[GemmConfig]] = field(default_factory=dict)
    answers: OrderedDict[Hashable, bytes] = field(default_factory=OrderedDict)


class Kept:
    """What one process keeps. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: Known | None = None
        self._database: Database | None = None

    def known_at_hand(self, database: Database) -> Known | None:
        """What holds now, where that can be told within microseconds. Raises DatabaseError."""
        known = self._known
        if known is None or not database.is_quick or self._database is not database:
            return None
        return known if database.change_number(ANSWERS) == known.number else None

    def known(self, database: Database) -> Known:
        """What holds now. Raises DatabaseError."""
        number, known = database.change_number(ANSWERS), self._known
        if known is not None and known.number == number and self._database is database:
            return known
        with database.read() as session:
            known = _read(session, number)
        with self._lock:
            self._known, self._database = known, database
        return known

    def find(self, known: Known, question: Hashable) -> bytes | None:
        """The answer that was given to this question before."""
        with self._lock:
            body = known.answers.get(question)
            if body is not None:
                known.answers.move_to_end(question)
        return body

    def keep(self, known: Known, question: Hashable, body: bytes) -> bytes:
        """Give this answer again until something changes; gives it back."""
        with self._lock:
            known.answers[question] = body
            if len(known.answers) > MAX_ANSWERS:
                known.answers.popitem(last=False)
        return body


def _read(session: Session, number: int) -> Known:
    devices: Any = queries.devices(session)
    today = Today(devices)
    # Without a device that told its environment nothing can be stale, and the question is not asked.
    seen = any(device.environment for device in devices)
    stale = today.stale(queries.current_environments(session)) if seen else ()
    withdrawn = queries.withdrawn_revisions(session)
    return Known(
        number=number,
        targets=Targets(devices),
        today=today,
        stale=stale,
        withdrawn=withdrawn,
        bad=_bad_configs(session),
    )


def _bad_configs(session: Session) -> dict[tuple[str | int, ...], frozenset[GemmConfig]]:
    found: dict[tuple[str | int, ...], set[GemmConfig]] = {}
    for *place, config in queries.withdrawn_configs(session):
        with suppress(ConfigError):  # stored by a version with other knobs
            found.setdefault(tuple(place), set()).add(config_from_dict(place[5], config))
    return {place: frozenset(configs) for place, configs in found.items()}
