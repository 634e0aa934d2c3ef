"""Command line; see the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.soak.gates.table import caught_by, table


def main() -> int:
    """0 when every bug is caught by some gate, and the healthy kernel by none."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.gates")
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("out", type=Path)
    run_parser.add_argument("--rows", nargs="*", help="names of bugs; all of them by default")
    run_parser.add_argument("--limit-s", type=float, default=240.0, help="no step begins after it")
    run_parser.add_argument("--processes", type=int, default=0, help="compiles at a time; one a core by default")
    table_parser = commands.add_parser("table")
    table_parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(json.loads(arguments.file.read_text(encoding="utf-8"))), end="")
        return 0

    from kernels.gemm_sm90 import EVERY_FAULT
    from tests.soak.gates.run import run

    faults = arguments.rows if arguments.rows is not None else list(EVERY_FAULT)
    found = run(arguments.out, faults=faults, limit_s=arguments.limit_s, processes=arguments.processes)
    caught = {name: caught_by(row) for name, row in found["rows"].items()}
    for name, gates in caught.items():
        print(f"{name}: {', '.join(gates) or 'no gate'}")
    return 0 if all(bool(gates) != name.startswith("healthy") for name, gates in caught.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
