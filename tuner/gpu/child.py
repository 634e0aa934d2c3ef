"""The child process of one GPU: `python -m tuner.gpu.child`. CUDA is initialised here and nowhere else.

Started by tuner.gpu.host, which chooses the card, watches the phases and kills the process when one takes too long.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tuner.engine.base import DeviceFacts, EvaluateJob, EvaluateReply, FinalJob
from tuner.gpu.jobs import ONLY_SUBJECT, Job, Phase, StressJob
from tuner.gpu.wire import Done, Failed, Report, child_main, describe
from tuner.records import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.gpu.context import Contexts
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.evaluate import Bench
    from tuner.gpu.finals import LoadKernel
    from tuner.gpu.referee import Kernel

FUNCTION = "gemm"


class LoadError(RuntimeError):
    """A module cannot be loaded."""


class ChangedError(LoadError):
    """A file is not the module that was stored."""


def load_module(path: Path, sha256: str) -> Kernel:
    """The kernel of a module. Raises ChangedError for a file that is not what was stored, LoadError for no module."""
    import tvm_ffi

    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ChangedError(f"the module cannot be read: {error}") from error
    if found != sha256:
        raise ChangedError(
            f"{path} hashes to {found[:12]}, stored was {sha256[:12]}: the file was changed or cut short"
        )
    try:
        kernel: Kernel = tvm_ffi.load_module(str(path))[FUNCTION]
    except (RuntimeError, OSError, AttributeError, KeyError) as error:
        raise LoadError(f"the module does not load: {describe(error)}") from error
    return kernel


class GpuWorker:
    """Runs jobs on the only GPU that this process sees."""

    def __init__(self, options: dict[str, str], load: LoadKernel = load_module) -> None:
        self._options = options
        self._load = load
        self._device: LiveDevice | None = None
        self._contexts: Contexts | None = None

    def warm(self) -> None:
        """Import torch and what is built on it. None of it creates a CUDA context."""
        _warm_tvm_ffi()
        for module in ("context", "device", "evaluate", "finals"):
            importlib.import_module(f"tuner.gpu.{module}")

    def start(self, report: Report) -> DeviceFacts:
        """Create the context, check its health. Raises DeviceError."""
        report(Phase.START)
        from tuner.gpu.context import Contexts
        from tuner.gpu.device import check_health, open_device

        self._device = open_device(**self._options)
        self._contexts = Contexts(self._device)
        report(Phase.HEALTH)
        check_health()
        # Collections would fall into the timing; what torch and tvm have made so far stays anyway.
        gc.collect()
        gc.freeze()
        return self._device.facts()

    def run(self, job: Job, report: Report) -> Done:
        """Run one job. May raise anything that a module raises."""
        from tuner.gpu.evaluate import Bench
        from tuner.gpu.finals import final, stress

        assert self._device is not None
        assert self._contexts is not None
        if isinstance(job, StressJob):
            return Done(reply=stress(job, self._load, self._device, report))
        context = self._contexts.get(job.problem, job.protocol, job.seed, report)
        bench = Bench(context=context, device=self._device, report=report)
        if isinstance(job, FinalJob):
            # Always, as this is the last look before a winner: its own rounds hide what it does to the others' data.
            # But where torch.matmul itself is refused, its reason may differ from call to call and says nothing.
            finished = final(job, self._load, bench)
            return Done(reply=finished, doubtful=context.control[0] is None and self._is_damaged(bench))
        reply = self._evaluate(job, bench)
        return Done(reply=reply, doubtful=reply.outcome is Outcome.WRONG_RESULT and self._is_damaged(bench))

    def _is_damaged(self, bench: Bench) -> bool:
        bench.report(Phase.BASELINE)
        return bench.context.is_damaged()

    def _evaluate(self, job: EvaluateJob, bench: Bench) -> EvaluateReply:
        from tuner.gpu.evaluate import evaluate

        bench.report(Phase.LOAD, ONLY_SUBJECT)
        began = time.monotonic()
        kernel = self._load(job.module_path, job.module_sha256)
        return evaluate(kernel, job, bench, began=began)

    def failure(self, error: Exception) -> Failed:
        """Say what an exception means, and whether the process can go on."""
        import torch

        from tuner.gpu.device import context_lost

        text = describe(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
            # Replaced even though the context works: what the failed attempt left allocated is anybody's guess.
            return Failed(outcome=Outcome.OUT_OF_MEMORY, reason=f"not enough device memory: {text}", tainted=True)
        tainted = context_lost()
        if isinstance(error, LoadError):
            text = str(error)
        elif isinstance(error, (ValueError, TypeError)) and not tainted:
            text = f"the kernel refused its arguments: {text}"
        changed = isinstance(error, ChangedError)
        return Failed(outcome=Outcome.CRASHED, reason=text, tainted=tainted, module_changed=changed)


def _warm_tvm_ffi() -> None:
    """Import it before any candidate: its first import with torch may build a helper library, which takes a while."""
    try:
        import tvm_ffi  # noqa: F401
    except ImportError:
        print("apache-tvm-ffi is not installed: no module can be loaded", file=sys.stderr)


def main(arguments: list[str], load: LoadKernel = load_module) -> None:
    """Run the child. Ends the process without destructors: on a lost CUDA context they hang or abort."""
    faulthandler.enable()

    def worker(options: dict[str, str]) -> Any:
        return GpuWorker(options, load)

    status = child_main(arguments, worker)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
