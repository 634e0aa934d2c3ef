"""The process of tuner.gpu.soak: `python -m tuner.gpu.soak_run JOB`. Loads one module and launches it many times.

Each launch writes to a NaN-filled output between guard bands, and is compared bit by bit with an output that was
verified against the float32 reference on all inputs before. Comparing is done on the device, so that launches follow
one another without the host.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernels.problem import GemmProblem
from tuner.gpu.inputs import GuardedOutput
from tuner.gpu.referee import differing
from tuner.gpu.soak import FIRST, MARK
from tuner.gpu.wire import describe, follow_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.gpu.inputs import Case
    from tuner.gpu.referee import Kernel

type Say = Callable[[dict[str, Any]], None]
BATCH_S = 0.25
GRAPH_LAUNCHES = 20


class SoakFailure(Exception):
    """A launch was wrong; the message says what."""


class Lane:
    """One output buffer that launches write to, one after the other, and the count of those that were wrong."""

    def __init__(self, kernel: Kernel, case: Case, output: GuardedOutput, expected: Any) -> None:
        self._kernel, self._case, self._output, self._expected = kernel, case, output, expected
        self._wrong = torch.zeros((), dtype=torch.int64, device=expected.device)
        self._most = torch.zeros((), dtype=torch.int64, device=expected.device)

    def launch(self) -> None:
        """Poison, launch, compare; all of it enqueued on the current stream."""
        self._output.poison()
        self._kernel(self._case.a, self._case.b, self._output.d)
        count = differing(self._output.bits, self._expected)
        self._wrong.add_(count > 0)
        torch.maximum(self._most, count, out=self._most)

    def check(self) -> None:
        """Raises SoakFailure when a launch so far was wrong. Waits for the device."""
        if wrong := int(self._wrong):
            total = self._expected.numel()
            raise SoakFailure(f"{wrong} launches gave another result; up to {int(self._most)} of {total} elements")
        if damage := self._output.damage() or self._case.overwritten():
            raise SoakFailure(damage)


@dataclass(kw_only=True)
class Soak:
    """Launches in batches until there are enough or the time is over.

    lanes: the first serves alone and graphs, both serve two streams
    synchronize: waits for the device
    say: tells the parent
    clock: seconds
    """

    lanes: tuple[Lane, Lane]
    synchronize: Callable[[], None]
    say: Say
    clock: Callable[[], float] = time.monotonic
    gpu_s: float = field(default=0.0, init=False)

    def way(self, name: str, launch: Callable[[], int], *, wanted: int, limit_s: float) -> int:
        """Call `launch`, which makes some launches and returns their number, `wanted` launches long; at least once.

        Raises SoakFailure.
        """
        made, batch, since = 0, 1, self.clock()
        self.say({"way": name, "launches": 0, "gpu_s": self.gpu_s})
        while made < wanted:
            began = self.clock()
            for _ in range(batch):
                made += launch()
                if made >= wanted:
                    break
            self.synchronize()
            took = self.clock() - began
            self.gpu_s += took
            for lane in self.lanes:
                lane.check()
            self.say({"way": name, "launches": made, "gpu_s": round(self.gpu_s, 3)})
            if self.clock() - since >= limit_s:
                break
            batch = max(1, min(4 * batch, int(batch * BATCH_S / max(took, 1e-6))))
        return made


def run(soak: Soak, launches: Mapping[str, int], limit_s: float) -> None:
    """All three ways on a CUDA device. Raises SoakFailure."""
    ways: dict[str, Callable[[], int]] = {
        "alone": lambda: _alone(soak.lanes[0]),
        "on two streams": _TwoStreams(soak.lanes),
        "by graph replay": _Replay(soak.lanes[0]),
    }
    # A share that one way does not use falls to those after it.
    left_s = limit_s
    for number, (name, launch) in enumerate(ways.items()):
        began = soak.clock()
        soak.way(name, launch, wanted=launches[name], limit_s=left_s / (len(ways) - number))
        left_s = max(0.0, left_s - (soak.clock() - began))


def _alone(lane: Lane) -> int:
    lane.launch()
    return 1


class _TwoStreams:
    """One launch on each of two streams; those of one stream wait for one another, the two streams do not."""

    def __init__(self, lanes: tuple[Lane, Lane]) -> None:
        self._lanes = lanes
        self._streams = (torch.cuda.Stream(), torch.cuda.Stream())

    def __call__(self) -> int:
        for lane, stream in zip(self._lanes, self._streams, strict=True):
            with torch.cuda.stream(stream):
                lane.launch()
        return len(self._lanes)


class _Replay:
    """A graph of launches, captured at the first call."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._graph: Any = None

    def __call__(self) -> int:
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        return GRAPH_LAUNCHES

    def _captured(self) -> Any:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._lane.launch()  # what is allocated or loaded at the first use must not be captured
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            for _ in range(GRAPH_LAUNCHES):
                self._lane.launch()
            graph.capture_end()
        return graph


def verified_lanes(kernel: Kernel, problem: GemmProblem, seed: int, say: Say) -> tuple[Lane, Lane]:
    """Compare the module with the float32 reference on all inputs; expect its output of the first ones from now on.

    Raises SoakFailure.
    """
    from tuner.gpu.context import make_referee
    from tuner.gpu.device import open_device

    device = open_device()
    # Kept by nobody after this: references and the other inputs may be as large as the memory that launches need.
    referee = make_referee(problem, device, seed)
    say({"way": FIRST, "launches": 0, "gpu_s": 0.0})
    verdict = referee.verify(kernel, lambda phase, subject=None: None, repeats=0)
    if verdict.outcome is not None:
        raise SoakFailure(verdict.reason)
    case, second = referee.cases[0], GuardedOutput(problem, device.torch_device)
    return Lane(kernel, case, referee.output, verdict.bits), Lane(kernel, case, second, verdict.bits)


def main(arguments: list[str]) -> int:
    """0 when every launch was right. What was found is said on standard output either way."""
    from tuner.gpu.child import ChangedError, LoadError, load_module

    def say(message: dict[str, Any]) -> None:
        print(MARK + json.dumps(message), flush=True)

    follow_parent()
    job = json.loads(arguments[0])
    try:
        kernel = load_module(Path(job["module_path"]), job["module_sha256"])
        lanes = verified_lanes(kernel, GemmProblem(**job["problem"]), job["seed"], say)
        soak = Soak(lanes=lanes, synchronize=torch.cuda.synchronize, say=say)
        run(soak, job["launches"], job["limit_s"])
    except SoakFailure as error:
        say({"failed": str(error)})
        return 1
    except ChangedError as error:
        say({"changed": str(error)})
        return 1
    except LoadError as error:
        say({"not_run": str(error)})
        return 1
    except torch.OutOfMemoryError as error:
        say({"not_run": f"not enough device memory beside what is in use: {describe(error)}"})
        return 1
    say({"done": True})
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # destructors may hang on a lost context
