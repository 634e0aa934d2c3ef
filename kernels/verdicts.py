"""Verdicts of the checkers, kept by what was checked: generated source, launch plan and tool versions.

An edit of the template that leaves a config's source as it was leaves its verdicts valid; any other edit, and another
version of a tool, asks again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kernels.artifacts import write_atomically
from kernels.checkers import CheckReport, available, check, reduced_instances, versions
from kernels.errors import ToolchainError
from kernels.problem import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kernels.config import Sm100GemmConfig


class VerdictStore:
    """One folder of JSON files, one for each source and set of tools."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, source_hash: str, tools: Mapping[str, str]) -> Path:
        """Where the verdict on a source lies, existing or not."""
        versions_hash = hashlib.sha256(json.dumps(dict(tools), sort_keys=True).encode()).hexdigest()
        return self.root / source_hash[:2] / f"{source_hash}-{versions_hash[:12]}.json"

    def find(self, source_hash: str, tools: Mapping[str, str]) -> CheckReport | None:
        """The stored verdict of these tools on this source; None where there is none, or where the file is damaged."""
        try:
            report = CheckReport.from_dict(json.loads(self.path(source_hash, tools).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return report if (report.source_hash, report.versions) == (source_hash, dict(tools)) else None

    def put(self, report: CheckReport) -> None:
        """Store a verdict in place of an earlier one on the same source. Raises OSError when the disk refuses it."""
        target = self.path(report.source_hash, report.versions)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, (json.dumps(report.to_dict(), indent=1, sort_keys=True) + "\n").encode())


def verdicts(
    config: Sm100GemmConfig,
    store: VerdictStore,
    *,
    dtype: Dtype = Dtype.BF16,
    force: bool = False,
    tell: Callable[[str], None] | None = None,
) -> tuple[CheckReport, ...]:
    """The verdict on each reduced instance of a config, stored or new; none follows one that did not pass.

    force: run the tools although a clean verdict is stored; a stored one that is not clean is never trusted
    tell: called with a line for people before each run
    Raises ConfigError for an illegal config and ToolchainError where the engine cannot be used or built.
    """
    if reason := available():
        raise ToolchainError(reason)
    from kernels.lowering import lower

    tools = versions()
    reports: list[CheckReport] = []
    for instance in reduced_instances(config, dtype):
        lowered = lower(instance.problem, config, instance.sm_count)
        report = None if force else store.find(lowered.source_hash, tools)
        if report is None or not report.passed:
            where = f"{instance.label} {instance.problem.shape}"
            report = check(config, instance, tell=None if tell is None else _telling(tell, where))
            store.put(report)
        reports.append(report)
        if not report.passed:
            break
    return tuple(reports)


def _telling(tell: Callable[[str], None], where: str) -> Callable[[str], None]:
    return lambda tool: tell(f"{tool} on {where} ...")
