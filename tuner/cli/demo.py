"""`demo`: the whole path once, over REST: post, tune, ask, export, load. Measures where there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.problem import GemmProblem
from tuner.bundle import extract_bundle
from tuner.cli.errors import CommandError, WorkFailed
from tuner.cli.output import Output, microseconds, warn
from tuner.cli.remote import as_command_error, wait_until_ready
from tuner.cli.supervisor import die_with_parent
from tuner.cli.watch import watch
from tuner.client import Client, ClientError
from tuner.gpu.inventory import list_gpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tuner.answers import Best, Study
    from tuner.cli.settings import Settings

READY_S = 60.0
STOP_S = 20.0
LOAD_S = 60.0
WALL_S = 600.0  # a limit for a machine that is busy with something else; 8 candidates take well under a minute
COUNTED = ("MEASURED", "MODELED", "STOPPED_EARLY")

# A fresh interpreter that imports apache-tvm-ffi and nothing of ours: what whoever receives a bundle has. torch may
# be among the imports: apache-tvm-ffi itself imports it where it is installed.
LOADER = """
import sys
import tvm_ffi
function = tvm_ffi.load_module(sys.argv[1])["gemm"]
ours = sorted({"tvm", "kernels", "tuner", "search_space"} & set(sys.modules))
if not callable(function) or ours:
    sys.exit(f"callable: {callable(function)}, imported besides: {ours}")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One problem of the demo.

    problem: what to tune
    arch: architecture to tune for
    """

    problem: GemmProblem
    arch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of one problem.

    wanted: the problem
    study: how it was tuned
    best: the answer of GET /v1/best
    module: file in the bundle
    """

    wanted: Wanted
    study: Study
    best: Best
    module: Path

    @property
    def compiled(self) -> int:
        """Candidates that were really compiled and judged."""
        return sum(self.study["counts"].get(outcome, 0) for outcome in COUNTED)

    @property
    def verdict(self) -> str:
        """What stands behind the time, in words for people."""
        evidence = self.best["evidence"]
        if "measured" not in evidence:
            return "modeled, not checked"
        return ", ".join(evidence)


PROBLEMS = (
    Wanted(problem=GemmProblem(m=4096, n=4096, k=4096), arch="sm_100a"),
    Wanted(problem=GemmProblem(m=64, n=7168, k=4096), arch="sm_90a"),
)


def demo(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 0 when both winners were exported and load in a fresh process. Raises WorkFailed."""
    started = time.monotonic()
    output = Output(as_json=args.json)
    home = Path(tempfile.mkdtemp(prefix="gemm-tuner-demo-"))
    try:
        with service(home) as url, Client(url) as client:
            output.text(f"service on {url}, state in a temporary folder")
            rows = _run(client, home, args.trials, quiet=args.json)
    except ClientError as error:
        raise _kept(as_command_error(error), home) from error
    except WorkFailed as error:
        raise _kept(error, home) from error
    except KeyboardInterrupt:
        shutil.rmtree(home)
        raise
    _report(output, rows, time.monotonic() - started)
    shutil.rmtree(home)
    return 0


def _kept(error: CommandError, home: Path) -> WorkFailed:
    """The same failure, with the place of what explains it: the service's log and its database."""
    return WorkFailed(error.line, hint=f"the service's state and serve.log are kept in {home}")


@contextmanager
def service(home: Path) -> Iterator[str]:
    """`gemm-tuner serve` on a free port with its state in `home`; stopped at the end. Raises WorkFailed."""
    port = _free_port()
    environ = {name: value for name, value in os.environ.items() if name != "GEMM_TUNER_DATABASE_URL"}
    environ["GEMM_TUNER_HOME"] = str(home)
    command = [sys.executable, "-m", "tuner.cli.main", "serve", "--port", str(port)]
    log = home / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(  # a demo that is killed must not leave a service behind
            command,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
    url = f"http://127.0.0.1:{port}"
    try:
        if not wait_until_ready(url, timeout_s=READY_S):
            raise WorkFailed(f"the service did not start: {_last_line(log)}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _run(client: Client, home: Path, trials: int, *, quiet: bool) -> list[Row]:
    live = _live_archs(client)
    studies: dict[Wanted, str] = {}
    for mode in ("measure", "model"):
        group = [wanted for wanted in PROBLEMS if (wanted.arch in live) == (mode == "measure")]
        if group:
            studies |= zip(group, _tune(client, group, mode, trials, quiet=quiet), strict=True)
    answers = {wanted: _best(client, wanted) for wanted in PROBLEMS}
    modules = _export(client, home, answers)
    rows = [
        Row(wanted=wanted, study=client.study(studies[wanted]), best=answers[wanted], module=modules[wanted])
        for wanted in PROBLEMS
    ]
    for row in rows:
        if row.compiled < trials:
            raise WorkFailed(f"{row.wanted.problem} {row.wanted.arch}: {row.compiled} of {trials} candidates compiled")
        _load(row.module)
    return rows


def _tune(client: Client, group: list[Wanted], mode: str, trials: int, *, quiet: bool) -> list[str]:
    """One job for all of these; the ids of its studies in the same order. Raises WorkFailed when one has no result."""
    body = {
        "problems": [
            {"m": w.problem.m, "n": w.problem.n, "k": w.problem.k, "dtype": w.problem.dtype.value, "arch": w.arch}
            for w in group
        ],
        "mode": mode,
        "budget": {"trials": trials, "wall_s": WALL_S},
    }
    submitted = client.submit_job(body)
    job = watch(client, submitted["id"], quiet=quiet)
    for study in job["studies"]:
        if study["best_trial"] is None:
            raise WorkFailed(f"no candidate worked for {study['arch']}: {study['state']}, {study['reason']}")
    return [study["id"] for study in job["studies"]]


def _best(client: Client, wanted: Wanted) -> Best:
    problem = wanted.problem
    return client.best(
        m=problem.m, n=problem.n, k=problem.k, dtype=problem.dtype.value, device=wanted.arch, evidence="modeled"
    )


def _export(client: Client, home: Path, answers: dict[Wanted, Best]) -> dict[Wanted, Path]:
    """One bundle with both winners, downloaded, checked and unpacked; the module of each."""
    results = [str(answer["result_id"]) for answer in answers.values()]
    order = client.create_export(results, allow_unverified=True)
    client.wait_export(order["id"])
    bundle = client.download_bundle(order["id"], home / "tuned.zip")
    manifest = extract_bundle(bundle, home / "bundle")
    files = {module["result"]: home / "bundle" / module["file"] for module in manifest["modules"]}
    return {wanted: files[str(answer["result_id"])] for wanted, answer in answers.items()}


def _load(module: Path) -> None:
    """Load it as a stranger would. Raises WorkFailed with what the loader said."""
    # -P: the working folder must not lend our packages to the fresh process.
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADER, str(module)], capture_output=True, text=True, timeout=LOAD_S, check=False
    )
    if done.returncode != 0:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "no output")
        raise WorkFailed(f"{module.name} does not load: {last}")


def _live_archs(client: Client) -> set[str]:
    """Architectures that this machine can measure on, once the tuner has announced its GPUs."""
    here = {facts.profile.arch.name for facts in list_gpus()}
    if not here:
        return set()
    if importlib.util.find_spec("torch") is None:
        warn("a GPU is here, but torch is not installed: modeling only (make setup-gpu brings it)")
        return set()
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        announced = {str(row["arch"]) for row in client.devices()["devices"] if row["state"] != "OFFLINE"}
        if announced & here:
            return announced
        time.sleep(0.5)
    warn(f"a GPU is here, but the tuner did not announce it within {READY_S:g} s: modeling only")
    return set()


def _report(output: Output, rows: list[Row], elapsed_s: float) -> None:
    output.document(
        {
            "elapsed_s": round(elapsed_s, 1),
            "rows": [
                {
                    "arch": row.wanted.arch,
                    "compiled": row.compiled,
                    "verdict": row.verdict,
                    "best": row.best,
                    "loads": True,
                }
                for row in rows
            ],
        }
    )
    columns = ("problem", "arch", "device", "compiled", "best us", "ratio to vendor", "evidence", "loads alone")
    output.table("winners, exported in one bundle", columns, [_cells(row) for row in rows])
    modeled = [row.wanted.arch for row in rows if "measured" not in row.best["evidence"]]
    if modeled:
        output.text(f"{', '.join(modeled)}: modeled, not checked; no GPU of that kind ran these kernels")
    output.text(f"done in {elapsed_s:.0f} s")


def _cells(row: Row) -> tuple[Any, ...]:
    ratio = row.best["ratio"].get("cublaslt_best")
    if isinstance(ratio, dict):
        ratio = ratio.get("median")
    return (
        str(row.wanted.problem),
        row.wanted.arch,
        row.best["device"],
        row.compiled,
        microseconds(row.best["median_us"]),
        ratio,
        row.verdict,
        "yes",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
