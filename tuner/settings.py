"""What the tuner process needs to know about its machine. Read once, at the door, and passed down."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ARTIFACTS_MIB = 20_480
ENGINES = ("local", "ray", "fake")

# (name, default as people read it, help): documentation is generated from this.
VARIABLES: tuple[tuple[str, str, str], ...] = (
    ("GEMM_TUNER_HOME", "the user's data folder", "folder of the database, artifacts and exports"),
    ("GEMM_TUNER_DATABASE_URL", "SQLite in GEMM_TUNER_HOME", "SQLAlchemy URL of another database"),
    ("GEMM_TUNER_TOKEN", "none", "bearer token that commands with --url send"),
    ("GEMM_TUNER_ENGINE", "local", "local, ray for a cluster, or fake for invented devices"),
    ("GEMM_TUNER_RAY_ADDRESS", "none", "host:port of the Ray head, for the engine ray"),
    ("GEMM_TUNER_COMPILE_PROCESSES", "the CPU cores, at most 16", "compiles at a time"),
    ("GEMM_TUNER_COMPILE_LIMIT_S", "60", "seconds after which a compile is killed"),
    ("GEMM_TUNER_GPU_SPARES", "1", "processes a GPU kept in reserve for after a fault, 0 for none"),
    ("GEMM_TUNER_ARTIFACTS_MIB", "20480", "MiB that modules may take on disk, 0 for any; named ones stay in any case"),
    ("GEMM_TUNER_STUDIES", "one for each 2 cores, at least 1", "studies at a time; they take turns on a GPU"),
    ("GEMM_TUNER_FAKE_SCALE", "0.01", "seconds of the fake engine for each second of a real one"),
)


def usable_cores() -> int:
    """CPU cores of this process, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


def default_studies() -> int:
    """Studies at a time: while some have their winners checked, the others keep the compilers and the GPU busy."""
    return max(1, usable_cores() // 2)


class SettingsError(ValueError):
    """A setting has a value that cannot be; the message names the variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Where the tuner keeps its state, and how much of the machine it uses.

    database_url: SQLAlchemy URL
    artifacts_dir: compiled modules by content hash
    exports_dir: bundles
    engine: "local", "ray" or "fake"
    ray_address: host:port of the Ray head, for the engine "ray"
    compile_processes: compiles at a time
    compile_limit_s: seconds after which a compile is killed
    gpu_spares: processes a GPU kept in reserve, torch imported, for after a fault
    studies: studies at a time
    fake_scale: seconds of the fake engine for each second of a real one
    poll_s: seconds between two looks for work and for cancelled studies
    heartbeat_s: seconds between two heartbeats of the devices, and between looks for tuners that have died
    lease_s: seconds without a sign of life after which other tuners on one PostgreSQL take this one's studies over
    ready_file: file that the tuner makes once it has noted its devices
    artifacts_mib: MiB that compiled modules may take, 0 for any number
    token: bearer token for a service that demands one
    """

    database_url: str
    artifacts_dir: Path
    exports_dir: Path
    engine: str = "local"
    ray_address: str = ""
    compile_processes: int = field(default_factory=usable_cores)
    compile_limit_s: float = 60.0
    gpu_spares: int = 1
    studies: int = field(default_factory=default_studies)
    fake_scale: float = 0.01
    poll_s: float = 0.25
    heartbeat_s: float = 5.0
    lease_s: float = 15.0
    ready_file: Path | None = None
    artifacts_mib: int = ARTIFACTS_MIB
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise SettingsError(f"engine {self.engine!r}: use one of {', '.join(ENGINES)}")
        if self.engine == "ray" and not self.ray_address:
            raise SettingsError("engine 'ray' needs the head's address: --ray-address or GEMM_TUNER_RAY_ADDRESS")

    @property
    def sqlite_file(self) -> Path | None:
        """File of the database; None where it is no SQLite."""
        _, found, path = self.database_url.partition("sqlite:///")
        return Path(path) if found else None

    @property
    def verdicts_dir(self) -> Path:
        """Verdicts of the sm_100a checkers, kept by source and tools."""
        return self.artifacts_dir.parent / "verdicts"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Raises SettingsError naming the variable that is wrong."""
        environ = os.environ if environ is None else environ
        home = _home(environ)
        return cls(
            database_url=environ.get("GEMM_TUNER_DATABASE_URL", "").strip() or f"sqlite:///{home / 'gemm-tuner.db'}",
            artifacts_dir=home / "artifacts",
            exports_dir=home / "exports",
            artifacts_mib=int(_number(environ, "GEMM_TUNER_ARTIFACTS_MIB", ARTIFACTS_MIB, whole=True, zero=True)),
            token=environ.get("GEMM_TUNER_TOKEN", "").strip() or None,
            engine=environ.get("GEMM_TUNER_ENGINE", "").strip() or "local",
            ray_address=environ.get("GEMM_TUNER_RAY_ADDRESS", "").strip(),
            compile_processes=int(_number(environ, "GEMM_TUNER_COMPILE_PROCESSES", usable_cores(), whole=True)),
            compile_limit_s=_number(environ, "GEMM_TUNER_COMPILE_LIMIT_S", 60.0),
            gpu_spares=int(_number(environ, "GEMM_TUNER_GPU_SPARES", 1, whole=True, zero=True)),
            studies=int(_number(environ, "GEMM_TUNER_STUDIES", default_studies(), whole=True)),
            fake_scale=_number(environ, "GEMM_TUNER_FAKE_SCALE", 0.01, zero=True),
        )


def _home(environ: Mapping[str, str]) -> Path:
    named = environ.get("GEMM_TUNER_HOME", "").strip()
    if named:
        return Path(named).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("gemm-tuner")


def _number(environ: Mapping[str, str], name: str, default: float, *, whole: bool = False, zero: bool = False) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(int(text)) if whole else float(text)
    except ValueError:
        raise SettingsError(f"{name} = {text!r} is not {'an integer' if whole else 'a number'}") from None
    if not (value > 0 or (zero and value == 0)):
        raise SettingsError(f"{name} = {text}: must be {'at least 0' if zero else 'above 0'}")
    return value
