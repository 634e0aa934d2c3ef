"""Which config is best for a shape: tuned for it, tuned near it, or the heuristic's choice, in this order.

One question is a list of one: both routes go the same way, so they give the same answers. An answer is put together
from the text of the JSON columns as they are stored; `api.views.answers.BestView` describes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING, Any

import orjson

from api.errors import NoResult, ProblemError, RequestError, WithdrawnResult
from api.services.problems import checked_kind, checked_problem
from api.services.vendor import verdict
from db import queries
from db.models import BURST, EVIDENCE_ORDER
from kernels.config import config_from_dict
from kernels.errors import ConfigError
from kernels.problem import Dtype, GemmProblem, Layout
from kernels.rules import violation
from search_space.model import rank
from search_space.starting import starting_configs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sqlalchemy.orm import Session

    from api.schemas import BestBulkIn, BestOptions, BestQuery
    from api.services.kept import Kept, Known
    from api.services.targets import Target
    from db.database import Database
    from db.queries import Answer, Shape
    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile

    Json = dict[str, Any]

PUBLISHED = "checked"  # without a wish for less evidence, only published revisions answer
MODELED = "modeled"
MAX_DEFAULTS = 256  # of one bulk question: each is a ranking by the model
# The nearest result lies within the first of these distances (powers of two) that holds any, and a narrow search looks
# at few rows. The last one is the setting.
SEARCH_LOG2 = (0.125, 0.5)
UNLIMITED_LOG2 = 128.0  # more than three dimensions of 31 bits can be apart
NEAR_A_SHAPE = (8, 64)  # results looked at: at first, and where none of these is legal


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is asked beside the shapes.

    target: device or architecture
    which: results that may answer
    allow_default: whether modeled answers are welcome when nothing better is there
    nearest_limit_log2: how far a tuned shape may be in each dimension, in powers of two
    bad: configs that were found to be bad, by problem, architecture and device: near or by default they do not answer
    """

    target: Target
    which: queries.Which
    allow_default: bool
    nearest_limit_log2: float = 1.0
    bad: Mapping[tuple[str | int, ...], frozenset[GemmConfig]] = field(default_factory=dict)

    def bad_for(self, shape: Shape, arch: str, device: str) -> frozenset[GemmConfig]:
        """Configs that were found to be bad for this shape on a device."""
        return self.bad.get((*shape, self.which.dtype, self.which.layout, arch, device), frozenset())


def quick_answer(database: Database, query: BestQuery, known: Known) -> bytes | None:
    """The answer where a result is tuned for exactly this shape, else None. Raises UnknownTarget, ProblemError."""
    if query.revision is not None:
        return None
    wish = wish_of(query, query.dtype, known.targets.named(query.device), known)
    shape = query.m, query.n, query.k
    row = queries.best_exact_many(database, [shape], wish.which).get(shape)
    return None if row is None else orjson.dumps(answer_view(shape, row, known))


def looked_up(database: Database, query: BestQuery, kept: Kept, nearest_limit_log2: float) -> tuple[Known, bytes]:
    """The answer, and after which change it holds. Raises what `answer` raises."""
    known = kept.known(database)
    with database.read() as session:
        return known, answer(session, query, known, nearest_limit_log2)


def answer(session: Session, query: BestQuery, known: Known, nearest_limit_log2: float) -> bytes:
    """One shape, as the body. Raises UnknownTarget, ProblemError, WithdrawnResult, and NoResult with the request that
    would tune it.
    """
    wish = wish_of(query, query.dtype, known.targets.named(query.device), known, nearest_limit_log2)
    shape = query.m, query.n, query.k
    if query.revision is not None:
        return orjson.dumps(_revision(session, shape, wish, query.revision, known))
    (found,) = _answers(session, [shape], wish, known).values()
    if isinstance(found, ProblemError):
        raise found
    if found is None:
        raise _nothing(session, _problem(shape, wish), wish, _withdrawn_for(known, shape, wish))
    return orjson.dumps(found)


def answer_many(session: Session, body: BestBulkIn, known: Known, nearest_limit_log2: float) -> bytes:
    """Many shapes, each with an answer or with the reason why there is none. Raises UnknownTarget, RequestError."""
    if body.allow_default and len(body.problems) > MAX_DEFAULTS:
        raise RequestError(
            f"problems: with allow_default at most {MAX_DEFAULTS} shapes at once, got {len(body.problems)}",
            hint="ask without allow_default first, then for the defaults of what is missing",
        )
    target = known.targets.named(body.device)
    by_dtype: dict[str, list[Shape]] = defaultdict(list)
    asked = [(shape.dtype or body.dtype, (shape.m, shape.n, shape.k)) for shape in body.problems]
    for dtype, shape in asked:
        by_dtype[dtype].append(shape)
    found: dict[tuple[str, Shape], Json] = {}
    untuned: list[Json] = []
    for dtype, shapes in by_dtype.items():
        try:
            wish = wish_of(body, dtype, target, known, nearest_limit_log2)
        except ProblemError as error:
            found |= {(dtype, shape): _miss(_shape_view(shape, dtype, body.layout), error) for shape in shapes}
        else:
            answers, missing = _answers_or_misses(session, shapes, wish, known)
            found |= {(dtype, shape): one for shape, one in answers.items()}
            untuned += missing
    submit = submit_body(untuned, target, body.protocol) if untuned else None
    return orjson.dumps({"items": [found[one] for one in asked], "submit": submit})


def _answers_or_misses(
    session: Session, shapes: Sequence[Shape], wish: Wish, known: Known
) -> tuple[dict[Shape, Json], list[Json]]:
    """Answers and misses by shape, and the problems that a job could tune."""
    answers: dict[Shape, Json] = {}
    untuned = []
    for shape, found in _answers(session, shapes, wish, known).items():
        problem = _shape_view(shape, wish.which.dtype, wish.which.layout)
        if found is None:
            untuned.append(problem)
            text = f"nothing is tuned for {_problem(shape, wish)} on {wish.target}, or near it"
            answers[shape] = _miss(problem, NoResult(text))
        else:
            answers[shape] = _miss(problem, found) if isinstance(found, ProblemError) else found
    return answers, untuned


def _miss(problem: Json, error: ProblemError | NoResult) -> Json:
    return {"match": "none", "problem": problem, "error": type(error).__name__, "detail": error.detail}


def wish_of(options: BestOptions, dtype: str, target: Target, known: Known, nearest_limit_log2: float = 0.0) -> Wish:
    """Raises ProblemError for a dtype or layout that there is not."""
    kind, layout = checked_kind(dtype, options.layout)
    which = queries.Which(
        dtype=kind.value,
        layout=layout.value,
        arch=target.arch.name,
        device_name=target.device,
        protocol=options.protocol,
        evidence=options.evidence.value if options.evidence else PUBLISHED,
        environment=options.environment,
        stale=() if options.allow_stale or options.environment else known.stale,
    )
    return Wish(
        target=target,
        which=which,
        allow_default=options.allow_default,
        nearest_limit_log2=nearest_limit_log2,
        bad=known.bad,
    )


def _answers(
    session: Session, shapes: Iterable[Shape], wish: Wish, known: Known
) -> dict[Shape, Json | ProblemError | None]:
    """Each shape with its answer, with the rule that makes it impossible, or with None."""
    found: dict[Shape, Json | ProblemError | None] = dict.fromkeys(shapes)
    exact = queries.best_exact_many(session, found, wish.which)
    found |= {shape: answer_view(shape, row, known) for shape, row in exact.items()}
    problems: dict[Shape, GemmProblem] = {}
    for shape in [shape for shape, view in found.items() if view is None]:
        try:
            problems[shape] = _problem(shape, wish)
        except ProblemError as error:
            found[shape] = error
    near = _nearest(session, problems, wish)
    found |= {shape: answer_view(shape, row, known) for shape, row in near.items()}
    if wish.allow_default:
        left = [shape for shape in problems if shape not in near]
        modeled = queries.best_exact_many(session, left, replace(wish.which, evidence=MODELED)) if left else {}
        found |= {shape: answer_view(shape, row, known) for shape, row in modeled.items()}
        found |= {shape: _default(problems[shape], wish, known) for shape in left if shape not in modeled}
    return found


def _problem(shape: Shape, wish: Wish) -> GemmProblem:
    """Raises ProblemError."""
    m, n, k = shape
    return checked_problem(m=m, n=n, k=k, dtype=wish.which.dtype, layout=wish.which.layout, target=wish.target)


# ---------------------------------------------------------------------------------------------- nearest


def _nearest(session: Session, problems: Mapping[Shape, GemmProblem], wish: Wish) -> dict[Shape, Answer]:
    """The nearest tuned shape whose config is legal for the asked one, for each that has any within the limit."""
    limit_log2, (few, many) = wish.nearest_limit_log2, NEAR_A_SHAPE
    found: dict[Shape, Answer] = {}

    def search(shapes: Collection[Shape], step_log2: float, most: int, sure_log2: float) -> Collection[Shape]:
        """Add what is found within `sure_log2`; gives the shapes that had more results near than were looked at."""
        rows = queries.nearby_many(session, shapes, wish.which, factor=2.0**step_log2, limit=most) if shapes else {}
        ids = {shape: [row.id for row in near if row.nearness <= 2.0**sure_log2] for shape, near in rows.items()}
        found.update(_first_legal(session, ids, problems, wish))
        return [shape for shape, near in rows.items() if shape not in found and len(near) == most]

    for step_log2 in (step for step in SEARCH_LOG2 if step < limit_log2):
        # Beyond the step's own distance, a shape outside the box that was searched may be nearer.
        search([shape for shape in problems if shape not in found], step_log2, few, step_log2)
    rest = search([shape for shape in problems if shape not in found], limit_log2, few, UNLIMITED_LOG2)
    search(rest, limit_log2, many, UNLIMITED_LOG2)
    return found


def _first_legal(
    session: Session, ids: Mapping[Shape, list[str]], problems: Mapping[Shape, GemmProblem], wish: Wish
) -> dict[Shape, Answer]:
    """Of each shape's results the first that can run, and is not known to be bad there.

    Loaded in rounds: the first is nearly always legal.
    """
    found: dict[Shape, Answer] = {}
    waiting = {shape: iter(results) for shape, results in ids.items()}
    while waiting:
        tried = {shape: identity for shape, left in waiting.items() if (identity := next(left, None)) is not None}
        rows = queries.answers_by_id(session, tried.values())
        for shape, identity in tried.items():
            row = rows.get(identity)
            if row is not None and _legal(problems[shape], row, wish.target) and not is_bad(shape, row, wish):
                found[shape] = row
        waiting = {shape: waiting[shape] for shape in tried if shape not in found}
    return found


def is_bad(shape: Shape, row: Answer, wish: Wish) -> bool:
    """Whether the result's config was found to be bad for this shape on the result's device."""
    bad = wish.bad_for(shape, row.arch, row.device_name)
    return bool(bad) and stored_config(row.arch, row.config) in bad


def bad_m(row: Answer, wish: Wish) -> list[int]:
    """The M for which the result's config was found to be bad, rising."""
    return sorted({int(m) for m, *_ in wish.bad if is_bad((int(m), row.n, row.k), row, wish)})


def is_servable(shape: Shape, wish: Wish) -> bool:
    """Whether the shape can be tuned at all."""
    try:
        _problem(shape, wish)
    except ProblemError:
        return False
    return True


def legal_row(m: int, row: Answer, wish: Wish) -> bool:
    """Whether the result's config can run for another M."""
    which = wish.which
    problem = GemmProblem(m=m, n=row.n, k=row.k, dtype=Dtype(which.dtype), layout=Layout(which.layout))
    return _legal(problem, row, wish.target)


def _legal(problem: GemmProblem, row: Answer, target: Target) -> bool:
    config = stored_config(row.arch, row.config)
    return (
        config is not None and violation(problem, config, stored_sm_count(row.environment) or target.sm_count) is None
    )


@lru_cache(maxsize=4096)
def stored_config(arch: str, text: str) -> GemmConfig | None:
    """The config of a result; None for one that was stored by a version with other knobs."""
    try:
        return config_from_dict(arch, json.loads(text))
    except ConfigError:
        return None


@lru_cache(maxsize=1024)
def stored_sm_count(text: str) -> int | None:
    """SMs of the device that a result was measured on, from the text of its environment."""
    count = json.loads(text).get("sm_count")
    return count if isinstance(count, int) else None


# ---------------------------------------------------------------------------------------------- default


@lru_cache(maxsize=4096)
def _starts(problem: GemmProblem, profile: DeviceProfile) -> tuple[tuple[GemmConfig, float], ...]:
    """Starting configs with their modeled times in us, the fastest first. Kept: it takes about 30 ms."""
    ranked = rank(problem, starting_configs(problem, profile), profile)
    return tuple((config, estimate.time_us) for config, estimate in ranked)


def _default(problem: GemmProblem, wish: Wish, known: Known) -> Json | None:
    """The heuristic's config with the model's estimate; None for a device without a profile."""
    profile = wish.target.profile
    if profile is None:
        return None
    device = wish.target.device or profile.name
    bad = wish.bad_for((problem.m, problem.n, problem.k), profile.arch.name, device)
    choice = next(((config, time_us) for config, time_us in _starts(problem, profile) if config not in bad), None)
    if choice is None:
        return None
    config, modeled_us = choice
    return {
        "match": "default",
        "problem": _problem_view(problem),
        "tuned_for": None,
        "distance": 0.0,
        "arch": profile.arch.name,
        "device": profile.name,
        "config": config.to_dict(),
        "evidence": [MODELED],
        "protocol": None,
        "environment": None,
        "revision": None,
        "pinned": False,
        "median_us": modeled_us,
        "tie_set": [],
        "ratio": {},
        "verdict": verdict(None),
        "stale": False,
        "stale_reason": "",
        "withdrawn": _withdrawn_for(known, (problem.m, problem.n, problem.k), wish),
        "artifact_sha256": None,
        "result_id": None,
    }


# ---------------------------------------------------------------------------------------------- views


def answer_view(shape: Shape, row: Answer, known: Known) -> Json:
    """The answer that a stored result gives to a question about this shape."""
    tuned = row.m, row.n, row.k
    exact = tuned == shape
    changed = stale_text(row, known)
    asked = _shape_view(shape, row.dtype, row.layout)
    return {
        "match": "exact" if exact else "nearest",
        "problem": asked,
        "tuned_for": asked if exact else _shape_view(tuned, row.dtype, row.layout),
        "distance": 0.0 if exact else round(_distance(shape, tuned), 4),
        "arch": row.arch,
        "device": row.device_name,
        "config": orjson.Fragment(row.config),
        "evidence": orjson.Fragment(row.evidence),
        "protocol": row.protocol,
        "environment": orjson.Fragment(row.environment) if row.environment != "{}" else None,
        "revision": row.revision,
        "pinned": bool(row.pinned),
        "median_us": row.median_us if row.median_us is not None else row.modeled_us,
        "tie_set": orjson.Fragment(row.tie_set),
        "ratio": orjson.Fragment(row.ratio or "{}"),
        "verdict": _verdict(row.ratio or "{}"),
        "stale": bool(changed),
        "stale_reason": changed,
        "withdrawn": _withdrawn(known, shape, row) if known.withdrawn else [],
        # A module computes one shape: the one of another shape would be refused when it is called.
        "artifact_sha256": (row.artifact_sha256 or None) if exact else None,
        "result_id": row.id,
    }


def _withdrawn(known: Known, shape: Shape, row: Answer) -> list[Json]:
    """Earlier answers for this shape on the device of this one that were found to be bad, newest first."""
    place = queries.place_of(shape, row.dtype, row.layout, row.arch, row.device_name, row.protocol)
    return [asdict(one) for one in known.withdrawn.get(place, ())]


def _withdrawn_for(known: Known, shape: Shape, wish: Wish) -> list[Json]:
    """As `_withdrawn` for a question that nothing answers, on each device that it may be about."""
    which = wish.which
    return [
        {**asdict(one), "device": place[6]}
        for place, found in known.withdrawn.items()
        if place[:6] == (*shape, which.dtype, which.layout, which.arch) and place[7] == which.protocol
        if which.device_name in (None, place[6])
        for one in found
    ]


@lru_cache(maxsize=4096)
def _verdict(ratio: str) -> str:
    """From the text of the ratios."""
    return verdict(json.loads(ratio))


def stale_text(row: Answer, known: Known) -> str:
    """Why a result is stale; empty for one that is not."""
    if row.made_in not in known.stale:
        return ""
    # The key's own parts where the environment does not tell: a result is never stale without a reason.
    return _reason(known, row.device_name, row.environment) or f"made in another environment: {row.made_in}"


def _reason(known: Known, device_name: str, environment: str) -> str:
    return known.today.stale_reason(device_name, json.loads(environment))


def _distance(asked: Shape, tuned: Shape) -> float:
    """Sum over M, N and K of how far they are apart, in powers of two."""
    return sum(abs(log2(one / other)) for one, other in zip(asked, tuned, strict=True))


def _shape_view(shape: Shape, dtype: str, layout: str) -> Json:
    return {"m": shape[0], "n": shape[1], "k": shape[2], "dtype": dtype, "layout": layout}


def shapes_view(shapes: Iterable[Shape], which: queries.Which) -> list[Json]:
    """Shapes as a job names them."""
    return [_shape_view(shape, which.dtype, which.layout) for shape in shapes]


def _problem_view(problem: GemmProblem) -> Json:
    return _shape_view((problem.m, problem.n, problem.k), problem.dtype.value, problem.layout.value)


# ---------------------------------------------------------------------------------------------- revisions and misses


def _revision(session: Session, shape: Shape, wish: Wish, revision: int, known: Known) -> Json:
    """The revision that was asked for by its number, stale or not. Raises ProblemError, NoResult, WithdrawnResult."""
    problem, which = _problem(shape, wish), wish.which
    found = queries.best_exact(
        session,
        *shape,
        which.dtype,
        which.layout,
        arch=which.arch,
        device_name=which.device_name,
        protocol=which.protocol,
        revision=revision,
    )
    if found is not None and found.withdrawn_at is not None:
        raise WithdrawnResult(
            f"revision {revision} of {problem} on {found.device_name} was withdrawn: {found.withdrawn_reason}",
            hint="leave revision out for what answers today; do not use the kernel any more",
            extra={"withdrawn": _withdrawn_for(known, shape, wish)},
        )
    if found is not None:
        return answer_view(shape, queries.answers_by_id(session, [found.id])[found.id], known)
    newest = _best_row(session, problem, replace(which, stale=()))
    there = f"the newest is {newest.revision}" if newest else "none is published"
    raise NoResult(
        f"{problem} on {wish.target} has no revision {revision}: {there}",
        hint="leave revision out for the newest, or POST `submit` to /v1/jobs to tune the shape",
        extra={"submit": submit_body([_problem_view(problem)], wish.target, wish.which.protocol)},
    )


def _nothing(session: Session, problem: GemmProblem, wish: Wish, withdrawn: Sequence[Json]) -> NoResult:
    """Says what would answer: a stale result, less evidence, else the job that would tune the shape.

    withdrawn: what answered before
    """
    hint = "POST `submit` to /v1/jobs to tune it"
    asked = replace(wish.which, stale=(), environment=None)
    if wish.which.environment is not None and _best_row(session, problem, asked) is not None:
        hint = f"a result of another environment is stored: ask without environment; or {hint}"
    elif wish.which.stale and _best_row(session, problem, asked) is not None:
        hint = f"a stale result is stored: allow_stale=true gives it and says what changed; or {hint}"
    elif (weaker := _best_row(session, problem, replace(asked, evidence=MODELED))) is not None:
        level = EVIDENCE_ORDER[min(weaker.evidence_level, len(EVIDENCE_ORDER) - 2)]
        words = ", ".join(json.loads(weaker.evidence))
        hint = f"a candidate with {words} is stored: ask with evidence={level}; or {hint}"
    elif not wish.allow_default:
        hint += "; allow_default=true gives the heuristic's modeled config"
    return NoResult(
        f"nothing is tuned for {problem} on {wish.target}, or near it, with evidence {wish.which.evidence}"
        + "".join(f"; revision {one['revision']} was withdrawn: {one['reason']}" for one in withdrawn[:1]),
        hint=hint,
        extra={
            "submit": submit_body([_problem_view(problem)], wish.target, wish.which.protocol),
            "withdrawn": withdrawn,
        },
    )


def _best_row(session: Session, problem: GemmProblem, which: queries.Which) -> Answer | None:
    shape = problem.m, problem.n, problem.k
    return queries.best_exact_many(session, [shape], which).get(shape)


def submit_body(problems: Sequence[Json], target: Target, protocol: str = BURST) -> Json:
    """Body of POST /v1/jobs for these problems."""
    where = {"device": target.device} if target.device else {"arch": target.arch.name}
    how = {} if protocol == BURST else {"protocol": {"kind": protocol}}
    return {"problems": list(problems), **where, **how}
