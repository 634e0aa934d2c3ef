"""A wheel of tuned kernels on a GPU, in an environment with torch and apache-tvm-ffi only.

    python -m tests.soak.wheel OUT_FOLDER [--wheel FILE] [--recorded results/h200/dev.json]

Without --wheel, every published result of this home's database for this machine's GPU goes into one; where fewer than
--kernels are published, shapes of a list are tuned first (8 trials each). Then `wheel_child` runs with the wheel
installed in a folder of its own, beside nothing of this project. Last, each module is timed next to the vendor library
with the product's own clock, and its ratio is compared with the stored one. Exit status 1 when something is not right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from db import queries
from db.database import Database
from kernels.artifacts import ArtifactStore, write_atomically
from kernels.problem import GemmProblem
from tests.soak.fresh_process import TOLERANCE, check, quiet
from tuner.cli.settings import Settings
from tuner.gpu.child import GpuWorker
from tuner.gpu.inventory import list_gpus
from tuner.wheel.build import PACKAGE, build_wheel

SHAPES = (
    *("1x6144x4096", "16x4096x4096", "32x2560x5120", "64x4096x14336", "64x7168x4096", "128x4096x7168"),
    *("256x5120x6400", "512x4096x4096", "1024x4096x4096", "2048x6144x4096", "4096x4096x4096", "8192x2560x2560"),
)
CHILD = Path(__file__).with_name("wheel_child.py")
CHILD_LIMIT_S = 300


def say(line: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def published(settings: Settings, device: str) -> list[Any]:
    """The answers of this device, newest revision of each problem."""
    with Database.open(settings.database_url) as database, database.read() as session:
        found: list[Any] = []
        after: str | None = None
        while page := queries.results(session, device_name=device, published=True, limit=500, after=after):
            found += [row for row in page if row.current]
            after = page[-1].id
    return found


def tune(count: int) -> None:
    """Tune the first shapes of the list."""
    say(f"tuning {count} shapes, 8 trials each")
    command = [sys.executable, "-m", "tuner.cli.main", "tune", *SHAPES[:count], "--arch", "sm_90a"]
    subprocess.run([*command, "--trials", "8", "--mode", "measure"], check=False)


def make_wheel(settings: Settings, device: str, wanted: int, folder: Path) -> tuple[Path, list[Any]]:
    """A wheel of what is published, after tuning where that is too little."""
    rows = published(settings, device)
    if len(rows) < wanted:
        tune(wanted)
        rows = published(settings, device)
    return build_wheel(rows, ArtifactStore(settings.artifacts_dir), folder, allow_unverified=False), rows


def install(wheel: Path, site: Path) -> None:
    """The wheel and apache-tvm-ffi in a folder; torch comes with the interpreter."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)
    for name in ("tvm_ffi", "typing_extensions"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, site / source.name)


def run_child(site: Path, out: Path) -> dict[str, Any]:
    """Its report; what it prints goes where ours goes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(site)
    with tempfile.TemporaryDirectory() as empty:
        script = shutil.copy(CHILD, empty)
        command = [sys.executable, str(script), str(out)]
        subprocess.run(command, cwd=empty, env=environment, check=False, timeout=CHILD_LIMIT_S)
    return json.loads(out.read_text()) if out.exists() else {"kept": False, "rows": [], "failure": "no report"}


def stored_ratios(rows: list[Any], recorded: Path | None) -> dict[tuple[str, str], float]:
    """Ratio to `cublaslt_best` by shape and dtype: of the results in the wheel, else of a file of recorded results."""
    if rows:
        return {
            (f"{row.m}x{row.n}x{row.k}", row.dtype): row.ratio["cublaslt_best"]["median"] for row in rows if row.ratio
        }
    content = json.loads(recorded.read_text())["rows"] if recorded else []
    return {(f"{row['m']}x{row['n']}x{row['k']}", row["dtype"]): row["ratio"]["cublaslt_best"] for row in content}


def time_modules(package: Path, stored: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Each module next to the vendor library, by the product's own referee and clock."""
    worker = GpuWorker({"uuid": list_gpus()[0].uuid, "toolchain": "", "cuda": ""})
    worker.start(quiet)
    rows = []
    for entry in json.loads((package / "manifest.json").read_text())["modules"]:
        row = check(worker, package, entry, quiet)
        problem = GemmProblem(**{name: entry["problem"][name] for name in ("m", "n", "k", "dtype", "layout")})
        row["stored_ratio"] = stored.get((problem.shape, problem.dtype.value))
        if "ratio" in row and row["stored_ratio"]:
            row["within_1_percent"] = abs(row["ratio"] / row["stored_ratio"] - 1) <= TOLERANCE
        say(json.dumps(row))
        rows.append(row)
    return rows


def main() -> int:
    """0 when every part is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the report and the wheel")
    parser.add_argument("--wheel", type=Path, help="take this wheel")
    parser.add_argument("--recorded", type=Path, help="with --wheel: stored ratios")
    parser.add_argument("--kernels", type=int, default=12, help="kernels wanted (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out: Path = options.out.absolute()
    settings, device = Settings.from_env(), list_gpus()[0].name
    settings.create()
    wheel, rows = (options.wheel, []) if options.wheel else make_wheel(settings, device, options.kernels, out)
    say(f"wheel {wheel.name}")
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        install(wheel, site)
        child = run_child(site, out / "wheel_child.json")
        timed = time_modules(site / PACKAGE, stored_ratios(rows, options.recorded))
    agreeing = [row for row in timed if row.get("within_1_percent")]
    report = {
        "schema": 1,
        "command": "python -m tests.soak.wheel",
        "wheel": wheel.name,
        **child,
        "ratios": timed,
        "ratios_within_1_percent": f"{len(agreeing)} of {len(timed)}",
    }
    report["kept"] = bool(child["kept"] and len(timed) >= options.kernels and len(agreeing) == len(timed))
    write_atomically(out / "wheel.json", (json.dumps(report, indent=1) + "\n").encode())
    say(f"kept: {report['kept']}, ratios within 1 %: {report['ratios_within_1_percent']}")
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
