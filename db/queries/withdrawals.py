"""Results that were found to be bad after they were stored: they stay in the history and are never an answer again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import exists, select

from db.database import ANSWERS, hold, note_change
from db.models import Result, Study, Trial, utc_now
from db.queries.devices import LOST_WORKERS, REMEMBERED_OUTCOMES, known_bad
from db.queries.results import hold_place, same_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Session

_BAD = (*REMEMBERED_OUTCOMES, "KNOWN_BAD")
_LOST = LOST_WORKERS.partition("%")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdrawn:
    """A revision that is withdrawn.

    result_id: of the result
    revision: its number
    reason: what was found, by which trial of which study
    at: when, UTC, ISO 8601
    """

    result_id: str
    revision: int
    reason: str
    at: str


def withdraw_source(session: Session, study_id: str, failed: Trial) -> Sequence[Result]:
    """Withdraw every result of this source on the study's problem and device, when the trial found the source bad.

    Called by the tuner in the transaction that stores the failure; returns what was withdrawn now. All of them, because
    a winner that stays on a tie is published again with the same source, and what is wrong under one protocol is wrong
    under the other. Where one of them was the answer, the newest revision that is left answers. A pin ends.
    """
    if not failed.source_hash or failed.outcome not in _BAD or failed.reason.startswith(_LOST):
        return ()
    study = session.get(Study, study_id)
    if study is None:
        return ()
    _hold_source(session, study.device_name, failed.source_hash)
    names = ("m", "n", "k", "dtype", "layout", "arch", "device_name")
    problem = [getattr(Result, name) == getattr(study, name) for name in names]
    query = select(Result).where(*problem, Result.source_hash == failed.source_hash, Result.withdrawn_at.is_(None))
    found = session.scalars(query.order_by(Result.id)).all()
    for one in found:
        hold_place(session, one)
        session.refresh(one)
        _withdraw(one, failed)
    session.flush()
    for one in found:
        _let_newest_answer(session, one)
    if _mark_ties(session, problem, failed) or found:
        note_change(session, ANSWERS)
    return found


def withdraw_known_bad(session: Session, new: Result) -> str:
    """Withdraw a candidate whose source another study found bad while its own went on; returns why, "" for a good one.

    Configs that tied with it and are known to be bad by then are marked.

    Called by the tuner before it publishes. A study asks what is known before a candidate goes to the GPU: it may end,
    or be resumed, days after that. Known by the toolchain too, as for a candidate: another may build what one broke.
    """
    trial = None if new.study_id is None else session.get(Trial, (new.study_id, new.trial_number))
    if trial is None or not new.source_hash:
        return ""
    _hold_source(session, new.device_name, new.source_hash)
    for tied in _tied_trials(session, new):
        if tied.source_hash and (failed := known_bad(session, str(new.device_name), tied.toolchain, tied.source_hash)):
            _mark_tie(new, tied, failed)
    failed = known_bad(session, new.device_name, trial.toolchain, new.source_hash)
    if failed is None:
        return ""
    _withdraw(new, failed)
    session.flush()
    return new.withdrawn_reason or ""


def _hold_source(session: Session, device_name: str | None, source_hash: str) -> None:
    """Make finding a source bad and publishing it follow one another."""
    hold(session, f"source {device_name} {source_hash}")


def _withdraw(one: Result, failed: Trial) -> None:
    one.withdrawn_at, one.withdrawn_by = utc_now(), failed.study_id
    one.withdrawn_reason = _finding(failed)
    one.current = one.pinned = False


def _finding(failed: Trial) -> str:
    return f"{failed.outcome}: {failed.reason} (trial {failed.number} of study {failed.study_id})"


def _mark_ties(session: Session, problem: Sequence[ColumnElement[bool]], failed: Trial) -> int:
    """Say of the configs of this source that tied with other winners that they are bad; how many there were."""
    marked = 0
    for one in session.scalars(select(Result).where(*problem, Result.source_hash != failed.source_hash)):
        for tied in _tied_trials(session, one):
            if tied.source_hash == failed.source_hash:
                marked += _mark_tie(one, tied, failed)
    return marked


def _tied_trials(session: Session, one: Result) -> list[Trial]:
    """The trials that the noise did not tell from a result's own, where its study is here."""
    numbers = [entry["trial"] for entry in one.tie_set if entry["trial"] != one.trial_number]
    if one.study_id is None or not numbers:  # a result that was imported has its study elsewhere
        return []
    return list(session.scalars(select(Trial).where(Trial.study_id == one.study_id, Trial.number.in_(numbers))))


def _mark_tie(one: Result, tied: Trial, failed: Trial) -> bool:
    """Note with a tied config what was found; whether that is news. It stays in the list, which tells of a final."""
    entries = [entry for entry in one.tie_set if entry["trial"] == tied.number]
    if all("withdrawn_reason" in entry for entry in entries):
        return False
    marks = {"withdrawn_reason": _finding(failed)}
    one.tie_set = [entry | marks if entry in entries else entry for entry in one.tie_set]
    return True


def _let_newest_answer(session: Session, withdrawn: Result) -> None:
    """Give the place of a withdrawn result to the newest revision that is left, where none answers."""
    published = (same_place(withdrawn), Result.revision.is_not(None), Result.withdrawn_at.is_(None))
    if session.scalar(select(exists().where(*published, Result.current.is_(True)))):
        return
    newest = session.scalar(select(Result).where(*published).order_by(Result.revision.desc()).limit(1))
    if newest is not None:
        newest.current = True
        session.flush()


def withdrawn_by(session: Session, study_id: str) -> Sequence[Result]:
    """Revisions that a study withdrew, oldest first. Called by the tuner at the end of a study."""
    query = select(Result).where(Result.withdrawn_at.is_not(None), Result.withdrawn_by == study_id)
    return session.scalars(query.where(Result.revision.is_not(None)).order_by(Result.revision, Result.id)).all()


def withdrawn_revisions(session: Session) -> dict[tuple[str | int, ...], list[Withdrawn]]:
    """All withdrawn revisions by place (`place_of`), newest first. They are few. Called when results changed."""
    query = select(Result).where(Result.withdrawn_at.is_not(None), Result.revision.is_not(None))
    found: dict[tuple[str | int, ...], list[Withdrawn]] = {}
    for one in session.scalars(query.order_by(Result.revision.desc(), Result.id)):
        assert one.revision is not None
        assert one.withdrawn_at is not None
        place = place_of((one.m, one.n, one.k), one.dtype, one.layout, one.arch, one.device_name, one.protocol)
        found.setdefault(place, []).append(
            Withdrawn(
                result_id=one.id,
                revision=one.revision,
                reason=one.withdrawn_reason or "",
                at=one.withdrawn_at.isoformat(timespec="seconds"),
            )
        )
    return found


def withdrawn_configs(session: Session) -> Sequence[Any]:
    """What was found to be bad for which problem and device, candidates too. Called when results changed.

    Columns: m, n, k, dtype, layout, arch, device_name, config
    """
    where = (Result.m, Result.n, Result.k, Result.dtype, Result.layout, Result.arch, Result.device_name)
    return session.execute(select(*where, Result.config).where(Result.withdrawn_at.is_not(None))).all()


def place_of(  # noqa: PLR0917  (the order of the unique key)
    shape: tuple[int, int, int], dtype: str, layout: str, arch: str, device_name: str, protocol: str
) -> tuple[str | int, ...]:
    """What one row of revisions is about, as a key."""
    return (*shape, dtype, layout, arch, device_name, protocol)


def withdrawn_without_answer(session: Session, *, device_name: str, dtype: str | None, limit: int) -> Sequence[Result]:
    """The newest withdrawn revision of each problem that no revision answers any more. Called by the shape map."""
    query = select(Result).where(Result.withdrawn_at.is_not(None), Result.revision.is_not(None))
    query = query.where(Result.device_name == device_name)
    if dtype is not None:
        query = query.where(Result.dtype == dtype)
    newest: dict[tuple[str | int, ...], Result] = {}
    for one in session.scalars(query.order_by(Result.revision.desc(), Result.id).limit(limit)):
        place = place_of((one.m, one.n, one.k), one.dtype, one.layout, one.arch, one.device_name, one.protocol)
        newest.setdefault(place, one)
    current = (Result.revision.is_not(None), Result.current.is_(True))
    return [one for one in newest.values() if not session.scalar(select(exists().where(same_place(one), *current)))]


def has_withdrawn_result() -> ColumnElement[bool]:
    """Condition on `Study`: its winner was found to be bad later, so the study answers nothing any more."""
    return exists().where(Result.study_id == Study.id, Result.withdrawn_at.is_not(None)).correlate(Study)
