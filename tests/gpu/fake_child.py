"""A GPU child without a GPU: runs the real message loop, and does what the module's file name says."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kernels.devices import profile_named
from tuner.engine.base import DeviceFacts, EvaluateJob, EvaluateReply, FinalJob, FinalReply
from tuner.gpu.jobs import Job, Phase, Reply, StressJob, StressReply
from tuner.gpu.wire import Done, Failed, Report, child_main, describe
from tuner.records import Environment, Measurement, Outcome, Ratio

CANDIDATE_PHASES = (Phase.LOAD, Phase.FIRST_LAUNCH, Phase.VERIFY, Phase.MEASURE)


class Unpicklable(Exception):
    """Cannot travel, and cannot even print itself."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise ValueError("no text")


class StickyFault(RuntimeError):
    """Stands for an error after which the CUDA context is lost."""


def environment() -> Environment:
    """Of the invented card."""
    return Environment(gpu_name="NVIDIA H200", arch="sm_90a", sm_count=132, gpu_uuid="GPU-fake")


class OtherBytes(RuntimeError):
    """Stands for a file that is not what was stored."""


class FakeWorker:
    """Behaves as told. `state` is a folder that outlives the process: its files count starts."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._state = Path(os.environ["FAKE_CHILD_STATE"])
        self._damaged = False

    def warm(self) -> None:
        """Takes as long as FAKE_CHILD_IMPORT_S says, as an import of torch would."""
        with (self._state / "born").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(float(os.environ.get("FAKE_CHILD_IMPORT_S", "0")))
        if (self._state / "stillborn").exists():
            os._exit(5)
        with (self._state / "warm").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def start(self, report: Report) -> DeviceFacts:
        """Fails its health check while there is a file that says so, once for each character in it."""
        report(Phase.START)
        with (self._state / "starts").open("a") as file:
            file.write(f"{os.getpid()}\n")
        report(Phase.HEALTH)
        sick = self._state / "sick"
        if sick.exists() and (left := sick.read_text()):
            sick.write_text(left[1:])
            if left[0] == "h":
                time.sleep(60)
            raise RuntimeError("health check: a known product is wrong")
        return DeviceFacts(
            name="NVIDIA H200", uuid="GPU-fake", profile=profile_named("h200"), environment=environment()
        )

    def run(self, job: Job, report: Report) -> Done:
        """Walk through the phases of each candidate. `damages` leaves the child with a broken reference."""
        reply = self._reply(job, report)
        wrong = isinstance(reply, EvaluateReply) and reply.outcome is Outcome.WRONG_RESULT
        return Done(reply=reply, doubtful=self._damaged and (wrong or isinstance(reply, FinalReply)))

    def _reply(self, job: Job, report: Report) -> Reply:
        if isinstance(job, StressJob):
            for subject, build in enumerate(job.builds):
                self._candidate(build.module_path.name, report, subject)
            return StressReply(outcome=None, launches=len(job.builds) * job.launches)
        report(Phase.BASELINE)
        self._misbehave(job, "baseline")
        candidates = job.candidates if isinstance(job, FinalJob) else (job,)
        failures = {
            candidate.source_hash: failed
            for subject, candidate in enumerate(candidates)
            if (failed := self._candidate(candidate.module_path.name, report, subject))
        }
        report(Phase.MEASURE)
        self._misbehave(job, "burst")
        report(Phase.VERIFY, len(candidates) - 1)
        measured = {
            candidate.source_hash: measurement(candidate)
            for candidate in candidates
            if candidate.source_hash not in failures
        }
        if isinstance(job, FinalJob):
            ratio = Ratio(median=1.0, low=1.0, high=1.0)
            environ = environment()
            return FinalReply(measurements=measured, aa_ratio=ratio, environment=environ, failures=failures, gpu_s=0.1)
        return failures.get(job.source_hash) or EvaluateReply(
            outcome=Outcome.MEASURED, measurement=measured[job.source_hash], gpu_s=0.1, max_rel_error=1e-3
        )

    def failure(self, error: Exception) -> Failed:
        """As the real worker, without torch."""
        if isinstance(error, MemoryError):
            return Failed(outcome=Outcome.OUT_OF_MEMORY, reason="not enough device memory", tainted=True)
        tainted, changed = isinstance(error, StickyFault), isinstance(error, OtherBytes)
        return Failed(outcome=Outcome.CRASHED, reason=describe(error), tainted=tainted, module_changed=changed)

    def _misbehave(self, job: EvaluateJob | FinalJob, where: str) -> None:
        """`once-in-baseline` and `always-in-baseline` die before a candidate is at work, `...-in-burst` in a burst of a
        baseline. `once-hangs-in-burst` hangs there, `once-no-room-in-baseline` finds no memory, and so on."""
        for candidate in job.candidates if isinstance(job, FinalJob) else (job,):
            name, flag = candidate.module_path.name, self._state / "died"
            if not name.endswith(f"-in-{where}") or (name.startswith("once") and flag.exists()):
                continue
            flag.touch()
            if "hangs" in name:
                time.sleep(600)
            if "no-room" in name:
                raise MemoryError
            os._exit(9)

    def _candidate(self, name: str, report: Report, subject: int | None) -> EvaluateReply | None:
        what, _, where = name.partition("@")
        for phase in CANDIDATE_PHASES:
            report(phase, subject)
            if phase.value == (where or "verify"):
                failed = self._act(what)
                self._damaged |= what in ("damages", "damages-and-shows")
                return failed
        return None

    def _act(self, what: str) -> EvaluateReply | None:
        if what in ("wrong", "damages-and-shows") or self._damaged:
            return EvaluateReply(outcome=Outcome.WRONG_RESULT, reason="1 of 64 elements wrong")
        if what in ("good", "damages") or "-in-" in what:
            return None
        if what == "big":
            return EvaluateReply(outcome=Outcome.WRONG_RESULT, reason="x" * 20_000_000)
        if what == "unsendable":
            return EvaluateReply(outcome=Outcome.WRONG_RESULT, reason=lambda: None)  # type: ignore[arg-type]
        if what == "forks":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (self._state / "grandchild").write_text(str(child.pid))
            what = "hang"
        if what == "shot":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if what == "exit":
            print("line before the end", flush=True)
            sys.stderr.write("assertion failed: phase == 1\n")
            sys.stderr.flush()
            os._exit(7)
        if what == "noisy":
            for number in range(50_000):
                print(f"line {number}")
            sys.stdout.flush()
            os._exit(1)
        if what == "segv":
            ctypes.string_at(0)
        if what == "half":
            # Half a message, then silence: a parent that reads it in the same thread would never return.
            os.write(int(_channel()), (1000).to_bytes(4, "big") + b"abc")
            time.sleep(600)
        raise {
            "unpicklable": Unpicklable(),
            "sticky": StickyFault("CUDA error: an illegal memory access was encountered"),
            "memory": MemoryError(),
            "changed": OtherBytes("the file was changed or cut short"),
            "refuses": ValueError("A: expected 2 dimensions"),
        }[what]


def _channel() -> str:
    return sys.argv[sys.argv.index("--channel") + 1]


def measurement(job: EvaluateJob) -> Measurement:
    """Some samples."""
    return Measurement(
        samples_us=(2.0, 2.1, 2.2),
        protocol=job.protocol,
        environment=environment(),
        baselines_us={"torch": (2.0, 2.1, 2.2)},
    )


if __name__ == "__main__":
    sys.exit(child_main(sys.argv[1:], FakeWorker))
