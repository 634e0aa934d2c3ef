"""What it costs to learn M only when a kernel is called: one module for many M beside one for each, on a real GPU.

    python -m tests.soak.dynamic_m OUT_DIR

Both are built from the same config. The one module has a tensor map whose rows and box are those of the call, a tile
walk whose length is computed in the kernel, and as many CTAs as run at once. Each M is verified by the referee, and the
two are timed in the same rounds; the ratio is fixed over dynamic, so that 0.98 means that the dynamic one takes 2 %
longer. A row is right when the module verifies for every M; no limit is set on the cost.
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kernels.artifacts import write_atomically
from kernels.compile import compile_kernel
from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from search_space.request import MeasureProtocol
from tests.soak.on_gpu import Json, open_first_gpu, quiet, say
from tests.soak.report import write_json
from tuner.records import Ratio

if TYPE_CHECKING:
    from tuner.gpu.context import Contexts
    from tuner.gpu.device import LiveDevice


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module with dynamic M.

    problem: N, K and dtype, with the largest M
    config: knobs
    rows: values of M
    """

    problem: GemmProblem
    config: Sm90GemmConfig
    rows: tuple[int, ...]


def _row(shape: str, dtype: str, rows: tuple[int, ...], **knobs: object) -> Row:
    return Row(problem=GemmProblem.parse(shape, dtype=dtype), config=Sm90GemmConfig.from_dict(knobs), rows=rows)


ROWS = (
    _row("4096x4096x4096", "bf16", (4096, 2048, 1000, 300), cta_group=2, blk_n=256),
    _row("8192x3072x768", "fp16", (8192, 777), schedule="pingpong", blk_m=128, blk_n=128, pipe_depth=5, epi_stages=1),
    _row(
        "16x7168x4096", "bf16", (16, 5, 1), swap_ab=True, num_consumers=1, blk_n=16, blk_k=128, epi_n=8, epi_stages=1,
        pipe_depth=9,
    ),
    _row("64x7168x4096", "bf16", (64, 33, 1), num_consumers=1, blk_n=64, blk_k=128, pipe_depth=6),
    _row("128x256x7168", "bf16", (128, 40), num_consumers=1, blk_n=64, split_k=8, epi_n=16, epi_stages=1, pipe_depth=8),
    _row("1000x1095x1032", "fp16", (1000, 129), cta_group=2, blk_n=128, epi_stages=1, raster="n-serpentine"),
    _row("500x2048x511", "bf16", (500, 222), load="cp_async", num_consumers=1, blk_n=64, epi_stages=1, pipe_depth=6),
)  # fmt: skip


def build(problem: GemmProblem, config: Sm90GemmConfig, sm_count: int, dynamic_m: bool, path: Path) -> str:
    """Compile one module into a file, in a process of the pool."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, compile_kernel(problem, config, sm_count, dynamic_m=dynamic_m).module)
    return str(path)


def modules(rows: tuple[Row, ...], sm_count: int, folder: Path) -> list[dict[str, str]]:
    """Files of each row: by M, and the one with dynamic M under the empty name."""
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [
            {
                str(m or ""): pool.submit(
                    build, replace(row.problem, m=m or row.problem.m), row.config, sm_count, m is None,
                    folder / f"{number}-{m or 'dynamic'}.so",
                )
                for m in (None, *row.rows)
            }
            for number, row in enumerate(rows)
        ]  # fmt: skip
        return [{name: future.result() for name, future in row.items()} for row in futures]


def compare(problem: GemmProblem, files: dict[str, str], contexts: Contexts, device: LiveDevice) -> Json:
    """Verify and time the module with dynamic M and the one for this M."""
    import tvm_ffi

    from tuner.gpu.clock import capture, graph_ms
    from tuner.gpu.rounds import measure

    protocol = MeasureProtocol()
    context = contexts.get(problem, protocol, 0, quiet)
    bursts = []
    for name, file in (("dynamic", files[""]), ("fixed", files[str(problem.m)])):
        kernel = tvm_ffi.load_module(file)["gemm"]
        verdict = context.referee.verify(kernel, quiet, repeats=20)
        if verdict.outcome is not None:
            return {"m": problem.m, "right": False, "reason": f"{name}: {verdict.reason}"}
        bursts.append(capture(name, kernel, context.timing.sets, burst_ms=graph_ms(protocol)))
    rounds = measure(
        bursts, protocol, card=device.card, order=random.Random(0), report=quiet, enough=lambda _: False
    )  # fmt: skip
    times = {burst.name: rounds.times_us(burst.name) for burst in bursts}
    return {
        "m": problem.m,
        "right": True,
        "us": {name: median(samples) for name, samples in times.items()},
        "fixed_over_dynamic": Ratio.of_pairs(times["fixed"], times["dynamic"]).to_dict(),
    }


def main() -> int:
    """0 when every module is right for every M."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--limit-s", type=float, default=90.0, help="no row begins after it")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.limit_s
    device = open_first_gpu()
    from tuner.gpu.context import Contexts

    contexts = Contexts(device)
    files = modules(ROWS, device.profile.sm_count, options.out_dir / "modules")
    say(f"{sum(map(len, files))} modules compiled")
    target = options.out_dir / "dynamic_m.json"
    done: list[Json] = json.loads(target.read_text())["rows"] if target.exists() else []
    for row, built in list(zip(ROWS, files, strict=True))[len(done) :]:
        if time.monotonic() > deadline_s:
            break
        sizes = [compare(replace(row.problem, m=m), built, contexts, device) for m in row.rows]
        problem = {"n": row.problem.n, "k": row.problem.k, "dtype": row.problem.dtype.value}
        done.append({"problem": problem, "config": row.config.to_dict(), "sizes": sizes})
        say(json.dumps(done[-1]["sizes"]))
        write_json(target, {"schema": 1, "command": "python -m tests.soak.dynamic_m OUT_DIR",
                            "environment": device.environment().to_dict(), "rows": done})  # fmt: skip
    return 0 if len(done) == len(ROWS) and all(size["right"] for row in done for size in row["sizes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
