"""Which config is best for a shape: tuned for it, tuned near it, or the heuristic's choice, in this order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING, Any

from api.errors import NoResult, ProblemError, RequestError
from api.services.freshness import Today, stale_reason
from api.services.problems import checked_problem
from api.services.results import time_us
from api.services.studies import problem_view
from api.services.targets import Target, Targets
from api.services.vendor import verdict
from api.views import BestBulk, BestMiss, BestView, ProblemView
from db import queries
from db.models import EVIDENCE_ORDER
from kernels.config import config_from_dict
from kernels.errors import ConfigError
from kernels.rules import violation
from search_space.model import rank
from search_space.starting import starting_configs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Row
    from sqlalchemy.orm import Session

    from api.schemas import BestBulkIn, BestOptions, BestQuery, BulkShape
    from api.settings import ApiSettings
    from db.models import Result
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

    Answer = Result | Row[*tuple[Any, ...]]  # with what `queries.best_exact_many` lists

PUBLISHED = "checked"  # without a wish for less evidence, only published revisions answer
MODELED = "modeled"
MAX_DEFAULTS = 256  # of one bulk question: each is a ranking by the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked about one shape.

    problem: the shape
    target: device or architecture
    evidence: least evidence wanted
    allow_default: whether modeled answers are welcome when nothing better is there
    revision: exactly this published revision
    """

    problem: GemmProblem
    target: Target
    evidence: str
    allow_default: bool
    revision: int | None = None


def answer(session: Session, query: BestQuery, settings: ApiSettings) -> BestView:
    """One shape. Raises UnknownTarget, ProblemError, and NoResult with the request that would tune it."""
    devices = queries.devices(session)
    target = Targets(devices).named(query.device)
    problem = checked_problem(m=query.m, n=query.n, k=query.k, dtype=query.dtype, layout=query.layout, target=target)
    asked = _question(problem, target, query, query.revision)
    exact = _exact(session, asked, asked.evidence)
    found = _answer(session, asked, exact, Today(devices), settings)
    if found is None:
        raise _nothing(session, asked) if asked.revision is None else _no_revision(session, asked)
    return found


def answer_many(session: Session, body: BestBulkIn, settings: ApiSettings) -> BestBulk:
    """Many shapes, each with an answer or with the reason why there is none. Raises UnknownTarget, RequestError.

    The answers are those of `answer`. Exact ones come hundreds a statement; nearest shapes are looked for one by one.
    """
    if body.allow_default and len(body.problems) > MAX_DEFAULTS:
        raise RequestError(
            f"problems: with allow_default at most {MAX_DEFAULTS} shapes at once, got {len(body.problems)}",
            hint="ask without allow_default first, then for the defaults of what is missing",
        )
    devices = queries.devices(session)
    target = Targets(devices).named(body.device)
    asked = [_asked(shape, body, target) for shape in body.problems]
    questions = {one: _question(one, target, body) for one in asked if not isinstance(one, BestMiss)}
    exact, today = _exact_many(session, questions, target), Today(devices)
    found = {
        problem: _answer(session, question, exact.get(problem), today, settings)
        for problem, question in questions.items()
    }
    untuned = [problem for problem, view in found.items() if view is None]
    return BestBulk(
        items=[one if isinstance(one, BestMiss) else found[one] or _untuned(one, target) for one in asked],
        submit=_submit(untuned, target) if untuned else None,
    )


def _asked(shape: BulkShape, body: BestBulkIn, target: Target) -> GemmProblem | BestMiss:
    """The problem, or why it is none."""
    dtype = shape.dtype or body.dtype
    try:
        return checked_problem(m=shape.m, n=shape.n, k=shape.k, dtype=dtype, layout=body.layout, target=target)
    except ProblemError as error:
        view = ProblemView(m=shape.m, n=shape.n, k=shape.k, dtype=dtype, layout=body.layout)
        return BestMiss(problem=view, error=type(error).__name__, detail=error.detail)


def _untuned(problem: GemmProblem, target: Target) -> BestMiss:
    detail = f"nothing is tuned for {problem} on {target}, or near it"
    return BestMiss(problem=_asked_view(problem), error=NoResult.__name__, detail=detail)


def _question(problem: GemmProblem, target: Target, options: BestOptions, revision: int | None = None) -> Question:
    return Question(
        problem=problem,
        target=target,
        evidence=options.evidence.value if options.evidence else PUBLISHED,
        allow_default=options.allow_default,
        revision=revision,
    )


def _answer(
    session: Session, asked: Question, exact: Answer | None, today: Today, settings: ApiSettings
) -> BestView | None:
    """The view of `exact`, or of what answers where there is none."""
    found = exact
    if found is None and asked.revision is None:
        found = _nearest(session, asked, settings.nearest_limit_log2)
        if found is None and asked.allow_default:
            found = _exact(session, asked, MODELED)
            if found is None:
                return _default(asked)
    return None if found is None else _view(asked, found, today)


def _exact(session: Session, asked: Question, evidence: str) -> Result | None:
    problem, target = asked.problem, asked.target
    return queries.best_exact(
        session,
        problem.m,
        problem.n,
        problem.k,
        problem.dtype.value,
        problem.layout.value,
        arch=target.arch.name,
        device_name=target.device,
        evidence=evidence,
        revision=asked.revision,
    )


def _exact_many(
    session: Session, questions: Mapping[GemmProblem, Question], target: Target
) -> dict[GemmProblem, Answer]:
    """`_exact` of all questions of one body, as far as there are results."""
    groups: dict[tuple[str, str, str], dict[queries.Shape, GemmProblem]] = defaultdict(dict)
    for problem, asked in questions.items():
        kind = problem.dtype.value, problem.layout.value, asked.evidence
        groups[kind][problem.m, problem.n, problem.k] = problem
    found: dict[GemmProblem, Answer] = {}
    for (dtype, layout, evidence), problems in groups.items():
        rows = queries.best_exact_many(
            session, problems, dtype, layout, arch=target.arch.name, device_name=target.device, evidence=evidence
        )
        found |= {problems[shape]: row for shape, row in rows.items()}
    return found


def _nearest(session: Session, asked: Question, limit_log2: float) -> Result | None:
    """The nearest tuned shape whose config is legal here; ties go to published results, then to more evidence."""
    problem, target = asked.problem, asked.target
    rows = queries.results_nearby(
        session,
        problem.n,
        problem.k,
        problem.dtype.value,
        problem.layout.value,
        arch=target.arch.name,
        device_name=target.device,
        m=problem.m,
        evidence=asked.evidence,
        factor=2.0**limit_log2,
    )
    near = [(sum(apart), row) for row in rows if max(apart := _apart(problem, row)) <= limit_log2]
    near.sort(key=lambda one: (one[0], one[1].revision is None, -one[1].evidence_level, one[1].m, one[1].n, one[1].id))
    # Loaded one by one: the first is nearly always legal.
    loaded = (queries.result(session, row.id) for _, row in near)
    return next((row for row in loaded if row is not None and _legal(problem, row, target)), None)


def _apart(problem: GemmProblem, row: Answer) -> tuple[float, float, float]:
    """How far the tuned shape is in M, N and K, in powers of two."""
    return abs(log2(problem.m / row.m)), abs(log2(problem.n / row.n)), abs(log2(problem.k / row.k))


def _legal(problem: GemmProblem, row: Result, target: Target) -> bool:
    sm_count = row.environment.get("sm_count") or target.sm_count
    try:
        return violation(problem, config_from_dict(row.arch, row.config), sm_count) is None
    except ConfigError:
        return False  # stored by a version with other knobs


@lru_cache(maxsize=4096)
def _fastest_start(problem: GemmProblem, profile: DeviceProfile) -> tuple[GemmConfig, float] | None:
    """The starting config that the model expects to be fastest, and its time in us. Kept: it takes about 30 ms."""
    ranked = rank(problem, starting_configs(problem, profile), profile)
    return (ranked[0][0], ranked[0][1].time_us) if ranked else None


def _default(asked: Question) -> BestView | None:
    """The heuristic's config with the model's estimate; None for a device without a profile."""
    profile = asked.target.profile
    choice = _fastest_start(asked.problem, profile) if profile else None
    if profile is None or choice is None:
        return None
    config, modeled_us = choice
    return BestView(
        match="default",
        problem=_asked_view(asked.problem),
        tuned_for=None,
        distance=0.0,
        arch=profile.arch.name,
        device=profile.name,
        config=config.to_dict(),
        evidence=[MODELED],
        environment=None,
        revision=None,
        median_us=modeled_us,
        tie_set=[],
        ratio={},
        verdict=verdict(None),
        stale=False,
        stale_reason="",
        artifact_sha256=None,
        result_id=None,
    )


def _view(asked: Question, row: Answer, today: Today) -> BestView:
    problem = asked.problem
    exact = (row.m, row.n, row.k) == (problem.m, problem.n, problem.k)
    apart = 0.0 if exact else sum(_apart(problem, row))
    changed = stale_reason(row.environment, today.environment(row.device_name))
    shown = _asked_view(problem)
    return BestView(
        match="exact" if exact else "nearest",
        problem=shown,
        tuned_for=shown if exact else problem_view(row),
        distance=round(apart, 4),
        arch=row.arch,
        device=row.device_name,
        config=row.config,
        evidence=row.evidence,
        environment=row.environment or None,
        revision=row.revision,
        median_us=time_us(row),
        tie_set=row.tie_set,
        ratio=row.ratio or {},
        verdict=verdict(row.ratio),
        stale=bool(changed),
        stale_reason=changed,
        # A module computes one shape: the one of another shape would be refused when it is called.
        artifact_sha256=(row.artifact_sha256 or None) if exact else None,
        result_id=row.id,
    )


def _asked_view(problem: GemmProblem) -> ProblemView:
    return ProblemView(m=problem.m, n=problem.n, k=problem.k, dtype=problem.dtype.value, layout=problem.layout.value)


def _no_revision(session: Session, asked: Question) -> NoResult:
    newest = queries.best_exact(
        session,
        asked.problem.m,
        asked.problem.n,
        asked.problem.k,
        asked.problem.dtype.value,
        asked.problem.layout.value,
        arch=asked.target.arch.name,
        device_name=asked.target.device,
    )
    there = f"the newest is {newest.revision}" if newest else "none is published"
    return NoResult(
        f"{asked.problem} on {asked.target} has no revision {asked.revision}: {there}",
        hint="leave revision out for the newest, or POST `submit` to /v1/jobs to tune the shape",
        extra={"submit": _submit([asked.problem], asked.target)},
    )


def _nothing(session: Session, asked: Question) -> NoResult:
    """Says what would answer: less evidence where there is a candidate, else the job that would tune the shape."""
    hint = "POST `submit` to /v1/jobs to tune it"
    weaker = _exact(session, asked, MODELED)
    if weaker is not None:
        level = EVIDENCE_ORDER[min(weaker.evidence_level, len(EVIDENCE_ORDER) - 2)]
        hint = f"a candidate with {', '.join(weaker.evidence)} is stored: ask with evidence={level}; or {hint}"
    elif not asked.allow_default:
        hint += "; allow_default=true gives the heuristic's modeled config"
    return NoResult(
        f"nothing is tuned for {asked.problem} on {asked.target}, or near it, with evidence {asked.evidence}",
        hint=hint,
        extra={"submit": _submit([asked.problem], asked.target)},
    )


def _submit(problems: Sequence[GemmProblem], target: Target) -> dict[str, Any]:
    """Body of POST /v1/jobs for these problems."""
    where = {"device": target.device} if target.device else {"arch": target.arch.name}
    return {"problems": [_asked_view(problem).model_dump() for problem in problems], **where}
