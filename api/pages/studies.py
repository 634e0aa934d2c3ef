"""One study: its trials with filters and reasons, how it got better, what each knob did, what was covered."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.deps import Db, StudyId
from api.pages.jobs import curve
from api.pages.replies import page
from api.pages.route import PageRoute
from api.pages.words import ratio_of
from api.schemas import QueryInt, Strict
from api.services import studies
from api.views.studies import StudyView, TrialView
from db import queries
from db.models import OUTCOMES
from kernels.problem import MAX_EXTENT
from search_space.knob_effects import FEWEST_TRIALS, effects, pair

router = APIRouter(route_class=PageRoute)

TRIALS_A_PAGE = 100
MOST_AT_ONCE = 5000  # trials whose curve is part of the page; that of 50,000 takes 0.1 s of the database
MOST_TRIALS_READ = 2000  # for the effects of the knobs: reading every config of 50,000 trials takes a second
Number = Annotated[int, QueryInt, Field(ge=0, le=MAX_EXTENT)]


class StudyQuery(Strict):
    """What a study's table shows."""

    outcome: Annotated[str, Field(pattern="^[A-Z_]{0,32}$")] | None = None
    """Only trials with this outcome."""
    reason: Annotated[str, Field(max_length=100)] | None = None
    """Only trials whose reason holds this text."""
    order: Literal["number", "fastest"] = "number"
    """By number, or the fastest first."""
    after: Number | None = None
    """Last trial of the page before."""
    before: Number | None = None
    """First trial of the page after."""


@router.get("/studies/{study_id}")
def show(study_id: StudyId, query: Annotated[StudyQuery, Query()], db: Db) -> Response:
    """The whole page."""
    with db.read() as session:
        study = studies.show(session, study_id)
        rows = queries.trials_page(
            session,
            study_id,
            mode=study.mode,
            order=query.order,
            outcome=query.outcome or None,
            reason=query.reason or None,
            limit=TRIALS_A_PAGE,
            after=query.after,
            before=query.before if query.after is None else None,
        )
        trials, earlier, later = _turned([studies.trial_view(row) for row in rows], query)
        ratio, total = _ratio(study), sum(study.counts.values())
        return page(
            "study.html",
            study=study,
            query=query,
            trials=trials,
            earlier=earlier,
            later=later,
            filters={"outcome": query.outcome, "reason": query.reason, "order": query.order},
            curve=curve(session, study_id, study.mode, ratio) if total <= MOST_AT_ONCE else None,
            most_at_once=MOST_AT_ONCE,
            ratio=ratio,
            common=(common := _common(trials)),
            own=lambda config: {name: value for name, value in config.items() if name not in common},
            result=queries.studies_with_results(session, [study_id]).get(study_id),
            total=total,
            outcomes=[name for name in OUTCOMES if study.counts.get(name)],
        )


@router.get("/studies/{study_id}/curve")
def study_curve(study_id: StudyId, db: Db) -> Response:
    """The best time so far, for a study so long that its page does not wait for it."""
    with db.read() as session:
        study = studies.show(session, study_id)
        return page("study_curve.html", curve=curve(session, study_id, study.mode, _ratio(study)))


@router.get("/studies/{study_id}/knobs")
def knobs(study_id: StudyId, db: Db) -> Response:
    """The part about the knobs: asked for after the page is there, as it reads many configs."""
    with db.read() as session:
        study = studies.found_study(session, study_id)
        rows = queries.timed_configs(session, study_id, study.mode, most=MOST_TRIALS_READ)
    timed = [(config, time_us) for config, time_us in rows if time_us]
    found = effects(timed)
    return page(
        "study_knobs.html",
        effects=found,
        pair=pair(timed, found[0].name, found[1].name) if len(found) > 1 else None,
        read=len(timed),
        fewest=FEWEST_TRIALS,
    )


def _ratio(study: StudyView) -> float | None:
    return ratio_of(study.best.ratio) if study.best else None


def _common(trials: list[TrialView]) -> dict[str, Any]:
    """Knobs that have one value in all rows: said once above them. Empty for one row, which shows its whole config."""
    if len(trials) < 2:
        return {}
    first, rest = trials[0].config, trials[1:]
    return {name: value for name, value in first.items() if all(one.config.get(name) == value for one in rest)}


def _turned(found: list[TrialView], query: StudyQuery) -> tuple[list[TrialView], int | None, int | None]:
    """The rows in reading order, and the numbers that lead to the page before and after."""
    more, rows = len(found) > TRIALS_A_PAGE, found[:TRIALS_A_PAGE]
    if query.before is not None and query.after is None:
        rows.reverse()
        has_earlier, has_later = more, True
    else:
        has_earlier, has_later = query.after is not None, more
    if not rows:
        return rows, None, None
    return rows, rows[0].number if has_earlier else None, rows[-1].number if has_later else None
