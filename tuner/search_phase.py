"""The search: trials by number, compiled ahead while the GPU evaluates, saved before the sampler hears of them.

Everything that decides what trial n is depends on trials with smaller numbers only, never on what finished first:

- its config depends on the trials up to n - D (see `tuner.search.sampler`) and on which configs were asked before it,
- whether its source is a duplicate depends on the sources of smaller numbers, so modules are taken up in number order,
- what it races against is the best of the trials up to n - D,
- whether it runs at all depends on how many of the smaller numbers count against the budget, and on what the sampler
  expects it to gain, which depends on what its config depends on.

So a study that is killed at any moment and resumed from the saved trials goes on as if nothing had happened.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_space.checks import rejection
from search_space.model import predict
from search_space.request import Mode, TuneRequest
from tuner.engine.base import (
    CompileJob,
    CompileReply,
    Engine,
    EngineError,
    EvaluateJob,
    EvaluateReply,
    ModuleChanged,
    WorkerLost,
)
from tuner.engine.incumbent import Incumbent, best_of
from tuner.records import Evidence, Outcome, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from tuner.recorder import Recorder
    from tuner.search.sampler import ConfigSampler


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchLimits:
    """When a search gives up or tries again.

    worker_retries: times a trial is tried again after its worker was lost
    failures_at_first: failed trials (beyond rejected ones) before the first success
    failures_per_trial: failed trials in all, as a multiple of the budget's trials
    numbers_per_trial: trials in all, rejected ones included, as a multiple of the budget's trials
    poll_s: seconds between looks at the clock and at whether to stop
    """

    worker_retries: int = 2
    failures_at_first: int = 60
    failures_per_trial: int = 10
    numbers_per_trial: int = 500
    poll_s: float = 0.1


@dataclass(slots=True)
class _Slot:
    """A trial in flight: its config, the future it waits for, and what is known so far.

    evaluating: what runs on the GPU, once the module is taken up
    lost: workers that went away under it
    rebuilding: the stored module was damaged, and the future builds it again
    """

    number: int
    config: GemmConfig
    future: Future[Any]
    kernel: CompiledKernel | None = None
    evaluating: EvaluateJob | None = None
    lost: int = 0
    rebuilding: bool = False


class SearchPhase:
    """One run of the search of one study."""

    def __init__(
        self,
        request: TuneRequest,
        engine: Engine,
        recorder: Recorder,
        sampler: ConfigSampler,
        *,
        starting: Sequence[GemmConfig],
        stored: Iterable[Trial],
        told_before: Iterable[Trial] = (),
        limits: SearchLimits,
        on_trial: Callable[[Trial], None],
    ) -> None:
        self._request, self._engine, self._recorder, self._sampler = request, engine, recorder, sampler
        self._profile = engine.device.profile
        self._limits = limits
        self._on_trial = on_trial
        self._starting = tuple({config.key: config for config in starting}.values())
        self._stored = {trial.number: trial for trial in stored}
        self._told_before = {(trial.number, trial.config.key): trial for trial in told_before}
        self.trials: dict[int, Trial] = {}
        self.counted = 0
        self._failures = 0
        self._next = 0  # the number to launch next
        self._taken_up = 0  # modules of smaller numbers were taken up
        self._slots: dict[int, _Slot] = {}
        self._source_owner: dict[str, int] = {}
        self._incumbent: Incumbent | None = None  # of the trials below _incumbent_next
        self._incumbent_next = 0
        self._exhausted = False
        self.last_gain: float | None = None  # expected of the trial that was not worth its while; it ended the search
        self._is_over = False  # the search: what is tried now is for the final
        for config in self._starting:
            sampler.claim(config)

    @property
    def in_flight(self) -> int:
        """Trials being compiled or evaluated."""
        return len(self._slots)

    def run(self, keep_going: Callable[[], bool]) -> bool:
        """Search until the budget is used, the space is exhausted, too much failed or, where the request wants it,
        another trial is not worth its while (True), or told to stop (False).

        Raises EngineError when the engine cannot work. Futures still in flight are dropped in any case.
        """
        try:
            self._adopt_stored()
            while keep_going():
                self._launch()
                if not self._slots:
                    return True
                wait(self._futures(), timeout=self._limits.poll_s, return_when=FIRST_COMPLETED)
                self._advance()
            return False
        finally:
            self._engine.drop(list(self._futures()))
            self.trials.update(self._stored)  # of numbers beyond a gap that there was no time to fill

    def try_also(self, config: GemmConfig, keep_going: Callable[[], bool]) -> str | None:
        """One more trial after the search, timed in full. Returns the key of the config that stands for this one.

        That is another one's where both generate the same source, and None where it was not tried or failed. The
        trials of the search are those that there would be without it. Raises EngineError.
        """
        tried = next((trial for trial in self.trials.values() if trial.config == config), None)
        if tried is None:
            number = max([self._next, *(known + 1 for known in self.trials)])
            self._slots.clear()
            self._next = self._taken_up = number
            self._is_over = True
            try:
                self._start(number, config)
                self._next += 1
                while self._slots and keep_going():
                    wait(self._futures(), timeout=self._limits.poll_s, return_when=FIRST_COMPLETED)
                    self._advance()
            finally:
                self._engine.drop(list(self._futures()))
            tried = self.trials.get(number)
        if tried is None:
            return None
        owner = self.trials.get(self._source_owner.get(tried.source_hash, tried.number), tried)
        return owner.config.key if owner.outcome is Outcome.MEASURED else None

    def _futures(self) -> Iterator[Future[Any]]:
        return (slot.future for slot in self._slots.values())

    # ------------------------------------------------------------------ launching

    def _adopt_stored(self) -> None:
        while (trial := self._stored.pop(self._next, None)) is not None:
            self._sampler.claim(trial.config)
            self._own_source(trial.number, trial.source_hash, trial.outcome)
            self._settle(trial)
            self._next += 1

    def _launch(self) -> None:
        while True:
            self._adopt_stored()
            if self._may_launch():
                config = self._config(self._next)
                if config is None:
                    self._exhausted = True
                    return
                if self._sampler.expects_less(self._request.stop_gain):
                    self.last_gain = self._sampler.gain
                    return
                self._start(self._next, config)
            else:
                return
            self._next += 1

    def _may_launch(self) -> bool:
        trials, flying = self._request.budget.trials, len(self._slots)
        if self._exhausted or self.last_gain is not None or not self._sampler.ready(self._next):
            return False
        # Each limit holds with the trials in flight taken the worse way, so that none depends on which finishes first.
        return (
            self.counted + flying < trials
            and self._failures + flying < max(self._limits.failures_per_trial * trials, self._limits.failures_at_first)
            and (self.counted > 0 or self._failures + flying < self._limits.failures_at_first)
            and self._next < self._limits.numbers_per_trial * trials
        )

    def _config(self, number: int) -> GemmConfig | None:
        if number < len(self._starting):
            return self._starting[number]
        return self._sampler.ask(number)

    def _start(self, number: int, config: GemmConfig) -> None:
        if reason := rejection(self._request.problem, config, self._profile):
            self._save(Trial(number=number, config=config, outcome=Outcome.REJECTED, reason=reason), None)
        elif reason := self._recorder.known_bad(config, None):
            self._save(Trial(number=number, config=config, outcome=Outcome.KNOWN_BAD, reason=reason), None)
        else:
            self._slots[number] = _Slot(number, config, self._compile(config))

    def _compile(self, config: GemmConfig) -> Future[CompileReply]:
        job = CompileJob(
            problem=self._request.problem, config=config, sm_count=self._profile.sm_count, urgent=self._is_over
        )
        return self._engine.compile(job)

    # ------------------------------------------------------------------ taking up modules, finishing trials

    def _advance(self) -> None:
        """Finish what is finished; then take up modules in number order as far as they are built."""
        for slot in sorted(self._slots.values(), key=lambda slot: slot.number):
            if slot.evaluating is not None and slot.future.done():
                self._rebuilt(slot) if slot.rebuilding else self._evaluated(slot)
        while self._taken_up < self._next:
            slot_or_none = self._slots.get(self._taken_up)
            if slot_or_none is not None and not self._take_up(slot_or_none):
                return
            self._taken_up += 1

    def _take_up(self, slot: _Slot) -> bool:
        """False while the module is being built."""
        if slot.evaluating is not None:
            return True
        if not slot.future.done():
            return False
        try:
            reply: CompileReply = slot.future.result()
        except WorkerLost as error:
            if slot.lost >= self._limits.worker_retries:
                self._fail(slot, Outcome.CRASHED, f"lost {slot.lost + 1} workers while compiling: {error}")
                return True
            slot.lost += 1
            slot.future = self._compile(slot.config)
            return False
        self._compiled(slot, reply)
        return True

    def _compiled(self, slot: _Slot, reply: CompileReply) -> None:
        slot.kernel = kernel = reply.kernel
        if reply.outcome is not None or kernel is None:
            outcome = reply.outcome or Outcome.COMPILE_FAILED
            self._own_source(slot.number, kernel.source_hash if kernel else "", outcome)
            self._fail(slot, outcome, reply.reason)
            return
        owner = self._source_owner.get(kernel.source_hash)
        if owner is not None and owner < slot.number:
            self._fail(slot, Outcome.REJECTED, f"generates the same source as trial {owner}, which stands for both")
            return
        self._source_owner[kernel.source_hash] = slot.number
        if reason := self._recorder.known_bad(slot.config, kernel):
            self._fail(slot, Outcome.KNOWN_BAD, reason)
        elif self._request.mode is Mode.MODEL:
            self._finish(slot, EvaluateReply(outcome=Outcome.MODELED, evidence=(Evidence.MODELED,)))
        else:
            slot.evaluating = self._evaluate_job(slot, kernel)
            slot.future = self._engine.evaluate(slot.evaluating)

    def _evaluate_job(self, slot: _Slot, kernel: CompiledKernel) -> EvaluateJob:
        incumbent = None if self._is_over else self._incumbent_of(slot.number)
        return EvaluateJob(
            problem=self._request.problem,
            config=slot.config,
            module_path=self._engine.module_path(kernel.sha256),
            module_sha256=kernel.sha256,
            source_hash=kernel.source_hash,
            protocol=self._request.protocol,
            phase="trial",
            seed=self._request.seed,
            incumbent=incumbent,
            urgent=self._is_over,
        )

    def _incumbent_of(self, number: int) -> Incumbent | None:
        """Best of the trials up to number - D that were measured to the end. Called with rising numbers."""
        while self._incumbent_next <= number - self._request.in_flight:
            trial = self.trials[self._incumbent_next]
            if trial.outcome is Outcome.MEASURED and trial.measurement is not None:
                self._incumbent = best_of((self._incumbent, Incumbent.of(trial.measurement)))
            self._incumbent_next += 1
        return self._incumbent

    def _evaluated(self, slot: _Slot) -> None:
        try:
            reply: EvaluateReply = slot.future.result()
        except ModuleChanged as error:
            self._build_again(slot, f"{error}, {slot.lost + 1} times: see to the disk, then resume the study", error)
            return
        except WorkerLost as error:
            slot.lost += 1
            if slot.lost <= self._limits.worker_retries:
                assert slot.evaluating is not None
                slot.future = self._engine.evaluate(slot.evaluating)
                return
            # Says nothing about the kernel, and by these words the store knows: db.queries.devices.LOST_WORKERS.
            reply = EvaluateReply(outcome=Outcome.CRASHED, reason=f"lost {slot.lost} workers on the GPU: {error}")
        self._finish(slot, reply)

    def _build_again(self, slot: _Slot, failure: str, cause: WorkerLost) -> None:
        """Build the module of a slot anew. Raises EngineError with `failure` when it was tried often enough."""
        slot.lost += 1
        if slot.lost > self._limits.worker_retries:
            raise EngineError(failure) from cause
        slot.future, slot.rebuilding = self._compile(slot.config), True

    def _rebuilt(self, slot: _Slot) -> None:
        """Evaluate the module that was built anew. Raises EngineError where it cannot be: the study goes on later."""
        slot.rebuilding = False
        try:
            reply: CompileReply = slot.future.result()
        except WorkerLost as error:
            self._build_again(slot, f"a stored module was damaged, and building it again failed: {error}", error)
            return
        assert slot.kernel is not None
        if reply.kernel is None or reply.outcome is not None or reply.kernel.source_hash != slot.kernel.source_hash:
            what = reply.reason or "the template now generates another source for its config"
            raise EngineError(f"a stored module was damaged, and building it again failed: {what}; resume the study")
        slot.kernel = reply.kernel
        assert slot.evaluating is not None  # with the incumbent of then
        path = self._engine.module_path(reply.kernel.sha256)
        slot.evaluating = replace(slot.evaluating, module_path=path, module_sha256=reply.kernel.sha256)
        slot.future = self._engine.evaluate(slot.evaluating)

    def _fail(self, slot: _Slot, outcome: Outcome, reason: str) -> None:
        self._finish(slot, EvaluateReply(outcome=outcome, reason=reason))

    def _finish(self, slot: _Slot, reply: EvaluateReply) -> None:
        del self._slots[slot.number]
        kernel = slot.kernel
        trial = Trial(
            number=slot.number,
            config=slot.config,
            outcome=reply.outcome,
            reason=reply.reason,
            measurement=reply.measurement,
            modeled_us=predict(self._request.problem, slot.config, self._profile).time_us,
            evidence=reply.evidence,
            source_hash=kernel.source_hash if kernel else "",
            artifact_sha256=kernel.sha256 if kernel else "",
            compile_s=kernel.compile_s if kernel else 0.0,
            gpu_s=reply.gpu_s,
            max_rel_error=reply.max_rel_error,
        )
        self._save(trial, kernel)

    def _save(self, trial: Trial, kernel: CompiledKernel | None) -> None:
        # Saved first: a crash after this line finds the trial in the store, one before it runs the trial again.
        self._recorder.save_trial(trial, kernel)
        self._settle(trial)
        self._on_trial(trial)

    def _settle(self, trial: Trial) -> None:
        self.trials[trial.number] = trial
        self.counted += trial.counts_against_budget
        self._failures += _is_failure(trial)
        # An equal study of before: told the same times, the sampler asks the same configs, and only the clock decides.
        told = self._told_before.get((trial.number, trial.config.key), trial)
        self._sampler.tell(trial.number, trial.config, told.time_us)

    def _own_source(self, number: int, source_hash: str, outcome: Outcome) -> None:
        if source_hash and outcome is not Outcome.REJECTED:
            self._source_owner.setdefault(source_hash, number)


def _is_failure(trial: Trial) -> bool:
    """Whether it cost a compile or GPU time and brought no time back."""
    return not trial.counts_against_budget and trial.outcome not in (Outcome.REJECTED, Outcome.KNOWN_BAD)
