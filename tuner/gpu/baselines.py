"""What a kernel is compared with: torch.matmul, and the fastest that the vendor library can do.

`cublaslt_best` is the best of torch.matmul, torch with its cublasLt backend, and every result of the cublasLt heuristic
lists. Result 0 is what torch uses; on an H200 it is up to 2.6 % slower than the best of the list on big shapes and 22 %
on one small one, so a ratio to torch.matmul alone flatters.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from search_space.request import MeasureProtocol
from tuner.gpu.clock import Burst, capture, graph_ms
from tuner.gpu.cublaslt import CublasLt, CublasLtError
from tuner.gpu.referee import Kernel, is_plausible
from tuner.gpu.rounds import Rounds, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.problem import GemmProblem
    from tuner.gpu.inputs import Case, GuardedOutput
    from tuner.gpu.jobs import Phase
    from tuner.gpu.nvml import Card

TORCH = "torch"
BEST = "cublaslt_best"
SCREEN_MS = 1.5
SCREEN_ROUNDS = 3
KEPT = 3


def matmul(a: Any, b: Any, d: Any) -> None:
    """torch.matmul with the BLAS backend that torch prefers."""
    torch.matmul(a, b.t(), out=d)


def matmul_lt(a: Any, b: Any, d: Any) -> None:
    """torch.matmul through torch's cublasLt backend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the switch experimental
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            torch.matmul(a, b.t(), out=d)
        finally:
            torch.backends.cuda.preferred_blas_library(before)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to let the vendor library compute the product.

    name: as it stands in records
    kernel: runs it
    text: name with the facts of its algorithm
    """

    name: str
    kernel: Kernel
    text: str


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Captured once a problem, replayed in every round.

    torch: torch.matmul
    best: the fastest few of all contenders in the screening, fastest first; torch.matmul itself may be among them
    texts: what each of `best` is, by name
    screened_us: medians of the screening, by name
    dropped: contenders that failed or computed something wrong, with the reason
    """

    torch: Burst
    best: tuple[Burst, ...]
    texts: dict[str, str]
    screened_us: dict[str, float]
    dropped: dict[str, str]

    def bursts(self, *, finalists: bool) -> list[Burst]:
        """What takes part in a round: the winner of the screening, or the few best in a final."""
        chosen = self.best if finalists else self.best[:1]
        return [self.torch, *(burst for burst in chosen if burst.name != TORCH)]

    def names(self, *, finalists: bool) -> list[str]:
        """Names of `bursts`."""
        return [burst.name for burst in self.bursts(finalists=finalists)]

    def best_in(self, rounds: Rounds, *, finalists: bool) -> str:
        """What `cublaslt_best` is: in a trial the winner of the screening, in a final the one that is fastest there."""
        contenders = [burst.name for burst in (self.best if finalists else self.best[:1])]
        return min(contenders, key=lambda name: median(rounds.times_us(name)))


def build_baselines(
    problem: GemmProblem,
    *,
    case: Case,
    output: GuardedOutput,
    sets: Sequence[Any],
    protocol: MeasureProtocol,
    card: Card | None,
    library: CublasLt | None,
    seed: int,
) -> Baselines:
    """Check every contender, time each in short bursts, keep the best few."""
    dropped: dict[str, str] = {}
    right: list[Contender] = []
    for contender in contenders(problem, library, dropped):
        # torch.matmul stays, right or not: it is what the ratio is defined by.
        if _attempt(partial(_check, contender, problem, case, output), contender, dropped) or contender.name == TORCH:
            right.append(contender)
    screening: dict[str, Burst] = {}
    for contender in right:
        screen = partial(capture, contender.name, contender.kernel, sets, burst_ms=SCREEN_MS)
        burst = _attempt(screen, contender, dropped)
        if burst:
            screening[contender.name] = burst
    screened_us = _screen(list(screening.values()), card, seed)
    ranked = sorted((c for c in right if c.name in screened_us), key=lambda c: screened_us[c.name])
    screening.clear()
    full = {c.name: capture(c.name, c.kernel, sets, burst_ms=graph_ms(protocol)) for c in ranked[:KEPT]}
    if TORCH not in full:
        full[TORCH] = capture(TORCH, matmul, sets, burst_ms=graph_ms(protocol))
    return Baselines(
        torch=full[TORCH],
        best=tuple(full[c.name] for c in ranked[:KEPT]),
        texts={c.name: c.text for c in ranked},
        screened_us=screened_us,
        dropped=dropped,
    )


def contenders(problem: GemmProblem, library: CublasLt | None, dropped: dict[str, str]) -> list[Contender]:
    """All ways to let the vendor library compute the problem."""
    found = [
        Contender(name=TORCH, kernel=matmul, text="torch.matmul"),
        Contender(name="torch_cublaslt", kernel=matmul_lt, text="torch.matmul, cublasLt backend"),
    ]
    if library is None:
        return found
    try:
        algos = library.algos(problem)
    except CublasLtError as error:
        dropped["lt"] = str(error)
        return found
    return [*found, *(Contender(name=algo.name, kernel=algo.kernel, text=algo.text()) for algo in algos)]


def _attempt[T](action: Callable[[], T], contender: Contender, dropped: dict[str, str]) -> T | None:
    """Run a step of one contender; a library that refuses a problem only loses that contender."""
    try:
        done = action()
    except (CublasLtError, torch.OutOfMemoryError) as error:
        dropped[contender.name] = str(error).partition("\n")[0]
        return None
    if done is False:
        dropped[contender.name] = "wrong result"
    return done


def _check(contender: Contender, problem: GemmProblem, case: Case, output: GuardedOutput) -> bool:
    output.poison()
    contender.kernel(case.a, case.b, output.d)
    torch.cuda.synchronize()
    return is_plausible(case, output.d, problem.dtype)


def _screen(bursts: list[Burst], card: Card | None, seed: int) -> dict[str, float]:
    """In short bursts under any protocol: the few best of them take part in every final."""

    def report(phase: Phase, subject: int | None = None) -> None:
        """The whole screening is one phase for the parent."""

    rounds = measure(
        bursts,
        MeasureProtocol.named("burst"),
        card=card,
        order=random.Random(seed),
        report=report,
        enough=lambda _: False,
        most=SCREEN_ROUNDS,
    )
    # Where no round counts, any order will do: nothing measured then is kept either.
    samples = rounds.kept() or rounds.rounds
    return {burst.name: median(one.times_us[burst.name] for one in samples) for burst in bursts}
