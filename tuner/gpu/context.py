"""All that is made once a problem and used by each of its candidates: inputs, reference, timing buffers, baselines."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from search_space.memory import BESIDE_BYTES, device_memory
from search_space.rotation import set_count
from tuner.gpu.baselines import Baselines, build_baselines, matmul
from tuner.gpu.cublaslt import CublasLt, CublasLtError
from tuner.gpu.inputs import TORCH_DTYPE, GuardedOutput, make_cases
from tuner.gpu.jobs import Phase
from tuner.gpu.referee import Referee

if TYPE_CHECKING:
    from kernels.problem import GemmProblem
    from search_space.request import MeasureProtocol
    from tuner.gpu.device import LiveDevice
    from tuner.gpu.wire import Report
    from tuner.records import Outcome

type Control = tuple[Outcome | None, str]

MAX_CONTEXTS = 8  # of studies that take turns: as many as a tuner runs at once by default
ALIGNMENT = 128  # elements: 256 bytes, what an allocator gives and libraries expect
MAX_GAP = 64  # steps of ALIGNMENT between two operands


@dataclass(frozen=True, kw_only=True)
class TimingSets:
    """Operands that the launches of a burst walk over.

    sets: (A, B, D) each; the first is the one that the referee verifies
    pool_bytes: size of all of them
    """

    sets: tuple[tuple[Any, Any, Any], ...]
    pool_bytes: int


@dataclass(frozen=True, kw_only=True)
class ProblemContext:
    """One problem on the device of this process.

    problem: what is computed
    protocol: how it is timed
    referee: verifies
    timing: buffers of the bursts
    baselines: captured and screened
    control: what the referee said of torch.matmul when inputs and reference were new
    """

    problem: GemmProblem
    protocol: MeasureProtocol
    referee: Referee
    timing: TimingSets
    baselines: Baselines
    control: Control

    def is_damaged(self) -> bool:
        """Whether the referee now judges torch.matmul differently than when inputs and reference were new.

        A kernel that writes far outside of D may hit them, and every later candidate would look wrong.
        """
        return judge_library(self.referee) != self.control


class Contexts:
    """Contexts of the problems at hand: studies that share a card take turns, and making one takes seconds."""

    def __init__(self, device: LiveDevice) -> None:
        self.device = device
        self._kept: OrderedDict[tuple[GemmProblem, MeasureProtocol], ProblemContext] = OrderedDict()
        self._library: CublasLt | None = None

    def get(self, problem: GemmProblem, protocol: MeasureProtocol, seed: int, report: Report) -> ProblemContext:
        """The context of a problem, made with the seed of the first job that asks for it.

        A later job with another seed gets the same inputs: making them anew would cost more than its measurement.
        """
        key = (problem, protocol)
        if key not in self._kept:
            report(Phase.BASELINE)
            self._make_room(problem)
            self._kept[key] = self._make(problem, protocol, seed)
        self._kept.move_to_end(key)
        return self._kept[key]

    def release(self) -> None:
        """Give the memory back."""
        self._kept.clear()
        torch.cuda.empty_cache()

    def _make_room(self, problem: GemmProblem) -> None:
        """Keep a few contexts as long as half of the memory is free, and all that verifying and measuring takes."""
        while len(self._kept) >= MAX_CONTEXTS:
            self._kept.popitem(last=False)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        # The process itself has what is beside already.
        needed = device_memory(problem, self.device.profile.l2_bytes).total - BESIDE_BYTES
        if free < max(total / 2, needed):
            self.release()

    def _make(self, problem: GemmProblem, protocol: MeasureProtocol, seed: int) -> ProblemContext:
        device = self.device
        referee = make_referee(problem, device, seed)
        timing = make_timing_sets(problem, referee, device, protocol, seed)
        baselines = build_baselines(
            problem,
            case=referee.cases[0],
            output=referee.output,
            sets=timing.sets,
            protocol=protocol,
            card=device.card,
            library=self._cublaslt(),
            seed=seed,
        )
        return ProblemContext(
            problem=problem,
            protocol=protocol,
            referee=referee,
            timing=timing,
            baselines=baselines,
            control=judge_library(referee),
        )

    def _cublaslt(self) -> CublasLt | None:
        if self._library is None:
            try:
                self._library = CublasLt()
            except CublasLtError:
                return None
        return self._library


def judge_library(referee: Referee) -> Control:
    """What the referee says of torch.matmul: a control of its inputs and its reference."""

    def report(phase: Phase, subject: int | None = None) -> None:
        """No candidate is at work."""

    verdict = referee.verify(matmul, report, repeats=0)
    return verdict.outcome, verdict.reason


def make_referee(problem: GemmProblem, device: LiveDevice, seed: int) -> Referee:
    """Inputs and reference of a problem."""
    generator = torch.Generator(device=device.torch_device)
    generator.manual_seed(seed * 1_000_003 + problem.m + 3 * problem.n + 7 * problem.k)
    cases = make_cases(problem, device.torch_device, generator)
    return Referee(problem, cases, GuardedOutput(problem, device.torch_device))


def make_timing_sets(
    problem: GemmProblem, referee: Referee, device: LiveDevice, protocol: MeasureProtocol, seed: int
) -> TimingSets:
    """Sets of operands of more than three times L2 in all (see search_space.rotation), at random offsets of one pool.

    Random offsets, because placement alone can move the ratio of two kernels by several percent on small shapes.
    Raises ValueError for an input distribution that is not served.
    """
    count = set_count(problem, device.profile.l2_bytes)
    if protocol.l2_policy != "rotate":
        count = 1
    case = referee.cases[0]
    first = (case.a, case.b, referee.output.d)
    generator = torch.Generator(device=device.torch_device)
    generator.manual_seed(seed * 1_000_003 + 11)
    shapes = [(problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n)]
    offsets, size = _offsets(shapes, count - 1, random.Random(seed))
    pool = torch.empty(size, dtype=TORCH_DTYPE[problem.dtype], device=device.torch_device)
    _fill(pool, protocol.distribution, generator)
    others = [
        tuple(
            pool[start : start + rows * columns].view(rows, columns)
            for start, (rows, columns) in zip(starts, shapes, strict=True)
        )
        for starts in offsets
    ]
    return TimingSets(sets=(first, *((a, b, d) for a, b, d in others)), pool_bytes=count * problem.min_bytes)


def _offsets(shapes: list[tuple[int, int]], count: int, order: random.Random) -> tuple[list[list[int]], int]:
    """Starts of the operands of `count` sets in elements, and the size of the pool that holds them."""
    sets, position = [], 0
    for _ in range(count):
        starts = []
        for rows, columns in shapes:
            position += ALIGNMENT * order.randrange(MAX_GAP)
            starts.append(position)
            position += math.ceil(rows * columns / ALIGNMENT) * ALIGNMENT
        sets.append(starts)
    return sets, max(position, 1)


def _fill(pool: Any, distribution: str, generator: Any) -> None:
    """Data decides the power that is drawn: zeros run 17 % faster than normal numbers on an H200."""
    match distribution:
        case "normal":
            pool.normal_(generator=generator)
        case "uniform":
            pool.uniform_(-1.0, 1.0, generator=generator)
        case "zeros":
            pool.zero_()
        case _:
            raise ValueError(f"input distribution {distribution!r} is not served: use normal, uniform or zeros")
