"""Entry point of `gemm-tuner`: parse, run one command, turn what went wrong into one line and an exit status.

Exit status: 0 done, 1 the work failed, 2 the request was wrong.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.errors import CommandError, UsageError, WorkFailed
from tuner.cli.parser import build_parser
from tuner.cli.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

log = logging.getLogger("gemm-tuner")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never prints a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # a program of its own: being told to stop ends as Ctrl-C does, with the work kept
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    as_json = "--json" in arguments
    try:
        args = build_parser().parse_args(arguments)
        return _run(args)
    except CommandError as error:
        return _report(error, as_json=as_json)
    except KeyboardInterrupt:
        return _report(WorkFailed("interrupted"), as_json=as_json)
    except BrokenPipeError:
        # The reader went away (`gemm-tuner jobs | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: argparse.Namespace) -> int:
    settings = Settings.from_env()
    try:
        with logged_to(settings.log_path):
            status: int | None = args.run(args, settings)
    except (CommandError, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # the door of the program: people get one line, the log gets the traceback
        raise _translated(error, settings) from error
    return status or 0


def _translated(error: Exception, settings: Settings) -> CommandError:
    """Errors of the packages below are told apart by name: importing them here would load what --url must not need."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"DatabaseBusy", "ToolchainError", "ArtifactError", "EngineError", "NoDevice"}:
        return WorkFailed(str(error))
    if names & {"ProblemError", "ConfigError", "RequestError", "ExportError", "DatabaseError"}:
        return UsageError(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        return WorkFailed(f"this command needs {error.name!r}, which is not installed", hint=_extra_of(error.name))
    return WorkFailed(f"unexpected {type(error).__name__}: {error}", hint=_log(error, settings))


def _extra_of(module: str) -> str:
    package = module.partition(".")[0]
    extra = {
        "torch": "gpu",
        "fastapi": "server",
        "uvicorn": "server",
        "sqlalchemy": "server",
        "alembic": "server",
        "ray": "ray",
    }
    return f"pip install 'gemm-tuner[{extra.get(package, 'tuner')}]', or name a running service with --url"


def _log(error: Exception, settings: Settings) -> str:
    """Write the traceback where a person can find it and say where that is."""
    try:
        settings.log_path.parent.mkdir(parents=True, exist_ok=True)
        settings.log_path.open("a").close()
    except OSError:
        return f"the log {settings.log_path} cannot be written"
    with logged_to(settings.log_path):
        log.error("%s", " ".join(sys.argv), exc_info=error)
    return f"traceback in {settings.log_path}"


class _LazyFile(logging.FileHandler):
    """Makes file and folder with the first record, and keeps standard error clean when that is not possible."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or drop it."""
        with suppress(OSError):
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Send what the packages below log, and warnings, to a file: standard error is for one line to people."""
    root, handler = logging.getLogger(), _LazyFile(path)
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()


def _report(error: CommandError, *, as_json: bool) -> int:
    sys.stderr.write(f"gemm-tuner: {error.line}\n")
    if as_json:
        document = {"error": type(error).__name__, "detail": str(error), "hint": error.hint}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
