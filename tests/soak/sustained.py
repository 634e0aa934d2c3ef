"""Protocol `sustained` next to `burst` on a real GPU: ratios, clocks, power, and energy of one product.

    python -m tests.soak.sustained OUT_DIR [--recorded results/h200/dev.json --shapes MxNxK ...]

A sensible config, or the published one, at a few large shapes, timed as a final of the product under both protocols:
next to torch.matmul, the best of cublasLt and a twin of itself. It shows that the load reaches the power limit, how
well the ratio is known there, and what a product costs in joules.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.problem import GemmProblem
from search_space.request import PROTOCOLS, MeasureProtocol
from tests.soak.aa_pairs import sensible
from tests.soak.on_gpu import Json, Module, compile_all, open_first_gpu, quiet, say
from tests.soak.published import published
from tests.soak.report import write_json
from tuner.engine.base import EvaluateJob, FinalJob
from tuner.gpu.child import load_module
from tuner.records import Outcome

if TYPE_CHECKING:
    from tuner.gpu.context import Contexts
    from tuner.gpu.device import LiveDevice

SHAPES = ("4096x4096x4096", "2048x6144x4096", "8192x8192x1024", "64x7168x4096")


def main() -> int:
    """0 when every shape was measured under both protocols."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK")
    parser.add_argument(
        "--recorded", type=Path, metavar="FILE", help="published configs of these shapes, not sensible ones"
    )
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--limit-s", type=float, default=90.0, help="stop after this time and keep what is done")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.limit_s
    device = open_first_gpu()
    from tuner.gpu.context import Contexts

    contexts = Contexts(device)
    if options.recorded:
        wanted = published(options.recorded, options.shapes)
    else:
        problems = [GemmProblem.parse(shape, dtype="bf16") for shape in options.shapes]
        wanted = [(problem, sensible(problem, device.profile)) for problem in problems]
    modules = compile_all(wanted, device.profile, options.out_dir)
    target = options.out_dir / "sustained.json"
    rows: list[Json] = json.loads(target.read_text())["rows"] if target.exists() else []
    for module in modules:
        for protocol in (PROTOCOLS[kind] for kind in options.protocols):
            known = [(row["shape"], row["protocol"]) for row in rows]
            if (module.problem.shape, protocol.kind) in known or time.monotonic() > deadline_s:
                continue
            rows.append(measured(module, protocol, contexts, device))
            say(json.dumps({name: value for name, value in rows[-1].items() if name != "measurement"}))
            write_json(target, _report(rows, device))
    return 0 if len(rows) >= len(options.protocols) * len(wanted) and all("ratio" in row for row in rows) else 1


def measured(module: Module, protocol: MeasureProtocol, contexts: Contexts, device: LiveDevice) -> Json:
    """One shape under one protocol."""
    from tuner.gpu.evaluate import Bench
    from tuner.gpu.finals import final

    context = contexts.get(module.problem, protocol, 0, quiet)
    candidate = EvaluateJob(
        problem=module.problem,
        config=module.config,
        module_path=module.path,
        module_sha256=module.sha256,
        source_hash=module.source_hash,
        protocol=protocol,
        phase="final",
    )
    job = FinalJob(problem=module.problem, candidates=(candidate,), protocol=protocol, seed=0)
    began = time.monotonic()
    reply = final(job, load_module, Bench(context=context, device=device, report=quiet))
    row: Json = {
        "shape": module.problem.shape,
        "dtype": module.problem.dtype.value,
        "protocol": protocol.kind,
        "config": module.config.to_dict(),
        "wall_s": round(time.monotonic() - began, 2),
        "aa_ratio": reply.aa_ratio.to_dict() if reply.aa_ratio else None,
    }
    if failure := reply.failures.get(module.source_hash):
        return row | {"outcome": failure.outcome.value, "reason": failure.reason}
    if (measurement := reply.measurements.get(module.source_hash)) is None:
        return row | {"outcome": "DISTURBED", "reason": reply.disturbed}
    environment = measurement.environment
    row |= {
        "outcome": Outcome.MEASURED.value,
        "rounds": len(measurement.samples_us),
        "discarded": measurement.discarded,
        "median_us": measurement.median_us(),
        "tflops": round(measurement.tflops(module.problem), 1),
        "ratio": {name: ratio.to_dict() for name, ratio in measurement.ratios().items()},
        "sm_clock_mhz": environment.sm_clock_mhz,
        "power_w": environment.power_w,
        "throttle_reasons": list(environment.throttle_reasons),
        "energy_mj": measurement.energy_mj,
        "measurement": measurement.to_dict(),
    }
    return row


def _report(rows: list[Json], device: LiveDevice) -> Json:
    return {
        "schema": 1,
        "command": "python -m tests.soak.sustained OUT_DIR",
        "environment": device.environment().to_dict(),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
