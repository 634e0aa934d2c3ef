"""Protocol bugs planted in the sm_100a template against the gates: which gate catches which.

    python -m tests.soak.mutations --out results/verify/mutations.json      resumes where it was stopped
    python -m tests.soak.mutations --table results/verify/mutations.json    prints the table of docs/guides/blackwell.md

Every bug goes through all four gates, although the structural rules alone would stop it: the table is to show what each
gate is worth. The knobs are chosen so that each bug takes effect: a pair of CTAs, two consumers, two accumulator slots,
and a number of epilogue chunks that the staging buffers do not divide. Bugs of parts of K, and of cluster launch
control, have knobs of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from kernels.checkers import CLEAN, EXACT, CheckReport, available, check, reduced_instances, versions
from kernels.config import Sm100GemmConfig
from kernels.gemm_sm100_plan import CLC_FAULTS, FAULTS, SPLIT_FAULTS
from kernels.lowering import lower
from kernels.structure import structural_findings
from tests.soak.one_by_one import Row, Rows, command_line, in_process, say, versions_match

SUBJECT = Sm100GemmConfig(
    cta_group=2, num_consumers=2, acc_stages=2, blk_n=32, blk_k=32, pipe_depth=2, epi_n=16, epi_stages=3
)
SPLIT = Sm100GemmConfig(cta_group=1, num_consumers=1, split_k=3, blk_n=32, blk_k=32, pipe_depth=2, epi_n=16)
CLC = Sm100GemmConfig(
    scheduler="clc", cta_group=2, num_consumers=1, acc_stages=2, blk_n=32, blk_k=32, pipe_depth=2, epi_n=16
)
BUGS = FAULTS | SPLIT_FAULTS | CLC_FAULTS
GATES = ("structure", "synccheck", "racecheck", "numsim")
LIMIT_S = 900.0
TEMPLATE = ""  # the name of the row without a bug


def subject_of(fault: str) -> Sm100GemmConfig:
    """The knobs with which a bug takes effect."""
    return SPLIT if fault in SPLIT_FAULTS else CLC if fault in CLC_FAULTS else SUBJECT


def examine(fault: str, limit_s: float = LIMIT_S) -> Row:
    """One bug, or none, through every gate."""
    subject = subject_of(fault)
    instance = reduced_instances(subject)[0]
    variant = {"fault": fault} if fault else {}
    lowered = lower(instance.problem, subject, instance.sm_count, **variant)
    broken = sorted({found.rule for found in structural_findings(lowered, instance.problem, subject)})
    report = in_process(_check, fault, limit_s=limit_s)
    row: Row = {
        "fault": fault,
        "what": BUGS.get(fault, "the template as it is"),
        "config": subject.to_dict(),
        "shape": [instance.problem.m, instance.problem.n, instance.problem.k],
        "dtype": instance.problem.dtype.value,
        "sm_count": instance.sm_count,
        "source_hash": lowered.source_hash,
        "structure": broken,
    }
    if isinstance(report, str):
        row |= {"sync": report, "race": report, "numsim": report, "findings": [], "versions": versions()}
    else:
        row |= {"sync": report.sync, "race": report.race, "numsim": report.numsim}
        row |= {"findings": list(report.findings), "versions": report.versions, "seconds": report.seconds}
    return row | {"caught_by": caught_by(row)}


def _check(fault: str) -> CheckReport:
    subject = subject_of(fault)
    return check(subject, reduced_instances(subject)[0], fault=fault, workers=1)


def caught_by(row: Row) -> list[str]:
    """The gates that did not pass the kernel."""
    passed = (not row["structure"], row["sync"] == CLEAN, row["race"] == CLEAN, row["numsim"] == EXACT)
    return [gate for gate, fine in zip(GATES, passed, strict=True) if not fine]


def table(rows: list[Row]) -> str:
    """The rows as Markdown: one bug a line, in the order in which the template lists them."""
    lines = ["| planted bug | structure | synccheck | racecheck | numsim |", "|---|---|---|---|---|"]
    by_fault = {row["fault"]: row for row in rows}
    bugs = [by_fault[fault] for fault in BUGS if fault in by_fault]
    for row in bugs:
        tools = " | ".join(_short(row, name) for name in ("sync", "race", "numsim"))
        lines.append(f"| `{row['fault']}`: {row['what']} | {', '.join(row['structure']) or '-'} | {tools} |")
    caught = [sum(gate in row["caught_by"] for row in bugs) for gate in GATES]
    lines.append(f"| **caught, of {len(bugs)}** | " + " | ".join(f"**{number}**" for number in caught) + " |")
    if waiting := [fault for fault in BUGS if fault not in by_fault]:
        names = ", ".join(f"`{fault}`" for fault in waiting)
        lines.append("\n" + textwrap.fill(f"Not run yet: {names}.", 118, break_on_hyphens=False))
    return "\n".join(lines)


def _short(row: Row, name: str) -> str:
    """What a tool found, in few words; a dash where it was content."""
    answer: str = row[name]
    if answer in (CLEAN, EXACT):
        return "-"
    kinds: list[str] = [line.split()[2].rstrip(":") for line in row["findings"] if line.startswith(f"{name}: ")]
    if kinds:
        return kinds[0]
    return "deadlock" if "deadlock" in answer else answer if answer.endswith("wrong") else answer[:60]


def main() -> int:
    """0 when the template passes every gate and every bug is caught by at least one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/verify/mutations.json"))
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a recorded file as a table and end")
    parser.add_argument("--only", nargs="*", choices=sorted(BUGS), help="bugs to run (default: all)")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())["rows"]))
        return 0
    if reason := available():
        print(f"the checkers cannot run: {reason}", file=sys.stderr)
        return 1
    return _run(Rows(arguments.out, command_line("tests.soak.mutations")), arguments.only or [TEMPLATE, *BUGS])


def _run(rows: Rows, faults: list[str]) -> int:
    began, tools = time.monotonic(), versions()
    wrong = []
    for fault in faults:
        earlier = rows.find(fault=fault)
        variant: dict[str, Any] = {"fault": fault} if fault else {}
        subject = subject_of(fault)
        instance = reduced_instances(subject)[0]
        source_hash = lower(instance.problem, subject, instance.sm_count, **variant).source_hash
        if not versions_match(earlier, source_hash, tools):
            rows.put(examine(fault), fault=fault)
        row = rows.find(fault=fault)
        assert row is not None
        say(f"{fault or 'template'}: {', '.join(row['caught_by']) or 'passes every gate'}", began)
        if bool(row["caught_by"]) != bool(fault):
            wrong.append(fault or "template")
    print(f"{len(faults)} run, not as they should be: {', '.join(wrong) or 'none'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
