"""Published kernels beside Triton kernels tuned for the same shape, in the same rounds, on a real GPU.

    python -m tests.soak.triton_peer OUT_DIR

Every Triton config of a shape is checked and screened in short bursts; the three fastest are timed with ours,
torch.matmul and the best of cublasLt under protocol `burst`. Rows that exist in OUT_DIR are kept. Before the first
timing other processes launch each config once, so that Triton's cache on disk holds them all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

from search_space.request import MeasureProtocol
from tests.soak.on_gpu import Json, Module, compile_all, open_first_gpu, quiet, say
from tests.soak.published import published
from tests.soak.report import write_json
from tuner.gpu.child import load_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.problem import GemmProblem
    from tuner.gpu.clock import Burst
    from tuner.gpu.context import Contexts, ProblemContext
    from tuner.gpu.device import LiveDevice

# Decode to prefill, few tiles and many, ragged, both dtypes, N that is no multiple of 8.
SHAPES = (
    *("1x6144x4096", "1x2112x7168", "4x1280x8192", "16x4096x4096", "16x720x2880", "32x2560x5120", "32x14336x3584"),
    *("64x4096x14336", "64x7168x4096", "128x256x7168", "128x4096x7168", "128x4096x9216", "256x5120x6400"),
    *("512x4096x4096", "2048x6144x4096", "4096x4096x4096", "7000x2560x2560", "8192x3072x768", "8192x30522x768"),
    "8457x35x2560",
)
KEPT = 3
SCREEN_ROUNDS = 3
SCREEN_MS = 1.5


def main() -> int:
    """0 when every shape was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--recorded", type=Path, default=Path("results/h200/dev.json"), metavar="FILE")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxNxK")
    parser.add_argument("--limit-s", type=float, default=300.0, help="stop after this time and keep what is done")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.limit_s
    wanted = published(options.recorded, options.shapes)
    compile_ahead([problem for problem, _ in wanted])
    device = open_first_gpu()
    from tuner.gpu.context import Contexts

    contexts, target = Contexts(device), options.out_dir / "triton.json"
    modules = compile_all(wanted, device.profile, options.out_dir)
    rows: list[Json] = json.loads(target.read_text())["rows"] if target.exists() else []
    for module in modules:
        if module.problem.shape in {row["shape"] for row in rows} or time.monotonic() > deadline_s:
            continue
        rows.append(measured(module, contexts, device))
        say(json.dumps({name: value for name, value in rows[-1].items() if name != "samples_us"}))
        write_json(target, report(rows, device))
    say(table(report(rows, device)))
    return 0 if len(rows) == len(options.shapes) else 1


def compile_ahead(problems: Sequence[GemmProblem]) -> None:
    """Build the Triton configs of all shapes with all cores; Triton finds them in its cache on disk afterwards."""
    began_s = time.monotonic()
    workers = min(len(problems), max(1, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        launched = sum(pool.map(launched_once, problems))
    say(f"{launched} Triton configs launched once in {time.monotonic() - began_s:.0f} s")


def launched_once(problem: GemmProblem) -> int:
    """How many configs of this shape could be built and launched; the others fail again where they are screened."""
    import torch

    from tests.soak.triton_kernels import candidates
    from tuner.gpu.inputs import TORCH_DTYPE

    dtype = TORCH_DTYPE[problem.dtype]
    a, b, d = (
        torch.zeros(extents, dtype=dtype, device="cuda")
        for extents in ((problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n))
    )
    launched = 0
    for _, launch in candidates(problem, torch.cuda.get_device_properties(0).multi_processor_count):
        try:
            launch(a, b, d)
            torch.cuda.synchronize()
            launched += 1
        except Exception:
            continue
    return launched


def measured(module: Module, contexts: Contexts, device: LiveDevice) -> Json:
    """One shape: ours, the best of Triton, and both baselines in the same rounds."""
    from tuner.gpu.clock import capture
    from tuner.gpu.rounds import measure

    protocol = MeasureProtocol.named("burst")
    context = contexts.get(module.problem, protocol, 0, quiet)
    tried, dropped = screened(context, device)
    ours = capture("ours", load_module(module.path, module.sha256), context.timing.sets, burst_ms=protocol.burst_ms)
    baselines = context.baselines.bursts(finalists=True)
    rounds = measure(
        [ours, *tried, *baselines],
        protocol,
        card=device.card,
        order=random.Random(0),
        report=quiet,
        enough=lambda _: False,
    )
    times = {burst.name: rounds.times_us(burst.name) for burst in (ours, *tried, *baselines)}
    medians = {name: median(values) for name, values in times.items()}
    triton = min((burst.name for burst in tried), key=medians.__getitem__)
    best = context.baselines.best_in(rounds, finalists=True)
    return {
        "shape": module.problem.shape,
        "dtype": module.problem.dtype.value,
        "config": module.config.to_dict(),
        "triton": triton,
        "triton_tried": len(tried) + len(dropped),
        "triton_dropped": dropped,
        "median_us": {"ours": medians["ours"], "triton": medians[triton], "torch": medians["torch"]}
        | {"cublaslt_best": medians[best]},
        "over_triton": medians[triton] / medians["ours"],
        "samples_us": {"ours": times["ours"], "triton": times[triton], "torch": times["torch"], best: times[best]},
    }


def screened(context: ProblemContext, device: LiveDevice) -> tuple[list[Burst], dict[str, str]]:
    """The fastest few Triton configs that are right, captured; and why others were dropped, by name."""
    import torch

    from tests.soak.triton_kernels import candidates
    from tuner.gpu.clock import capture
    from tuner.gpu.referee import is_plausible

    case, output = context.referee.cases[0], context.referee.output
    sets, dropped, times = context.timing.sets, {}, {}
    launches = dict(candidates(context.problem, device.profile.sm_count))
    for name, launch in launches.items():
        try:
            output.poison()
            launch(case.a, case.b, output.d)
            torch.cuda.synchronize()
            if not is_plausible(case, output.d, context.problem.dtype):
                dropped[name] = "wrong result"
                continue
            burst = capture(name, launch, sets, burst_ms=SCREEN_MS)
            times[name] = median(burst.time_us() for _ in range(SCREEN_ROUNDS))
        except Exception as error:  # whatever Triton's compiler or launcher raises for a config
            dropped[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
    kept = sorted(times, key=times.__getitem__)[:KEPT]
    if not kept:
        raise SystemExit(f"no Triton config works for {context.problem}: {dropped}")
    burst_ms = MeasureProtocol.named("burst").burst_ms
    slower = {name: f"{times[name]:.2f} us in the screening" for name in times if name not in kept}
    return [capture(name, launches[name], sets, burst_ms=burst_ms) for name in kept], dropped | slower


def report(rows: list[Json], device: LiveDevice) -> Json:
    """What is written."""
    return {
        "schema": 1,
        "command": "python -m tests.soak.triton_peer OUT_DIR",
        "environment": device.environment().to_dict(),
        "geometric_mean_over_triton": geometric_mean(row["over_triton"] for row in rows),
        "rows": rows,
    }


def table(found: Json) -> str:
    """Times and ratios as Markdown."""

    def lines() -> Iterator[str]:
        yield "| M x N x K | dtype | ours us | Triton us | torch us | best cuBLAS us | over Triton |"
        yield "|---|---|---|---|---|---|---|"
        for row in found["rows"]:
            times = " | ".join(f"{row['median_us'][name]:.2f}" for name in ("ours", "triton", "torch", "cublaslt_best"))
            yield f"| {row['shape']} | {row['dtype']} | {times} | {row['over_triton']:.3f} |"
        mean = found["geometric_mean_over_triton"]
        yield f"| **geometric mean of {len(found['rows'])}** | | | | | | **{mean:.3f}** |"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
