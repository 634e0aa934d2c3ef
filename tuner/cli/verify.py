"""`verify CONFIG [MxNxK]`: every gate that needs no GPU, run for a person.

Compiler and structural rules; for sm_100a also both checkers and the simulator, on reduced instances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.config import Sm100GemmConfig
from kernels.devices import default_profile, profile_named
from kernels.problem import GemmProblem
from kernels.rules import violation
from tuner.cli.errors import UsageError
from tuner.cli.explain import arch_of_device, read_config
from tuner.cli.output import Output

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from kernels.checkers import CheckReport
    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from tuner.cli.settings import Settings

CLEAN, FAILED, INCOMPLETE = "clean", "failed", "incomplete"


def verify(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 0 when every gate ran and was clean, 1 when one found something or could not run.

    Raises UsageError for what is no config, or cannot serve the problem, and ToolchainError without a compiler.
    """
    problem = GemmProblem.parse(args.shape, dtype=args.dtype)
    config = read_config(args.config, arch=args.arch or arch_of_device(args.device))
    profile = profile_named(args.device) if args.device else default_profile(config.arch)
    if reason := violation(problem, config, profile.sm_count):
        raise UsageError(f"the config cannot serve {problem.shape}: {reason}", hint="see gemm-tuner explain")
    output = Output(as_json=args.json)
    output.text(f"{config.arch.name} config for {problem} on {profile.name} ({profile.sm_count} SMs)")
    gates = _gates(problem, config, profile.sm_count)
    if isinstance(config, Sm100GemmConfig):
        gates += _checked(config, problem, settings.tuner.verdicts_dir, output, force=args.force, before=gates)
    verdict = _verdict(gates)
    document = {
        "arch": config.arch.name,
        "device": profile.name,
        "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype, "layout": problem.layout},
        "config": config.to_dict(),
        "gates": gates,
        "verdict": verdict,
    }
    output.document(document)
    rows = [(gate["name"], gate["on"], gate["verdict"], gate["detail"]) for gate in gates]
    output.table("", ("gate", "on", "verdict", "detail"), rows)
    output.text(f"verdict: {verdict}" + ("" if verdict == CLEAN else ", not a pass"))
    return 0 if verdict == CLEAN else 1


def _gates(problem: GemmProblem, config: GemmConfig, sm_count: int) -> list[dict[str, Any]]:
    """What both architectures share. Raises ToolchainError."""
    from kernels.compile import compile_kernel
    from kernels.errors import CompileError

    try:
        kernel = compile_kernel(problem, config, sm_count, check_structure=True)
    except CompileError as error:
        return [_gate("compile", problem.shape, FAILED, str(error))]
    return [_compiled(problem, kernel), _structure(problem, kernel)]


def _gate(name: str, on: str, verdict: str, detail: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "on": on, "verdict": verdict, "detail": detail, **more}


def _compiled(problem: GemmProblem, kernel: CompiledKernel) -> dict[str, Any]:
    spoiled = bool(kernel.spill_bytes or kernel.stack_bytes or kernel.warnings)
    detail = f"{kernel.registers} registers, {kernel.spill_bytes} B spilled, {kernel.stack_bytes} B stack"
    return _gate(
        "compile",
        problem.shape,
        FAILED if spoiled else CLEAN,
        "; ".join((detail, *kernel.warnings)),
        versions={"toolchain": kernel.toolchain},
        source_hash=kernel.source_hash,
    )


def _structure(problem: GemmProblem, kernel: CompiledKernel) -> dict[str, Any]:
    findings = kernel.findings or ()
    detail = "; ".join(findings) or "all rules hold"
    return _gate("structure", problem.shape, FAILED if findings else CLEAN, detail)


def _checked(
    config: Sm100GemmConfig,
    problem: GemmProblem,
    store: Path,
    output: Output,
    *,
    force: bool,
    before: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The checkers take minutes: they run only for a kernel that compiles clean and keeps the rules."""
    from kernels.checkers import reduced_instances
    from kernels.errors import ToolchainError
    from kernels.verdicts import VerdictStore, verdicts

    if _verdict(before) != CLEAN:
        return [_gate("checkers", "", INCOMPLETE, "not run: a cheaper gate is not clean")]
    labels = {i.problem.shape: i.label for i in reduced_instances(config, problem.dtype)}
    try:
        reports = verdicts(config, VerdictStore(store), dtype=problem.dtype, force=force, tell=output.text)
    except ToolchainError as error:
        return [_gate("checkers", "", INCOMPLETE, f"cannot run, so this config stays unverified: {error}")]
    gates = []
    for report in reports:
        gates += _answers(report, f"{labels[report.problem.shape]} {report.problem.shape}")
    return gates


def _answers(report: CheckReport, on: str) -> list[dict[str, Any]]:
    gates = []
    for name, key, answer in (
        ("synccheck", "sync", report.sync),
        ("racecheck", "race", report.race),
        ("numsim", "numsim", report.numsim),
    ):
        verdict = CLEAN if answer in ("clean", "exact") else INCOMPLETE if answer == "incomplete" else FAILED
        found = [line.removeprefix(f"{key}: ") for line in report.findings if line.startswith(f"{key}: ")]
        detail = "; ".join((answer, *found[:2]))
        gates.append(_gate(name, on, verdict, detail, versions=report.versions, seconds=report.seconds[key]))
    return gates


def _verdict(gates: list[dict[str, Any]]) -> str:
    """`failed` outweighs `incomplete`: what was found stays found."""
    verdicts = {gate["verdict"] for gate in gates}
    return next((verdict for verdict in (FAILED, INCOMPLETE) if verdict in verdicts), CLEAN)
