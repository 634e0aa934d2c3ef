"""Real Hopper kernels with a bug planted on purpose: bugs of the template's own FAULTS, and others cut into the
generated source or the launch plan. Each says how its trial must end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kernels.compile import CompiledKernel, compile_kernel
from kernels.errors import CompileError
from kernels.launch import TensorMapPlan
from kernels.lowering import LoweredKernel, lower
from tuner.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.config import GemmConfig
    from kernels.problem import GemmProblem

    type Cut = Callable[[LoweredKernel, GemmProblem, GemmConfig, int], LoweredKernel]

LAST_GOOD_LAUNCH = 14  # of the kernel that is not deterministic: more than there are kinds of inputs
FAULTY_LAUNCH = 100  # of the kernel that faults late: verifying takes fewer, the first bursts more
MEASURED = frozenset({Outcome.MEASURED, Outcome.STOPPED_EARLY})
ANY_FAILURE = frozenset({Outcome.WRONG_RESULT, Outcome.NONDETERMINISTIC, Outcome.TIMED_OUT, Outcome.CRASHED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """One planted bug.

    outcomes: how a trial may end that has it
    fault: bug of the template (kernels.gemm_sm90.FAULTS), if it is one
    cut: or how the lowered kernel is changed
    compiler: or what happens instead of a compile
    """

    outcomes: frozenset[Outcome]
    fault: str = ""
    cut: Cut | None = None
    compiler: Callable[[], None] | None = None

    @property
    def may_pass(self) -> bool:
        """Whether it may pass every comparison at the tuned size, so that only certifying keeps it from winning."""
        return Outcome.MEASURED in self.outcomes


# ---------------------------------------------------------------------- cuts


def _source(lowered: LoweredKernel, pattern: str, replacement: str, *, count: int = 1) -> LoweredKernel:
    text, found = re.subn(pattern, replacement, lowered.source, count=count)
    if not found:
        raise CompileError(f"nothing to cut: the generated source has no {pattern}", log_tail="")
    return replace(lowered, source=text)


def _at_start(lowered: LoweredKernel, statement: str) -> LoweredKernel:
    return _source(lowered, r"(gemm_kernel\([^;{]*\) \{\n)", rf"\g<1>{statement}\n")


def _counting(lowered: LoweredKernel, then: str) -> LoweredKernel:
    """Count launches in `planted`; `then` runs in one thread with the number of this one in `now`, from 1."""
    counted = _source(lowered, r'(extern "C" __global__)', r"__device__ unsigned planted;\n\g<1>")
    count = f"if (blockIdx.x == 0 && threadIdx.x == 0) {{ unsigned now = atomicAdd(&planted, 1u) + 1u; {then} }}"
    return _at_start(counted, count)


def _no_op(lowered: LoweredKernel, *_: Any) -> LoweredKernel:
    """Returns at once: what stood in D before must not pass."""
    return _at_start(lowered, "return;")


def _adds_to_output(lowered: LoweredKernel, *_: Any) -> LoweredKernel:
    """The store adds to what stands in D."""
    return _source(
        lowered,
        r'"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile',
        '"cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile',
    )


def _misaligned_address(lowered: LoweredKernel, *_: Any) -> LoweredKernel:
    """Values are staged at an address that stmatrix does not take."""
    return _source(lowered, r'("stmatrix[^;]*;"[^;]*?"r"\(__p)\)', r"\g<1> + 2)", count=0)


def _late_fault(lowered: LoweredKernel, *_: Any) -> LoweredKernel:
    """An illegal address, but only in one launch, in the middle of a graph."""
    return _counting(lowered, f"if (now == {FAULTY_LAUNCH}u) *(volatile int*)16 = 1;")


def _not_deterministic(lowered: LoweredKernel, *_: Any) -> LoweredKernel:
    """From a launch on, each third one rounds some values the other way."""
    counted = _counting(lowered, "")
    is_bad = f"now > {LAST_GOOD_LAUNCH}u && now % 3u == 0u"
    flip = f"{{ unsigned now = *(volatile unsigned*)&planted; if ({is_bad}) __d ^= 1u; }}"
    cut = _source(counted, r"(asm volatile\(\"cvt\.rn\.[^;]*;\"[^;]*;)", rf"\g<1> {flip}")
    # the helpers stand before the kernel, where the counter was declared
    return replace(cut, source="extern __device__ unsigned planted;\n" + cut.source)


def _half_of_k(lowered: LoweredKernel, problem: GemmProblem, config: GemmConfig, sm_count: int) -> LoweredKernel:
    """Fast and wrong."""
    half = lower(replace(problem, k=problem.k // 2), config, sm_count)
    return replace(lowered, source=half.source, launch=replace(half.launch, parameters=lowered.launch.parameters))


def _tall_output(lowered: LoweredKernel, problem: GemmProblem, *_: Any) -> LoweredKernel:
    """The tensor map of D has a tile of rows too many, so the store of a ragged tile is not clipped."""

    def taller(plan: Any) -> Any:
        if not isinstance(plan, TensorMapPlan) or plan.operand != "D":
            return plan
        return replace(plan, extents=(plan.extents[0], plan.extents[1] + 64))

    parameters = tuple(taller(plan) for plan in lowered.launch.parameters)
    return replace(lowered, launch=replace(lowered.launch, parameters=parameters))


# ---------------------------------------------------------------------- compilers


def _sleep() -> None:
    time.sleep(600)


def _fork_and_sleep() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=False)


def _refuse() -> None:
    raise CompileError("nvcc for sm_90a failed: planted", log_tail="kernel.cu(1): error: planted")


# ---------------------------------------------------------------------- the table


def _template(fault: str, *outcomes: Outcome) -> Plant:
    return Plant(outcomes=frozenset(outcomes), fault=fault)


def _racy(fault: str) -> Plant:
    return Plant(outcomes=ANY_FAILURE | MEASURED | {Outcome.CHECK_FAILED}, fault=fault)


def _broken(fault: str) -> Plant:
    return Plant(outcomes=ANY_FAILURE, fault=fault)


def _cut(cut: Cut, outcome: Outcome) -> Plant:
    return Plant(outcomes=frozenset({outcome}), cut=cut)


def _compiler(compiler: Callable[[], None], outcome: Outcome) -> Plant:
    return Plant(outcomes=frozenset({outcome}), compiler=compiler)


PLANTS: dict[str, Plant] = {
    # barriers
    "arrive_count": _template("arrive_count", Outcome.TIMED_OUT),
    "producer_phase": _template("producer_phase", Outcome.TIMED_OUT),
    "half_multicast": _template("half_multicast", Outcome.TIMED_OUT),
    # addresses
    "illegal_address": _template("illegal_address", Outcome.CRASHED),
    "misaligned_address": _cut(_misaligned_address, Outcome.CRASHED),
    "late_fault": _cut(_late_fault, Outcome.CRASHED),
    "tall_output": _cut(_tall_output, Outcome.WRONG_RESULT),
    # results
    "wrong_row": _template("wrong_row", Outcome.WRONG_RESULT),
    "no_op": _cut(_no_op, Outcome.WRONG_RESULT),
    "half_of_k": _cut(_half_of_k, Outcome.WRONG_RESULT),
    "adds_to_output": _cut(_adds_to_output, Outcome.WRONG_RESULT),
    "not_deterministic": _cut(_not_deterministic, Outcome.NONDETERMINISTIC),
    # broken protocols: how they fail depends on the timing, that they fail does not
    "expect_tx": _broken("expect_tx"),
    "no_full_wait": _broken("no_full_wait"),
    "no_empty_wait": _broken("no_empty_wait"),
    # races that may pass every comparison
    "epilogue_restart": _racy("epilogue_restart"),
    "early_release": _racy("early_release"),
    "no_accumulator_wait": _racy("no_accumulator_wait"),
    "no_store_wait": _racy("no_store_wait"),
    "no_proxy_fence": _racy("no_proxy_fence"),
    "no_stage_barrier": _racy("no_stage_barrier"),
    # compilers
    "compiler_aborts": _compiler(os.abort, Outcome.COMPILE_FAILED),
    "compiler_refuses": _compiler(_refuse, Outcome.COMPILE_FAILED),
    "compiler_sleeps": _compiler(_sleep, Outcome.TIMED_OUT),
    "compiler_forks": _compiler(_fork_and_sleep, Outcome.TIMED_OUT),
}


# ---------------------------------------------------------------------- building


def lower_planted(problem: GemmProblem, config: GemmConfig, sm_count: int, name: str, **variant: Any) -> LoweredKernel:
    """The lowered kernel with a plant. Raises CompileError where the source has no place for it."""
    plant = PLANTS[name]
    if plant.fault:
        return lower(problem, config, sm_count, fault=plant.fault, **variant)
    assert plant.cut is not None
    cut = plant.cut(lower(problem, config, sm_count, **variant), problem, config, sm_count)
    text = cut.source + json.dumps(asdict(cut.launch), sort_keys=True)
    return replace(cut, source_hash=hashlib.sha256(text.encode()).hexdigest())


def compile_planted(
    problem: GemmProblem,
    config: GemmConfig,
    sm_count: int,
    name: str,
    *,
    delays_ns: dict[str, int] | None = None,
    check_structure: bool = False,
) -> CompiledKernel:
    """As kernels.compile.compile_kernel, with a plant."""
    plant = PLANTS[name]
    if plant.compiler is not None:
        plant.compiler()

    def lowered(problem: GemmProblem, config: GemmConfig, sm_count: int, **variant: Any) -> LoweredKernel:
        return lower_planted(problem, config, sm_count, name, **variant)

    variant: dict[str, Any] = {"delays_ns": delays_ns} if delays_ns else {}
    with mock.patch("kernels.compile.lower", lowered):
        return compile_kernel(problem, config, sm_count, check_structure=check_structure, **variant)
