"""All tables of the first version.

Revision: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table with its indexes."""
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("arch", sa.String(length=32), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("source_hash", sa.String(length=64), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("problem_key", sa.String(length=128), nullable=False),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("toolchain", sa.String(length=255), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifacts")),
    )
    op.create_index("ix_artifacts_source_hash_toolchain", "artifacts", ["source_hash", "toolchain"])
    op.create_table(
        "devices",
        sa.Column("uuid", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("arch", sa.String(length=32), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('READY', 'BUSY', 'SET_ASIDE', 'OFFLINE')", name=op.f("ck_devices_state")),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_devices")),
    )
    op.create_table(
        "exports",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=True),
        sa.Column("bundle_path", sa.Text(), nullable=True),
        sa.Column("bundle_sha256", sa.String(length=64), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('QUEUED', 'RUNNING', 'DONE', 'FAILED')", name=op.f("ck_exports_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exports")),
    )
    op.create_index("ix_exports_state_created_at", "exports", ["state", "created_at"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("force", sa.Boolean(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.CheckConstraint("mode IN ('measure', 'model')", name=op.f("ck_jobs_mode")),
        sa.CheckConstraint(
            "state IN ('QUEUED', 'RUNNING', 'DONE', 'PARTIAL', 'CANCELLED', 'FAILED')", name=op.f("ck_jobs_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"])
    op.create_index("ix_jobs_state_created_at", "jobs", ["state", "created_at"])
    op.create_table(
        "studies",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("study_key", sa.String(length=64), nullable=False),
        sa.Column("m", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(length=16), nullable=False),
        sa.Column("layout", sa.String(length=8), nullable=False),
        sa.Column("arch", sa.String(length=32), nullable=False),
        sa.Column("device_name", sa.String(length=128), nullable=True),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=True),
        sa.Column("environment_key", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("owner", sa.String(length=128), nullable=True),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("best_trial", sa.Integer(), nullable=True),
        sa.Column("best_us", sa.Double(), nullable=True),
        sa.CheckConstraint("mode IN ('measure', 'model')", name=op.f("ck_studies_mode")),
        sa.CheckConstraint(
            "state IN ('QUEUED', 'RUNNING', 'DONE', 'PARTIAL', 'CANCELLED', 'FAILED')", name=op.f("ck_studies_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_studies")),
    )
    op.create_index(op.f("ix_studies_owner"), "studies", ["owner"])
    op.create_index("ix_studies_state_created_at", "studies", ["state", "created_at"])
    op.create_index("ix_studies_study_key_state", "studies", ["study_key", "state"])
    op.create_table(
        "job_studies",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_studies_job_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name=op.f("fk_job_studies_study_id")),
        sa.PrimaryKeyConstraint("job_id", "position", name=op.f("pk_job_studies")),
    )
    op.create_index("ix_job_studies_study_id", "job_studies", ["study_id"])
    op.create_table(
        "results",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("m", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(length=16), nullable=False),
        sa.Column("layout", sa.String(length=8), nullable=False),
        sa.Column("arch", sa.String(length=32), nullable=False),
        sa.Column("device_name", sa.String(length=128), nullable=False),
        sa.Column("study_id", sa.String(length=32), nullable=True),
        sa.Column("trial_number", sa.Integer(), nullable=True),
        sa.Column("revision", sa.Integer(), nullable=True),
        sa.Column("current", sa.Boolean(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("evidence_level", sa.Integer(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=False),
        sa.Column("environment_key", sa.String(length=255), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("modeled_us", sa.Double(), nullable=True),
        sa.Column("interval_us", sa.JSON(), nullable=True),
        sa.Column("baselines_us", sa.JSON(), nullable=True),
        sa.Column("ratio", sa.JSON(), nullable=True),
        sa.Column("tie_set", sa.JSON(), nullable=False),
        sa.Column("checks", sa.JSON(), nullable=False),
        sa.Column("tflops", sa.Double(), nullable=True),
        sa.Column("max_rel_error", sa.Double(), nullable=True),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("artifact_sha256", sa.String(length=64), nullable=True),
        sa.Column("source_hash", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("revision IS NULL OR revision >= 1", name=op.f("ck_results_revision")),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name=op.f("fk_results_study_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_results")),
        sa.UniqueConstraint(
            "m", "n", "k", "dtype", "layout", "arch", "device_name", "revision", name="uq_results_problem_revision"
        ),
    )
    op.create_index("ix_results_created_at_id", "results", ["created_at", "id"])
    op.create_index(
        "ix_results_nearby",
        "results",
        ["current", "dtype", "layout", "arch", "n", "k", "m", "device_name", "revision", "evidence_level", "id"],
        sqlite_where=sa.text("current IS 1"),
        postgresql_where=sa.text("current IS true"),
    )
    op.create_index("ix_results_study_id", "results", ["study_id"])
    op.create_table(
        "trials",
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_key", sa.String(length=255), nullable=False),
        sa.Column("source_hash", sa.String(length=64), nullable=True),
        sa.Column("toolchain", sa.String(length=255), nullable=False),
        sa.Column("outcome", sa.String(length=24), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("modeled_us", sa.Double(), nullable=True),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("ratio", sa.JSON(), nullable=True),
        sa.Column("artifact_sha256", sa.String(length=64), nullable=True),
        sa.Column("compile_s", sa.Double(), nullable=True),
        sa.Column("gpu_s", sa.Double(), nullable=True),
        sa.Column("max_rel_error", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('MEASURED', 'MODELED', 'STOPPED_EARLY', 'REJECTED', 'KNOWN_BAD', 'COMPILE_FAILED', 'SPILLED', "
            "'WRONG_RESULT', 'NONDETERMINISTIC', 'CHECK_FAILED', 'INVALID_TIMING', 'CRASHED', 'TIMED_OUT', "
            "'OUT_OF_MEMORY')",
            name=op.f("ck_trials_outcome"),
        ),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name=op.f("fk_trials_study_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "number", name=op.f("pk_trials")),
    )
    op.create_index("ix_trials_source_hash_toolchain", "trials", ["source_hash", "toolchain"])
    op.create_table(
        "measurements",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=8), nullable=False),
        sa.Column("samples_us", sa.JSON(), nullable=False),
        sa.Column("baselines_us", sa.JSON(), nullable=False),
        sa.Column("protocol", sa.JSON(), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=False),
        sa.Column("discarded", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("phase IN ('trial', 'final')", name=op.f("ck_measurements_phase")),
        sa.ForeignKeyConstraint(
            ["study_id", "trial_number"],
            ["trials.study_id", "trials.number"],
            name=op.f("fk_measurements_study_id_trial_number"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurements")),
    )
    op.create_index("ix_measurements_study_id_trial_number", "measurements", ["study_id", "trial_number"])


def downgrade() -> None:
    """Drop every table."""
    op.drop_index("ix_measurements_study_id_trial_number", table_name="measurements")
    op.drop_table("measurements")
    op.drop_index("ix_trials_source_hash_toolchain", table_name="trials")
    op.drop_table("trials")
    op.drop_index("ix_results_study_id", table_name="results")
    op.drop_index("ix_results_nearby", table_name="results")
    op.drop_index("ix_results_created_at_id", table_name="results")
    op.drop_table("results")
    op.drop_index("ix_job_studies_study_id", table_name="job_studies")
    op.drop_table("job_studies")
    op.drop_index("ix_studies_study_key_state", table_name="studies")
    op.drop_index("ix_studies_state_created_at", table_name="studies")
    op.drop_index(op.f("ix_studies_owner"), table_name="studies")
    op.drop_table("studies")
    op.drop_index("ix_jobs_state_created_at", table_name="jobs")
    op.drop_index("ix_jobs_created_at_id", table_name="jobs")
    op.drop_table("jobs")
    op.drop_index("ix_exports_state_created_at", table_name="exports")
    op.drop_table("exports")
    op.drop_table("devices")
    op.drop_index("ix_artifacts_source_hash_toolchain", table_name="artifacts")
    op.drop_table("artifacts")
