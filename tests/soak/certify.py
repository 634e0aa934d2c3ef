"""What certifying a winner costs on this GPU, check by check, and that a healthy kernel passes.

    python -m tests.soak.certify OUT.json           on a GPU
    python -m tests.soak.certify --table FILE.json  the table of docs/guides/trust.md

Compiles with one process a core, then runs the product's own checks with a clock around each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import write_atomically
from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from tuner.engine.base import CertifyJob, CertifyReply
from tuner.engine.certify import Apart, Certification
from tuner.engine.compile_pool import CompilePool, CompilePoolOptions
from tuner.gpu.host import GpuChild
from tuner.gpu.inventory import list_gpus
from tuner.gpu.memcheck import memcheck
from tuner.gpu.soak import soak

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = (
    (GemmProblem(m=4096, n=4096, k=4096), Sm90GemmConfig()),
    (GemmProblem(m=16, n=7168, k=4096), Sm90GemmConfig(num_consumers=1, blk_n=64, blk_k=128, pipe_depth=6)),
    (GemmProblem(m=8192, n=8192, k=8192), Sm90GemmConfig(cta_group=2)),
)


class Clocked:
    """Wraps calls and keeps how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around[Reply](self, name: str, call: Callable[..., Reply]) -> Callable[..., Reply]:
        """The same call with a clock."""

        def clocked(*arguments: Any) -> Reply:
            since = time.monotonic()
            try:
                return call(*arguments)
            finally:
                self.seconds[name] = round(time.monotonic() - since, 2)

        return clocked


def certify(problem: GemmProblem, config: Sm90GemmConfig, pool: CompilePool, child: GpuChild) -> dict[str, Any]:
    """All checks of one kernel."""
    clocked = Clocked()
    sm_count = child.facts().profile.sm_count
    compiled = pool.submit(problem, config, sm_count).result().value
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "published.so"
        path.write_bytes(compiled.module)
        job = CertifyJob(
            problem=problem,
            config=config,
            sm_count=sm_count,
            module_path=path,
            module_sha256=compiled.sha256,
            source_hash=compiled.source_hash,
            seed=1,
        )
        began = time.monotonic()
        work = Certification(pool, job)
        built = clocked.around("compile", work.build)(Path(name))
        checks = Apart(
            soak=clocked.around("soak", lambda job, uuid: soak(job, device=uuid)),
            memcheck=clocked.around("memcheck", lambda launches, uuid: memcheck(launches, device=uuid)),
        )
        if isinstance(built, CertifyReply):
            reply = built
        else:
            structure, modules = built
            stress = clocked.around("stress", work.stress)(child, modules)
            apart = work.apart(modules, checks, child.uuid) if stress.passed else None
            reply = work.reply(structure, stress, apart)
    return {
        "shape": problem.shape,
        "dtype": problem.dtype.value,
        "config": config.to_dict(),
        "certified": reply.certified,
        "checks": [check.to_dict() for check in reply.checks],
        "seconds": clocked.seconds,
        "wall_s": round(time.monotonic() - began, 2),
        "gpu_s": round(reply.gpu_s, 2),
    }


STEPS = ("compile", "stress", "soak", "memcheck")


def table(found: dict[str, Any]) -> str:
    """Seconds of each step, as Markdown."""
    lines = [f"| M x N x K | dtype | {' s | '.join(STEPS)} s | launches soaked |", "|---" * (len(STEPS) + 3) + "|"]
    for row in found["rows"]:
        soaked = next(check["detail"].partition(" ")[0] for check in row["checks"] if check["name"] == "soak")
        seconds = " | ".join(f"{row['seconds'][step]:.1f}" for step in STEPS)
        lines.append(f"| {row['shape']} | {row['dtype']} | {seconds} | {soaked} |")
    return "\n".join(lines) + "\n"


def main(out: str) -> int:
    """0 when every kernel is certified."""
    pool = CompilePool(CompilePoolOptions(processes=os.cpu_count() or 1))
    rows: list[dict[str, Any]] = []
    try:
        with GpuChild(0, uuid=list_gpus()[0].uuid) as child:
            environment = child.facts().environment
            for problem, config in CASES:
                rows.append(certify(problem, config, pool, child))
                print(json.dumps(rows[-1]), flush=True)
                found = {
                    "schema": 1,
                    "command": "python -m tests.soak.certify OUT.json",
                    "compile_processes": os.cpu_count(),
                    "environment": environment.to_dict() if environment else {},
                    "rows": rows,
                }
                write_atomically(Path(out), (json.dumps(found, indent=1) + "\n").encode())
    finally:
        pool.close()
    return 0 if all(row["certified"] for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))), end="")
        sys.exit(0)
    sys.exit(main(sys.argv[1]))
