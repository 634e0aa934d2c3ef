"""Which modules stay on disk: those of results, and the rest as long as there is room.

A module is a few hundred KB and a study builds dozens of them. Config, toolchain and source say how to build one again,
so only what somebody may ask for by name has to stay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from db import queries
from tuner.store import write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.orm import Session

    from db.database import Database
    from kernels.artifacts import ArtifactStore

log = logging.getLogger("gemm_tuner.retention")


class Retention:
    """Removes modules of one artifact store.

    limit_bytes: what the modules may take together; 0 for no limit
    """

    def __init__(self, database: Database, artifacts: ArtifactStore, *, limit_bytes: int) -> None:
        self._database, self._artifacts, self._limit_bytes = database, artifacts, limit_bytes

    def sweep(self) -> None:
        """Remove files that are noted as removed: a process may have died in between. Call it at start."""
        with self._database.read() as session:
            gone = queries.removed_artifacts(session)
        self._delete(gone)

    def after_study(self, study_id: str) -> int:
        """Remove what lost, then what the limit asks for; gives the number of modules removed."""
        removed = self._remove(lambda session: queries.losers_of_study(session, study_id))
        if self._limit_bytes:
            removed += self._remove(lambda session: queries.artifacts_over(session, self._limit_bytes))
        return removed

    def _remove(self, choose: Callable[[Session], Sequence[str]]) -> int:
        def note(session: Session) -> Sequence[str]:
            chosen = choose(session)
            queries.note_removed(session, chosen)
            return chosen

        chosen = write(self._database, note)
        self._delete(chosen)
        if chosen:
            log.info("removed %d modules from the artifact store", len(chosen))
        return len(chosen)

    def _delete(self, hashes: Sequence[str]) -> None:
        for sha256 in hashes:
            try:
                self._artifacts.delete(sha256)
            except OSError as error:  # it is noted as removed, and the next start tries again
                log.warning("cannot remove module %s: %s", sha256[:12], error.strerror)
