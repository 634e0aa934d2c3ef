"""Gate for sm_100a kernels: tirx-harness runs reduced instances with the same knobs on the CPU.

synccheck follows the barriers, racecheck the memory accesses, numsim the values. All three are needed: a staging
buffer that is rewritten too early passes synccheck and numsim, a wrong result may pass both checkers. None of them sees
a missing `tcgen05.fence::after_thread_sync`; `kernels.structure` does. Needs the extra `verify` and a Rust toolchain;
the engine's first build takes minutes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.arch import SM_100A
from kernels.config import Sm100GemmConfig
from kernels.errors import ConfigError, ToolchainError
from kernels.problem import Dtype, GemmProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kernels.ladder import Sm100StepConfig

PACKAGES = ("tirx-harness", "apache-tvm")
CLEAN, EXACT = "clean", "exact"
RAGGED_ROWS, RAGGED_COLUMNS, RAGGED_K = 3, 8, 8
FINDINGS_KEPT = 6
_INCOMPLETE, _PARTIAL_LAUNCH = "incomplete", "subset_execution"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One reduced run of a config.

    label: what it is for
    problem: what is computed
    sm_count: SMs of the pretended device, which decide the number of clusters
    """

    label: str
    problem: GemmProblem
    sm_count: int


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What the checkers say about one config, on one reduced problem.

    config_key: canonical text of the config
    problem: reduced problem that was run
    sm_count: SMs of the pretended device
    source_hash: of the generated source and launch plan that this problem has
    fault: planted bug, empty for the template as it is
    sync: verdict of synccheck: clean, review, incomplete or error; `failed: ...` where it could not finish
    race: verdict of racecheck, likewise
    numsim: `exact` when every element equals the reference bit for bit, `N of M wrong`, or `failed: ...`
    findings: what the checkers found, worst first, one line each
    versions: packages and Rust compiler, by name
    seconds: wall time of each tool, by name
    """

    config_key: str
    problem: GemmProblem
    sm_count: int
    source_hash: str
    fault: str
    sync: str
    race: str
    numsim: str
    findings: tuple[str, ...]
    versions: dict[str, str]
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Nothing short of three clean answers passes: not `incomplete`, not a tool that failed."""
        return (self.sync, self.race, self.numsim) == (CLEAN, CLEAN, EXACT)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        problem = self.problem
        described = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype.value}
        return {**asdict(self), "problem": described, "findings": list(self.findings)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckReport:
        """Inverse of to_dict. Raises KeyError, TypeError or ValueError for values that are not a report."""
        described = dict(values["problem"])
        problem = GemmProblem(**{**described, "dtype": Dtype(described["dtype"])})
        return cls(**{**values, "problem": problem, "findings": tuple(values["findings"])})


def available() -> str | None:
    """Why the checkers cannot be used on this machine, or None. Does not build the engine."""
    if importlib.util.find_spec("tirx_harness") is None:
        return "tirx-harness is not installed: install the extra 'verify'"
    if importlib.util.find_spec("ml_dtypes") is None:
        return "ml_dtypes is not installed: install the extra 'verify'"
    for tool in ("cargo", "rustc"):
        if _rust_tool(tool) is None:
            return f"no {tool} found: the checker engine is built with Rust; install it or set NUMSIM_{tool.upper()}"
    return None


def _rust_tool(name: str) -> str | None:
    """Where the engine will look: a setting of its own, cargo's folder in the home, the path."""
    explicit = os.environ.get(f"NUMSIM_{name.upper()}")
    if explicit:
        return shutil.which(explicit)
    home = Path.home() / ".cargo" / "bin" / name
    return str(home) if home.is_file() else shutil.which(name)


def reduced_instances(config: Sm100GemmConfig, dtype: Dtype = Dtype.BF16) -> tuple[Instance, ...]:
    """Small problems that take a config through every hand-over, the quickest first.

    ragged: one cluster, every side and the last stage cut short. Two rows of tiles and at least `acc_stages` columns:
        more tiles than accumulator slots, so each is handed back.
    several clusters: whole tiles, shared out among two clusters or a few more, each of which reuses its accumulators.
    With cluster launch control there are two columns more, so that every answer's place is used again.
    Both have one stage more of K than the rings of all parts of K hold, so a ring wraps within a tile; over the tiles
    of a cluster every stage meets both phases.
    """
    rows, cols = config.cluster_tile
    ring_k = config.split_k * config.pipe_depth * config.blk_k
    whole_cols = config.acc_stages - 1 + 2 * (config.scheduler == "clc")
    ragged = GemmProblem(
        m=rows + RAGGED_ROWS,
        n=whole_cols * cols + min(cols - RAGGED_COLUMNS, config.epi_n + RAGGED_COLUMNS),
        k=ring_k + RAGGED_K,
        dtype=dtype,
    )
    sm_count = next(count for count in itertools.count(config.cluster_size) if config.resident_clusters(count) > 1)
    tiles = config.resident_clusters(sm_count) * (config.acc_stages + 1)
    whole = GemmProblem(m=2 * rows, n=ceil(tiles / 2) * cols, k=ring_k + config.blk_k, dtype=dtype)
    return (
        Instance(label="ragged", problem=ragged, sm_count=config.cluster_size),
        Instance(label="several clusters", problem=whole, sm_count=sm_count),
    )


def check(
    config: Sm100GemmConfig | Sm100StepConfig,
    instance: Instance,
    *,
    fault: str = "",
    workers: int = 2,
    tell: Callable[[str], None] | None = None,
) -> CheckReport:
    """Run all three tools on one reduced instance of a config.

    tell: called with each tool's name before it runs; one takes 10 to 60 s
    Raises ConfigError for an illegal config and ToolchainError where the engine cannot be used or built, which is never
    a verdict.
    """
    if reason := available():
        raise ToolchainError(reason)
    if config.arch is not SM_100A:
        raise ConfigError(f"the checkers know sm_100a kernels only, the config is for {config.arch.name}", knob="arch")

    from kernels.lowering import build, lower

    variant = {"fault": fault} if fault else {}
    lowered = lower(instance.problem, config, instance.sm_count, **variant)
    kernel = build(instance.problem, config, instance.sm_count, **variant)
    operands, resident = _operands(instance.problem), _resident(config, instance)
    answers: dict[str, str] = {}
    findings: list[str] = []
    seconds: dict[str, float] = {}
    with _steady_path():
        for name, tool in (("sync", _synccheck), ("race", _racecheck), ("numsim", _numsim)):
            if tell is not None:
                tell(name)
            started = time.perf_counter()
            answers[name], found = _answer(tool, kernel, operands, resident, workers)
            seconds[name] = round(time.perf_counter() - started, 2)
            findings += (f"{name}: {line}" for line in found)
    return CheckReport(
        config_key=config.key,
        problem=instance.problem,
        sm_count=instance.sm_count,
        source_hash=lowered.source_hash,
        fault=fault,
        findings=tuple(findings),
        versions=versions(),
        seconds=seconds,
        **answers,
    )


def _resident(config: Sm100GemmConfig | Sm100StepConfig, instance: Instance) -> tuple[int, ...] | None:
    """Clusters that the pretended device holds; with cluster launch control they take over the tiles of the others."""
    if not isinstance(config, Sm100GemmConfig) or config.scheduler == "static":
        return None  # all that are launched
    return tuple(range(config.clusters(instance.problem, instance.sm_count)))


def versions() -> dict[str, str]:
    """Packages and Rust compiler that a verdict depends on, by name. Needs `available() is None`."""
    rustc = _rust_tool("rustc")
    assert rustc is not None
    printed = subprocess.run([rustc, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    return {name: importlib.metadata.version(name) for name in PACKAGES} | {"rustc": printed.strip()}


@contextmanager
def _steady_path() -> Iterator[None]:
    """One PATH for every caller: the engine's cache is keyed on it, and a miss rebuilds the engine for minutes."""
    cargo = _rust_tool("cargo")
    assert cargo is not None
    before = os.environ.get("PATH")
    os.environ["PATH"] = os.pathsep.join((str(Path(cargo).parent), "/usr/local/bin", "/usr/bin", "/bin"))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


_Answer = tuple[str, tuple[str, ...]]
_Resident = tuple[int, ...] | None


def _answer(
    tool: Callable[..., _Answer], kernel: Any, operands: dict[str, Any], resident: _Resident, workers: int
) -> _Answer:
    from tirx_harness.numsim.errors import NumSimBuildError, NumSimError

    try:
        return tool(kernel, {name: values.copy() for name, values in operands.items()}, resident, workers)
    except NumSimBuildError as error:
        raise ToolchainError(f"the checker engine cannot be built: {_one_line(error)}") from error
    except NumSimError as error:
        # A deadlock or a protocol error ends a run this way; an instruction that the engine lacks does too.
        return f"failed: {_one_line(error)}", ()


def _subset(resident: _Resident) -> Any:
    from tirx_harness.numsim.api import ExecutionSubset

    return None if resident is None else ExecutionSubset(cluster_ids=resident)


def _synccheck(kernel: Any, operands: dict[str, Any], resident: _Resident, workers: int) -> _Answer:
    del workers
    from tirx_harness import synccheck

    return (
        _verdict(synccheck(kernel, operands)) if resident is None else _twice("synccheck", kernel, operands, resident)
    )


def _racecheck(kernel: Any, operands: dict[str, Any], resident: _Resident, workers: int) -> _Answer:
    del workers
    from tirx_harness import racecheck

    return (
        _verdict(racecheck(kernel, operands)) if resident is None else _twice("racecheck", kernel, operands, resident)
    )


def _verdict(report: Any) -> _Answer:
    lines = tuple(f"{found.status} {found.kind}: {_one_line(found.message)}" for found in report.findings)
    return str(report.verdict), lines[:FINDINGS_KEPT]


def _twice(name: str, kernel: Any, operands: dict[str, Any], resident: tuple[int, ...]) -> _Answer:
    """A kernel whose clusters take tiles over: launched whole, and with the `resident` clusters only.

    In the engine no cluster waits for room, so a whole launch leaves nothing to take over; the clusters that do not
    take part in a partial one are those whose tiles are taken over. Of a partial launch the checkers say `incomplete`
    for that reason alone, whatever they find; see docs/decisions/0011.
    """
    from tirx_harness.numsim.checker_runner import run_native_checker

    for clusters in (None, resident):
        arguments = {operand: values.copy() for operand, values in operands.items()}
        answer = _partial_answer(run_native_checker(name, kernel, inputs=arguments, subset=_subset(clusters)).payload)
        if answer[0] != CLEAN:
            return answer
    return answer


def _partial_answer(payload: Mapping[str, Any]) -> _Answer:
    """What a checker says, where a partial launch alone is no reason to call the analysis incomplete."""
    gaps = [gap.get("reason") for gap in payload["incomplete"]]
    open_search = not payload.get("coverage", {"eligible_for_clean": True})["eligible_for_clean"]
    whole = gaps == [_PARTIAL_LAUNCH] and not open_search and payload["execution_error"] is None
    if payload["verdict"] == _INCOMPLETE and whole and not payload["findings"] and not payload.get("advisories"):
        return CLEAN, ()
    return _own_verdict(payload)


def _own_verdict(payload: Mapping[str, Any]) -> _Answer:
    from tirx_harness.numsim.checker_report import RaceReport, SyncCheckReport

    kind = RaceReport if payload["execution_model"] == "direct_online_vc" else SyncCheckReport
    return _verdict(kind.from_native(payload))


def _numsim(kernel: Any, operands: dict[str, Any], resident: _Resident, workers: int) -> _Answer:
    import numpy as np
    from tirx_harness.numsim.api import Engine, transpile

    run = Engine(max_workers=workers).run(transpile(kernel), operands, outputs=["D"], subset=_subset(resident))
    a, b = (operands[name].astype(np.float32) for name in ("A", "B"))
    expected = (a @ b.T).astype(operands["D"].dtype)
    wrong = int((run.outputs["D"].view(np.uint16) != expected.view(np.uint16)).sum())
    return (f"{wrong} of {expected.size} wrong" if wrong else EXACT), ()


def _operands(problem: GemmProblem) -> dict[str, Any]:
    """Small integers: their products and sums are exact in float32 in any order, so results must match bit for bit."""
    import ml_dtypes
    import numpy as np

    dtype = np.dtype(np.float16) if problem.dtype is Dtype.FP16 else np.dtype(ml_dtypes.bfloat16)
    values = np.random.default_rng(0)
    return {
        "A": values.integers(-3, 4, (problem.m, problem.k)).astype(dtype),
        "B": values.integers(-3, 4, (problem.n, problem.k)).astype(dtype),
        "D": np.full((problem.m, problem.n), np.nan, dtype),
    }


def _one_line(value: object, limit: int = 300) -> str:
    return " ".join(str(value).split())[:limit]
