"""One study from its first trial to its winner.

The loop knows an engine, a recorder and a sampler; it knows neither processes, nor GPUs, nor a database.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernels.config import Sm100GemmConfig
from search_space.request import Mode, TuneRequest
from search_space.starting import starting_configs
from tuner.cards import card_spread
from tuner.choosing import Choice, choose_measured, choose_modeled, finalists, next_batch, why_none_worked
from tuner.engine.base import (
    CertifyJob,
    CertifyReply,
    Engine,
    EngineError,
    EvaluateJob,
    FinalJob,
    FinalReply,
    ModuleChanged,
    NoDevice,
    WorkerLost,
)
from tuner.modules import Modules, with_modules
from tuner.progress import Progress, StudyResult, vendor_ratio
from tuner.records import Evidence, Measurement, Outcome, Ratio, State, Trial
from tuner.search.sampler import ConfigSampler, tried_first
from tuner.search.searched import SearchedSpace
from tuner.search_phase import SearchLimits, SearchPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kernels.config import GemmConfig
    from tuner.recorder import Recorder
    from tuner.search.cost_model import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopLimits:
    """Limits that are no part of the request.

    search: of the search
    finalists: fewest of the fastest candidates that are timed again
    final_retries: times a final, or the checks of a winner, are repeated after their worker was lost
    """

    search: SearchLimits = field(default_factory=SearchLimits)
    finalists: int = 5
    final_retries: int = 2


def tune_study(
    request: TuneRequest,
    engine: Engine,
    recorder: Recorder,
    *,
    resume_from: Iterable[Trial] = (),
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    starting: Sequence[GemmConfig] | None = None,
    space: SearchedSpace | None = None,
    previous_winner: GemmConfig | None = None,
    told_before: Iterable[Trial] = (),
    model: CostModel | None = None,
    wall_before_s: float = 0.0,
    limits: LoopLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> StudyResult:
    """Tune one problem on one device. Blocks until the study ends.

    resume_from: trials that an earlier run of this study saved; they are not run again
    should_stop: asked several times a second; True cancels; what it raises ends the study without an answer
    starting: configs to try first; default: those of the search space. The sampler "learned" weighs most of them
        itself, see `tuner.search.sampler.tried_first`
    space: configs to search; default: every legal one
    previous_winner: of the revision before: timed again in the final, kept when it ties with the best
    told_before: trials of an equal study of before: the sampler hears their times again, so that it asks the same
        configs; all are measured anew
    model: what was learned from other studies' times, for the sampler that can use it
    wall_before_s: seconds that earlier runs of this study used
    Raises NoDevice when the request wants measurements and the engine has no live device.
    """
    if request.mode is Mode.MEASURE and not engine.device.is_live:
        raise NoDevice(f"no GPU of kind {engine.device.name} here: ask for mode 'model', or tune where there is one")
    run = _Run(
        request=request,
        engine=engine,
        recorder=recorder,
        on_progress=on_progress,
        should_stop=should_stop or (lambda: False),
        wall_before_s=wall_before_s,
        limits=limits or LoopLimits(),
        clock=clock,
    )
    if starting is None:
        starting = starting_configs(request.problem, engine.device.profile)
    space = space or SearchedSpace.of(request.problem, engine.device.profile)
    return run.study(
        starting=starting,
        space=space,
        stored=tuple(resume_from),
        previous_winner=previous_winner,
        told_before=tuple(told_before),
        model=model,
    )


@dataclass(slots=True)
class _Final:
    """Times to choose by.

    timed: finalists as they are now: a module may have been built again
    failed: finalists that failed in a final or in a check, with the outcome and the reason of that
    """

    measurements: dict[int, Measurement] = field(default_factory=dict)
    aa_ratio: Ratio | None = None
    paired: bool = False
    reply: FinalReply | None = None
    note: str = ""
    timed: dict[int, Trial] = field(default_factory=dict)
    failed: dict[int, Trial] = field(default_factory=dict)

    @property
    def disqualified(self) -> dict[int, Trial]:
        """Those that failed by their own fault. One such verdict is enough: a race may well be won the next time."""
        return {number: trial for number, trial in self.failed.items() if trial.outcome.is_own_fault}

    def follow(self, before: _Final) -> None:
        """Take over what an earlier final of the same study found."""
        self.note = "; ".join(filter(None, (before.note, self.note)))
        self.timed = before.timed | self.timed
        self.failed = before.failed | self.failed


class _Run:
    """State of one call of `tune_study`."""

    def __init__(
        self,
        *,
        request: TuneRequest,
        engine: Engine,
        recorder: Recorder,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool],
        wall_before_s: float,
        limits: LoopLimits,
        clock: Callable[[], float],
    ) -> None:
        self._request, self._engine, self._recorder, self._limits = request, engine, recorder, limits
        self._on_progress, self._should_stop, self._clock = on_progress, should_stop, clock
        self._started_s = clock() - wall_before_s
        self._cancelled = False
        self._best: Trial | None = None
        self._search: SearchPhase | None = None

    def study(
        self,
        *,
        starting: Sequence[GemmConfig],
        space: SearchedSpace,
        stored: tuple[Trial, ...],
        previous_winner: GemmConfig | None,
        told_before: tuple[Trial, ...],
        model: CostModel | None,
    ) -> StudyResult:
        """Search, settle the final, choose."""
        request = self._request
        sampler = ConfigSampler(
            request.sampler, space, seed=request.seed, in_flight=request.in_flight, model=model, also=starting
        )
        search = SearchPhase(
            request,
            self._engine,
            self._recorder,
            sampler,
            starting=tried_first(request.sampler, starting),
            stored=stored,
            told_before=told_before,
            limits=self._limits.search,
            on_trial=self._report,
        )
        self._search = search
        for trial in stored:
            self._note_best(trial)
        complete, broken, previous_key = False, "", None
        try:
            complete = search.run(self._keep_going)
            if previous_winner is not None and request.mode is Mode.MEASURE and not self._cancelled:
                previous_key = search.try_also(previous_winner, lambda: not self._stop_asked())
        except EngineError as error:
            complete, broken = False, str(error)
        trials = tuple(search.trials[number] for number in sorted(search.trials))
        result = self._finish(trials, complete, broken, previous_key)
        return replace(result, askable=len(space.configs))

    def _finish(self, trials: tuple[Trial, ...], complete: bool, broken: str, previous_key: str | None) -> StudyResult:
        final, certificate = _Final(), CertifyReply(checks=())
        if self._request.mode is Mode.MODEL:
            choice = choose_modeled(trials)
        else:
            final, certificate, choice = self._settled(trials, broken, previous_key)
            now = final.timed | final.disqualified
            trials = tuple(now.get(trial.number, trial) for trial in trials)
        judged = [final.failed.get(trial.number, trial) for trial in trials]
        state, reason = self._verdict(judged, choice, complete, broken)
        reply = final.reply
        return StudyResult(
            state=state,
            reason="; ".join(str(part) for part in (reason, final.note, card_spread(trials)) if part),
            trials=trials,
            winner=choice.winner if choice else None,
            measurement=choice.measurement if choice else None,
            tie_set=choice.tie_set if choice else (),
            evidence=self._evidence(choice, certificate),
            checks=certificate.checks,
            aa_ratio=final.aa_ratio,
            noise=choice.noise if choice else 0.0,
            environment=reply.environment if reply else self._engine.device.environment,
            wall_s=self._wall_s(),
            finals=final.measurements if final.paired else {},
        )

    def _settled(
        self, trials: tuple[Trial, ...], broken: str, previous_key: str | None
    ) -> tuple[_Final, CertifyReply, Choice | None]:
        """Time the fastest again and check the best. Where all of them fail, the next fastest have their turn."""
        final = _Final()
        while True:
            if not self._cancelled and not broken:
                before, final = final, self._final(trials, previous_key)
                final.follow(before)
            taking_part, out = len(trials), final.disqualified
            trials = tuple(final.timed.get(trial.number, trial) for trial in trials if trial.number not in out)
            timed = set(final.measurements)
            choice = self._choose(trials, final, previous_key)
            certificate, choice = self._certified(trials, final, choice, previous_key)
            trials = tuple(trial for trial in trials if trial.number not in timed)
            if choice is not None or len(trials) == taking_part:
                return final, certificate, choice

    def _verdict(
        self, trials: Sequence[Trial], choice: Choice | None, complete: bool, broken: str
    ) -> tuple[State, str]:
        if self._cancelled:
            return (State.PARTIAL if choice else State.CANCELLED), "cancelled"
        if choice is None:
            return State.FAILED, broken or why_none_worked(trials)
        if broken:
            return State.PARTIAL, broken
        if not complete:
            wall_s = self._request.budget.wall_s
            return State.PARTIAL, f"stopped after {wall_s:g} s, the wall budget"
        return State.DONE, self._shortfall(trials)

    def _shortfall(self, trials: Sequence[Trial]) -> str:
        counted, asked = sum(trial.counts_against_budget for trial in trials), self._request.budget.trials
        if counted >= asked:
            return ""
        if self._search is not None and (gain := self._search.last_gain) is not None:
            return (
                f"{counted} of {asked} trials: another one was expected to gain {gain:.2%}, and is worth its while "
                f"from {self._request.stop_gain:.2%} on: {asked - counted} were saved"
            )
        return f"{counted} of {asked} trials: every config worth asking about was tried, or too many failed"

    # ------------------------------------------------------------------ certificate

    def _certified(
        self, trials: Sequence[Trial], final: _Final, choice: Choice | None, previous_key: str | None
    ) -> tuple[CertifyReply, Choice | None]:
        """Check the winner; one that fails a check is out, and the next best is checked in its place."""
        none = CertifyReply(checks=())
        while choice is not None and final.paired and not self._cancelled:
            try:
                winner, reply = self._run_certify(choice.winner)
            except (EngineError, WorkerLost) as error:
                final.note = "; ".join(filter(None, (final.note, f"not checked: {error}")))
                return none, choice
            if winner is not choice.winner:  # its module was damaged, and was built again
                final.timed[winner.number] = winner
                choice = replace(choice, winner=winner)
            if reply is None or reply.failure is None:
                if reply is not None and reply.gap is not None:
                    text = f"not published: the {reply.gap.name} check did not pass: {reply.gap.detail}"
                    final.note = "; ".join(filter(None, (final.note, text)))
                return reply or none, choice
            place = f"{self._request.problem} with {winner.config.key}"
            found = f"{reply.failure.name}: {reply.failure.detail} ({place})"
            self._recorder.save_failed_check(winner, found)
            final.failed[winner.number] = replace(winner, outcome=Outcome.CHECK_FAILED, reason=found)
            text = f"trial {winner.number} failed its {reply.failure.name} check: {reply.failure.detail}"
            final.note = "; ".join(filter(None, (final.note, text)))
            del final.measurements[winner.number]
            choice = self._choose(trials, final, previous_key)
        return none, choice

    def _run_certify(self, winner: Trial) -> tuple[Trial, CertifyReply | None]:
        """The winner with the module that was checked, and what the checks said; None when cancelled.

        Raises EngineError, and WorkerLost when it happened again and again.
        """
        for attempt in range(self._limits.final_retries + 1):
            future = self._engine.certify(self._certify_job(winner))
            try:
                return winner, future.result() if self._wait(future) else None
            except WorkerLost as error:
                if attempt == self._limits.final_retries:
                    raise
                if isinstance(error, ModuleChanged):
                    found = self._with_modules([winner])
                    if found is None:
                        return winner, None
                    if not found.trials:
                        raise EngineError("; ".join(found.notes)) from error
                    (winner,) = found.trials
        raise AssertionError("unreachable")

    def _certify_job(self, winner: Trial) -> CertifyJob:
        return CertifyJob(
            problem=self._request.problem,
            config=winner.config,
            sm_count=self._engine.device.profile.sm_count,
            module_path=self._engine.module_path(winner.artifact_sha256),
            module_sha256=winner.artifact_sha256,
            source_hash=winner.source_hash,
            seed=self._request.seed,
        )

    def _with_modules(self, trials: Sequence[Trial]) -> Modules | None:
        return with_modules(trials, self._request, self._engine, self._recorder, self._wait)

    @staticmethod
    def _evidence(choice: Choice | None, certificate: CertifyReply) -> tuple[Evidence, ...]:
        if choice is None:
            return ()
        simulated = (Evidence.SIMULATED,) if certificate.simulated else ()
        # Whatever engine answered: nothing of sm_100a is published on the word of the other checks alone.
        complete = certificate.simulated or not isinstance(choice.winner.config, Sm100GemmConfig)
        checked = (Evidence.CHECKED,) if certificate.certified and complete else ()
        return (*simulated, *choice.winner.evidence, *checked)

    # ------------------------------------------------------------------ final

    def _choose(self, trials: Sequence[Trial], final: _Final, previous_key: str | None) -> Choice | None:
        measurements = final.measurements
        if not final.paired:  # no final was taken: choose by the times of the search
            few = finalists(trials)[: self._limits.finalists]
            measurements = {trial.number: trial.measurement for trial in few if trial.measurement}
        return choose_measured(
            trials,
            measurements,
            aa_ratio=final.aa_ratio,
            paired=final.paired,
            previous_key=previous_key,
        )

    def _final(self, trials: Sequence[Trial], previous_key: str | None) -> _Final:
        """Time the fastest again; when all of them fail this time, the next fastest."""
        ranked = finalists(trials)
        notes: list[str] = []
        failed: dict[int, Trial] = {}
        while ranked:
            batch, ranked = next_batch(ranked, fewest=self._limits.finalists, previous_key=previous_key)
            try:
                ended = self._run_final(batch, notes)
            except (EngineError, WorkerLost) as error:
                return _Final(note="; ".join([*notes, f"no final: {error}"]), failed=failed)
            if ended is None:
                return _Final(note="no final: cancelled", failed=failed)
            timed, reply = ended
            if reply is None:
                continue
            by_hash = {trial.source_hash: trial for trial in timed}
            notes += [
                f"trial {by_hash[source].number} failed in the final as {failure.outcome}: {failure.reason}"
                for source, failure in reply.failures.items()
            ]
            failed |= self._failed(by_hash, reply)
            if reply.disturbed:
                return _Final(note="; ".join([*notes, f"no final: {reply.disturbed}"]), failed=failed)
            measured = {
                by_hash[source].number: measurement
                for source, measurement in reply.measurements.items()
                if source not in reply.failures
            }
            for number, measurement in measured.items():
                self._recorder.save_final(number, measurement)
            if measured:
                return _Final(
                    measurements=measured,
                    aa_ratio=reply.aa_ratio,
                    paired=True,
                    reply=reply,
                    note="; ".join(notes),
                    timed={trial.number: trial for trial in timed},
                    failed=failed,
                )
        return _Final(paired=True, note="; ".join(notes), failed=failed)

    def _failed(self, by_hash: Mapping[str, Trial], reply: FinalReply) -> dict[int, Trial]:
        """The finalists that failed, as they are now. Those that did by their own fault are saved as such."""
        failed = {}
        for source, failure in reply.failures.items():
            trial = by_hash[source]
            evidence = tuple(item for item in trial.evidence if item is not Evidence.NUMERIC)
            reason = f"in the final: {failure.reason}"
            failed[trial.number] = replace(trial, outcome=failure.outcome, reason=reason, evidence=evidence)
        for trial in failed.values():
            if trial.outcome.is_own_fault:
                self._recorder.save_failed_final(trial)
        return failed

    def _run_final(self, batch: Sequence[Trial], notes: list[str]) -> tuple[Sequence[Trial], FinalReply | None] | None:
        """Those of the batch that have a module, and their times; no times when none has one. None when cancelled.

        Says in `notes` why others are left out. Raises EngineError and WorkerLost.
        """
        for attempt in range(self._limits.final_retries + 1):
            found = self._with_modules(batch)  # each time: the file itself may be why the worker gave up
            if found is None:
                return None
            batch = found.trials
            notes += found.notes
            if not batch:
                return batch, None
            job = FinalJob(
                problem=self._request.problem,
                candidates=tuple(self._final_candidate(trial) for trial in batch),
                protocol=self._request.protocol,
                seed=self._request.seed,
            )
            future = self._engine.final(job)
            try:
                return (batch, future.result()) if self._wait(future) else None
            except WorkerLost:
                if attempt == self._limits.final_retries:
                    raise
        raise AssertionError("unreachable")

    def _final_candidate(self, trial: Trial) -> EvaluateJob:
        return EvaluateJob(
            problem=self._request.problem,
            config=trial.config,
            module_path=self._engine.module_path(trial.artifact_sha256),
            module_sha256=trial.artifact_sha256,
            source_hash=trial.source_hash,
            protocol=self._request.protocol,
            phase="final",
            seed=self._request.seed,
        )

    def _wait(self, future: Future[Any]) -> bool:
        """False when cancelled first. The wall budget does not cut a final short: it takes seconds and decides."""
        try:
            while not future.done():
                if self._should_stop():
                    self._cancelled = True
                    return False
                wait([future], timeout=self._limits.search.poll_s)
            return True
        finally:
            if not future.done():
                self._engine.drop([future])

    # ------------------------------------------------------------------ clock and progress

    def _stop_asked(self) -> bool:
        self._cancelled = self._cancelled or self._should_stop()
        return self._cancelled

    def _keep_going(self) -> bool:
        return not self._stop_asked() and self._wall_s() < self._request.budget.wall_s

    def _wall_s(self) -> float:
        return self._clock() - self._started_s

    def _note_best(self, trial: Trial) -> None:
        time_us = trial.time_us
        if time_us is None or trial.outcome not in (Outcome.MEASURED, Outcome.MODELED):
            return
        if self._best is None or (best_us := self._best.time_us) is None or time_us < best_us:
            self._best = trial

    def _report(self, trial: Trial) -> None:
        self._note_best(trial)
        if self._on_progress is None or self._search is None:
            return
        best, budget, counted = self._best, self._request.budget, self._search.counted
        wall_s = self._wall_s()
        left_s = (budget.trials - counted) * wall_s / counted if counted else None
        self._on_progress(
            Progress(
                phase="search",
                trial=trial,
                tried=len(self._search.trials),
                counted=counted,
                budget=budget.trials,
                in_flight=self._search.in_flight,
                best=best,
                best_us=best.time_us if best else None,
                ratio=vendor_ratio(best.measurement) if best else None,
                wall_s=wall_s,
                left_s=None if left_s is None else min(left_s, max(0.0, budget.wall_s - wall_s)),
            )
        )
