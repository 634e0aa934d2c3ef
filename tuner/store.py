"""Between the records of the tuner and the rows of the database.

A block that writes is short and may be repeated: when another writer holds the database for longer than its timeout,
the block is tried again until the patience of the store is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from db import queries
from db.errors import DatabaseBusy
from db.models import BURST, Export
from kernels.config import GemmConfig, config_from_dict
from tuner.progress import vendor_ratio
from tuner.records import Environment, Evidence, Measurement, Outcome, State, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy.orm import Session

    from db.database import Database
    from db.models import Measurement as MeasurementRow
    from db.models import Study
    from db.models import Trial as TrialRow
    from kernels.compile import CompiledKernel
    from search_space.request import TuneRequest
    from tuner.engine.base import DeviceFacts
    from tuner.progress import StudyResult

PATIENCE_S = 120.0  # of a writer that finds the database busy; each attempt waits for the database's own timeout first
LONGEST_GAP_S = 120.0  # between two trials of a running study: a compile and an evaluation at their limits
PUBLISHED = frozenset({Evidence.NUMERIC, Evidence.CHECKED})


def write[Value](
    database: Database,
    work: Callable[[Session], Value],
    *,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Value:
    """Run `work` in one transaction, again while the database is busy. Raises DatabaseBusy when patience is over."""
    deadline_s = clock() + patience_s
    while True:
        try:
            with database.write() as session:
                return work(session)
        except DatabaseBusy:
            if clock() > deadline_s:
                raise


class NotOwner(RuntimeError):
    """The study belongs to another tuner by now: this one was taken for dead. Nothing was written."""


def write_as_owner[Value](
    database: Database, study_id: str, owner: str | None, work: Callable[[Session], Value]
) -> Value:
    """As `write`, in a transaction in which the study is still this owner's. Raises NotOwner.

    owner: None where one process is sure to be alone
    """

    def fenced(session: Session) -> Value:
        if owner is not None and not queries.owns_study(session, study_id, owner):
            raise NotOwner(f"study {study_id} has another owner than {owner}")
        return work(session)

    return write(database, fenced)


class StudyRecorder:
    """Saves the trials of one study. See `tuner.recorder.Recorder`. Raises NotOwner when the study went to another."""

    def __init__(
        self,
        database: Database,
        study_id: str,
        request: TuneRequest,
        device: DeviceFacts,
        *,
        owner: str | None = None,
    ) -> None:
        self._database, self._study_id, self._request, self._device = database, study_id, request, device
        self._owner = owner

    def _write[Value](self, work: Callable[[Session], Value]) -> Value:
        return write_as_owner(self._database, self._study_id, self._owner, work)

    def save_trial(self, trial: Trial, kernel: CompiledKernel | None) -> None:
        """See Recorder. The trial and its module's row are one transaction."""
        self._write(lambda session: self._save(session, trial, kernel))

    def save_final(self, number: int, measurement: Measurement) -> None:
        """See Recorder."""
        self._write(
            lambda session: queries.save_measurement(
                session, self._study_id, number, _new_measurement(measurement), phase="final"
            )
        )

    def save_rebuilt(self, trial: Trial, kernel: CompiledKernel) -> None:
        """See Recorder."""

        def save(session: Session) -> None:
            self._add_artifact(session, trial.config, kernel)
            queries.replace_artifact(session, self._study_id, trial.number, kernel.sha256)

        self._write(save)

    def save_failed_final(self, trial: Trial) -> None:
        """See Recorder."""
        evidence = [item.value for item in trial.evidence]
        self._fail(trial.number, outcome=trial.outcome.value, reason=trial.reason, evidence=evidence)

    def save_failed_check(self, trial: Trial, reason: str) -> None:
        """See Recorder."""
        self._fail(trial.number, outcome=Outcome.CHECK_FAILED.value, reason=reason)

    def _fail(self, number: int, *, outcome: str, reason: str, evidence: list[str] | None = None) -> None:
        def fail(session: Session) -> None:
            row = queries.fail_trial(session, self._study_id, number, outcome=outcome, reason=reason, evidence=evidence)
            if row is not None:
                queries.withdraw_source(session, self._study_id, row)

        self._write(fail)

    def known_bad(self, config: GemmConfig, kernel: CompiledKernel | None) -> str | None:
        """See Recorder. Known by what was compiled, so there is nothing to say before."""
        if kernel is None:
            return None
        with self._database.read() as session:
            row = queries.known_bad(session, self._device.name, kernel.toolchain, kernel.source_hash)
        if row is None:
            return None
        where = f"trial {row.number} of study {row.study_id}"
        return f"failed before on {self._device.name} with this toolchain as {row.outcome} ({where}): {row.reason}"

    def _add_artifact(self, session: Session, config: GemmConfig, kernel: CompiledKernel) -> None:
        queries.add_artifact(
            session,
            sha256=kernel.sha256,
            size_bytes=len(kernel.module),
            arch=kernel.arch,
            sm_count=kernel.sm_count,
            source_hash=kernel.source_hash,
            config=config.to_dict(),
            problem_key=self._request.problem.key,
            toolchain=kernel.toolchain,
            registers=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            facts={
                "stack_bytes": kernel.stack_bytes,
                "warnings": list(kernel.warnings),
                "trace_s": kernel.trace_s,
                "cubin_s": kernel.cubin_s,
                "link_s": kernel.link_s,
            },
        )

    def _save(self, session: Session, trial: Trial, kernel: CompiledKernel | None) -> None:
        if kernel is not None and trial.outcome is not Outcome.SPILLED:
            self._add_artifact(session, trial.config, kernel)
        measurement = trial.measurement
        row = queries.save_trial(
            session,
            self._study_id,
            trial.number,
            config=trial.config.to_dict(),
            config_key=trial.config.key,
            outcome=trial.outcome.value,
            reason=trial.reason,
            evidence=[item.value for item in trial.evidence],
            source_hash=trial.source_hash or None,
            toolchain=kernel.toolchain if kernel else "",
            modeled_us=trial.modeled_us,
            median_us=measurement.median_us() if measurement else None,
            ratio=_ratios(measurement),
            artifact_sha256=(trial.artifact_sha256 or None) if trial.outcome is not Outcome.SPILLED else None,
            compile_s=trial.compile_s,
            gpu_s=trial.gpu_s,
            max_rel_error=trial.max_rel_error,
            measurement=_new_measurement(measurement) if measurement else None,
        )
        queries.withdraw_source(session, self._study_id, row)


def owners_at_work(session: Session) -> set[str]:
    """Names of the processes that hold a running study or export."""
    studies = (study.owner for study in queries.running_studies(session))
    exports = session.scalars(select(Export.owner).where(Export.state == State.RUNNING.value))
    return {owner for owner in (*studies, *exports) if owner}


def stored_trials(session: Session, study: Study) -> tuple[Trial, ...]:
    """The trials of a study that are saved, by number."""
    samples = {
        row.trial_number: _measurement(row) for row in queries.measurements_of_study(session, study.id, phase="trial")
    }
    return tuple(_trial(row, study.arch, samples.get(row.number)) for row in queries.trials_of_study(session, study.id))


def wall_before_s(session: Session, study: Study) -> float:
    """Seconds that earlier runs of a study used, read from when its trials ended.

    A gap longer than a running study can have is time in which nobody ran it: only the longest possible gap counts.
    """
    ends = sorted(row.finished_at for row in queries.trials_of_study(session, study.id))
    if study.started_at is None or not ends:
        return 0.0
    starts = [study.started_at, *ends[:-1]]
    gaps = ((end - start).total_seconds() for start, end in zip(starts, ends, strict=True))
    return sum(min(max(gap, 0.0), LONGEST_GAP_S) for gap in gaps)


def previous_winner(session: Session, request: TuneRequest, device_name: str) -> GemmConfig | None:
    """The config of the newest published result of this problem on this device, timed as this study will be."""
    problem = request.problem
    best = queries.best_exact(
        session,
        problem.m,
        problem.n,
        problem.k,
        problem.dtype,
        problem.layout,
        arch=request.arch,
        device_name=device_name,
        protocol=request.protocol.kind,
    )
    return config_from_dict(best.arch, best.config) if best is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlace:
    """Which study, and where it runs.

    study_id: id of its row
    owner: who must still own it for a write to count; None where one process is sure to be alone
    request: what was asked
    device: what it was tuned for
    toolchain: compilers of this machine, in one line
    """

    study_id: str
    owner: str | None = None
    request: TuneRequest
    device: DeviceFacts
    toolchain: str

    @property
    def environment(self) -> Environment:
        """What is known before anything ran: read from the device, or from the data sheet of one that is not here."""
        if self.device.environment is not None:
            return replace(self.device.environment, toolchain=self.toolchain)
        profile = self.device.profile
        return Environment(
            gpu_name=self.device.name,
            arch=profile.arch.name,
            sm_count=profile.sm_count,
            toolchain=self.toolchain,
            max_sm_clock_mhz=float(profile.clock_mhz),
        )


def note_place(database: Database, place: StudyPlace) -> None:
    """Note where a claimed study runs."""
    environment = place.environment
    write_as_owner(
        database,
        place.study_id,
        place.owner,
        lambda session: queries.record_environment(
            session,
            place.study_id,
            device_name=place.device.name,
            environment=environment.to_dict(),
            environment_key=environment.key(""),
        ),
    )


def save_result(database: Database, place: StudyPlace, result: StudyResult) -> None:
    """End the study; store its winner, and publish it when it was both verified and checked. One transaction."""
    write_as_owner(database, place.study_id, place.owner, lambda session: _save_result(session, place, result))


def fail_study(database: Database, study_id: str, reason: str, *, owner: str | None = None) -> None:
    """End a study that could not be run."""

    def fail(session: Session) -> None:
        queries.finish_study(session, study_id, state=State.FAILED.value, reason=reason)

    write_as_owner(database, study_id, owner, fail)


def _save_result(session: Session, place: StudyPlace, result: StudyResult) -> None:
    bad = ""
    if result.winner is not None:
        stored = queries.add_result(session, _new_result(place, result))
        if found := queries.withdraw_known_bad(session, stored):
            bad = f"not published: another study found the winner's kernel to be bad: {found}"
        # The answer always says how it compares with the vendor library: without a ratio there is nothing to publish.
        elif frozenset(result.evidence) >= PUBLISHED and vendor_ratio(result.measurement) is not None:
            queries.publish_result(session, stored.id)
    queries.finish_study(
        session,
        place.study_id,
        state=result.state.value,
        reason="; ".join(filter(None, (result.reason, bad, *_withdrawals(session, place.study_id)))),
        best_trial=result.winner.number if result.winner else None,
        best_us=result.best_us,
        coverage=result.coverage,
    )


def _withdrawals(session: Session, study_id: str) -> list[str]:
    """What to say of the published revisions that the study found to be bad."""
    return [
        f"revision {row.revision} ({row.protocol}) is withdrawn: {row.withdrawn_reason}"
        for row in queries.withdrawn_by(session, study_id)
    ]


def _new_result(place: StudyPlace, result: StudyResult) -> queries.NewResult:
    winner, measurement, problem = result.winner, result.measurement, place.request.problem
    assert winner is not None
    environment = result.environment or place.environment
    return queries.NewResult(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype.value,
        layout=problem.layout.value,
        arch=place.request.arch,
        device_name=place.device.name,
        protocol=measurement.protocol.kind if measurement else BURST,
        study_id=place.study_id,
        trial_number=winner.number,
        config=winner.config.to_dict(),
        evidence=[item.value for item in result.evidence],
        environment=environment.to_dict(),
        environment_key=environment.key(winner.source_hash),
        median_us=measurement.median_us() if measurement else None,
        modeled_us=winner.modeled_us,
        interval_us=list(measurement.interval_us()) if measurement else None,
        baselines_us=_baselines(measurement),
        ratio=_ratios(measurement),
        noise=result.noise if result.aa_ratio else None,
        aa_ratio=result.aa_ratio.to_dict() if result.aa_ratio else None,
        tie_set=_tie_set(result),
        checks=[check.to_dict() for check in result.checks],
        tflops=measurement.tflops(problem) if measurement else None,
        max_rel_error=winner.max_rel_error,
        trials=sum(trial.counts_against_budget for trial in result.trials),
        artifact_sha256=winner.artifact_sha256 or None,
        source_hash=winner.source_hash or None,
    )


def _tie_set(result: StudyResult) -> list[dict[str, Any]]:
    by_number = {trial.number: trial for trial in result.trials}
    tied = []
    for number in result.tie_set:
        final = result.finals.get(number)
        time_us = final.median_us() if final else by_number[number].time_us
        tied.append({"trial": number, "config": by_number[number].config.to_dict(), "median_us": time_us})
    return tied


def _ratios(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    return {name: ratio.to_dict() for name, ratio in measurement.ratios().items()}


def _baselines(measurement: Measurement | None) -> dict[str, float] | None:
    if measurement is None:
        return None
    return {name: measurement.baseline_median_us(name) for name in measurement.baselines_us}


def _new_measurement(measurement: Measurement) -> queries.NewMeasurement:
    return queries.NewMeasurement(**measurement.to_dict())


def _measurement(row: MeasurementRow) -> Measurement:
    return Measurement.from_dict(
        {
            "samples_us": row.samples_us,
            "baselines_us": row.baselines_us,
            "protocol": row.protocol,
            "environment": row.environment,
            "discarded": row.discarded,
            "states": row.states,
            "energy_mj": row.energy_mj,
        }
    )


def _trial(row: TrialRow, arch: str, measurement: Measurement | None) -> Trial:
    return Trial(
        number=row.number,
        config=config_from_dict(arch, row.config),
        outcome=Outcome(row.outcome),
        reason=row.reason,
        measurement=measurement,
        modeled_us=row.modeled_us,
        evidence=tuple(Evidence(item) for item in row.evidence),
        source_hash=row.source_hash or "",
        artifact_sha256=row.artifact_sha256 or "",
        compile_s=row.compile_s or 0.0,
        gpu_s=row.gpu_s or 0.0,
        max_rel_error=row.max_rel_error,
    )


def note_devices(
    database: Database,
    devices: Iterable[DeviceFacts],
    *,
    toolchain: str = "",
    cuda: str = "",
    busy: Sequence[str] = (),
    troubled: Mapping[str, tuple[str, str]] | None = None,
    gone: bool = False,
) -> None:
    """Heartbeat: these devices are here and READY, those named in `busy` BUSY; or, `gone`, OFFLINE.

    toolchain, cuda: of the compilers that build for them; with the driver they decide which results are stale
    troubled: state and reason of those that cannot be used now, by uuid
    """

    live = [device for device in devices if device.is_live]

    def note(session: Session) -> None:
        for device in live:
            state, reason = "BUSY" if device.name in busy else "READY", ""
            state, reason = (troubled or {}).get(device.uuid, (state, reason))
            if gone:
                state, reason = "OFFLINE", "no tuner is running"
            assert device.environment is not None
            queries.upsert_device(
                session,
                uuid=device.uuid,
                name=device.name,
                arch=device.profile.arch.name,
                sm_count=device.profile.sm_count,
                state=state,
                reason=reason,
                environment=replace(
                    device.environment,
                    toolchain=toolchain or device.environment.toolchain,
                    cuda=cuda or device.environment.cuda,
                ).to_dict(),
            )

    if live:
        write(database, note)
