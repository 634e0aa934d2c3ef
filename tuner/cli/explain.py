"""`explain CONFIG`: what a config needs, whether it is legal, and what the performance model expects of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.arch import arch_named
from kernels.config import CONFIG_CLASSES, GemmConfig, config_from_dict
from kernels.devices import DeviceProfile, default_profile, profile_named
from kernels.problem import GemmProblem
from kernels.resources import Resources, resources_of
from kernels.rules import config_violation, violation
from search_space.checks import rejection
from search_space.model import predict
from search_space.starting import PRESETS, preset
from tuner.cli.errors import UsageError
from tuner.cli.output import Output, warn

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings

# Longer text is never the name of a file; asking the system about it raises OSError.
LONGEST_NAME = 255


def explain(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 0 for a legal config, 2 for one that cannot run: it is explained all the same, and the rule it breaks
    is the line on standard error. Raises UsageError, ConfigError, ProblemError.
    """
    problem = GemmProblem.parse(args.shape, dtype=args.dtype)
    config = read_config(args.config, arch=args.arch or arch_of_device(args.device))
    profile = profile_named(args.device) if args.device else default_profile(config.arch)
    if profile.arch is not config.arch:
        raise UsageError(f"{profile.name} runs {profile.arch.name}, the config is for {config.arch.name}")
    document = describe(problem, config, profile)
    output = Output(as_json=args.json)
    output.document(document)
    _print(output, document, problem, profile)
    if document["violation"] is None:
        return 0
    warn(f"gemm-tuner: cannot run: {document['violation']}")
    return UsageError.exit_status


def read_config(text: str, *, arch: str | None = None) -> GemmConfig:
    """A preset's name, a JSON object, or a file that holds one; the object is the knobs, or {"arch", "config"}.

    Raises UsageError for text that is none of them and ConfigError for wrong knobs.
    """
    name = text.strip()
    if name in PRESETS:
        config = preset(name)
        if arch and arch_named(arch) is not config.arch:
            raise UsageError(f"preset {name} is for {config.arch.name}, not for {arch}")
        return config
    if not name.startswith("{"):
        path = Path(name)
        if len(name) > LONGEST_NAME or not path.is_file():
            known = ", ".join(PRESETS)
            raise UsageError(f"{name[:80]!r} is no preset, no JSON object and no file", hint=f"presets are {known}")
        name = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(name)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"the config is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"the config must be a JSON object of knobs, got {type(value).__name__}")
    return _from_object(value, arch)


def _from_object(value: dict[str, Any], arch: str | None) -> GemmConfig:
    if "config" in value:
        arch, value = arch or value.get("arch"), value["config"]
        if not isinstance(value, dict):
            raise UsageError(f"'config' must be an object of knobs, got {type(value).__name__}")
    if arch is None:
        fitting = [name for name, kind in CONFIG_CLASSES.items() if set(value) <= set(kind.knobs())]
        if len(fitting) != 1:
            raise UsageError(
                "these knobs do not tell the architecture", hint=f"add --arch {' or '.join(CONFIG_CLASSES)}"
            )
        arch = fitting[0]
    return config_from_dict(arch, value)


def describe(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> dict[str, Any]:
    """Everything that is known before compiling, as plain JSON values."""
    reason = violation(problem, config, profile.sm_count)
    needs = resources_of(config) if config_violation(config) is None else None
    return {
        "arch": config.arch.name,
        "device": profile.name,
        "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype, "layout": problem.layout},
        "config": config.to_dict(),
        "violation": reason,
        "rejection": None if reason else rejection(problem, config, profile),
        "resources": asdict(needs or resources_of(config)),
        "limits": _limits(config),
        "geometry": _geometry(problem, config, profile),
        "prediction": None if reason else asdict(predict(problem, config, profile)),
    }


def _limits(config: GemmConfig) -> dict[str, int]:
    return {
        "smem_bytes": config.arch.smem_bytes,
        "tmem_columns": config.arch.tmem_columns,
        "threads": 1024,
        "registers": config.arch.max_registers_per_thread,
    }


def _geometry(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> dict[str, Any]:
    tiles_m, tiles_n = config.cluster_tiles(problem)
    return {
        "cluster_tile": list(config.cluster_tile),
        "cluster_tiles": [tiles_m, tiles_n],
        "clusters": config.clusters(problem, profile.sm_count),
        "k_blocks": config.k_blocks(problem),
        "stage_bytes": config.stage_bytes,
        "epilogue_bytes": config.epilogue_bytes,
    }


def _print(output: Output, document: dict[str, Any], problem: GemmProblem, profile: DeviceProfile) -> None:
    output.text(f"{document['arch']} config for {problem} on {profile.name} ({profile.sm_count} SMs)")
    output.table("", ("knob", "value"), document["config"].items())
    names = Resources.__dataclass_fields__
    rows = [(name, document["resources"][name], document["limits"][name]) for name in names]
    output.table("", ("resource of one CTA", "needed", "limit"), rows)
    output.table("", ("geometry", "value"), [(k, _plain(v)) for k, v in document["geometry"].items()])
    if document["violation"]:
        output.text(f"cannot run: {document['violation']}")
        return
    output.text("rules: all hold")
    if document["rejection"]:
        output.text(f"legal, but not worth asking about: {document['rejection']}")
    output.text("time as the performance model expects it: modeled, not measured")
    output.table("", ("term", "value"), [(name, _plain(value)) for name, value in document["prediction"].items()])


def _plain(value: object) -> object:
    return " x ".join(map(str, value)) if isinstance(value, list | tuple) else value


def arch_of_device(device: str | None) -> str | None:
    """The architecture of a device that was named, or None. Raises ConfigError for an unknown one."""
    return profile_named(device).arch.name if device else None
