"""Problems on which other libraries failed: ours must be right and quick on them, or refuse them by the field's name.

    python -m tests.soak.hostile run ROWS_JSON OUT_DIR    on an H200; writes OUT_DIR/hostile.json, and goes on where it
                                                          stopped
    python -m tests.soak.hostile table HOSTILE_JSON       prints the table of ratios

ROWS_JSON is a list of {"m", "n", "k", "dtype", "batch", "layout"} with the layout in words. Each row is first put as a
request. One with a batch or a transposed operand has to be refused by the field's name, and so has an extent that is
zero or does not fit; M, N and K of the others, and of those with the batch left out, are searched: the starting configs
and a few random ones, verified and raced by the product's own engine, the best measured once more. A row whose A is a
slice of a wider matrix, or with an extent of zero, is also called in that form, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from kernels.config import Sm90GemmConfig
from kernels.devices import profile_named
from kernels.errors import ProblemError
from kernels.problem import GemmProblem
from search_space.askable import askable_configs
from search_space.request import MeasureProtocol, RequestError, TuneRequest
from search_space.starting import starting_configs
from tests.soak.report import write_json
from tuner.engine.base import CompileJob, EvaluateJob, FinalJob
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.incumbent import Incumbent, best_of
from tuner.engine.local import LocalMachine, LocalOptions
from tuner.records import Outcome
from tuner.settings import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from tuner.engine.base import CompileReply, Engine, FinalReply

Json = dict[str, Any]

PROFILE = "h200"
CONTIGUOUS = "A[M,K] and B[N,K] contiguous"
# Words of a layout that only say how far apart rows of A are: still A[M, K] and B[N, K] with K contiguous.
STRIDE = re.compile(r"(?:row stride|leading dimension) (\d+)")
OFFSET = re.compile(r"storage offset (\d+)")
RANDOM_CONFIGS = 10
CALL_LIMIT_S = 60.0
ANY_ROWS = Sm90GemmConfig(load="cp_async", num_consumers=1, blk_n=64, epi_stages=1, pipe_depth=6)


# ---------------------------------------------------------------------- what a row asks for


def layout_of(row: Json) -> str:
    """The layout as a request names it: "NT", or the words of a row that has another."""
    text: str = row["layout"]
    return "NT" if text.startswith(CONTIGUOUS) or STRIDE.search(text) else text


def refusal(row: Json) -> str:
    """What a request of the row is refused with, with the field's name in front; empty where it is taken."""
    problem = {name: row[name] for name in ("m", "n", "k", "dtype")} | {"layout": layout_of(row)}
    if row.get("batch", 1) != 1:
        problem["batch"] = row["batch"]
    try:
        TuneRequest.from_dict({"problem": problem, "device": PROFILE})
    except RequestError as error:
        return f"{error.field}: {error}"
    return ""


def product_of(row: Json) -> GemmProblem | None:
    """M, N and K of a row with batch and layout left out; None where no request can have them."""
    try:
        problem = GemmProblem(m=row["m"], n=row["n"], k=row["k"], dtype=row["dtype"])
        return TuneRequest(problem=problem, arch="sm_90a", device=PROFILE).problem
    except (ProblemError, RequestError):
        return None


def calls_of(row: Json) -> Json | None:
    """How a row is called beside its search: with rows of A apart, or with an extent of zero. None for neither."""
    if row.get("batch", 1) == 1 and (stride := STRIDE.search(row["layout"])) and layout_of(row) == "NT":
        offset = OFFSET.search(row["layout"])
        return {"kind": "rows apart", "stride": int(stride[1]), "offset": int(offset[1]) if offset else 0}
    if 0 in (row["m"], row["n"], row["k"]):
        return {"kind": "zero", "stride": row["k"], "offset": 0}
    return None


def config_of(call: Json, winner: GemmConfig | None) -> GemmConfig:
    """What serves a call: the winner where TMA can take the rows as they lie, or the one that takes any."""
    aligned = call["stride"] % 8 == 0 and call["offset"] % 8 == 0
    return winner if winner is not None and aligned and call["kind"] == "rows apart" else ANY_ROWS


# ---------------------------------------------------------------------- search


class Search:
    """The rows of one run on the first GPU."""

    def __init__(self, out: Path, limit_s: float) -> None:
        self.path, self.deadline_s = out / "hostile.json", time.monotonic() + limit_s
        self.store = ArtifactStore(out / "modules")
        self.profile = profile_named(PROFILE)
        self.building: dict[GemmProblem, list[tuple[GemmConfig, Future[CompileReply]]]] = {}
        self.found: Json = {"schema": 1, "command": "python -m tests.soak.hostile run ROWS_JSON OUT_DIR", "rows": []}
        if self.path.exists():
            self.found = json.loads(self.path.read_text(encoding="utf-8"))

    def run(self, rows: list[Json]) -> None:
        """Every row that is missing, until the time is up."""
        machine = LocalMachine(LocalOptions(compile=CompilePoolOptions(processes=usable_cores())), self.store)
        try:
            engine = machine.engine(self.profile, live=True)
            for number in range(len(self.found["rows"]), len(rows)):
                if time.monotonic() > self.deadline_s:
                    break
                if number + 1 < len(rows):  # its kernels are built while those of this row have the GPU
                    self.build(product_of(rows[number + 1]), engine)
                self.found["rows"].append(self.row(rows[number], engine))
                if engine.device.environment is not None:
                    self.found["environment"] = engine.device.environment.to_dict()
                write_json(self.path, self.found)
                print(line_of(self.found["rows"][-1]), flush=True)
        finally:
            machine.close()

    def row(self, row: Json, engine: Engine) -> Json:
        """Request, search and calls of one row."""
        kept = {name: row.get(name) for name in ("m", "n", "k", "dtype", "batch", "layout", "source", "category")}
        done: Json = {"row": kept, "refusal": refusal(row)}
        winner = None
        if (problem := product_of(row)) is not None:
            done["search"], winner = self.search(problem, engine)
        if (call := calls_of(row)) is not None and row["dtype"] in ("bf16", "fp16"):
            done["call"] = self.call(row, call, config_of(call, winner), engine)
        return done

    def build(self, problem: GemmProblem | None, engine: Engine) -> list[tuple[GemmConfig, Future[CompileReply]]]:
        """The candidates of a problem and their modules, asked for once."""
        if problem is None:
            return []
        if problem not in self.building:
            self.building[problem] = [
                (config, engine.compile(self.compile_job(problem, config))) for config in candidates(problem)
            ]
        return self.building[problem]

    def search(self, problem: GemmProblem, engine: Engine) -> tuple[Json, GemmConfig | None]:
        """Race the candidates of one problem; what a final says of the best, and the best."""
        built = self.build(problem, engine)
        del self.building[problem]
        incumbent: Incumbent | None = None
        best: EvaluateJob | None = None
        failed: list[str] = []
        for config, future in built:
            compiled = future.result()
            if compiled.outcome is not None or compiled.kernel is None:
                failed.append(f"{compiled.outcome}: {compiled.reason}")
                continue
            job = self.evaluate_job(problem, config, compiled.kernel, incumbent)
            reply = engine.evaluate(job).result()
            if reply.outcome not in (Outcome.MEASURED, Outcome.STOPPED_EARLY):
                failed.append(f"{reply.outcome.value}: {reply.reason} {short(config)}")
            elif reply.outcome is Outcome.MEASURED and reply.measurement is not None:
                found = Incumbent.of(reply.measurement)
                if best_of((incumbent, found)) is found:
                    incumbent, best = found, job
        known: Json = {"asked": len(built), "failed": failed}
        if best is None:
            return known, None
        finalist = replace(best, phase="final")
        final = FinalJob(problem=problem, candidates=(finalist,), protocol=finalist.protocol, seed=finalist.seed)
        return known | measured(engine.final(final).result(), finalist), best.config

    def compile_job(self, problem: GemmProblem, config: GemmConfig) -> CompileJob:
        """For the device that the rows run on."""
        return CompileJob(problem=problem, config=config, sm_count=self.profile.sm_count)

    def evaluate_job(
        self, problem: GemmProblem, config: GemmConfig, kernel: CompiledKernel, incumbent: Incumbent | None
    ) -> EvaluateJob:
        """A trial."""
        return EvaluateJob(
            problem=problem,
            config=config,
            module_path=self.store.path(kernel.sha256),
            module_sha256=kernel.sha256,
            source_hash=kernel.source_hash,
            protocol=MeasureProtocol(),
            phase="trial",
            incumbent=incumbent,
        )

    def call(self, row: Json, call: Json, config: GemmConfig, engine: Engine) -> Json:
        """Call a module with the row's own operands, in a process that may be killed."""
        extents = {name: max(1, row[name]) for name in ("m", "n", "k")}
        problem = GemmProblem(**extents, dtype=row["dtype"])
        compiled = engine.compile(self.compile_job(problem, config)).result()
        if compiled.kernel is None:
            return call | {"right": False, "said": f"{compiled.outcome}: {compiled.reason}"}
        asked = call | {name: row[name] for name in ("m", "n", "k", "dtype")}
        asked["path"] = str(self.store.path(compiled.kernel.sha256))
        command = [sys.executable, "-m", "tests.soak.hostile", "call"]
        try:
            done = subprocess.run(
                command, input=json.dumps(asked), capture_output=True, text=True, timeout=CALL_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return call | {"right": False, "said": f"no end within {CALL_LIMIT_S:g} s"}
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        return call | {"right": done.returncode == 0, "said": " ".join(said)[:300], "config": config.to_dict()}


def candidates(problem: GemmProblem) -> list[GemmConfig]:
    """Starting configs, then a few that a random search would ask."""
    profile = profile_named(PROFILE)
    chosen = list(starting_configs(problem, profile))
    askable = askable_configs(problem, profile)
    draws = random.Random(problem.key).sample(range(len(askable)), min(RANDOM_CONFIGS, len(askable)))
    return [*chosen, *(config for config in (askable[at] for at in draws) if config not in chosen)]


def measured(final: FinalReply, job: EvaluateJob) -> Json:
    """What a record keeps of the best."""
    kept: Json = {"config": job.config.to_dict()}
    if (failure := final.failures.get(job.source_hash)) is not None:
        return kept | {"outcome": failure.outcome.value, "reason": failure.reason}
    if (measurement := final.measurements.get(job.source_hash)) is None:
        return kept | {"outcome": "DISTURBED", "reason": final.disturbed}
    return kept | {
        "outcome": Outcome.MEASURED.value,
        "reason": "",
        "median_us": measurement.median_us(),
        "ratio": {name: ratio.to_dict() for name, ratio in measurement.ratios().items()},
        "aa_ratio": final.aa_ratio.to_dict() if final.aa_ratio else None,
        "measurement": measurement.to_dict(),
    }


# ---------------------------------------------------------------------- calls with the row's own operands


def call_here(asked: Json) -> str:
    """Call a module on the device of this process. Returns what is wrong, or nothing."""
    import torch
    import tvm_ffi

    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[asked["dtype"]]
    m, n, k, stride = asked["m"], asked["n"], asked["k"], asked["stride"]
    flat = torch.randn(asked["offset"] + m * stride + 8, device="cuda").to(dtype)
    a = flat.as_strided((m, k), (stride, 1), asked["offset"])
    b = torch.randn(n, k, device="cuda").to(dtype)
    d = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    tvm_ffi.load_module(asked["path"])["gemm"](a, b, d)
    torch.cuda.synchronize()
    if 0 in (m, n, k):
        return "" if not d.any() and not d.isnan().any() else "D is not all zero"
    reference = a.float() @ b.float().t()
    error = ((d.float() - reference).norm() / reference.norm()).item()
    return "" if error < 4e-3 else f"relative error {error:.3g}"


# ---------------------------------------------------------------------- table


def short(config: GemmConfig) -> str:
    """The knobs that are not the defaults."""
    plain = type(config)().to_dict()
    return " ".join(f"{name}={value}" for name, value in config.to_dict().items() if plain[name] != value)


def line_of(done: Json) -> str:
    """One row of the table."""
    row, search, call = done["row"], done.get("search", {}), done.get("call")
    cells = [f"{row['m']}x{row['n']}x{row['k']} {row['dtype']}" + (f" x{row['batch']}" if row["batch"] != 1 else "")]
    if "ratio" in search:
        best, torch_ratio = search["ratio"]["cublaslt_best"], search["ratio"]["torch"]
        cells += [
            f"{search['median_us']:.2f}", f"{best['median']:.3f} [{best['low']:.3f}, {best['high']:.3f}]",
            f"{torch_ratio['median']:.3f}", short(Sm90GemmConfig.from_dict(search["config"])),
        ]  # fmt: skip
    else:
        cells += ["-", "-", "-", "; ".join(search.get("failed", ()))[:120]]
    notes = [f"refused: {done['refusal']}"] if done["refusal"] else []
    if call is not None:
        notes.append(f"{call['kind']}: {'right' if call['right'] else call['said']}")
    return "| " + " | ".join([*cells, "; ".join(notes)]) + " |"


def table(found: Json) -> str:
    """All rows in Markdown."""
    head = "| problem | us | ratio to the best of cublasLt | to torch | config | request and calls |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(line_of, found["rows"])]) + "\n"


def wrong(found: Json) -> Iterator[str]:
    """What does not meet the promise: a batch or layout taken, a product that failed, a call that was wrong."""
    for done in found["rows"]:
        row, search, call = done["row"], done.get("search"), done.get("call")
        name = f"{row['m']}x{row['n']}x{row['k']}"
        batched, laid_out = row["batch"] != 1, layout_of(row) != "NT"
        if (batched or laid_out) and not done["refusal"].partition(":")[0].endswith(("batch", "layout")):
            yield f"{name}: the request is not refused for batch or layout: {done['refusal'] or 'taken'}"
        if search is not None and search.get("outcome") != Outcome.MEASURED:
            yield f"{name}: not measured: {search}"
        if call is not None and not call["right"]:
            yield f"{name}: {call['kind']}: {call['said']}"


def main() -> int:
    """0 when every row is served or refused as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("rows", type=Path, metavar="ROWS_JSON")
    run.add_argument("out", type=Path, metavar="OUT_DIR")
    run.add_argument("--limit-s", type=float, default=500.0, help="no row begins after it")
    shown = commands.add_parser("table")
    shown.add_argument("file", type=Path, metavar="HOSTILE_JSON")
    commands.add_parser("call")
    options = parser.parse_args()
    if options.command == "call":
        said = call_here(json.loads(sys.stdin.read()))
        print(said or "right")
        return 1 if said else 0
    if options.command == "table":
        print(table(json.loads(options.file.read_text(encoding="utf-8"))), end="")
        return 0
    search, rows = Search(options.out, options.limit_s), json.loads(options.rows.read_text(encoding="utf-8"))
    search.run(rows)
    complaints = [*wrong(search.found), *(["not all rows were run"] if len(search.found["rows"]) < len(rows) else [])]
    print("\n".join(complaints) or "every row is served or refused as it should be")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
