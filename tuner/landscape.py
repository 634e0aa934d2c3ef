"""A landscape: every config of a bounded space with its time, as a file that grows row by row.

A file is JSON lines. The first says what was asked: problem, device, protocol, and the configs, fixed before the first
was timed. Each later line is the outcome of one config, an environment that rows refer to, a final, or winners that
were published since and are measured too. While a recording goes on the file is plain and only ever appended to;
afterwards it is compressed. Both are read alike.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from kernels.arch import arch_named
from kernels.artifacts import write_atomically
from kernels.config import config_from_dict
from kernels.devices import DeviceProfile
from search_space.request import MeasureProtocol, problem_from_dict
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem
    from tuner.landscape_space import BoundedSpace

    Json = dict[str, Any]

SCHEMA = 1
KIND = "landscape"
PLAIN, PACKED = ".jsonl", ".jsonl.gz"
BASELINE = "torch"  # the same kernel in every session; what cublaslt_best is may change with a screening
# What two sessions on one card share; clocks, power and temperature differ from row to row.
PASSING = ("sm_clock_mhz", "power_w", "temperature_c", "throttle_reasons")


class LandscapeError(ValueError):
    """A file is no landscape, or not the one that was asked for; the message says which and why."""


def file_name(problem: GemmProblem, device_name: str) -> str:
    """Name of a landscape's file without suffix."""
    device = device_name.removeprefix("NVIDIA ").replace(" ", "-").lower()
    return f"{device}-{problem.shape}-{problem.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one config.

    index: of the config in the space
    outcome: as of a trial; REJECTED where it generates the same source as another one of the space
    reason: for people, empty after success
    samples_us: times of one product
    baselines_us: times of the vendor library in the same rounds, by name
    source_hash: of the generated source
    registers: of one thread, 0 where it was not built
    compile_s, gpu_s: seconds it took
    max_rel_error: largest relative error against float32, None where it never got that far
    environment: id of the environment
    session: id of the recording run: times of one session compare, those of two are scaled by the baseline
    """

    index: int
    outcome: Outcome
    reason: str = ""
    samples_us: tuple[float, ...] = ()
    baselines_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    source_hash: str = ""
    registers: int = 0
    compile_s: float = 0.0
    gpu_s: float = 0.0
    max_rel_error: float | None = None
    environment: str = ""
    session: str = ""

    def to_dict(self) -> Json:
        """As a line of the file."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {
            "outcome": self.outcome.value,
            "samples_us": [round(sample, 4) for sample in self.samples_us],
            "baselines_us": {name: [round(s, 4) for s in samples] for name, samples in self.baselines_us.items()},
            "compile_s": round(self.compile_s, 3),
            "gpu_s": round(self.gpu_s, 4),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Inverse of to_dict. Raises KeyError, TypeError and ValueError for a line that is not one of ours."""
        known = {name: values[name] for name in cls.__slots__ if name in values}
        return cls(
            **{
                **known,
                "outcome": Outcome(values["outcome"]),
                "samples_us": tuple(values["samples_us"]),
                "baselines_us": {name: tuple(samples) for name, samples in values["baselines_us"].items()},
            }
        )


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """One file's content.

    problem: what the configs compute
    profile: device that they were built for
    protocol: how they were timed
    configs: the space, in the order of their keys, then what was added later
    known: indices of those that were put in because something was known of them
    space: how the space was made, in words and numbers
    rows: by index of the config; a config that was not reached has none
    finals: the fastest timed again in shared rounds, by index
    environments: by id
    synthetic: how the times were made up; empty for measured ones
    """

    problem: GemmProblem
    profile: DeviceProfile
    protocol: MeasureProtocol
    configs: tuple[GemmConfig, ...]
    known: tuple[int, ...]
    space: Json
    rows: Mapping[int, Row]
    finals: Mapping[int, Row] = field(default_factory=dict)
    environments: Mapping[str, Json] = field(default_factory=dict)
    synthetic: str = ""

    @property
    def name(self) -> str:
        """Short name: device, shape and dtype."""
        return file_name(self.problem, self.profile.name)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the configs without a row."""
        return tuple(index for index in range(len(self.configs)) if index not in self.rows)

    @cached_property
    def times_us(self) -> dict[int, float]:
        """Time of each config that has one, by index, on the scale of the session with the most rows.

        A card's absolute times drift by up to 2 % from day to day, so a session's times are scaled by what the vendor
        library took in it. A config that was in the final has its time from there; configs with equal source share one.
        """
        scale = self._scales()
        found = {
            index: median(row.samples_us) * scale[row.session] for index, row in self.rows.items() if row.samples_us
        }
        found |= {
            index: median(row.samples_us) * scale[row.session] for index, row in self.finals.items() if row.samples_us
        }
        by_source = {self.rows[index].source_hash: time_us for index, time_us in found.items() if index in self.rows}
        for index, row in self.rows.items():
            if row.outcome is Outcome.REJECTED and row.source_hash in by_source:
                found[index] = by_source[row.source_hash]
        return found

    @property
    def best_us(self) -> float:
        """The least time of all configs that were right. Raises LandscapeError where none has a time."""
        if not self.times_us:
            raise LandscapeError(f"{self.name} holds no config with a time")
        return min(self.times_us.values())

    def _scales(self) -> dict[str, float]:
        """Factor of each session that brings its times to those of the largest one."""
        baseline: dict[str, list[float]] = {}
        for row in (*self.rows.values(), *self.finals.values()):
            baseline.setdefault(row.session, []).extend(row.baselines_us.get(BASELINE, ()))
        largest = max(baseline, key=lambda session: len(baseline[session]), default="")
        return {
            session: median(baseline[largest]) / median(samples) if samples and baseline[largest] else 1.0
            for session, samples in baseline.items()
        }


# ---------------------------------------------------------------------- files


def header(
    problem: GemmProblem,
    profile: DeviceProfile,
    protocol: MeasureProtocol,
    space: BoundedSpace,
    *,
    seed: int = 0,
    synthetic: str = "",
) -> Json:
    """The first line of a file."""
    knobs = list(type(space.configs[0]).knobs())
    at = {config: index for index, config in enumerate(space.configs)}
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "problem": {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "dtype": problem.dtype.value,
            "layout": problem.layout.value,
        },
        "device": {**asdict(profile), "arch": profile.arch.name},
        "protocol": protocol.to_dict(),
        "seed": seed,
        "synthetic": synthetic,
        "space": space.to_dict(),
        "known": [at[config] for config in space.known],
        "knobs": knobs,
        "configs": [[getattr(config, knob) for knob in knobs] for config in space.configs],
    }


def added_line(configs: Sequence[GemmConfig]) -> Json:
    """Winners that were published after the space was fixed, to be measured like the others."""
    knobs = type(configs[0]).knobs()
    return {"added": [[getattr(config, knob) for knob in knobs] for config in configs]}


def environment_line(environment: Mapping[str, Any]) -> tuple[str, Json]:
    """The id of an environment, and the line that says what it is."""
    lasting = {name: value for name, value in environment.items() if name not in PASSING}
    text = json.dumps(lasting, sort_keys=True)
    identity = hashlib.sha256(text.encode()).hexdigest()[:12]
    return identity, {"environment_id": identity, "environment": lasting}


def path_of(stem: Path) -> Path | None:
    """The file of a landscape, given without suffix: the plain one while a recording goes on, else the packed one."""
    candidates = (stem.with_name(stem.name + suffix) for suffix in (PLAIN, PACKED))
    return next((path for path in candidates if path.is_file()), None)


def read(path: Path) -> Landscape:
    """Raises LandscapeError for a file that is no landscape. A last line that was cut short is left out."""
    lines = _lines(path)
    first = next(lines, None)
    if first is None or first.get("kind") != KIND:
        raise LandscapeError(f"{path} is no landscape: its first line does not say so")
    if first.get("schema") != SCHEMA:
        raise LandscapeError(f"{path} has schema {first.get('schema')!r}, this version reads {SCHEMA}")
    try:
        return _landscape(first, lines)
    except (KeyError, TypeError, ValueError) as error:
        raise LandscapeError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def read_folder(folder: Path) -> list[Landscape]:
    """Every landscape of a folder, by name. Raises LandscapeError for a folder without any."""
    stems = {path.name.removesuffix(".gz").removesuffix(PLAIN) for path in folder.glob(f"*{PLAIN}*")}
    found = [path for stem in sorted(stems) if (path := path_of(folder / stem)) is not None]
    if not found:
        raise LandscapeError(
            f"{folder} holds no landscapes (*{PACKED}): record some with `gemm-tuner landscape record`"
        )
    return [read(path) for path in found]


def pack(plain: Path) -> Path:
    """Compress a file and remove the plain one. Returns the packed file."""
    packed = plain.with_name(plain.name.removesuffix(PLAIN) + PACKED)
    # without a time in the header, equal content gives equal bytes
    write_atomically(packed, gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()
    return packed


def unpack(packed: Path) -> Path:
    """The plain file of a packed one, which stays until it is packed anew."""
    plain = packed.with_name(packed.name.removesuffix(PACKED) + PLAIN)
    write_atomically(plain, gzip.decompress(packed.read_bytes()))
    return plain


def _lines(path: Path) -> Iterator[Json]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise LandscapeError(f"{path} cannot be read: {error}") from error
    complete = text[: text.rfind("\n") + 1]
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise LandscapeError(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise LandscapeError(f"{path}, line {number}, is no object")
        yield content


def _landscape(first: Json, lines: Iterable[Json]) -> Landscape:
    rows: dict[int, Row] = {}
    finals: dict[int, Row] = {}
    environments: dict[str, Json] = {}
    listed, known = list(first["configs"]), list(first["known"])
    for line in lines:
        if "added" in line:
            known += range(len(listed), len(listed) + len(line["added"]))
            listed += line["added"]
        elif "environment_id" in line:
            environments[line["environment_id"]] = line["environment"]
        elif "final" in line:
            finals |= {row.index: row for row in map(Row.from_dict, line["final"])}
        else:
            row = Row.from_dict(line)
            rows.setdefault(row.index, row)
    device = first["device"]
    profile = DeviceProfile(**{**device, "arch": arch_named(device["arch"]), "aliases": tuple(device["aliases"])})
    knobs = first["knobs"]
    configs = [config_from_dict(profile.arch.name, dict(zip(knobs, values, strict=True))) for values in listed]
    return Landscape(
        problem=problem_from_dict(first["problem"]),
        profile=profile,
        protocol=MeasureProtocol.from_dict(first["protocol"]),
        configs=tuple(configs),
        known=tuple(known),
        space=first["space"],
        rows=rows,
        finals=finals,
        environments=environments,
        synthetic=first["synthetic"],
    )
