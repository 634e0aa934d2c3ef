"""200 injected faults with real faulty kernels on a Hopper GPU, through the local engine, the loop and the store.

    python -m tests.soak.device_faults OUT_DIR [--max-seconds N] [--share 0.1] [--only STUDY]

Each fault must get its outcome and a reason, no healthy trial may suffer, no process and no GPU memory may be left, and
the winner must be healthy and certified. Cut short (exit status 3), the same command goes on after the last trial: each
study has a database in OUT_DIR. The report is OUT_DIR/device_faults.json; until the end it holds what has ended so far.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from db.database import Database
from kernels.artifacts import ArtifactStore, write_atomically
from kernels.config import Sm90GemmConfig
from kernels.problem import Dtype, GemmProblem
from search_space.askable import askable_configs
from search_space.model import predict
from search_space.request import Budget, TuneRequest
from tests.gpu.faulty_compile import BLIND, FUNCTION, write_plan
from tests.gpu.plants import MEASURED, PLANTS
from tests.soak.studies import study_of, trials_of
from tuner.engine.compile_pool import CompilePoolOptions
from tuner.engine.local import LocalMachine, LocalOptions, toolchain
from tuner.gpu.host import GpuChild, PhaseLimits
from tuner.gpu.inventory import list_gpus
from tuner.loop import tune_study
from tuner.records import Evidence, Outcome, State, Trial
from tuner.search.searched import SearchedSpace
from tuner.settings import usable_cores
from tuner.store import StudyRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from tuner.engine.base import DeviceFacts
    from tuner.progress import Progress, StudyResult

CUT_SHORT = 3
COMPILE_LIMIT_S = 15.0
# A healthy kernel of these problems launches in well under a millisecond; loading has a phase of its own.
LIMITS = PhaseLimits(load_s=10.0, first_launch_s=1.5, verify_s=6.0, measure_s=6.0)
SPARES = 3
WRITE_EVERY_S = 5.0
LEFT_MB = 64.0  # of device memory that may differ before and after: the driver's own

# Faults of the large study. Hangs cost their limit, what loses the context costs a child; wrong results cost little.
MIX = {
    "arrive_count": 6,
    "producer_phase": 3,
    "half_multicast": 3,
    "illegal_address": 10,
    "misaligned_address": 10,
    "late_fault": 8,
    "tall_output": 16,
    "wrong_row": 20,
    "no_op": 16,
    "half_of_k": 20,
    "adds_to_output": 16,
    "not_deterministic": 20,
    "expect_tx": 2,
    "no_full_wait": 2,
    "no_empty_wait": 2,
    "epilogue_restart": 4,
    "early_release": 2,
    "no_accumulator_wait": 2,
    "no_store_wait": 2,
    "no_proxy_fence": 2,
    "no_stage_barrier": 2,
    "compiler_aborts": 14,
    "compiler_refuses": 7,
    "compiler_sleeps": 1,
    "compiler_forks": 1,
}
HEALTHY = 40  # configs of the large study besides the faulty ones


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """One study and its faults.

    name: of its database
    request: what is asked
    plants: plant of each config, empty for a healthy one
    """

    name: str
    request: TuneRequest
    plants: dict[GemmConfig, str]

    @property
    def faults(self) -> int:
        """Configs with a plant."""
        return sum(bool(plant) for plant in self.plants.values())


# ---------------------------------------------------------------------- plans


def plans(profile: DeviceProfile, share: float = 1.0) -> list[StudyPlan]:
    """The race that passes every comparison, then all the others on a small ragged problem. The same on every call."""
    taken: set[str] = set()
    small = TuneRequest(problem=GemmProblem.parse("40x4096x2048"), arch="sm_90a", sampler="tpe", seed=1)
    return [_race("race", profile, taken), _mixed("mixed", small, profile, share, taken)]


def _mixed(name: str, request: TuneRequest, profile: DeviceProfile, share: float, taken: set[str]) -> StudyPlan:
    problem = request.problem
    pool = [config for config in _drawn(problem, profile, request.seed) if config.key not in taken]
    plants: dict[GemmConfig, str] = {}
    for plant, count in MIX.items():
        fitting = [config for config in pool if config not in plants and _fits(plant, problem, config)]
        plants.update(dict.fromkeys(fitting[: ceil(count * share)], plant))
    healthy = (config for config in pool if config not in plants)
    plants.update({config: "" for config, _ in zip(healthy, range(ceil(HEALTHY * share)), strict=False)})
    return _study(name, request, plants, taken)


# Knobs that leave the kernel in the form that the plants are cut for: one output tile a CTA, stored by the copy engine.
_TILE_KNOBS = frozenset(
    {"pipe_depth", "cta_group", "num_consumers", "blk_m", "blk_n", "blk_k", "l2_group_size", "raster"}
    | {"epi_n", "epi_stages", "share"}
)


def _drawn(problem: GemmProblem, profile: DeviceProfile, seed: int) -> list[GemmConfig]:
    """Some of the plain configs worth asking, in random order."""
    askable, plain = askable_configs(problem, profile), Sm90GemmConfig()
    drawn = (askable[index] for index in random.Random(seed).sample(range(len(askable)), len(askable)))
    others = [knob for knob in Sm90GemmConfig.knobs() if knob not in _TILE_KNOBS]
    fitting = (one for one in drawn if all(getattr(one, knob) == getattr(plain, knob) for knob in others))
    return [one for one, _ in zip(fitting, range(1500), strict=False) if one.cta_group <= 2]


def _fits(plant: str, problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether the plant does something in this config."""
    assert isinstance(config, Sm90GemmConfig)
    chunks = config.blk_m // 64 * (config.blk_n // config.epi_n)
    blocks = config.k_blocks(problem)
    match plant:
        case "arrive_count" | "no_empty_wait" | "early_release":
            return blocks > config.pipe_depth  # the ring comes round
        case "half_multicast":
            return config.cta_group == 2
        case "epilogue_restart":
            return chunks % config.epi_stages != 0
        case "half_of_k":
            return blocks % 2 == 0
        case "tall_output":
            return problem.m % config.cta_rows != 0
    return True


def _race(name: str, profile: DeviceProfile, taken: set[str]) -> StudyPlan:
    """The fastest kernels have the epilogue race, at a K that hides it; behind them healthy ones that are slower."""
    problem = GemmProblem(m=25344, n=384, k=4096, dtype=Dtype.FP16)
    racy = Sm90GemmConfig(
        num_consumers=3, blk_m=64, blk_n=192, blk_k=64, pipe_depth=3, epi_n=64, epi_stages=2, l2_group_size=1
    )
    fast_us = predict(problem, racy, profile).time_us
    slower = [
        config
        for config in _drawn(problem, profile, seed=3)
        if config.key not in taken and 1.25 * fast_us < predict(problem, config, profile).time_us < 2.5 * fast_us
    ]
    plants: dict[GemmConfig, str] = {racy: "epilogue_restart"}
    plants |= {replace(racy, raster=raster): BLIND + "epilogue_restart" for raster in ("n", "m-serpentine")}
    plants |= dict.fromkeys(slower[:6], "")
    others = ("illegal_address", "wrong_row", "no_op", "arrive_count", "half_of_k", "misaligned_address")
    plants |= dict(zip(slower[6:12], others, strict=True))
    return _study(name, TuneRequest(problem=problem, arch="sm_90a", sampler="random", seed=3), plants, taken)


def _study(name: str, request: TuneRequest, plants: dict[GemmConfig, str], taken: set[str]) -> StudyPlan:
    taken |= {config.key for config in plants}
    # Many in flight: a compile that sleeps shall be over before the GPU gets to its number.
    whole = replace(request, budget=Budget(trials=len(plants), wall_s=3600.0), in_flight=48)
    return StudyPlan(name=name, request=whole, plants=plants)


# ---------------------------------------------------------------------- running


class TimedChild(GpuChild):
    """Notes how long it takes to have a healthy child, and how often one was replaced."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.starts_s: list[float] = []

    def _start(self) -> str:
        began = time.monotonic()
        reason = super()._start()
        self.starts_s.append(time.monotonic() - began)
        return reason


class Log:
    """What has ended so far, in the file of the report: a run that is cut has something to show."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: list[list[Any]] = json.loads(file.read_text())["trials"] if file.exists() else []
        self._began = self._written = time.monotonic()

    def add(self, plan: StudyPlan, trial: Trial) -> None:
        """A trial ended."""
        plant = plan.plants.get(trial.config, "") or "healthy"
        at_s = round(time.monotonic() - self._began, 2)
        self.rows.append(
            [plan.name, trial.number, plant, trial.outcome, round(trial.gpu_s, 3), at_s, trial.reason[:200]]
        )
        print(
            f"{at_s:7.2f} {plan.name} {len(self.rows):3d} {plant:20s} {trial.outcome:18s} {trial.reason[:90]}",
            flush=True,
        )
        if time.monotonic() > self._written + WRITE_EVERY_S:
            self.write({"complete": False})

    def write(self, report: dict[str, Any]) -> None:
        """The report, with the trials."""
        self._written = time.monotonic()
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        text = json.dumps({**report, "trials": []}, indent=1).replace('"trials": []', f'"trials": [\n{rows}\n ]')
        write_atomically(self._file, (text + "\n").encode())


class Bench:
    """The machine, its one GPU and the folder of the run."""

    def __init__(self, folder: Path, gpu: DeviceFacts, start_child: Callable[[int], Any] | None = None) -> None:
        self.folder, self.gpu = folder, gpu
        self.children: list[TimedChild] = []
        self.log = Log(folder / "device_faults.json")
        compile_options = CompilePoolOptions(
            function=FUNCTION, processes=max(2, usable_cores() - 2), limit_s=COMPILE_LIMIT_S
        )
        self.machine = LocalMachine(
            LocalOptions(compile=compile_options),
            ArtifactStore(folder / "artifacts"),
            list_gpus=lambda: (gpu,),
            start_child=start_child or self._start_child,
        )

    def _start_child(self, index: int) -> TimedChild:
        compilers = toolchain()
        child = TimedChild(
            index,
            uuid=self.gpu.uuid,
            limits=LIMITS,
            spares=SPARES,
            toolchain=compilers.name,
            cuda=compilers.nvcc_version,
        )
        self.children.append(child)
        return child

    def run(self, plan: StudyPlan, deadline_s: float) -> dict[str, Any] | None:
        """Run a study, or go on with it. None when the deadline came first."""
        began = time.monotonic()
        configs = list(plan.plants)
        ends: list[tuple[float, Trial]] = []

        def note(progress: Progress) -> None:
            if progress.trial is not None:
                ends.append((time.monotonic(), progress.trial))
                self.log.add(plan, progress.trial)

        with Database.open(f"sqlite:///{self.folder / plan.name}.db") as database:
            study_id = study_of(database, plan.request)
            before = trials_of(database, study_id)
            engine = self.machine.engine(self.gpu.profile, live=True)
            result = tune_study(
                plan.request,
                engine,
                StudyRecorder(database, study_id, plan.request, engine.device),
                resume_from=before,
                starting=(),
                space=SearchedSpace.of_configs(configs),
                on_progress=note,
                should_stop=lambda: time.monotonic() > deadline_s,
            )
            if result.reason.startswith("cancelled"):
                return None
            stored = trials_of(database, study_id)
        report = judge(plan, result, stored, self.gpu.uuid)
        report["resumed_after"] = len(before)
        report["wall_s"] = round(time.monotonic() - began, 1)
        report["median_s_a_trial"] = seconds_a_trial(plan, ends, began)
        return report


def seconds_a_trial(plan: StudyPlan, ends: Sequence[tuple[float, Trial]], began: float) -> dict[str, float]:
    """Median seconds between the end of a trial on the GPU and that of the one before, by plant.

    What a fault leaves to be done (a fresh child, its context, the problem's baselines) shows in the trial after it, so
    the trials after one that lost its child are also listed apart.
    """
    on_gpu = [(end, trial) for end, trial in ends if trial.gpu_s > 0]
    took: dict[str, list[float]] = {}
    last_s, lost = began, False
    for end, trial in on_gpu:
        plant = plan.plants.get(trial.config, "") or "healthy"
        took.setdefault(plant + (", on a fresh child" if lost else ""), []).append(end - last_s)
        last_s, lost = end, trial.outcome in (Outcome.TIMED_OUT, Outcome.CRASHED)
    return {name: round(median(values), 2) for name, values in sorted(took.items())}


# ---------------------------------------------------------------------- judging


def judge(plan: StudyPlan, result: StudyResult, stored: Sequence[Trial], gpu_uuid: str) -> dict[str, Any]:
    """Outcomes by plant, and everything that is not as it must be."""
    outcomes: Counter[str] = Counter()
    problems = []
    for trial in stored:
        plant = plan.plants[trial.config].removeprefix(BLIND)
        outcomes[f"{plant or 'healthy'}: {trial.outcome}"] += 1
        problems += [
            f"trial {trial.number}, {plant or 'healthy'}: {text}" for text in _wrong(trial, plant, plan, gpu_uuid)
        ]
    missing = len(plan.plants) - len({trial.config for trial in stored})
    if missing or len(stored) != len(plan.plants):
        problems.append(f"{len(stored)} trials of {len(plan.plants)} configs, {missing} configs never tried")
    if result.state is not State.DONE:
        problems.append(f"the study is {result.state}: {result.reason}")
    winner = result.winner
    if winner is None or plan.plants[winner.config]:
        problems.append(f"the winner is {winner and plan.plants[winner.config]}")
    if Evidence.CHECKED not in result.evidence:
        problems.append(f"the winner is not certified: {[check.to_dict() for check in result.checks]}")
    return {
        "name": plan.name,
        "problem": str(plan.request.problem),
        "sampler": plan.request.sampler,
        "trials": len(stored),
        "faults": plan.faults,
        "outcomes": dict(sorted(outcomes.items())),
        "winner": winner.config.to_dict() if winner else None,
        "checks": [check.to_dict() for check in result.checks],
        "reason": result.reason,
        "problems": problems,
    }


def _wrong(trial: Trial, plant: str, plan: StudyPlan, gpu_uuid: str) -> list[str]:
    """What is wrong with the end of one trial."""
    allowed = PLANTS[plant].outcomes if plant else MEASURED
    found = []
    if trial.outcome not in allowed:
        found.append(f"became {trial.outcome}: {trial.reason}")
    if trial.outcome in MEASURED:
        return found
    needed = [trial.config.key, str(plan.request.problem)]
    if trial.outcome is not Outcome.CHECK_FAILED:  # a structural rule is broken on every GPU
        needed += [gpu_uuid] if trial.gpu_s > 0 else []
    found += [f"its reason does not name {what}: {trial.reason}" for what in needed if what not in trial.reason]
    return found


# ---------------------------------------------------------------------- what is left behind


def device_memory_mb(uuid: str) -> float:
    """Memory of the card that is in use. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return float(info.used) / 2**20


def settled_memory_mb(uuid: str, wanted_mb: float, *, within_s: float = 10.0) -> float:
    """Memory in use once it is low enough: the driver takes a moment to free a context. What it is after the time."""
    deadline_s = time.monotonic() + within_s
    while (used_mb := device_memory_mb(uuid)) > wanted_mb and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return used_mb


def processes_left() -> list[str]:
    """Compilers, workers and children that outlived the run, whoever is their parent."""
    ours = ("tuner.gpu.", "tuner.engine.compile_worker", "nvcc", "ptxas", "cicc", "compute-sanitizer")
    found = [f"{child.pid} {child.name()}" for child in psutil.Process().children(recursive=True)]
    for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.info["create_time"] >= psutil.Process().create_time() and any(name in line for name in ours):
            found.append(f"{process.info['pid']} {line[:120]}")
    return found


def main() -> int:
    """0 when all went as it must, 1 when not, 3 when the time was up: run it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--max-seconds", type=float, default=540.0)
    parser.add_argument("--share", type=float, default=1.0, help="part of the faults of each kind, for a quick look")
    parser.add_argument("--only", metavar="STUDY", help="run one study")
    arguments = parser.parse_args()
    began = time.monotonic()
    gpus = [gpu for gpu in list_gpus() if gpu.profile.arch.name == "sm_90a"]
    if not gpus:
        print("needs a Hopper GPU: the faults are planted in the Hopper template", file=sys.stderr)
        return 2
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    studies = [plan for plan in plans(gpus[0].profile, arguments.share) if arguments.only in (None, plan.name)]
    print(f"{sum(plan.faults for plan in studies)} faults in {len(studies)} studies on {gpus[0].name}", flush=True)
    write_plan(folder / "plants.json", {c.key: plant for plan in studies for c, plant in plan.plants.items() if plant})
    memory_before_mb = device_memory_mb(gpus[0].uuid)
    bench = Bench(folder, gpus[0])
    try:
        complete = run_all(bench, studies, folder, began + arguments.max_seconds)
    finally:
        bench.machine.close()
    if not complete:
        bench.log.write({"complete": False})
        print("time is up: run the same command again", flush=True)
        return CUT_SHORT
    return write_report(bench, studies, folder, memory_before_mb, command=f"--share {arguments.share:g}")


def run_all(bench: Bench, studies: Sequence[StudyPlan], folder: Path, deadline_s: float) -> bool:
    """Every study that has no report yet. False when the deadline came first."""
    for plan in studies:
        file = folder / f"{plan.name}.json"
        if file.exists():
            continue
        report = bench.run(plan, deadline_s)
        if report is None:
            return False
        starts_s = [round(took, 2) for child in bench.children for took in child.starts_s]
        report["child_starts_s"] = starts_s
        for child in bench.children:
            child.starts_s.clear()
        write_atomically(file, json.dumps(report, indent=1).encode())
        print(json.dumps({key: report[key] for key in ("name", "faults", "wall_s", "problems")}), flush=True)
    return True


def measured_environment(folder: Path, studies: Sequence[StudyPlan]) -> dict[str, Any] | None:
    """Environment of a trial that was measured: it knows torch and the compilers."""
    for plan in studies:
        with Database.open(f"sqlite:///{folder / plan.name}.db") as database:
            for trial in trials_of(database, study_of(database, plan.request)):
                if trial.measurement is not None:
                    return trial.measurement.environment.to_dict()
    return None


def write_report(
    bench: Bench, studies: Sequence[StudyPlan], folder: Path, memory_before_mb: float, *, command: str
) -> int:
    """Put the studies' reports together, add what was left behind. Returns the exit status."""
    reports = [json.loads((folder / f"{plan.name}.json").read_text()) for plan in studies]
    memory_after_mb = settled_memory_mb(bench.gpu.uuid, memory_before_mb + LEFT_MB)
    left = processes_left()
    problems = [f"{one['name']}: {text}" for one in reports for text in one["problems"]]
    if left:
        problems.append(f"processes left: {left}")
    if memory_after_mb > memory_before_mb + LEFT_MB:
        problems.append(f"device memory in use rose from {memory_before_mb:.0f} to {memory_after_mb:.0f} MB")
    environment = measured_environment(folder, studies) or (bench.gpu.environment and bench.gpu.environment.to_dict())
    report = {
        "schema": 1,
        "complete": True,
        "command": f"python -m tests.soak.device_faults OUT_DIR {command}",
        "environment": environment or {},
        "faults": sum(one["faults"] for one in reports),
        "healthy_trials": sum(one["trials"] - one["faults"] for one in reports),
        "wall_s": round(sum(one["wall_s"] for one in reports), 1),
        "limits_s": {"first_launch": LIMITS.first_launch_s, "compile": COMPILE_LIMIT_S},
        "spares": SPARES,
        "device_memory_mb": {"before": round(memory_before_mb, 1), "after": round(memory_after_mb, 1)},
        "processes_left": left,
        "problems": problems,
        "trial_fields": ["study", "number", "plant", "outcome", "gpu_s", "ended_at_s", "reason"],
        "studies": reports,
    }
    bench.log.write(report)
    print(json.dumps(report, indent=1)[:6000], flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    # The workers of the pool and the children import the tests too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", ""))))
    sys.exit(main())
