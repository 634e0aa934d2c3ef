"""The events of a job, read from the database: the tuner writes trials, whoever listens compares with what was sent.

An event's id is its place in the job: finish time in microseconds, then the study's position, then the trial's number.
It says where to go on, also for another process or after a restart.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from api.errors import RequestError
from api.services.jobs import found_job, job_view
from api.services.studies import trial_view
from db import queries
from db.models import FINAL_STATES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.datastructures import State

    from api.settings import ApiSettings
    from api.views.jobs import JobView
    from api.views.studies import TrialView
    from db.database import Database

Place = tuple[int, int, int]
START: Place = (0, 0, 0)  # before every trial: no trial finished in 1970
END_SUFFIX = "-end"

_ID = re.compile(r"([0-9]{1,18})-([0-9]{1,6})-([0-9]{1,9})(-end)?")
HEARTBEAT = b": still here\n\n"


def _place(trial: TrialView, position: int) -> Place:
    micros = int(trial.finished_at.timestamp() * 1_000_000) if trial.finished_at else 0
    return micros, position, trial.number


class Follower:
    """Finds what is new in a job since the last look. One per stream; `look` runs in one thread at a time.

    ended: the job's last event was given out
    """

    def __init__(self, database: Database, job_id: str, after: Place) -> None:
        self.ended = False
        self._database = database
        self._job_id = job_id
        self._after = after
        self._last = after
        self._first_look = True
        self._sent: dict[str, set[int]] = {}
        self._totals: dict[str, int] = {}
        self._shown: dict[str, Any] = {}

    def look(self) -> list[bytes]:
        """New events, encoded: trials in the order in which they finished, then the job if it changed, then the end."""
        with self._database.read() as session:
            job = job_view(session, found_job(session, self._job_id))
            trials = self._new_trials(session, job)
        lines = []
        for place, study_id, trial in trials:
            self._last = max(self._last, place)
            data = {"study_id": study_id, **trial.model_dump(mode="json")}
            lines.append(_encoded("trial", _id_text(self._last), data))
        shown = job.model_dump(mode="json", exclude={"studies"})  # thousands of studies would be megabytes a look
        changing = {name: value for name, value in shown.items() if name != "time_left_s"}  # that changes every moment
        if changing != self._shown:
            self._shown = changing
            lines.append(_encoded("job", _id_text(self._last), shown))
        if job.state in FINAL_STATES:
            self.ended = True
            lines.append(_encoded("end", _id_text(self._last) + END_SUFFIX, shown))
        return lines

    def _new_trials(self, session: Any, job: JobView) -> list[tuple[Place, str, TrialView]]:
        """Trials that were not sent. Only studies whose counts changed are read."""
        new = []
        for position, study in enumerate(job.studies):
            total, sent = sum(study.counts.values()), self._sent.setdefault(study.id, set())
            if self._totals.get(study.id) == total:
                continue
            self._totals[study.id] = total
            for row in queries.trials_of_study(session, study.id):
                if row.number in sent:
                    continue
                sent.add(row.number)
                trial = trial_view(row)
                place = _place(trial, position)
                # On the first look the client has what lies before its last id. Later a trial may be saved after one
                # that finished later (several are in flight): it is new all the same.
                if not self._first_look or place > self._after:
                    new.append((place, study.id, trial))
        self._first_look = False
        return sorted(new, key=lambda item: item[0])


def follower(database: Database, job_id: str, last_event_id: str | None) -> Follower | None:
    """Where the stream starts; None when the client has read it to its end. Raises NotFound, RequestError."""
    match = _ID.fullmatch(last_event_id or _id_text(START))
    if match is None:
        raise RequestError(
            f"Last-Event-ID: {ascii(last_event_id)[:60]} is not an id of this stream",
            hint="send an id as it came, or none to start over",
        )
    with database.read() as session:
        job = found_job(session, job_id)
        if match[4] and job.state in FINAL_STATES:
            return None
    micros, position, number = (int(match[group]) for group in (1, 2, 3))
    return Follower(database, job_id, (micros, position, number))


def response(follower: Follower | None, settings: ApiSettings, state: State) -> Response:
    """The stream, or 204, which tells a browser's EventSource not to come back."""
    if follower is None:
        return Response(status_code=204)
    return StreamingResponse(_stream(follower, settings, state), media_type="text/event-stream")


async def _stream(follower: Follower, settings: ApiSettings, state: State) -> AsyncIterator[bytes]:
    spoke_s = time.monotonic()
    while True:
        lines = await run_in_threadpool(follower.look)
        if lines:
            spoke_s = time.monotonic()
            yield b"".join(lines)
        if follower.ended or state.stopping:
            return
        if time.monotonic() - spoke_s > settings.events_heartbeat_s:
            spoke_s = time.monotonic()
            yield HEARTBEAT
        await asyncio.sleep(settings.events_poll_s)


def _id_text(place: Place) -> str:
    return "-".join(map(str, place))


def _encoded(name: str, identity: str, data: dict[str, Any]) -> bytes:
    """One event; JSON without line breaks needs one data line."""
    return f"id: {identity}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()
