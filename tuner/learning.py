"""What a study's search begins with: starting configs, and what was learned from the times of all studies.

Both are noted with the study before its first trial, so that it asks the same configs after a stop, and when an equal
request is run again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from db import queries
from db.models import Snapshot
from kernels.config import config_from_dict
from kernels.errors import ConfigError, ProblemError
from kernels.problem import Dtype, GemmProblem, Layout
from kernels.rules import violation
from search_space.features import features
from search_space.request import Mode
from search_space.samplers import LEARNED
from search_space.starting import Tuned, starting_configs
from tuner.search.cost_model import CostModel, Sample, is_available
from tuner.store import write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.orm import Session

    from db.database import Database
    from db.models import Study
    from kernels.config import GemmConfig
    from search_space.request import TuneRequest
    from tuner.engine.base import DeviceFacts

log = logging.getLogger(__name__)

MOST_ROWS = 4000  # times that are learned from, the newest ones: describing each takes 0.3 ms
MOST_WINNERS = 500
GROWTH = 1.2  # of the times since the last snapshot, before there is a new one


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchStart:
    """What a search begins with.

    starting: configs that are known to be good, or expected to be
    model: what was learned; None where there is too little to learn from, or nobody asked
    """

    starting: tuple[GemmConfig, ...]
    model: CostModel | None


def begin_search(
    database: Database, study: Study, request: TuneRequest, device: DeviceFacts, before: Study | None
) -> SearchStart:
    """What was noted with the study, else with an equal one of before, else what is known now; it is noted then.

    Raises DatabaseError.
    """
    noted = study.search or (before.search if before is not None else None)
    if noted is not None:
        start = _recalled(database, noted, request.arch)
        if study.search is None:
            write(database, lambda session: queries.note_search(session, study.id, noted))
        return start
    profile = device.profile
    with database.read() as session:
        winners = queries.current_winners(session, request.arch, limit=MOST_WINNERS)
    starting = starting_configs(request.problem, profile, tuned=list(_tuned(winners)))
    model = None
    if request.sampler == LEARNED and request.mode is Mode.MEASURE:
        if not is_available():
            log.warning("LightGBM does not load, so nothing is learned from other studies: try to import lightgbm")
        model = _newest_model(database, device)
    search = {
        "starting": [config.to_dict() for config in starting],
        "snapshot": model.sha256 if model is not None else None,
    }
    write(database, lambda session: queries.note_search(session, study.id, search))
    return SearchStart(starting=starting, model=model)


def _recalled(database: Database, noted: dict[str, Any], arch: str) -> SearchStart:
    starting = tuple(config_from_dict(arch, knobs) for knobs in noted["starting"])
    if noted["snapshot"] is None:
        return SearchStart(starting=starting, model=None)
    with database.read() as session:
        row = queries.snapshot(session, noted["snapshot"])
    model = _loaded(row) if row is not None else None
    if model is None:
        log.warning("what the study had learned (%s) cannot be read here: it goes on without", noted["snapshot"][:12])
    return SearchStart(starting=starting, model=model)


def _loaded(row: Snapshot) -> CostModel | None:
    if not is_available():
        return None
    try:
        return CostModel.load(row.data)
    except ValueError:  # of another version
        return None


def _newest_model(database: Database, device: DeviceFacts) -> CostModel | None:
    """The newest snapshot, or a new one where there are many more times by now."""
    with database.read() as session:
        row = queries.newest_snapshot(session, device.name)
        times = queries.timed_trials(session, device.name, limit=MOST_ROWS)
    if row is not None and len(times) < min(GROWTH * row.rows, MOST_ROWS) and (model := _loaded(row)) is not None:
        return model
    model = CostModel.train(list(_samples(times, device)))
    if model is not None:
        data = model.dump()
        write(database, partial(_keep, device=device, sha256=model.sha256, rows=len(times), data=data))
        log.info("learned from %d times of %d problems on %s", model.rows, model.groups, device.name)
    return model


def _keep(session: Session, device: DeviceFacts, sha256: str, rows: int, data: bytes) -> None:
    new = Snapshot(sha256=sha256, arch=device.profile.arch.name, device_name=device.name, rows=rows, data=data)
    queries.add_snapshot(session, new)


def _samples(rows: Sequence[Any], device: DeviceFacts) -> Iterator[Sample]:
    """In the order of problem and config: the same times give the same model in whatever order they came."""
    for row in sorted(rows, key=lambda row: (row.m, row.n, row.k, row.dtype, sorted(map(str, row.config.items())))):
        try:
            problem, config = _problem(row), config_from_dict(row.arch, row.config)
        except (ConfigError, ProblemError):  # of another version
            continue
        if violation(problem, config, device.profile.sm_count) is None:
            described = features(problem, config, device.profile)
            yield Sample(features=described, time_us=row.median_us, group=problem.key)


def _tuned(rows: Sequence[Any]) -> Iterator[Tuned]:
    for row in rows:
        try:
            config = config_from_dict(row.arch, row.config)
            yield Tuned(problem=_problem(row), config=config, device=row.device_name)
        except (ConfigError, ProblemError):  # of another version
            continue


def _problem(row: Any) -> GemmProblem:
    return GemmProblem(m=row.m, n=row.n, k=row.k, dtype=Dtype(row.dtype), layout=Layout(row.layout))
