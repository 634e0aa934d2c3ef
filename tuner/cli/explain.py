"""`explain CONFIG|RESULT`: what a config needs and is made of, whether it is legal, and what the model expects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.arch import arch_named
from kernels.config import CONFIG_CLASSES, GemmConfig, config_from_dict
from kernels.devices import DeviceProfile, default_profile, profile_named
from kernels.errors import CompileError, ConfigError
from kernels.problem import GemmProblem
from kernels.resources import Resources
from pictures.pipeline import timeline_picture
from search_space.explaining import describe
from search_space.starting import PRESETS, preset
from tuner.cli.errors import UsageError
from tuner.cli.output import Output, warn
from tuner.explaining import compiled_facts, instruction_facts

if TYPE_CHECKING:
    import argparse

    from tuner.cli.settings import Settings

# Longer text is never the name of a file; asking the system about it raises OSError.
LONGEST_NAME = 255
RESULT_ID = re.compile(r"[0-9a-f]{32}")


def explain(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 0 for a legal config, 1 for one that does not compile, 2 for one that cannot run: it is explained all
    the same, and the rule it breaks is the line on standard error.

    Raises UsageError, ConfigError, ProblemError, and ToolchainError with --compile where there is no compiler.
    """
    result = _result(args, settings) if RESULT_ID.fullmatch(args.config) else None
    if result is None:
        problem = GemmProblem.parse(args.shape, dtype=args.dtype)
        config = read_config(args.config, arch=args.arch or arch_of_device(args.device))
        profile = profile_named(args.device) if args.device else default_profile(config.arch)
    else:
        problem, config, profile = _of_result(result)
    if profile.arch is not config.arch:
        raise UsageError(f"{profile.name} runs {profile.arch.name}, the config is for {config.arch.name}")
    document = describe(problem, config, profile)
    if result is not None:
        document["result"] = result
        document["compiled"] = _stored_facts(result, settings)
    legal, failed = document["violation"] is None, ""
    if args.compile and legal:
        try:
            document["compiled"] = compiled_facts(problem, config, profile.sm_count)
        except CompileError as error:
            failed = str(error)
            document["compiled"] = {"error": failed}
    output = Output(as_json=args.json)
    output.document(document)
    _print(output, document, problem, profile)
    if args.svg and legal:
        output.picture(timeline_picture(problem, config, profile), args.svg)
    if not legal:
        warn(f"gemm-tuner: cannot run: {document['violation']}")
        return UsageError.exit_status
    return 1 if failed else 0


# ---------------------------------------------------------------------- what is asked about


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


def arch_of_device(device: str | None) -> str | None:
    """The architecture of a device that was named, or None. Raises ConfigError for an unknown one."""
    return profile_named(device).arch.name if device else None


def _result(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    from tuner.cli.remote import connected

    with connected(args, settings) as client:
        return client.result(args.config)


def _of_result(result: dict[str, Any]) -> tuple[GemmProblem, GemmConfig, DeviceProfile]:
    """What a stored result is about. A device that has no data sheet here stands for its architecture's default."""
    stated = result["problem"]
    problem = GemmProblem.parse(f"{stated['m']}x{stated['n']}x{stated['k']}", dtype=stated["dtype"])
    config = config_from_dict(result["arch"], result["config"])
    try:
        profile = profile_named(result["device"])
    except ConfigError:
        profile = default_profile(config.arch)
    return problem, config, profile


def _stored_facts(result: dict[str, Any], settings: Settings) -> dict[str, Any] | None:
    """What the stored module says of itself, where it lies on this machine."""
    sha256 = result.get("artifact_sha256")
    if not sha256:
        return None
    from kernels.artifacts import ArtifactError, ArtifactStore

    store = ArtifactStore(settings.artifacts_dir)
    try:
        module = store.read(sha256)
    except ArtifactError as error:
        return {"artifact_sha256": sha256, "sass": None, "sass_missing": str(error)}
    return {"artifact_sha256": sha256, "module_bytes": len(module), **instruction_facts(lambda: module)}


# ---------------------------------------------------------------------- text


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
    _print_anatomy(output, document["anatomy"])
    output.table("", ("waves and tail", "value"), document["tiles"].items())
    output.table("", ("roofline (data sheet)", "value"), document["roofline"].items())
    output.text("time as the performance model expects it: modeled, not measured")
    output.table("", ("term", "value"), [(name, _plain(value)) for name, value in document["prediction"].items()])
    if document.get("compiled"):
        _print_compiled(output, document["compiled"])
    if document.get("result"):
        result = document["result"]
        output.text(
            f"result {result['id']}: {result['median_us'] or '-'} us on {result['device']}, "
            f"evidence {', '.join(result['evidence'])}"
        )


def _print_anatomy(output: Output, parts: dict[str, Any]) -> None:
    output.table(
        "",
        ("role", "scope", "dispatch", "waits on", "signals"),
        [
            (r["name"], r["scope"], r["dispatch"], ", ".join(r["waits"]), ", ".join(r["signals"]))
            for r in parts["roles"]
        ],
    )
    columns = ("name", "kind", "slots", "arrivals", "arrives", "waits", "protects")
    output.table(
        "",
        ("barrier", "kind", "slots", "arrivals", "who arrives", "who waits", "protects"),
        [[barrier[name] for name in columns] for barrier in parts["barriers"]],
    )
    regions = [(r["name"], r["start"], r["size_bytes"], r["layout"]) for r in parts["shared_memory"]]
    output.table("", ("shared memory", "from byte", "bytes", "layout"), regions)
    if parts["tensor_memory"]:
        columns_used = [(c["name"], c["start"], c["count"]) for c in parts["tensor_memory"]]
        output.table("", ("tensor memory", "from column", "columns"), columns_used)
    registers = [(r["owner"], r["granted"], r["accumulators"]) for r in parts["registers"]]
    output.table("", ("registers of a thread", "granted by setmaxnreg", "float32 of a tile"), registers)


def _print_compiled(output: Output, facts: dict[str, Any]) -> None:
    plain = [(name, _plain(value)) for name, value in facts.items() if name not in ("sass", "sass_missing")]
    output.table("", ("compiled", "value"), plain)
    if facts.get("sass"):
        output.table("", ("machine instruction", "in the code"), facts["sass"].items())
    elif facts.get("sass_missing"):
        output.text(f"no instruction counts: {facts['sass_missing']}")


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) if all(isinstance(item, int) for item in value) else "; ".join(value)
    return value
