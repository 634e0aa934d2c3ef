"""Every command and option, in one place: help, README and the tests are read off this parser."""

from __future__ import annotations

import argparse
import importlib
import re
from typing import TYPE_CHECKING, Any, NoReturn

from search_space.request import PROTOCOL_KINDS
from search_space.samplers import SAMPLERS
from tuner.cli.errors import UsageError
from tuner.settings import ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.cli.settings import Settings

DESCRIPTION = "Tune GEMM kernels: post a problem, get the fastest correct kernel as a module that loads offline."


class Parser(argparse.ArgumentParser):
    """Wrong arguments raise UsageError: one line, exit status 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # `-5x64x64` is a wrong shape, not an unknown option: let the shape's own message say so.
        self._negative_number_matcher = re.compile(r"-\d.*")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError instead of printing usage and exiting."""
        raise UsageError(f"{message}", hint=f"see {self.prog} --help")


def build_parser() -> Parser:
    """The parser of `gemm-tuner`. Building it imports no command module."""
    parser = Parser(prog="gemm-tuner", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _service_commands(commands)
    _job_commands(commands)
    _answer_commands(commands)
    _reproduce_command(commands)
    _explain_commands(commands)
    _search_commands(commands)
    _database_commands(commands)
    return parser


def commands_of(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, argparse.ArgumentParser]:
    """Every command that can be typed (`jobs`, `job resume`, ...) with its parser."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                below = commands_of(child, f"{prefix}{name} ")
                found |= below or {f"{prefix}{name}": child}
    return found


class _Version(argparse.Action):
    """As argparse's own; the version is looked up when it is asked for, which takes longer than parsing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tuner.export import version

        print(version())
        parser.exit()


def _command(commands: Any, name: str, module: str, function: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=_later(module, function))
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser


def _later(module: str, function: str) -> Callable[[argparse.Namespace, Settings], int | None]:
    """Import the command's module when it is run: `gemm-tuner best --url` must not load what tuning needs."""

    def run(args: argparse.Namespace, settings: Settings) -> int | None:
        command: Callable[[argparse.Namespace, Settings], int | None] = getattr(
            importlib.import_module(f"tuner.cli.{module}"), function
        )
        return command(args, settings)

    return run


def _url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="talk to a running service, such as http://127.0.0.1:8000")


def _problem(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    parser.add_argument("shape", nargs="+" if many else None, metavar="MxNxK", help="rows x columns x depth")
    _target(parser)


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", metavar="NAME", help="bf16 (default) or fp16")
    parser.add_argument("--arch", metavar="NAME", help="sm_90a or sm_100a")
    parser.add_argument("--device", metavar="NAME", help="device model, such as h200 or b200")


def _service_commands(commands: Any) -> None:
    serve = _command(commands, "serve", "serve", "serve", "run the API and the tuner on this machine")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=_port, default=8000, help="TCP port to listen on (default 8000)")
    _engine(serve)
    serve.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="name to be called by; may be repeated"
    )
    serve.add_argument("--requests-per-s", metavar="N", help="requests a second that one client may send; 0 for any")
    tuner = _command(commands, "tuner", "serve", "tuner", "run a tuner alone, beside others on one database")
    _engine(tuner)
    _node_command(commands)
    token = commands.add_parser(
        "token",
        help="who may use a service that listens beyond this machine",
        description="who may use a service that listens beyond this machine",
        allow_abbrev=False,
    )
    actions = token.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    create = _command(actions, "create", "tokens", "create", "make a bearer token and print it, once")
    create.add_argument("name", metavar="NAME", help="whose it is; logs show it")
    create.add_argument("--scope", choices=("read", "submit", "admin"), default="read", help="what it allows (read)")
    create.add_argument("--days", type=_positive, metavar="N", help="valid for so long (default: until it is revoked)")
    _command(actions, "list", "tokens", "listing", "list bearer tokens")
    revoke = _command(actions, "revoke", "tokens", "revoke", "make a bearer token useless")
    revoke.add_argument("name", metavar="NAME")
    demo = _command(commands, "demo", "demo", "demo", "tune, export and load one kernel for each architecture")
    demo.add_argument("--trials", type=_positive, default=8, help="candidates per problem (default 8)")
    devices = _command(commands, "devices", "devices", "devices", "list devices that can be tuned for")
    _url(devices)
    _command(commands, "doctor", "doctor", "doctor", "check compilers, driver, GPU, database and versions")


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=ENGINES, help="where candidates are built and run (default: local)")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="head of the Ray cluster, for the engine ray")


def _node_command(commands: Any) -> None:
    node = _command(commands, "node", "node", "node", "make this machine a node of a Ray cluster")
    node.add_argument("--head", action="store_true", help="start the cluster's head here; it does no work itself")
    node.add_argument("--address", default="", metavar="HOST:PORT", help="head of the cluster to join")
    node.add_argument("--port", type=_port, default=6379, help="TCP port of the head (default 6379)")
    node.add_argument("--node-ip", default="", metavar="IP", help="by which others reach this machine")
    node.add_argument("--name", default="", help="for messages (default: made of the host's name)")
    node.add_argument("--compile-processes", type=_count, metavar="N", help="compiles at a time; 0 to measure only")
    node.add_argument("--no-gpus", action="store_true", help="compile only")
    node.add_argument("--modules-mib", type=_positive, default=4096, metavar="N", help="MiB of modules kept (4096)")
    node.add_argument("--object-store-mib", type=_positive, default=256, metavar="N", help="shared memory of Ray (256)")
    node.add_argument("--temp-dir", default="", metavar="DIR", help="where the head's Ray keeps sockets and logs")
    node.add_argument("--fake-devices", default="", metavar="NAMES", help="invented GPUs, such as h200,h200: for tests")
    node.add_argument("--fake", action="store_true", help="an invented compiler and no GPUs: for tests")
    node.add_argument(
        "--ray-option", action="append", default=[], metavar="OPTION", help="passed on to ray start; may be repeated"
    )


def _job_commands(commands: Any) -> None:
    tune = _command(commands, "tune", "jobs", "tune", "find the best kernel for one or more problems")
    _problem(tune, many=True)
    tune.add_argument("--trials", type=int, metavar="N", help="candidates to try for each problem")
    tune.add_argument("--wall-s", type=float, metavar="SECONDS", help="time limit for each problem")
    tune.add_argument("--effort", choices=("quick", "normal", "full"), help="preset of trials and time")
    tune.add_argument("--sampler", choices=SAMPLERS, help="who chooses the next config")
    tune.add_argument(
        "--stop-early",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end when another trial is expected to gain less than the noise (default: unless --trials is given)",
    )
    tune.add_argument("--seed", type=int, default=0, help="same seed, same answer (default 0)")
    tune.add_argument("--mode", choices=("measure", "model"), help="run on a GPU, or rank by the performance model")
    tune.add_argument(
        "--protocol", choices=PROTOCOL_KINDS, help="how to time: short bursts (default) or sustained load"
    )
    tune.add_argument("--priority", type=int, default=0, help="begun before jobs with a lower one (default 0)")
    tune.add_argument("--force", action="store_true", help="tune again although a finished study exists")
    tune.add_argument("--detach", action="store_true", help="with --url: print the job and return at once")
    _url(tune)
    jobs = _command(commands, "jobs", "jobs", "jobs", "list jobs, newest first")
    jobs.add_argument("--limit", type=_positive, default=20, metavar="N", help="jobs to list (default 20)")
    _url(jobs)
    show = _command(commands, "show", "jobs", "show", "show a job, its studies and their trials")
    show.add_argument("id", metavar="ID", help="job or study")
    show.add_argument(
        "--optuna", metavar="URL", help="also write the studies to an Optuna storage, for optuna-dashboard"
    )
    show.add_argument(
        "--plots", metavar="DIR", help="draw knob importance, slices, pairs, coverage and what was turned away (SVG)"
    )
    _url(show)
    cancel = _command(commands, "cancel", "jobs", "cancel", "stop a job and keep what is done")
    cancel.add_argument("id", metavar="ID", help="job")
    _url(cancel)
    job = commands.add_parser("job", help="work on one job", description="work on one job", allow_abbrev=False)
    resume = _command(
        job.add_subparsers(dest="subcommand", metavar="COMMAND", required=True),
        "resume",
        "jobs",
        "resume",
        "go on with a stopped job",
    )
    resume.add_argument("id", metavar="ID", help="job")


def _answer_commands(commands: Any) -> None:
    best = _command(commands, "best", "answers", "best", "the best known kernel for a problem")
    _problem(best)
    best.add_argument("--evidence", metavar="NAME", help="least evidence wanted, such as modeled or measured")
    best.add_argument(
        "--allow-default", action="store_true", help="answer with the model's choice when nothing is stored"
    )
    _stale(best)
    best.add_argument(
        "--environment", metavar="KEY", help="only results of this environment_key, whole or without hash"
    )
    best.add_argument("--revision", type=_positive, metavar="N", help="exactly this published revision")
    _url(best)
    dispatch = _command(
        commands, "dispatch", "questions", "dispatch", "the best known kernel for each M, N and K fixed"
    )
    dispatch.add_argument("family", metavar="NxK", help="rows of B x depth")
    _target(dispatch)
    dispatch.add_argument("--m-min", type=_positive, default=1, metavar="M", help="smallest M of the table (default 1)")
    dispatch.add_argument(
        "--m-max", type=_positive, metavar="M", help="largest M (default: the largest that is answered)"
    )
    dispatch.add_argument("--evidence", metavar="NAME", help="least evidence wanted, such as modeled or measured")
    _stale(dispatch)
    _url(dispatch)
    for name, text in (
        ("revisions", "list what was published for the problem of a result"),
        ("pin", "let a published result stay the answer"),
        ("unpin", "let the newest revision answer again"),
    ):
        command = _command(commands, name, "questions", name, text)
        command.add_argument("id", metavar="RESULT", help="result id")
        _url(command)
    regressions = _command(
        commands,
        "regressions",
        "questions",
        "regressions",
        "compare answers before and after a driver or toolchain change",
    )
    regressions.add_argument("--device", metavar="NAME", help="only this device or architecture")
    regressions.add_argument("--verdict", choices=("slower", "faster", "same"), help="only these")
    _url(regressions)
    export = _command(commands, "export", "answers", "export", "write tuned kernels to one bundle")
    export.add_argument("result", nargs="+", metavar="RESULT", help="result id, or MxNxK of a tuned problem")
    _target(export)
    export.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="bundle to write; for a wheel, the folder to write it to"
    )
    export.add_argument(
        "--format", choices=("zip", "wheel"), default="zip", help="modules with a manifest, or a Python package (zip)"
    )
    export.add_argument("--allow-unverified", action="store_true", help="export candidates too; the manifest says so")
    _url(export)


def _reproduce_command(commands: Any) -> None:
    reproduce = _command(
        commands, "reproduce", "reproduce", "run", "measure stored results again on this machine's GPU"
    )
    reproduce.add_argument("targets", nargs="*", metavar="RESULT", help="result id, or a file of recorded measurements")
    reproduce.add_argument("--all", action="store_true", help="every published result, the newest revision of each")
    reproduce.add_argument("--device", metavar="NAME", help="with --all: only results of this device")
    reproduce.add_argument("--limit", type=_positive, metavar="N", help="at most this many")
    reproduce.add_argument("-o", "--output", metavar="FILE", help="write the JSON document here too")
    _url(reproduce)


def _stale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-stale", action="store_true", help="answer also with results of another driver, CUDA or toolchain"
    )
    parser.add_argument("--protocol", choices=PROTOCOL_KINDS, help="how it was timed (default burst)")


def _explain_commands(commands: Any) -> None:
    explain = _command(commands, "explain", "explain", "explain", "parts, needs, rules and predicted time of a config")
    explain.add_argument("config", metavar="CONFIG", help="preset name, JSON object, file, or id of a stored result")
    explain.add_argument("--shape", default="4096x4096x4096", metavar="MxNxK", help="problem (default 4096x4096x4096)")
    explain.add_argument(
        "--compile", action="store_true", help="compile it too: registers, spills, machine instructions"
    )
    explain.add_argument("--svg", metavar="FILE", help="draw the pipeline's timeline, as the model sees it")
    _target(explain)
    _url(explain)
    verify = _command(commands, "verify", "verify", "verify", "run every gate that needs no GPU on a config")
    verify.add_argument("config", metavar="CONFIG", help="preset name, JSON object or file")
    verify.add_argument(
        "shape", nargs="?", default="4096x4096x4096", metavar="MxNxK", help="problem (default 4096x4096x4096)"
    )
    verify.add_argument("--force", action="store_true", help="run the checkers although a clean verdict is stored")
    _target(verify)
    ladder = _command(commands, "ladder", "ladder", "ladder", "build and time the tutorial's steps beside the library")
    ladder.add_argument("shape", nargs="?", metavar="MxNxK", help="multiples of 128, 128 and 64")
    ladder.add_argument("--from", dest="recorded", metavar="FILE", help="print a recorded ladder instead")
    ladder.add_argument("--svg", metavar="FILE", help="draw the times")
    _target(ladder)


def _search_commands(commands: Any) -> None:
    text = "every config of a bounded space, timed"
    landscape = commands.add_parser("landscape", help=text, description=text, allow_abbrev=False)
    actions = landscape.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    record = _command(actions, "record", "landscape", "record", "time every config of a bounded space on a GPU")
    record.add_argument("shapes", nargs="+", metavar="MxNxK[:DTYPE]", help="problems, recorded in this order")
    record.add_argument("--winners", metavar="FILE", help="recorded measurements whose configs the space must hold")
    record.add_argument("--wall-s", type=float, default=540.0, metavar="SECONDS", help="begin nothing after (540)")
    _landscapes(record)
    _landscapes(_command(actions, "list", "landscape", "listing", "say what was recorded"))
    give = _command(actions, "export", "landscape", "export", "write a landscape for another tuner")
    give.add_argument("name", metavar="NAME", help="as listed")
    give.add_argument("file", metavar="FILE", help="file to write")
    give.add_argument(
        "--format", choices=("t4", "kernel-tuner"), default="t4", help="T4 (default), or a cache file of Kernel Tuner"
    )
    _landscapes(give)
    replay = _command(commands, "replay", "replay", "replay", "run samplers against recorded landscapes, without a GPU")
    replay.add_argument(
        "--strategy",
        nargs="+",
        default=["random", "tpe", "tpe+starts", "learned", "learned+starts"],
        metavar="NAME",
        help="SAMPLER or SAMPLER+SOURCE+..., such as tpe+model; sources: presets, measured, neighbours, heuristics, "
        "model, or starts for all",
    )
    replay.add_argument("--seeds", type=_positive, default=50, metavar="N", help="runs of each (50)")
    replay.add_argument("--trials", type=_positive, default=48, metavar="N", help="candidates of each run (48)")
    replay.add_argument("--in-flight", type=_positive, default=8, metavar="N", help="trials in flight (8)")
    replay.add_argument("--compile-processes", type=_positive, default=16, metavar="N", help="simulated ones (16)")
    replay.add_argument("--processes", type=_positive, metavar="N", help="of this machine (default: the CPU cores)")
    replay.add_argument("--train", metavar="DIR", help="more landscapes to learn from, not replayed")
    replay.add_argument("--winners", metavar="FILE", help="recorded measurements of other problems, as neighbours")
    replay.add_argument("--winners-device", default="NVIDIA H200", metavar="NAME", help="their device (NVIDIA H200)")
    replay.add_argument("-o", "--output", metavar="FILE", help="write the JSON document here too")
    replay.add_argument("--plots", metavar="DIR", help="write pictures (SVG)")
    replay.add_argument(
        "--from", dest="recorded", metavar="FILE", help="run nothing: print what -o or --table wrote before"
    )
    replay.add_argument("--svg", metavar="FILE", help="draw one picture")
    replay.add_argument(
        "--picture",
        choices=("candidates", "seconds", "budgets"),
        default="candidates",
        help="which: best so far against candidates (default) or simulated seconds, or bars at a few budgets",
    )
    replay.add_argument(
        "--table",
        metavar="DIR",
        help="instead of strategies: every sampler with every source, and the anchors, as Markdown; what was made is "
        "kept in DIR, and the same command goes on where it stopped",
    )
    replay.add_argument(
        "--slow-seeds", type=_positive, metavar="N", help="with --table: runs of TPE and CMA-ES (as --seeds)"
    )
    replay.add_argument("--only", nargs="+", default=[], metavar="ROW", help="with --table: make only these rows now")
    _landscapes(replay)


def _landscapes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", default="results/landscapes", metavar="DIR", help="folder of landscapes (default results/landscapes)"
    )


def _database_commands(commands: Any) -> None:
    db = commands.add_parser(
        "db", help="look after the database", description="look after the database", allow_abbrev=False
    )
    actions = db.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    backup = _command(actions, "backup", "database", "backup", "copy the database to a file while it is in use")
    backup.add_argument("file", metavar="FILE")
    restore = _command(actions, "restore", "database", "restore", "replace the database by a backup")
    restore.add_argument("file", metavar="FILE")
    _command(actions, "upgrade", "database", "upgrade", "bring the database to the schema of this version")
    forget = _command(actions, "forget", "database", "forget", "let kernels that failed in a study run again")
    forget.add_argument("study", metavar="STUDY", help="id of the study, as a KNOWN_BAD trial names it")
    forget.add_argument("--trial", type=int, metavar="N", help="only this trial of it")
    results = commands.add_parser(
        "results",
        help="move, record and print results",
        description="move, record and print results",
        allow_abbrev=False,
    )
    actions = results.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    give = _command(actions, "export", "results", "export_results", "write results as JSON lines, or a study as T4")
    give.add_argument("file", metavar="FILE", help="file to write, - for standard output")
    give.add_argument("--format", choices=("jsonl", "t4"), default="jsonl", help="JSON lines (default), or T4")
    give.add_argument("--study", metavar="ID", help="with t4: the study whose trials are written")
    _url(give)
    take = _command(actions, "import", "results", "import_results", "read results from JSON lines or T4")
    take.add_argument("file", metavar="FILE")
    take.add_argument("--format", choices=("jsonl", "t4"), default="jsonl", help="JSON lines (default), or T4")
    take.add_argument("--shape", metavar="MxNxK", help="with t4: the problem, where the file does not say")
    take.add_argument("--dtype", default="bf16", metavar="NAME", help="with --shape: bf16 (default) or fp16")
    take.add_argument("--device", metavar="NAME", help="with t4: the device, where the file does not say")
    record = _command(actions, "record", "recorded", "record", "write published results as a file for docs and tests")
    record.add_argument("file", metavar="FILE", help="file to write or to bring up to date")
    record.add_argument("--device", metavar="NAME", help="only results of this device")
    _url(record)
    table = _command(actions, "table", "recorded", "table", "print such a file as a Markdown table")
    table.add_argument("file", metavar="FILE")
    table.add_argument("--by", choices=("class", "path"), help="groups of rows: by shape, or by the kernel's path")
    table.add_argument("--svg", metavar="FILE", help="draw the ratios to the vendor library by class of shape")


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a TCP port: use 1 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)
