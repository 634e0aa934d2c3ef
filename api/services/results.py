"""Stored results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from api.errors import Conflict, WithdrawnResult
from api.services.lookup import found
from api.services.studies import problem_view
from api.services.targets import Targets
from api.services.vendor import verdict
from api.views.results import MeasurementView, PinList, ResultList, ResultView, RevisionList
from db import queries
from db.errors import NotPublishable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Row
    from sqlalchemy.orm import Session

    from api.schemas import PinIn, ResultsQuery, RevisionsQuery
    from db.models import Measurement, Result


def listing(session: Session, query: ResultsQuery) -> ResultList:
    """One page, newest first. Raises UnknownTarget."""
    arch, device_name = target_filter(query.device, Targets(queries.devices(session)))
    rows = queries.results(
        session,
        arch=arch,
        device_name=device_name,
        study_id=query.study,
        published=query.published,
        environment=query.environment,
        limit=query.limit + 1,
        after=query.after,
    )
    page = rows[: query.limit]
    return ResultList(items=result_views(session, page), next=page[-1].id if len(rows) > query.limit else None)


def target_filter(device: str | None, targets: Targets) -> tuple[str | None, str | None]:
    """Architecture and device name that a listing is limited to. Raises UnknownTarget."""
    if device is None:
        return None, None
    target = targets.named(device)
    return target.arch.name, target.device


def show(session: Session, result_id: str) -> ResultView:
    """Raises NotFound."""
    return result_views(session, [found_result(session, result_id)])[0]


def revisions(session: Session, result_id: str, query: RevisionsQuery) -> RevisionList:
    """One page of what was published for the problem and device of a result. Raises NotFound."""
    found_result(session, result_id)
    rows = queries.revisions(session, result_id, limit=query.limit + 1, below=query.after)
    page = rows[: query.limit]
    return RevisionList(items=result_views(session, page), next=page[-1].revision if len(rows) > query.limit else None)


def pin(session: Session, body: PinIn) -> ResultView:
    """Pin a revision, or let it go. Raises NotFound, WithdrawnResult, Conflict for a candidate."""
    result = found_result(session, body.result, field="result: ")
    if body.pinned:
        refuse_withdrawn(result, field="result: ")
    try:
        return result_views(session, [queries.pin_result(session, result.id, pinned=body.pinned)])[0]
    except NotPublishable as error:
        hint = "verified and checked results are published; GET /v1/results?published=true lists them"
        raise Conflict(f"result: {error}", hint=hint) from error


def pins(session: Session) -> PinList:
    """All pins, by device and problem."""
    return PinList(items=result_views(session, queries.pinned_results(session)))


def found_result(session: Session, result_id: str, *, field: str = "") -> Result:
    """Raises NotFound; `field` says where the id stood when it came in a body."""
    return found(queries.result, session, result_id, "result", hint="GET /v1/results lists the results", field=field)


def refuse_withdrawn(result: Result, *, field: str = "") -> None:
    """Raises WithdrawnResult for a result whose kernel was found to be bad."""
    if result.withdrawn_at is not None:
        raise WithdrawnResult(
            f"{field}result {result.id} was withdrawn: {result.withdrawn_reason}",
            hint="GET /v1/best gives what answers for its problem today; do not use the kernel any more",
        )


def result_views(session: Session, results: Sequence[Result]) -> list[ResultView]:
    """Results as the client sees them, each with its raw samples and the coverage of its study."""
    samples = queries.measurements_of_results(session, results)
    coverage = queries.coverage_of_studies(session, {one.study_id for one in results if one.study_id})
    return [_view(one, samples.get(one.id), coverage.get(one.study_id or "")) for one in results]


def _view(result: Result, samples: Measurement | None, coverage: dict[str, Any] | None) -> ResultView:
    return ResultView(
        id=result.id,
        problem=problem_view(result),
        arch=result.arch,
        device=result.device_name,
        study_id=result.study_id,
        trial_number=result.trial_number,
        revision=result.revision,
        pinned=result.pinned,
        current=result.current,
        config=result.config,
        evidence=result.evidence,
        protocol=result.protocol,
        environment=result.environment or None,
        environment_key=result.environment_key or None,
        median_us=time_us(result),
        interval_us=result.interval_us,
        baselines_us=result.baselines_us or {},
        ratio=result.ratio or {},
        verdict=verdict(result.ratio),
        noise=result.noise,
        aa_ratio=result.aa_ratio,
        measurement=_measurement(samples) if samples else None,
        coverage=coverage,
        tie_set=result.tie_set,
        checks=result.checks,
        tflops=result.tflops,
        max_rel_error=result.max_rel_error,
        trials=result.trials,
        artifact_sha256=result.artifact_sha256 or None,
        source_hash=result.source_hash or None,
        created_at=result.created_at,
        published_at=result.published_at,
        withdrawn_at=result.withdrawn_at,
        withdrawn_reason=result.withdrawn_reason or "",
    )


def _measurement(samples: Measurement) -> MeasurementView:
    return MeasurementView(
        phase="final" if samples.phase == "final" else "trial",
        samples_us=samples.samples_us,
        baselines_us=samples.baselines_us,
        discarded=samples.discarded,
        protocol=samples.protocol,
        states=samples.states or [],
        energy_mj=samples.energy_mj or {},
    )


def time_us(result: Result | Row[*tuple[Any, ...]]) -> float | None:
    """The measured median where there is one, else the model's estimate; `evidence` says which, in microseconds."""
    return result.median_us if result.median_us is not None else result.modeled_us
