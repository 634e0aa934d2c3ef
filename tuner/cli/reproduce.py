"""`reproduce`: measure stored results again on this machine's GPU, next to the vendor library, and say which hold.

With --url the results and their modules come from a running service; the GPU is the one here.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.artifacts import ArtifactStore
from search_space.request import TuneRequest
from tuner import recorded
from tuner.cli.errors import UsageError, WorkFailed
from tuner.cli.output import Output, warn
from tuner.cli.recorded import newest_published
from tuner.cli.remote import connected
from tuner.reproduce import Claim, ClaimError, Reproduction, claim_of_result, claim_of_row, reproduce

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kernels.devices import DeviceProfile
    from tuner.cli.settings import Settings
    from tuner.client import Client
    from tuner.engine.base import Engine
    from tuner.engines import Engines

Json = dict[str, Any]
RESULT_ID = re.compile(r"[0-9a-f]{32}")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Exit status 1 when a result does not hold."""
    if bool(args.targets) == args.all:
        raise UsageError("name results or files, or say --all", hint="gemm-tuner reproduce RESULT_ID")
    from tuner.engines import engines_of

    settings.create()
    engines = engines_of(settings.tuner)
    try:
        claims = _claims(args, settings)
        engine = _engine(engines, claims)
        rows = reproduce(claims, engine, on_done=_progress)
    finally:
        engines.close()
    return _report(args, engine, rows)


# ---------------------------------------------------------------------- what was claimed


def _claims(args: argparse.Namespace, settings: Settings) -> list[Claim]:
    """Raises UsageError for what states nothing that could be measured again."""
    files = [target for target in args.targets if Path(target).is_file()]
    ids = [target for target in args.targets if target not in files]
    for target in ids:
        if RESULT_ID.fullmatch(target) is None:
            raise UsageError(f"{target!r} is no result id and no file", hint="gemm-tuner best shows the id of a result")
    try:
        claims = [claim for file in files for claim in _claims_of_file(Path(file))]
        if ids or args.all:
            with connected(args, settings) as client:
                claims += [claim_of_result(result) for result in _results(args, client, ids)]
                if args.url:
                    _fetch_modules(client, claims, ids, ArtifactStore(settings.artifacts_dir))
    except (ClaimError, recorded.RecordError) as error:
        raise UsageError(str(error)) from error
    if not claims:
        raise WorkFailed("there is no published result to reproduce", hint="tune first, or name a recorded file")
    return claims[: args.limit]


def _claims_of_file(path: Path) -> Iterator[Claim]:
    content = recorded.read(path)
    for row in content["rows"]:
        yield claim_of_row(row, path.name, content.get("protocol"))


def _results(args: argparse.Namespace, client: Client, ids: list[str]) -> list[Json]:
    if args.all:
        return list(islice(newest_published(client, args.device), args.limit))
    return [client.result(identity) for identity in ids]


def _fetch_modules(client: Client, claims: list[Claim], ids: list[str], store: ArtifactStore) -> None:
    """Bring the service's modules into this machine's store, so that the very bytes are timed."""
    from tuner.bundle import extract_bundle

    wanted = ids or [claim.name.removeprefix("result ") for claim in claims]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = client.wait_export(client.create_export(wanted, allow_unverified=True)["id"])
        bundle = client.download_bundle(order["id"], folder / "bundle.zip")
        for entry in extract_bundle(bundle, folder / "modules")["modules"]:
            store.put((folder / "modules" / entry["file"]).read_bytes())


# ---------------------------------------------------------------------- where it is measured


def _engine(engines: Engines, claims: list[Claim]) -> Engine:
    """The engine of one live device that fits all claims. Raises WorkFailed where there is none."""
    (arch, *others) = sorted({claim.config.arch.name for claim in claims})
    if others:
        raise UsageError(f"results of {arch} and {others[0]} need two machines", hint="name those of one architecture")
    devices = [facts for facts in engines.devices() if facts.is_live and facts.profile.arch.name == arch]
    if not devices:
        here = ", ".join(sorted({facts.name for facts in engines.devices()})) or "none"
        raise WorkFailed(
            f"no {arch} GPU on this machine to measure on (GPUs here: {here})", hint="run this where the tuner's GPU is"
        )
    names = {claim.environment.gpu_name for claim in claims}
    facts = next((facts for facts in devices if facts.name in names), devices[0])
    device = _known_name(facts.profile)
    return engines.engine_for(TuneRequest(problem=claims[0].problem, arch=arch, device=device))


def _known_name(profile: DeviceProfile) -> str | None:
    """The device's name where a request may name it; None, any of the architecture, for a device without a sheet."""
    from kernels.devices import PROFILES

    return profile.name if any(profile.name == known.name for known in PROFILES) else None


# ---------------------------------------------------------------------- saying what was found


def _progress(row: Reproduction) -> None:
    warn(f"{row.claim.name}: {'reproduced' if row.reproduced else 'not reproduced'}: {row.reason}")
    for line in row.warnings:
        warn(f"  differs: {line}")


def _report(args: argparse.Namespace, engine: Engine, rows: list[Reproduction]) -> int:
    held = sum(row.reproduced for row in rows)
    facts = engine.device
    document = {
        "schema": 1,
        "command": shlex.join(["gemm-tuner", *sys.argv[1:]]),
        "device": facts.name,
        "uuid": facts.uuid,
        "reproduced": held,
        "of": len(rows),
        "rows": [row.to_dict() for row in rows],
    }
    if args.output:
        try:
            Path(args.output).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {args.output}: {error.strerror}") from error
    output = Output(as_json=args.json)
    output.document(document)
    columns = ("result", "problem", "stored ratio", "stored 95 %", "ratio now", "now 95 %", "module", "verdict")
    output.table("", columns, [_line(row) for row in rows])
    output.text(f"{held} of {len(rows)} reproduced on {facts.name}")
    return 0 if held == len(rows) else 1


def _line(row: Reproduction) -> tuple[object, ...]:
    claim, now = row.claim, row.measurement.ratio("cublaslt_best") if row.measurement else None
    return (
        claim.name.split(" ")[1] if claim.name.startswith("result ") else claim.name.split(" ")[0],
        str(claim.problem),
        f"{claim.ratio.median:.4f}",
        f"{claim.ratio.low:.4f} to {claim.ratio.high:.4f}",
        f"{now.median:.4f}" if now else None,
        f"{now.low:.4f} to {now.high:.4f}" if now else None,
        row.module,
        "reproduced" if row.reproduced else f"not reproduced: {row.reason}" if now is None else "not reproduced",
    )
