"""Recording landscapes: all cores compile, the GPU verifies and times whatever is built, each outcome is kept at once.

Compiling is what takes long (a GPU needs a tenth of a second for a hopeless candidate), so the compile processes never
wait: they work ahead into the next landscape while the GPU finishes this one. Candidates race against the best so far,
as in a study. A recording may be cut at any moment and go on later, on another machine or another card of the kind.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from search_space.request import MeasureProtocol
from search_space.starting import starting_configs
from tuner import landscape
from tuner.engine.base import CompileJob, CompileReply, EvaluateJob, EvaluateReply, FinalJob, FinalReply, WorkerLost
from tuner.engine.incumbent import Incumbent
from tuner.landscape import Landscape, LandscapeError, Row
from tuner.landscape_space import BoundedSpace, bounded_space, measuring_order
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem
    from tuner.engine.base import Engine
    from tuner.records import Measurement

    Json = dict[str, Any]

GPU_QUEUE = 3  # evaluations handed over: the GPU's thread must find the next one when it is done
RETRIES = 2  # of a job whose worker was lost
FINALISTS = 8
PROGRESS_S = 10.0
POLL_S = 0.5
DRIFT = 1.02  # of a card's absolute times from one session to another


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """How a recording is run.

    ahead: compiles asked for ahead of the GPU
    wall_s: seconds after which nothing new is begun
    seed: of the input data
    """

    ahead: int = 64
    wall_s: float = 540.0
    seed: int = 0


@dataclass(slots=True)
class _Work:
    """One config on its way.

    book: landscape it belongs to
    index: of the config
    building, running: what is being waited for
    reply: of the compiler
    lost: workers that went away under it
    """

    book: Book
    index: int
    building: Future[CompileReply]
    running: Future[EvaluateReply] | None = None
    reply: CompileReply | None = None
    lost: int = 0


class Book:
    """The file of one landscape while it is being recorded."""

    def __init__(self, path: Path, session: str) -> None:
        """`path` is the plain file, which has its first line already."""
        self.path, self.session = path, session
        self.content: Landscape = landscape.read(path)
        self.rows: dict[int, Row] = dict(self.content.rows)
        self.sources = {row.source_hash: index for index, row in self.rows.items() if row.samples_us}
        self._environments = set(self.content.environments)
        self._file: TextIO | None = None

    @property
    def problem(self) -> GemmProblem:
        """What the configs compute."""
        return self.content.problem

    @property
    def best_us(self) -> float | None:
        """What candidates race against: the best time of this session; at first, that of others and a margin."""
        times: dict[bool, list[float]] = {True: [], False: []}
        for row in self.rows.values():
            if row.outcome is Outcome.MEASURED:
                times[row.session == self.session].append(median(row.samples_us))
        if times[True]:
            return min(times[True])
        return min(times[False]) * DRIFT if times[False] else None

    def queue(self) -> list[int]:
        """Configs without a row, in the order in which they are measured."""
        content = self.content
        at = {config: index for index, config in enumerate(content.configs)}
        space = _space_of(content)
        return [at[config] for config in measuring_order(space, content.problem) if at[config] not in self.rows]

    def add(self, row: Row, measurement: Measurement | None) -> None:
        """Write a row down."""
        environment = self._environment(measurement)
        row = replace(row, session=self.session, environment=environment)
        self.rows[row.index] = row
        if row.samples_us:
            self.sources.setdefault(row.source_hash, row.index)
        self._write(row.to_dict())

    def add_final(self, measured: Mapping[int, Measurement]) -> None:
        """Write a final down."""
        rows = [
            Row(
                index=index,
                outcome=Outcome.MEASURED,
                samples_us=measurement.samples_us,
                baselines_us=measurement.baselines_us,
                source_hash=self.rows[index].source_hash,
                environment=self._environment(measurement),
                session=self.session,
            )
            for index, measurement in measured.items()
        ]
        self._write({"final": [row.to_dict() for row in rows]})

    def close(self) -> Path:
        """Compress the file. Returns where it lies."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return landscape.pack(self.path)

    def _environment(self, measurement: Measurement | None) -> str:
        if measurement is None:
            return ""
        identity, line = landscape.environment_line(measurement.environment.to_dict())
        if identity not in self._environments:
            self._environments.add(identity)
            self._write(line)
        return identity

    def _write(self, line: Json) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(line, sort_keys=True) + "\n")
        self._file.flush()


def _space_of(content: Landscape) -> BoundedSpace:
    """The space that a file says, which is not worked out anew: the rules may have changed since."""
    return BoundedSpace(
        configs=content.configs,
        known=tuple(content.configs[index] for index in content.known),
        grid=content.space["grid"],
        grid_size=content.space["grid_size"],
    )


def open_book(
    folder: Path,
    problem: GemmProblem,
    engine: Engine,
    winners: Sequence[GemmConfig],
    *,
    session: str,
    seed: int = 0,
    synthetic: str = "",
) -> Book:
    """The file of a problem, begun if there is none. Raises LandscapeError for one of another device or protocol."""
    profile, protocol = engine.device.profile, MeasureProtocol.named("burst")
    stem = folder / landscape.file_name(problem, profile.name)
    found = landscape.path_of(stem)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        space = bounded_space(problem, profile, [*winners, *starting_configs(problem, profile)])
        found = stem.with_name(stem.name + landscape.PLAIN)
        first = landscape.header(problem, profile, protocol, space, seed=seed, synthetic=synthetic)
        found.write_text(json.dumps(first, sort_keys=True) + "\n", encoding="utf-8")
    elif found.name.endswith(landscape.PACKED):
        found = landscape.unpack(found)
    _mend(found)
    book = Book(found, session)
    recorded = book.content.profile
    if (recorded.name, recorded.sm_count, book.content.protocol) != (profile.name, profile.sm_count, protocol):
        raise LandscapeError(f"{found} was recorded on another device or under another protocol: name another folder")
    if absent := [config for config in winners if config not in book.content.configs]:
        with found.open("a", encoding="utf-8") as file:
            file.write(json.dumps(landscape.added_line(absent), sort_keys=True) + "\n")
        book = Book(found, session)
    return book


def _mend(path: Path) -> None:
    """Cut off a last line that was being written when the recording was killed."""
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        path.write_bytes(complete)


@dataclass(slots=True)
class _Final:
    """The fastest of a complete landscape, to be timed again in shared rounds.

    book: the landscape
    building: by index of the config; built anew, for the modules of an earlier session are gone
    running: what the GPU was asked
    sources: index by source hash
    """

    book: Book
    building: dict[int, Future[CompileReply]]
    running: Future[FinalReply] | None = None
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def futures(self) -> list[Future[Any]]:
        """What is being waited for."""
        return [self.running] if self.running is not None else list(self.building.values())


class Recording:
    """One run over several landscapes."""

    def __init__(
        self,
        engine: Engine,
        books: Sequence[Book],
        options: RecordOptions,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._books, self._options, self._say, self._clock = engine, books, options, say, clock
        self._began_s = self._said_s = clock()
        self._todo = deque((book, index) for book in books for index in book.queue())
        self._works: list[_Work] = []
        self._finals: list[_Final] = []
        self._done = 0
        self._busy_s = 0.0

    def run(self) -> bool:
        """Record until all is done (True) or the time is over (False). Raises EngineError when nothing works."""
        try:
            for book in self._books:
                self._settle(book)
            while self._todo or self._works or self._finals:
                if self._clock() - self._began_s >= self._options.wall_s:
                    return False
                self._advance()
            return True
        finally:
            self._engine.drop(self._waiting())
            self._progress(always=True)

    def _waiting(self) -> list[Future[Any]]:
        """Futures that something is awaited from."""
        works = [work.running or work.building for work in self._works if work.running or not work.reply]
        return [*works, *(future for final in self._finals for future in final.futures)]

    def _advance(self) -> None:
        while self._todo and len(self._works) < self._options.ahead:
            book, index = self._todo.popleft()
            self._works.append(_Work(book, index, self._compile(book, index)))
        self._collect()
        self._collect_finals()
        self._hand_over()
        if waiting := self._waiting():
            wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
        self._progress()

    def _compile(self, book: Book, index: int) -> Future[CompileReply]:
        sm_count = self._engine.device.profile.sm_count
        return self._engine.compile(
            CompileJob(problem=book.problem, config=book.content.configs[index], sm_count=sm_count)
        )

    def _collect(self) -> None:
        """Take up what is finished."""
        for work in list(self._works):
            if work.running is not None and work.running.done():
                self._evaluated(work, work.running)
            elif work.reply is None and work.building.done():
                self._built(work)

    def _built(self, work: _Work) -> None:
        try:
            reply = work.building.result()
        except WorkerLost as error:
            if self._may_retry(work, error):
                work.building = self._compile(work.book, work.index)
            return
        if reply.outcome is not None or reply.kernel is None:
            self._finish(
                work, reply, EvaluateReply(outcome=reply.outcome or Outcome.COMPILE_FAILED, reason=reply.reason)
            )
            return
        owner = work.book.sources.setdefault(reply.kernel.source_hash, work.index)
        if owner != work.index:
            twin = work.book.content.configs[owner].key
            same = EvaluateReply(outcome=Outcome.REJECTED, reason=f"generates the same source as {twin}")
            self._finish(work, reply, same)
            return
        work.reply = reply

    def _hand_over(self) -> None:
        """Give the GPU what is built, first asked first."""
        flying = sum(work.running is not None for work in self._works)
        for work in self._works:
            if flying >= GPU_QUEUE:
                return
            if work.running is None and work.reply is not None:
                work.running = self._engine.evaluate(self._job(work.book, work.index, work.reply, "trial"))
                flying += 1

    def _job(self, book: Book, index: int, reply: CompileReply, phase: Any) -> EvaluateJob:
        kernel = reply.kernel
        assert kernel is not None
        return EvaluateJob(
            problem=book.problem,
            config=book.content.configs[index],
            module_path=self._engine.module_path(kernel.sha256),
            module_sha256=kernel.sha256,
            source_hash=kernel.source_hash,
            protocol=book.content.protocol,
            phase=phase,
            seed=self._options.seed,
            incumbent=None if book.best_us is None else Incumbent(time_us=book.best_us),
        )

    def _evaluated(self, work: _Work, future: Future[EvaluateReply]) -> None:
        try:
            reply = future.result()
        except WorkerLost as error:
            if self._may_retry(work, error):
                work.running = None
            return
        assert work.reply is not None
        self._busy_s += reply.gpu_s
        self._finish(work, work.reply, reply)

    def _may_retry(self, work: _Work, error: WorkerLost) -> bool:
        work.lost += 1
        if work.lost <= RETRIES:
            return True
        lost = EvaluateReply(outcome=Outcome.CRASHED, reason=f"lost {work.lost} workers: {error}")
        self._finish(work, work.reply or CompileReply(kernel=None), lost)
        return False

    def _finish(self, work: _Work, built: CompileReply, reply: EvaluateReply) -> None:
        self._works.remove(work)
        self._done += 1
        kernel, measurement = built.kernel, reply.measurement
        row = Row(
            index=work.index,
            outcome=reply.outcome,
            reason=reply.reason,
            samples_us=measurement.samples_us if measurement else (),
            baselines_us=measurement.baselines_us if measurement else {},
            source_hash=kernel.source_hash if kernel else "",
            registers=kernel.registers if kernel else 0,
            compile_s=kernel.compile_s if kernel else 0.0,
            gpu_s=reply.gpu_s,
            max_rel_error=reply.max_rel_error,
        )
        work.book.add(row, measurement)
        self._settle(work.book)

    # ------------------------------------------------------------------ the fastest, once more

    def _settle(self, book: Book) -> None:
        """Have the fastest timed again once every config has its row."""
        if len(book.rows) < len(book.content.configs) or book.content.finals:
            return
        timed = sorted((median(row.samples_us), index) for index, row in book.rows.items() if row.samples_us)
        building = {index: self._compile(book, index) for _, index in timed[:FINALISTS]}
        if building:
            self._finals.append(_Final(book, building))

    def _collect_finals(self) -> None:
        for final in list(self._finals):
            if not all(future.done() for future in final.futures):
                continue
            try:
                if final.running is None:
                    self._begin_final(final)
                else:
                    self._write_final(final, final.running.result())
            except WorkerLost as error:
                self._say(f"{final.book.problem}: the fastest were not timed again: {error}")
                self._finals.remove(final)

    def _begin_final(self, final: _Final) -> None:
        replies = {index: future.result() for index, future in final.building.items()}
        jobs = [
            self._job(final.book, index, reply, "final")
            for index, reply in replies.items()
            if reply.outcome is None and reply.kernel is not None
        ]
        final.sources = {reply.kernel.source_hash: index for index, reply in replies.items() if reply.kernel}
        content = final.book.content
        job = FinalJob(
            problem=content.problem, candidates=tuple(jobs), protocol=content.protocol, seed=self._options.seed
        )
        final.running = self._engine.final(job)

    def _write_final(self, final: _Final, reply: FinalReply) -> None:
        self._finals.remove(final)
        self._busy_s += reply.gpu_s
        measured = {final.sources[source]: found for source, found in reply.measurements.items()}
        if measured and not reply.disturbed:
            final.book.add_final(measured)
        self._say(f"{final.book.problem}: {len(measured)} of the fastest timed again {reply.disturbed}".rstrip())

    # ------------------------------------------------------------------ progress

    def _progress(self, *, always: bool = False) -> None:
        now_s = self._clock()
        if not always and now_s - self._said_s < PROGRESS_S:
            return
        self._said_s = now_s
        wall_s = now_s - self._began_s
        left = len(self._todo) + len(self._works)
        built = sum(work.reply is not None for work in self._works)
        rate = self._done / wall_s if wall_s else 0.0
        book = self._works[0].book if self._works else self._books[-1]
        best = f", best {book.best_us:.2f} us" if book.best_us is not None else ""
        self._say(
            f"{wall_s:.0f} s: {self._done} done ({rate:.2f}/s), {left} left, {built} built and waiting, "
            f"GPU busy {self._busy_s / wall_s if wall_s else 0:.0%}; {book.problem} {len(book.rows)}"
            f"/{len(book.content.configs)}{best}"
        )


def record(
    engine: Engine,
    folder: Path,
    wanted: Iterable[tuple[GemmProblem, Sequence[GemmConfig]]],
    options: RecordOptions,
    *,
    say: Callable[[str], None],
    synthetic: str = "",
) -> list[Path]:
    """Record landscapes in this order; each problem comes with its published winners. Returns the files.

    synthetic: what made the times up, where the engine has no real device

    Raises LandscapeError for a file that is another landscape, EngineError when nothing works here.
    """
    session = uuid.uuid4().hex[:12]
    books = [
        open_book(folder, problem, engine, winners, session=session, seed=options.seed, synthetic=synthetic)
        for problem, winners in wanted
    ]
    recording = Recording(engine, books, options, say=say)
    try:
        recording.run()
    finally:
        files = [book.close() for book in books]
    return files
