"""Every question that is asked of the store, as a named function.

Each takes a session of `Database.read()` or `Database.write()` first and returns models. None commits: the block that
opened the session does. Functions that change something need a `write()` session.
"""

from __future__ import annotations

from db.queries.best import Shape, best_exact, best_exact_many, results_nearby
from db.queries.devices import add_artifact, artifact, device, devices, known_bad, upsert_device
from db.queries.exports import claim_next_export, create_export, export, finish_export
from db.queries.jobs import (
    NewStudy,
    cancel_job,
    create_job,
    job,
    job_by_idempotency_key,
    job_studies,
    jobs,
    jobs_of_study,
    refresh_job_state,
    studies_of_job,
    study_summaries,
)
from db.queries.results import (
    NewResult,
    add_result,
    publish_result,
    result,
    results,
    results_exact,
    results_for_nk,
    revisions,
)
from db.queries.studies import (
    FinishedStudy,
    claim_next_study,
    coverage_of_studies,
    finish_study,
    finished_study,
    newest_finished,
    record_environment,
    requeue_running,
    running_studies,
    studies,
    study,
)
from db.queries.trials import (
    NewMeasurement,
    fail_trial,
    measurements_of_results,
    measurements_of_study,
    replace_artifact,
    save_measurement,
    save_trial,
    trial,
    trials_of_study,
)

__all__ = [
    "FinishedStudy",
    "NewMeasurement",
    "NewResult",
    "NewStudy",
    "Shape",
    "add_artifact",
    "add_result",
    "artifact",
    "best_exact",
    "best_exact_many",
    "cancel_job",
    "claim_next_export",
    "claim_next_study",
    "coverage_of_studies",
    "create_export",
    "create_job",
    "device",
    "devices",
    "export",
    "fail_trial",
    "finish_export",
    "finish_study",
    "finished_study",
    "job",
    "job_by_idempotency_key",
    "job_studies",
    "jobs",
    "jobs_of_study",
    "known_bad",
    "measurements_of_results",
    "measurements_of_study",
    "newest_finished",
    "publish_result",
    "record_environment",
    "refresh_job_state",
    "replace_artifact",
    "requeue_running",
    "result",
    "results",
    "results_exact",
    "results_for_nk",
    "results_nearby",
    "revisions",
    "running_studies",
    "save_measurement",
    "save_trial",
    "studies",
    "studies_of_job",
    "study",
    "study_summaries",
    "trial",
    "trials_of_study",
    "upsert_device",
]
