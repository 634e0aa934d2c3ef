"""`tune`, `jobs`, `show`, `cancel`, `job resume`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kernels.problem import GemmProblem
from search_space.samplers import unusable_reason
from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output, microseconds, short, warn
from tuner.cli.remote import connected, has_live, live_gpus, target
from tuner.cli.watch import watch
from tuner.client import ClientError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from tuner.answers import Job, Study, Trial
    from tuner.cli.settings import Settings
    from tuner.client import Client

NOTHING_TO_SHOW = ("FAILED", "CANCELLED")
LIVE = ("RUNNING", "QUEUED")


def tune(args: argparse.Namespace, settings: Settings) -> int:
    """Submit a job and follow it to its end. Exit status 1 when a study of it ended without a result."""
    if args.detach and not args.url:
        raise UsageError("--detach needs a service that goes on working", hint="add --url, or leave --detach out")
    if args.sampler and not args.url and (reason := unusable_reason(args.sampler)):
        raise UsageError(reason)
    problems = [GemmProblem.parse(shape, dtype=args.dtype) for shape in args.shape]
    output = Output(as_json=args.json)
    with connected(args, settings) as client:
        body = _body(client, args, settings, problems)
        older = [] if args.url else [job["id"] for state in LIVE for job in client.jobs(state=state)]
        submitted = client.submit_job(body)
        output.text(f"job {submitted['id']}")
        if body["mode"] == "model" and args.mode is None:
            warn(f"no {body.get('device') or body['arch']} GPU at hand: times will be modeled, not measured")
        if older:
            warn(f"{len(older)} unfinished jobs of this home go first, such as {older[0]}: gemm-tuner cancel drops one")
        if args.detach:
            output.document(submitted)
            return 0
        with _tuning(args, settings) as check:
            job = _follow(client, submitted["id"], check, quiet=args.json)
        studies = _studies(client, job)
        results = _results(client, studies)
    return _report(output, job, studies, results)


def jobs(args: argparse.Namespace, settings: Settings) -> None:
    """List jobs."""
    with connected(args, settings) as client:
        rows = client.jobs(limit=args.limit)
    output = Output(as_json=args.json)
    output.document(rows)
    columns = ("job", "state", "mode", "created", "finished")
    output.table("", columns, [(r["id"], r["state"], r["mode"], r["created_at"], r["finished_at"]) for r in rows])


def show(args: argparse.Namespace, settings: Settings) -> None:
    """A job with its studies, or a study with its trials."""
    output = Output(as_json=args.json)
    with connected(args, settings) as client:
        try:
            job = client.job(args.id)
        except ClientError as error:
            if error.status != 404:
                raise
            study = _study(client, args.id)
            trials = client.trials(study["id"])
            names = _to_optuna(client, args.optuna, [study])
            output.document({**study, "trials": trials})
            _print_study(output, study, trials)
            if args.plots:
                _draw(output, args.plots, study, trials)
        else:
            names = _to_optuna(client, args.optuna, _studies(client, job) if args.optuna else [])
            output.document(job)
            _print_job(output, job)
            if args.plots:
                for study in _studies(client, job):
                    problem = study["problem"]
                    name = "{m}x{n}x{k}-{dtype}".format(**problem)
                    _draw(output, f"{args.plots}/{name}-{study['id'][:8]}", study, client.trials(study["id"]))
    for name in names:
        output.text(f"{args.optuna}: wrote {name}")


def _draw(output: Output, folder: str, study: Study, trials: list[Trial]) -> None:
    from tuner.cli.study_plots import study_pictures, write_pictures

    found = study_pictures(study, trials)
    write_pictures(found, folder)
    output.text(f"{folder}: {', '.join(sorted(found)) or 'nothing to draw yet'}")


def _to_optuna(client: Client, storage_url: str | None, studies: list[Study]) -> list[str]:
    """Write studies to an Optuna storage; gives their names there. Raises UsageError where it cannot take them."""
    if storage_url is None:
        return []
    from tuner.search.dashboard import DashboardError, export_study

    try:
        return [export_study(study, client.trials(study["id"]), storage_url) for study in studies]
    except DashboardError as error:
        raise UsageError(str(error)) from error


def cancel(args: argparse.Namespace, settings: Settings) -> None:
    """Ask a job to stop."""
    with connected(args, settings) as client:
        job = client.cancel(args.id)
    output = Output(as_json=args.json)
    output.document(job)
    output.text(f"job {job['id']}: {job['state']}, cancel {'requested' if job['cancel_requested'] else 'not needed'}")


def resume(args: argparse.Namespace, settings: Settings) -> int:
    """Queue the unfinished studies of a job again and follow it. Finished trials are kept and numbered on."""
    from tuner.cli.embedded import embedded_client, requeue

    output = Output(as_json=args.json)
    count = requeue(settings, args.id)
    warn(f"{count} of the job's studies go on")
    args.url = None
    with embedded_client(settings) as client:
        with _tuning(args, settings) as check:
            job = _follow(client, args.id, check, quiet=args.json)
        studies = _studies(client, job)
        results = _results(client, studies)
    return _report(output, job, studies, results)


def _studies(client: Client, job: Job) -> list[Study]:
    """Each study of a job once, in the order of its problems."""
    return [client.study(identity) for identity in dict.fromkeys(row["id"] for row in job["studies"])]


def _study(client: Client, identity: str) -> Study:
    try:
        return client.study(identity)
    except ClientError as error:
        if error.status != 404:
            raise
        raise UsageError(f"no job and no study {identity!r}", hint="gemm-tuner jobs lists the jobs") from error


@contextmanager
def _tuning(args: argparse.Namespace, settings: Settings) -> Iterator[Callable[[], None]]:
    """Without a service, this process does the work itself. Yields what raises WorkFailed when it no longer can."""
    if args.url:
        yield lambda: None
        return
    from tuner.cli.embedded import tuning

    with tuning(settings) as check:
        yield check


def _body(client: Client, args: argparse.Namespace, settings: Settings, problems: list[GemmProblem]) -> dict[str, Any]:
    here = args.mode == "measure" and not args.url
    named = args.mode and (args.arch or args.device)
    gpus = [] if named and not here else live_gpus(client, args, settings)
    wanted = target(gpus, arch=args.arch, device=args.device)
    if here and not has_live(gpus, wanted):
        raise WorkFailed(
            f"no {wanted.get('device') or wanted['arch']} GPU on this machine to measure on",
            hint="use --mode model, or --url of a service that has one",
        )
    mode = args.mode
    if mode is None:
        mode = "measure" if has_live(gpus, wanted) else "model"
    budget = {"trials": args.trials, "wall_s": args.wall_s}
    body: dict[str, Any] = {
        "problems": [
            {"m": p.m, "n": p.n, "k": p.k, "dtype": p.dtype.value, "layout": p.layout.value} for p in problems
        ],
        **wanted,
        "mode": mode,
        "budget": {name: value for name, value in budget.items() if value is not None},
        "seed": args.seed,
        "force": args.force,
        "priority": args.priority,
    }
    if args.effort:
        body["effort"] = args.effort
    if args.sampler:
        body["sampler"] = args.sampler
    if args.stop_early is not None:
        body["stop_early"] = args.stop_early
    if args.protocol:
        body["protocol"] = {"kind": args.protocol}
    return body


def _follow(client: Client, job_id: str, check: Callable[[], None], *, quiet: bool) -> Job:
    """Until the job ends. Ctrl-C cancels it, so that nothing goes on unseen, and keeps what is done."""
    try:
        return watch(client, job_id, quiet=quiet, check=check)
    except KeyboardInterrupt:
        client.cancel(job_id)
        raise WorkFailed(f"interrupted: job {job_id} was cancelled", hint=f"gemm-tuner job resume {job_id}") from None


def _results(client: Client, studies: list[Study]) -> dict[str, dict[str, Any]]:
    """The result of each study that has one: timed among the finalists, and with more evidence than its best trial."""
    found = {study["id"]: client.results(study=study["id"], limit=1) for study in studies}
    return {identity: results[0] for identity, results in found.items() if results}


def _report(output: Output, job: Job, studies: list[Study], results: dict[str, dict[str, Any]]) -> int:
    output.document({**job, "studies": studies, "results": list(results.values())})
    rows = [_row(study, results.get(study["id"])) for study in studies]
    output.table("", ("problem", "device", "state", "best us", "ratio to vendor", "evidence", "trials"), rows)
    for study in studies:
        if (result := results.get(study["id"])) and "measured" in result["evidence"]:
            output.text(f"{_shape(study)}: {result['verdict']}; result {result['id']}")
    if any(study["mode"] == "model" for study in studies):
        output.text("modeled, not checked: no GPU ran these kernels")
    empty = [study for study in studies if study["best"] is None or study["state"] in NOTHING_TO_SHOW]
    for study in empty:
        warn(f"{_shape(study)}: {study['state']}: {study['reason'] or 'no candidate worked'}")
    return 1 if empty else 0


def _row(study: Study, result: dict[str, Any] | None) -> tuple[object, ...]:
    ratio = result["ratio"] if result else study["best"]["ratio"] if study["best"] else {}
    return (
        _shape(study),
        study["device"] or study["arch"],
        study["state"],
        microseconds(result["median_us"] if result else _time(study)),
        _ratio_text(ratio),
        ", ".join(result["evidence"] if result else ()) or "-",
        sum(study["counts"].values()),
    )


def _print_job(output: Output, job: Job) -> None:
    left_s = job["time_left_s"]
    left = f", about {left_s:.0f} s to go" if left_s else ""
    output.text(f"job {job['id']}: {job['state']}, mode {job['mode']}, created {job['created_at']}{left}")
    rows = [
        (s["id"], _shape(s), s["device"] or s["arch"], s["state"], microseconds(s["best_us"]), _counts(s["counts"]))
        for s in job["studies"]
    ]
    output.table("", ("study", "problem", "device", "state", "best us", "outcomes"), rows)
    for study in job["studies"]:
        if study["reason"]:
            output.text(f"{_shape(study)}: {study['reason']}")


def _print_study(output: Output, study: Study, trials: list[Trial]) -> None:
    output.text(f"study {study['id']}: {_shape(study)} on {study['device'] or study['arch']}, {study['state']}")
    if study["reason"]:
        output.text(study["reason"])
    if coverage := study["coverage"]:
        output.text(
            f"of {coverage['askable']} configs worth asking about: {coverage['asked']} asked, {coverage['rejected']} "
            f"rejected, {coverage['compiled']} compiled, {coverage['timed']} timed"
        )
    rows = [
        (
            trial["number"],
            trial["outcome"],
            microseconds(trial["median_us"] or trial["modeled_us"]),
            _ratio_text(trial["ratio"]),
            ", ".join(trial["evidence"]),
            short(trial["artifact_sha256"]),
            trial["reason"],
        )
        for trial in trials
    ]
    output.table("", ("trial", "outcome", "us", "ratio", "evidence", "module", "reason"), rows)


def _shape(study: Any) -> str:
    problem = study["problem"]
    return f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']}"


def _time(study: Study) -> float | None:
    best = study["best"]
    return None if best is None else best["median_us"] or best["modeled_us"]


def _ratio_text(ratio: dict[str, Any] | None) -> str:
    """Ratio to the vendor library's best choice, else to torch."""
    for name in ("cublaslt_best", "torch"):
        value = (ratio or {}).get(name)
        if value is not None:
            return f"{value['median'] if isinstance(value, dict) else value:.3f}"
    return "-"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{outcome} {number}" for outcome, number in sorted(counts.items()))
