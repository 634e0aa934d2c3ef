"""Made-up landscapes: the performance model's times, bent where a real card would bend them, and noise.

They serve to develop and to test replays; no figure from them says anything about a GPU. How they are bent: a factor
for each value of a knob, the same for all problems and thus learnable; one for each value of a knob in each problem;
and one for each config. All are drawn from the seed.
"""

from __future__ import annotations

import json
import random
from math import exp
from typing import TYPE_CHECKING

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.model import predict
from search_space.request import MeasureProtocol
from tuner import landscape
from tuner.landscape import Row
from tuner.landscape_space import bounded_space
from tuner.records import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.config import GemmConfig

TEXT = "made up: the performance model, bent at random, with noise (seed {seed})"
H200 = profile_named("h200")


def times_of(problem: GemmProblem, configs: tuple[GemmConfig, ...], seed: int) -> list[float]:
    """Made-up times in us."""
    return [predict(problem, config, H200).time_us * exp(_bend(problem, config, seed)) for config in configs]


def _bend(problem: GemmProblem, config: GemmConfig, seed: int) -> float:
    shared = sum(_draw(f"{seed}:{knob}:{value}", 0.03) for knob, value in config.to_dict().items())
    own = sum(_draw(f"{seed}:{problem.key}:{knob}:{value}", 0.03) for knob, value in config.to_dict().items())
    return shared + own + abs(_draw(f"{seed}:{problem.key}:{config.key}", 0.06))


def _draw(key: str, sd: float) -> float:
    return random.Random(key).gauss(0.0, sd)


def write(folder: Path, shape: str, *, seed: int = 0, size: int = 120) -> Path:
    """One landscape as a packed file; every 40th config fails."""
    name, _, dtype = shape.partition(":")
    problem = GemmProblem.parse(name, dtype=dtype or "bf16")
    space = bounded_space(problem, H200, size=size)
    first = landscape.header(problem, H200, MeasureProtocol(), space, seed=seed, synthetic=TEXT.format(seed=seed))
    times = times_of(problem, space.configs, seed)
    best_us = min(times)
    lines = [first, *(_row(index, time_us, best_us).to_dict() for index, time_us in enumerate(times))]
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / f"{landscape.file_name(problem, H200.name)}{landscape.PLAIN}"
    plain.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return landscape.pack(plain)


def _row(index: int, time_us: float, best_us: float) -> Row:
    if index % 40 == 39 and time_us > best_us:
        return Row(index=index, outcome=Outcome.COMPILE_FAILED, reason="made up to fail", compile_s=1.0)
    slow = time_us > 1.03 * best_us
    rng = random.Random(f"{index}:{time_us}")
    samples = tuple(time_us * exp(rng.gauss(0.0, 0.002)) for _ in range(2 if slow else 9))
    return Row(
        index=index,
        outcome=Outcome.STOPPED_EARLY if slow else Outcome.MEASURED,
        reason="made up to be slow" if slow else "",
        samples_us=samples,
        baselines_us={"torch": tuple(best_us * 1.01 for _ in samples)},
        source_hash=f"{index:064x}",
        registers=168,
        compile_s=1.2,
        gpu_s=0.09 if slow else 0.21,
        max_rel_error=0.001,
        session="made-up",
    )
