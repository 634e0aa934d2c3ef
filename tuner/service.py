"""The tuner process: claims studies, runs them, builds exports, keeps the devices' heartbeat.

It is the only writer of trials. Killed at any moment, it loses nothing that was saved: the next one finds the studies
of the dead owner, queues them again and goes on after their last trial.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from db import queries
from db.database import Database
from db.errors import DatabaseError
from kernels.artifacts import ArtifactError, ArtifactStore
from search_space.request import Mode, RequestError, TuneRequest
from search_space.samplers import unusable_reason
from tuner.allocator import use_few_arenas
from tuner.engine.base import EngineError, NoDevice
from tuner.engines import Engines, engines_of
from tuner.exporting import run_export
from tuner.learning import begin_search
from tuner.loop import tune_study
from tuner.owners import Owner
from tuner.retention import Retention
from tuner.settings import ENGINES, Settings, SettingsError
from tuner.store import (
    NotOwner,
    StudyPlace,
    StudyRecorder,
    fail_study,
    note_devices,
    note_place,
    owners_at_work,
    previous_winner,
    save_result,
    stored_trials,
    wall_before_s,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.orm import Session

    from db.models import Export, Study

log = logging.getLogger("gemm_tuner.service")


class ServiceError(RuntimeError):
    """The tuner process cannot go on; the message says why."""


class _Interrupted(Exception):
    """The process is stopping: the study stays unfinished, and whoever claims it next goes on with it."""


def run_service(
    settings: Settings,
    engines: Callable[[Settings], Engines],
    stop: threading.Event,
    *,
    until_idle: bool = False,
) -> None:
    """Serve until `stop` is set; with `until_idle`, also return once nothing is queued or running.

    Raises DatabaseError when the database cannot be used and ServiceError when a study's thread lost it on the way.
    """
    with ExitStack() as at_exit:
        database = at_exit.enter_context(Database.open(settings.database_url))
        owner = Owner(settings.artifacts_dir / ".owners", database, lease_s=settings.lease_s)
        at_exit.callback(owner.close)
        factory = engines(settings)
        at_exit.callback(factory.close)
        service = _Service(settings, database, owner, factory)
        at_exit.callback(service.stop)
        service.serve(stop, until_idle=until_idle)


class _StudyThread(threading.Thread):
    """Runs one claimed study."""

    def __init__(self, service: _Service, study: Study) -> None:
        super().__init__(name=f"study-{study.id[:8]}", daemon=True)
        self.study = study
        self.cancelled = threading.Event()
        self.broken: DatabaseError | None = None
        self.device_name = ""
        self._service = service

    def run(self) -> None:
        """Tune; whatever goes wrong ends the study with a reason, or, with the database gone, the process."""
        try:
            self._service.tune(self)
        except NotOwner as error:
            log.warning("study %s moved: %s", self.study.id, error)
        except _Interrupted:
            log.info("study %s interrupted", self.study.id)
        except DatabaseError as error:
            self.broken = error
        except Exception as error:  # the worker boundary: one study's surprise must not take the others with it
            log.exception("study %s failed", self.study.id)
            self._fail(f"internal error, {type(error).__name__}: {error}; the tuner's log has the details")

    def _fail(self, reason: str) -> None:
        try:
            fail_study(self._service.database, self.study.id, reason, owner=self.study.owner)
        except NotOwner as error:
            log.warning("study %s moved: %s", self.study.id, error)
        except DatabaseError as error:
            self.broken = error


class _Service:
    def __init__(self, settings: Settings, database: Database, owner: Owner, engines: Engines) -> None:
        self.database = database
        self._settings, self._owner, self._engines = settings, owner, engines
        self._artifacts = ArtifactStore(settings.artifacts_dir)
        limit_bytes = settings.artifacts_mib * 2**20
        self._retention = Retention(database, self._artifacts, limit_bytes=limit_bytes)
        self._studies: list[_StudyThread] = []
        self._export: threading.Thread | None = None
        self._stopping = threading.Event()
        self._next_heartbeat_s = 0.0
        self._toolchain, self._cuda = _compilers(engines)

    def serve(self, stop: threading.Event, *, until_idle: bool) -> None:
        """See run_service."""
        self._retention.sweep()
        self._heartbeat()
        if self._settings.ready_file is not None:
            self._settings.ready_file.touch()
        while not stop.is_set():
            if self._owner.is_replaced:
                raise ServiceError(
                    "this process was out of touch with the database for too long: its studies went to another tuner"
                )
            self._heartbeat()
            self._reap()
            self._pass_cancels_on()
            self._claim()
            if until_idle and not self._studies and self._export is None:
                return
            stop.wait(self._settings.poll_s)

    def stop(self) -> None:
        """Interrupt the studies and give them back."""
        self._stopping.set()
        for thread in self._studies:
            thread.join()
        if self._export is not None:
            self._export.join()
        write(self.database, lambda session: queries.requeue_running(session, self._owner.name))
        if (
            self._settings.engine != "ray"
        ):  # a cluster's devices may serve other tuners; silence tells when none is left
            self._note_devices(gone=True)

    # ------------------------------------------------------------------ one round

    def _heartbeat(self) -> None:
        if time.monotonic() < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = time.monotonic() + self._settings.heartbeat_s
        self._recover()
        busy = [thread.device_name for thread in self._studies]
        self._note_devices(busy=busy)

    def _note_devices(self, *, busy: Sequence[str] = (), gone: bool = False) -> None:
        devices, toolchain, cuda = self._engines.devices(), self._toolchain, self._cuda
        troubled = self._engines.troubled()
        note_devices(self.database, devices, toolchain=toolchain, cuda=cuda, busy=busy, troubled=troubled, gone=gone)

    def _recover(self) -> None:
        """Queue the studies of dead owners again."""
        all_here = self.database.path is not None
        with self.database.read() as session:
            owners = owners_at_work(session)
            alive = queries.live_owners(session) if self._owner.has_lease and owners else None
        for name in sorted(owners):
            if self._owner.is_dead(name, all_here=all_here, alive=alive):
                ids = write(self.database, partial(self._take_over, owner=name))
                self._owner.forget(name)
                log.info("owner %s is dead: queued %d of its studies again", name, len(ids))

    def _take_over(self, session: Session, owner: str) -> Sequence[str]:
        """Ids of the studies that are queued again; none when the owner has renewed its lease meanwhile."""
        proven = self._owner.lock_is_free(owner)
        if self._owner.has_lease and not queries.take_over(session, owner, proven=proven):
            return ()
        return queries.requeue_running(session, owner)

    def _reap(self) -> None:
        for thread in [thread for thread in self._studies if not thread.is_alive()]:
            self._studies.remove(thread)
            if thread.broken is not None:
                raise ServiceError(f"study {thread.study.id} cannot be saved: {thread.broken}") from thread.broken
        if self._export is not None and not self._export.is_alive():
            self._export = None

    def _pass_cancels_on(self) -> None:
        if not self._studies:
            return
        with self.database.read() as session:
            wanted = queries.wanted_studies(session, [thread.study.id for thread in self._studies])
        for thread in self._studies:
            if thread.study.id not in wanted:
                thread.cancelled.set()

    def _claim(self) -> None:
        may_study, may_export = len(self._studies) < self._settings.studies, self._export is None
        if not (may_study or may_export):
            return

        def claim(session: Session) -> tuple[Study | None, Export | None]:
            study = queries.claim_next_study(session, self._owner.name) if may_study else None
            export = queries.claim_next_export(session, self._owner.name) if may_export else None
            return study, export

        study, export = write(self.database, claim)
        if study is not None:
            log.info("study %s: %dx%dx%d %s on %s", study.id, study.m, study.n, study.k, study.dtype, study.arch)
            thread = _StudyThread(self, study)
            self._studies.append(thread)
            thread.start()
        if export is not None:
            self._export = threading.Thread(target=self._build_export, args=(export,), name="export", daemon=True)
            self._export.start()

    def _build_export(self, export: Export) -> None:
        run_export(
            self.database,
            export.id,
            export.request,
            artifacts=self._artifacts,
            exports_dir=self._settings.exports_dir,
        )

    # ------------------------------------------------------------------ one study

    def tune(self, thread: _StudyThread) -> None:
        """Run a claimed study to its end. Raises DatabaseError, and _Interrupted when the process is stopping."""
        study = thread.study
        try:
            request = TuneRequest.from_dict(study.request)
            if reason := unusable_reason(request.sampler):
                raise RequestError(reason, field="sampler")
            engine = self._engines.engine_for(request)
            toolchain = self._engines.toolchain()
        except (RequestError, NoDevice, EngineError) as error:
            fail_study(self.database, study.id, str(error), owner=study.owner)
            return
        place = StudyPlace(
            study_id=study.id, owner=study.owner, request=request, device=engine.device, toolchain=toolchain
        )
        thread.device_name = engine.device.name if request.mode is Mode.MEASURE else ""
        note_place(self.database, place)
        with self.database.read() as session:
            stored = stored_trials(session, study)
            used_s = wall_before_s(session, study)
            previous = previous_winner(session, request, engine.device.name)
            before = queries.first_finished_study(session, study.study_key, engine.device.name)
            told_before = stored_trials(session, before) if before else ()
        start = begin_search(self.database, study, request, engine.device, before)
        result = tune_study(
            request,
            engine,
            StudyRecorder(self.database, study.id, request, engine.device, owner=study.owner),
            resume_from=stored,
            should_stop=lambda: self._should_stop(thread),
            previous_winner=previous,
            told_before=told_before,
            starting=start.starting,
            model=start.model,
            wall_before_s=used_s,
        )
        if result.winner is not None and result.winner.artifact_sha256:
            self._keep(result.winner.artifact_sha256)
        save_result(self.database, place, result)
        self._retention.after_study(study.id)
        log.info("study %s is %s: %s", study.id, result.state, result.reason or f"{result.best_us:.2f} us")

    def _keep(self, sha256: str) -> None:
        try:
            self._artifacts.keep(sha256)
        except ArtifactError as error:  # the result stands; its module may be gone when the machine loses power
            log.warning("%s", error)

    def _should_stop(self, thread: _StudyThread) -> bool:
        if self._stopping.is_set():
            raise _Interrupted
        return thread.cancelled.is_set()


def _compilers(engines: Engines) -> tuple[str, str]:
    """Toolchain and CUDA version of this machine, empty without compilers: each study says so for itself."""
    try:
        return engines.toolchain(), engines.cuda()
    except EngineError:
        return "", ""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tuner.service`: serve until SIGTERM or SIGINT. Exit status 1: it cannot go on; 2: bad settings."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = _settings(arguments)
    except SettingsError as error:
        print(f"gemm-tuner: {error}", file=sys.stderr)
        return 2
    use_few_arenas()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run_service(settings, engines_of, stop)
    except (DatabaseError, ServiceError) as error:
        print(f"gemm-tuner: {error}", file=sys.stderr)
        return 1
    return 0


def _settings(arguments: Sequence[str] | None) -> Settings:
    settings = Settings.from_env()
    parser = argparse.ArgumentParser(prog="python -m tuner.service", description="Run the tuner process.")
    parser.add_argument("--database-url", default=settings.database_url, help="SQLAlchemy URL")
    parser.add_argument("--artifacts-dir", type=Path, default=settings.artifacts_dir, help="compiled modules")
    parser.add_argument("--exports-dir", type=Path, default=settings.exports_dir, help="bundles")
    parser.add_argument("--engine", choices=ENGINES, default=settings.engine)
    parser.add_argument("--ray-address", default=settings.ray_address, help="host:port of the head, for engine ray")
    parser.add_argument("--ready-file", type=Path, help="file to make once the devices are noted")
    options = parser.parse_args(arguments)
    return dataclasses.replace(settings, **vars(options))


if __name__ == "__main__":
    sys.exit(main())
