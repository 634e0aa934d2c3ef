"""What a person asks the tuner for: one problem on one kind of device, a budget, a protocol and a seed.

A request is checked when it is built, so whoever holds one can rely on it. Its hash, `study_key`, decides whether two
requests are the same study.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self

from kernels.arch import ARCHES, arch_named
from kernels.devices import PROFILES, DeviceProfile, default_profile, profile_named
from kernels.errors import ConfigError, ProblemError
from kernels.problem import Dtype, GemmProblem, Layout
from kernels.rules import problem_violation
from search_space.memory import shortage
from search_space.samplers import DEFAULT_SAMPLER, LEARNED, SAMPLERS
from search_space.space import choices

MAX_TRIALS = 100_000
MAX_WALL_S = 7 * 24 * 3600.0
MAX_IN_FLIGHT = 256
MAX_SEED = 2**63 - 1  # the largest integer a SQL column of the store holds
MIN_ROUNDS = 6  # fewer values cannot hold a 95 % interval of their median
MAX_ROUNDS = 1000
PROTOCOL_KINDS = ("burst", "sustained")
L2_POLICIES = ("rotate",)
DISTRIBUTIONS = ("normal",)


class RequestError(ValueError):
    """The request asks for something that cannot be. `field` names the offending field, dotted where it is nested."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


def _one_of(value: object, allowed: Iterable[str], name: str) -> str:
    names = tuple(allowed)
    if isinstance(value, str) and value in names:
        return str(value)
    raise RequestError(f"unknown {name} {value!r}: use one of {', '.join(names)}", field=name)


def _whole(value: object, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", field=name)
    return value


def _number(value: object, name: str, *, above: float | None = None, low: float = 0.0, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", field=name)
    if above is not None and value <= above:
        raise RequestError(f"{name} must be above {above:g}, got {value:g}", field=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value:g}", field=name)
    return float(value)


def _only(raw: object, known: Iterable[str], name: str) -> dict[str, Any]:
    """A mapping with no key but the known ones."""
    if not isinstance(raw, Mapping):
        raise RequestError(f"{name or 'request'} must be an object, got {raw!r}", field=name)
    names = tuple(known)
    for key in raw:
        if key not in names:
            path = f"{name}.{key}" if name else str(key)
            raise RequestError(f"unknown field {path!r}: fields are {', '.join(names)}", field=path)
    return dict(raw)


class Mode(StrEnum):
    """How candidates are judged: timed on a GPU, or compiled and estimated by the performance model."""

    MEASURE = "measure"
    MODEL = "model"

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Raises RequestError naming the modes there are."""
        return cls(_one_of(text, tuple(cls), "mode"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When a study stops. Raises RequestError for a budget that allows nothing.

    trials: candidates that count (measured, modeled or stopped early)
    wall_s: seconds from the first trial on
    """

    trials: int = 40
    wall_s: float = 600.0

    def __post_init__(self) -> None:
        _whole(self.trials, "budget.trials", 1, MAX_TRIALS)
        object.__setattr__(self, "wall_s", _number(self.wall_s, "budget.wall_s", above=0.0, high=MAX_WALL_S))

    @classmethod
    def from_dict(cls, raw: object) -> Self:
        """Raises RequestError naming an unknown or impossible field."""
        return cls(**_only(raw, (item.name for item in fields(cls)), "budget"))


class Effort(StrEnum):
    """A named budget."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"

    @classmethod
    def parse(cls, text: str) -> Effort:
        """Raises RequestError naming the efforts there are."""
        return cls(_one_of(text, tuple(cls), "effort"))

    @property
    def budget(self) -> Budget:
        """Trials and seconds of this effort."""
        return EFFORT_BUDGETS[self]

    def budget_with(self, trials: int | None, wall_s: float | None) -> Budget:
        """Trials and seconds of this effort, where they are not given."""
        preset = self.budget
        return Budget(
            trials=preset.trials if trials is None else trials, wall_s=preset.wall_s if wall_s is None else wall_s
        )


# quick: the starting configs and little more. normal: 40 trials at about 2.3 s of compiling each (two processes) and
# under 1 s of GPU time fit well into ten minutes.
EFFORT_BUDGETS: dict[Effort, Budget] = {
    Effort.QUICK: Budget(trials=16, wall_s=180.0),
    Effort.NORMAL: Budget(trials=40, wall_s=600.0),
    Effort.FULL: Budget(trials=200, wall_s=3600.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureProtocol:
    """How a candidate is timed. Part of what a result means, so part of the study key.

    kind: "burst": short bursts at full clocks with idle time between them; "sustained": continuous load, at the clocks
        that the power limit leaves
    burst_ms: GPU time of one burst, in milliseconds; of a sustained one, the first quarter only settles the clocks
    rounds: most bursts of each candidate, paired with bursts of the baselines; a ratio known to within half a percent
        takes fewer
    idle_gap_ms: idle time before each burst, in milliseconds; none under sustained load
    warm_up_s: seconds of load before the first round; only under sustained load
    l2_policy: "rotate": operands rotate over buffers larger than L2
    distribution: values of A and B; "normal" is N(0, 1) (zeros run up to 15 % faster: power)
    """

    kind: str = "burst"
    burst_ms: float = 4.0
    rounds: int = 9
    idle_gap_ms: float = 5.0
    warm_up_s: float = 0.0
    l2_policy: str = "rotate"
    distribution: str = "normal"

    def __post_init__(self) -> None:
        _one_of(self.kind, PROTOCOL_KINDS, "protocol.kind")
        _one_of(self.l2_policy, L2_POLICIES, "protocol.l2_policy")
        _one_of(self.distribution, DISTRIBUTIONS, "protocol.distribution")
        _whole(self.rounds, "protocol.rounds", MIN_ROUNDS, MAX_ROUNDS)
        for name, (low, high) in LIMITS[self.kind].items():
            object.__setattr__(self, name, self._checked(name, low, high))

    def _checked(self, name: str, low: float, high: float) -> float:
        path, value = f"protocol.{name}", getattr(self, name)
        if low == high and value != low:
            raise RequestError(f"{path} must be {low:g} under protocol {self.kind!r}, got {value!r}", field=path)
        return _number(value, path, low=low, high=high)

    @property
    def is_sustained(self) -> bool:
        """Whether the card is kept under load without a gap."""
        return self.kind == "sustained"

    def to_dict(self) -> dict[str, Any]:
        """Every field with its value."""
        return dict(_values(self))

    @classmethod
    def named(cls, kind: object) -> MeasureProtocol:
        """The protocol of a kind with its defaults. Raises RequestError naming the kinds there are."""
        return PROTOCOLS[_one_of(kind, PROTOCOL_KINDS, "protocol.kind")]

    @classmethod
    def from_dict(cls, raw: object) -> MeasureProtocol:
        """What is left out gets the default of its kind. Raises RequestError naming an unknown or impossible field."""
        given = _only(raw, (item.name for item in fields(cls)), "protocol")
        return replace(cls.named(given.get("kind", "burst")), **given)


# Numbers between which each kind makes sense. A sustained burst has to outlast the card's reaction to another kernel's
# power (0.1 s on an H200) and to span some steps of its energy counter.
LIMITS: dict[str, dict[str, tuple[float, float]]] = {
    "burst": {"burst_ms": (0.1, 1000.0), "idle_gap_ms": (0.0, 10_000.0), "warm_up_s": (0.0, 0.0)},
    "sustained": {"burst_ms": (200.0, 5000.0), "idle_gap_ms": (0.0, 0.0), "warm_up_s": (1.0, 20.0)},
}
PROTOCOLS: dict[str, MeasureProtocol] = {
    "burst": MeasureProtocol(),
    "sustained": MeasureProtocol(kind="sustained", burst_ms=300.0, idle_gap_ms=0.0, warm_up_s=2.0),
}


def resolve_target(arch: str | None, device: str | None) -> tuple[str, str | None]:
    """Names of architecture and device as they are stored, from what a person gave: at least one of the two.

    Raises RequestError for an unknown name, for a device of another architecture, and when both are missing.
    """
    profile = None
    if device is not None:
        if not isinstance(device, str):
            raise RequestError(f"device must be a name, got {device!r}", field="device")
        try:
            profile = profile_named(device)
        except ConfigError as error:
            raise RequestError(str(error), field="device") from None
    if arch is None:
        if profile is None:
            raise RequestError(
                f"name an arch ({', '.join(ARCHES)}) or a device ({', '.join(p.name for p in PROFILES)})", field="arch"
            )
        return profile.arch.name, profile.name
    _one_of(arch, ARCHES, "arch")
    if profile is not None and profile.arch.name != arch:
        raise RequestError(
            f"{profile.name} runs {profile.arch.name}, not {arch}: leave one of them out", field="device"
        )
    return arch, profile.name if profile else None


def problem_from_dict(raw: object) -> GemmProblem:
    """The problem that `m`, `n`, `k` and optionally `dtype` and `layout` describe. Raises RequestError."""
    knobs = _only(raw, ("m", "n", "k", "dtype", "layout"), "problem")
    for name in ("m", "n", "k"):
        if name not in knobs:
            raise RequestError(f"problem.{name} is missing", field=name)
    for name in ("dtype", "layout"):
        if name in knobs and not isinstance(knobs[name], str):
            raise RequestError(f"{name} must be a name, got {knobs[name]!r}", field=name)
    try:
        return GemmProblem(**knobs)
    except ProblemError as error:
        raise RequestError(str(error), field=error.field) from None


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """One study as it was asked for. Raises RequestError for anything that cannot be served.

    problem: the GEMM
    arch: architecture to tune for
    device: device profile to tune for, any spelling it goes by; None means any device of the architecture
    mode: measure on a GPU, or compile and rank by the model
    budget: when to stop
    protocol: how to measure
    seed: seed of the sampler; equal seeds and measurements give equal winners
    sampler: one of `search_space.samplers.SAMPLERS`
    in_flight: trials asked ahead of the last told one; fixed for a study so that any engine repeats it
    stop_gain: end before the budget is used, when another trial is expected to gain less than this share of the best
        time; 0 to use the whole budget. Only the sampler "learned" can tell
    """

    problem: GemmProblem
    arch: str
    device: str | None = None
    mode: Mode = Mode.MEASURE
    budget: Budget = field(default_factory=Budget)
    protocol: MeasureProtocol = field(default_factory=MeasureProtocol)
    seed: int = 0
    sampler: str = DEFAULT_SAMPLER
    in_flight: int = 8
    stop_gain: float = 0.0

    def __post_init__(self) -> None:
        arch, device = resolve_target(self.arch, self.device)
        object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "mode", Mode.parse(self.mode))
        _one_of(self.sampler, SAMPLERS, "sampler")
        _whole(self.seed, "seed", 0, MAX_SEED)
        _whole(self.in_flight, "in_flight", 1, MAX_IN_FLIGHT)
        self._check_stop()
        for name, kind in (("problem", GemmProblem), ("budget", Budget), ("protocol", MeasureProtocol)):
            if not isinstance(getattr(self, name), kind):
                raise RequestError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}", field=name)
        self._check_problem()

    def _check_stop(self) -> None:
        object.__setattr__(self, "stop_gain", _number(self.stop_gain, "stop_gain", high=1.0))
        if self.stop_gain and self.sampler != LEARNED:
            raise RequestError(
                f"stop_gain needs the sampler {LEARNED!r}: {self.sampler!r} does not tell what it expects to gain",
                field="stop_gain",
            )

    def _check_problem(self) -> None:
        if reason := problem_violation(self.problem, arch_named(self.arch)):
            raise RequestError(reason, field=reason.split(" ", 1)[0])
        rooms = [self.profile] if self.device else [p for p in PROFILES if p.arch.name == self.arch]
        roomiest = max(rooms, key=lambda profile: profile.memory_bytes)
        if self.problem.min_bytes > roomiest.memory_bytes:
            raise RequestError(
                f"{self.problem.shape} needs {self.problem.min_bytes} B for A, B and D, "
                f"{roomiest.name} has {roomiest.memory_bytes} B",
                field="problem",
            )
        if self.mode is Mode.MEASURE and (reason := shortage(self.problem, roomiest)):
            raise RequestError(f"{reason}: split the product into several, or ask for mode 'model'", field="problem")

    @property
    def profile(self) -> DeviceProfile:
        """Profile of the device asked for, or of the architecture's default device."""
        return profile_named(self.device) if self.device else default_profile(arch_named(self.arch))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into an equal request."""
        problem = self.problem
        return {
            "problem": {
                "m": problem.m,
                "n": problem.n,
                "k": problem.k,
                "dtype": Dtype(problem.dtype).value,
                "layout": Layout(problem.layout).value,
            },
            "arch": self.arch,
            "device": self.device,
            "mode": self.mode.value,
            "budget": dict(_values(self.budget)),
            "protocol": self.protocol.to_dict(),
            "seed": self.seed,
            "sampler": self.sampler,
            "in_flight": self.in_flight,
            # Only where it is on: the keys of studies from before there was a choice stay what they were.
            **({"stop_gain": self.stop_gain} if self.stop_gain else {}),
        }

    @classmethod
    def from_dict(cls, raw: object) -> Self:
        """Read what `to_dict` wrote, or a person: only `problem` and one of `arch`, `device` are needed.

        Raises RequestError naming the field that is unknown, missing or impossible.
        """
        values = _only(raw, (item.name for item in fields(cls)), "")
        if "problem" not in values:
            raise RequestError("problem is missing: give m, n and k", field="problem")
        values["problem"] = problem_from_dict(values["problem"])
        values["arch"], values["device"] = resolve_target(values.get("arch"), values.get("device"))
        if "budget" in values:
            values["budget"] = Budget.from_dict(values["budget"])
        if "protocol" in values:
            values["protocol"] = MeasureProtocol.from_dict(values["protocol"])
        return cls(**values)

    @property
    def study_key(self) -> str:
        """SHA-256 of everything that changes the answer, the choices of each knob included, as hex.

        What the machine adds (driver, toolchain, template source) is the environment key's business.
        """
        canonical = (
            f'{{"request":{_canonical(self.to_dict())},"space":{_canonical_space(tuple(choices(self.arch).items()))}}}'
        )
        return hashlib.sha256(canonical.encode()).hexdigest()


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=16)
def _canonical_space(space: tuple[tuple[str, tuple[object, ...]], ...]) -> str:
    """Kept: a job of 4,096 problems asks for as many keys, and the space is most of the text."""
    return _canonical(dict(space))


@lru_cache(maxsize=64)
def _values(part: Budget | MeasureProtocol) -> dict[str, Any]:
    """Kept: all requests of a job share these parts. Callers copy it."""
    return asdict(part)
