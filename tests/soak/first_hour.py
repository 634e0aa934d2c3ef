"""The first hour on a fresh card: does every preset load, are kernels right, how fast are the ladder and one tuned
shape, and where do the model and the measurements differ?

    python -m tests.soak.first_hour --arch sm_100a --out results/b200/first_hour.json     make b200
    python -m tests.soak.first_hour --arch sm_90a --out results/h200/first_hour.json      make h200

One command, under 30 minutes, resumed by giving it again: each answer is in the file as soon as it is there. Kernels
run in the product's GPU child, which is watched: one that hangs or crashes costs its row and not the card.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kernels.arch import arch_named
from kernels.devices import PROFILES
from kernels.problem import GemmProblem
from search_space.model import predict
from search_space.request import Budget, MeasureProtocol, TuneRequest
from search_space.space import random_legal
from search_space.starting import PRESETS, starting_configs
from tests.soak.one_by_one import command_line, say
from tests.soak.report import write_json
from tuner.engine.base import CompileJob, EngineError, EvaluateJob, NoDevice, WorkerLost
from tuner.engines import engines_of
from tuner.ladder import climb
from tuner.loop import tune_study
from tuner.recorder import MemoryRecorder
from tuner.records import Outcome
from tuner.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from kernels.config import GemmConfig
    from tuner.engine.base import CompileReply, Engine

    Json = dict[str, Any]

SCHEMA = 1
WALL_S = 1500.0
PRESET_PROBLEM = GemmProblem(m=512, n=512, k=512)
# small, ragged in M, N and K, one row of tiles, long K, square: four configs each
CORRECTNESS = ("256x256x256", "333x776x520", "16x7168x4096", "128x512x8192", "2048x2048x2048")
CONFIGS_OF_SHAPE = 4
LADDER = GemmProblem.parse("4096x4096x4096", dtype="fp16")
TUNED = GemmProblem.parse("4096x4096x4096", dtype="bf16")
TUNE_BUDGET = Budget(trials=40, wall_s=420)
MODEL_TOLERANCE = 0.15


class OtherDeviceError(RuntimeError):
    """The file to resume is of another device."""


class FirstHour:
    """One run, on one device."""

    def __init__(self, engine: Engine, out: Path, command: str, tell: Callable[[str], None], wall_s: float = WALL_S):
        """Reads what an earlier run left in `out`. Raises OtherDeviceError where that was on another kind of device."""
        self.engine, self.out, self.tell = engine, out, tell
        self.began, self.wall_s = time.monotonic(), wall_s
        self.content: Json = {"schema": SCHEMA, "command": command, "device": engine.device.name, "done": {}}
        if out.exists():
            earlier = json.loads(out.read_text())
            if earlier["device"] != engine.device.name:
                message = f"{out} is of {earlier['device']}, this is {engine.device.name}: name another file"
                raise OtherDeviceError(message)
            self.content["done"] = earlier["done"]

    def run(self) -> bool:
        """Everything that is not done yet. Whether all of it is done now, and as it should be."""
        profile = self.engine.device.profile
        wanted = [("preset", PRESET_PROBLEM, config) for config in PRESETS.values() if config.arch is profile.arch]
        wanted += [("correctness", *pair) for pair in self._correctness()]
        named = {f"{kind} {problem.key} {config.key}": (kind, problem, config) for kind, problem, config in wanted}
        # All are in the compile queue from the start: the card does not wait for a compiler it need not wait for.
        built = {
            name: self.engine.compile(CompileJob(problem=problem, config=config, sm_count=profile.sm_count))
            for name, (_, problem, config) in named.items()
            if name not in self.content["done"]
        }
        for name, (kind, problem, config) in named.items():
            self._once(name, partial(self._kernel, kind, problem, config, built.get(name)))
        self._once("ladder", self._ladder)
        self._once("tuned", self._tuned)
        self.content["report"] = report(self.content["done"], profile_name=profile.name)
        self.content["complete"] = len(self.content["done"]) == len(named) + 2
        write_json(self.out, self.content)
        return bool(self.content["complete"]) and not self.content["report"]["failures"]

    def _correctness(self) -> Iterator[tuple[GemmProblem, GemmConfig]]:
        rng, profile = random.Random(0), self.engine.device.profile
        for number, shape in enumerate(CORRECTNESS):
            problem = GemmProblem.parse(shape, dtype=("bf16", "fp16")[number % 2])
            chosen: dict[str, GemmConfig] = {c.key: c for c in starting_configs(problem, profile)[:1]}
            while len(chosen) < CONFIGS_OF_SHAPE:
                config = random_legal(problem, profile, rng)
                chosen[config.key] = config
            yield from ((problem, config) for config in chosen.values())

    def _once(self, name: str, work: Callable[[], Json]) -> None:
        """Do one thing unless it is done or the time is over; an engine's trouble is tried again the next time."""
        if name in self.content["done"] or time.monotonic() - self.began > self.wall_s:
            return
        try:
            answer = work()
        except (EngineError, WorkerLost) as error:
            self.tell(f"{name}: not done: {error}")
            return
        self.content["done"][name] = answer
        write_json(self.out, self.content)
        self.tell(f"{name}: {answer['said']}")

    def _kernel(
        self, kind: str, problem: GemmProblem, config: GemmConfig, building: Future[CompileReply] | None
    ) -> Json:
        """Load, verify and time one kernel once it is built."""
        profile = self.engine.device.profile
        row: Json = {"kind": kind, "shape": problem.shape, "dtype": problem.dtype.value, "config": config.to_dict()}
        row |= {"modeled_us": predict(problem, config, profile).time_us, "median_us": None}
        assert building is not None, "only what is done has no future"
        built = building.result()
        if built.outcome is not None or built.kernel is None:
            return row | {"outcome": built.outcome, "reason": built.reason, "said": f"{built.outcome}: {built.reason}"}
        job = EvaluateJob(
            problem=problem,
            config=config,
            module_path=self.engine.module_path(built.kernel.sha256),
            module_sha256=built.kernel.sha256,
            source_hash=built.kernel.source_hash,
            protocol=MeasureProtocol(),
            phase="trial",
        )
        reply = self.engine.evaluate(job).result()
        row |= {"outcome": reply.outcome.value, "reason": reply.reason, "max_rel_error": reply.max_rel_error}
        if reply.measurement is None:
            return row | {"said": f"{reply.outcome}: {reply.reason}"}
        measured_us = reply.measurement.median_us()
        ratios = {name: ratio.median for name, ratio in reply.measurement.ratios().items()}
        return row | {"median_us": measured_us, "ratios": ratios, "said": f"{measured_us:.1f} us"}

    def _ladder(self) -> Json:
        said: list[str] = []
        climbed = climb(
            LADDER, self.engine, protocol=MeasureProtocol(), command=self.content["command"], tell=said.append
        )
        return climbed | {"kind": "ladder", "said": "; ".join(said)}

    def _tuned(self) -> Json:
        profile = self.engine.device.profile
        known = profile.name if profile.name in {each.name for each in PROFILES} else None
        asked = TuneRequest(problem=TUNED, arch=profile.arch.name, device=known, budget=TUNE_BUDGET)
        result = tune_study(asked, self.engine, MemoryRecorder())
        row: Json = {"kind": "tuned", "shape": TUNED.shape, "dtype": TUNED.dtype.value, "state": result.state.value}
        row |= {"reason": result.reason, "evidence": [item.value for item in result.evidence]}
        row |= {"checks": [check.to_dict() for check in result.checks], "median_us": None}
        row["outcomes"] = dict(Counter(trial.outcome.value for trial in result.trials))
        if result.winner is None or result.measurement is None:
            return row | {"said": f"{result.state}: {result.reason}"}
        winner, measured_us = result.winner.config, result.measurement.median_us()
        row |= {"config": winner.to_dict(), "median_us": measured_us}
        row |= {"modeled_us": predict(TUNED, winner, profile).time_us}
        row |= {"ratios": {name: ratio.to_dict() for name, ratio in result.measurement.ratios().items()}}
        return row | {"said": f"{measured_us:.1f} us, evidence {', '.join(row['evidence'])}; {result.reason}"}


def timed_rows(done: Json) -> list[Json]:
    """Rows with a modeled and a measured time, those of the ladder too."""
    rows = [row for row in done.values() if row["kind"] != "ladder"]
    rows += [{**row, "kind": "ladder"} for row in done.get("ladder", {"rows": []})["rows"]]
    return [row for row in rows if row.get("modeled_us") and row.get("median_us")]


def report(done: Json, *, profile_name: str) -> Json:
    """Model against measurement, and what failed."""
    rows = [
        {
            "what": f"{row['kind']} {row.get('name') or row['shape']}",
            "modeled_us": round(row["modeled_us"], 2),
            "measured_us": round(row["median_us"], 2),
            "modeled_over_measured": round(row["modeled_us"] / row["median_us"], 3),
        }
        for row in timed_rows(done)
    ]
    ratios = [row["modeled_over_measured"] for row in rows]
    off = [row["what"] for row in rows if abs(row["modeled_over_measured"] - 1) > MODEL_TOLERANCE]
    return {
        "constants": profile_name,
        "rows": rows,
        "median modeled over measured": round(median(ratios), 3) if ratios else None,
        "further off than 15 %": off,
        "failures": _failures(done),
    }


def _failures(done: Json) -> list[str]:
    failed = [
        f"{name}: {row['outcome']}: {row['reason']}"
        for name, row in done.items()
        if row["kind"] in ("preset", "correctness") and row["outcome"] != Outcome.MEASURED
    ]
    built = [row for row in done.get("ladder", {"rows": []})["rows"] if "outcome" in row]
    failed += [f"ladder {row['name']}: {row['outcome']}" for row in built if row["outcome"] != Outcome.MEASURED]
    if "tuned" in done and done["tuned"]["median_us"] is None:
        failed.append(f"tuned: {done['tuned']['state']}: {done['tuned']['reason']}")
    return failed


def main() -> int:
    """0 when all was done and every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True, choices=sorted({config.arch.name for config in PRESETS.values()}))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wall-s", type=float, default=WALL_S, help="begin nothing after this long")
    arguments = parser.parse_args()
    engines, began = engines_of(Settings.from_env()), time.monotonic()
    try:
        asked = TuneRequest(problem=TUNED, arch=arch_named(arguments.arch).name, budget=TUNE_BUDGET)
        engine = engines.engine_for(asked)
        command = command_line("tests.soak.first_hour")
        hour = FirstHour(engine, arguments.out, command, lambda text: say(text, began), arguments.wall_s)
        fine = hour.run()
    except (NoDevice, OtherDeviceError) as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    finally:
        engines.close()
    for row in hour.content["report"]["rows"]:
        print(f"{row['what']}: modeled {row['modeled_us']} us, measured {row['measured_us']} us", flush=True)
    for text in hour.content["report"]["failures"]:
        print(f"FAILED {text}", flush=True)
    if not hour.content["complete"]:
        print("stopped by the time limit: give the same command again to go on", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
