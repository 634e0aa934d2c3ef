"""Structural rules: does the code that TVM generated keep the protocol of its template?

A kernel with a missing wait or fence often passes every comparison, because timing hides the race. The rules read the
generated CUDA source instead of running it: each thread is followed (`kernels.cuda_trace`) and must keep the order of
waits, fences and hand-overs that RULES lists. They see what the source orders, not what the numbers mean: a wrong
coordinate or a wrong descriptor layout is the business of the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.cuda_expressions import SourceError
from kernels.cuda_instructions import UNKNOWN
from kernels.cuda_source import Kernel, read_kernel
from kernels.cuda_trace import Trace, Walk, traces
from kernels.launch import PointerPlan, RowsPlan, StridePlan, TensorMapPlan, WorkspacePlan
from kernels.structure_barriers import Lifetime, Phases, Producer
from kernels.structure_clc import Answers, check_requests, learn_answers
from kernels.structure_counts import barrier_slots, check_arrivals, check_bytes, learn_regions, takes_turns
from kernels.structure_exchange import Exchange, check_parts
from kernels.structure_facts import Check, Facts
from kernels.structure_sm90 import Copies, Turns, WarpStaging, Wgmma, check_multicast, check_registers
from kernels.structure_sm100 import Tmem, check_issuers, check_tensor_memory
from kernels.structure_staging import Staging
from kernels.structure_stream_k import WORKSPACE_BASE, Parts, Shared, shared_of

if TYPE_CHECKING:
    from kernels.lowering import LoweredKernel
    from kernels.problem import GemmProblem


RULES: dict[str, str] = {
    "not understood": "the reader can follow every statement that steers a thread",
    "unknown instruction": "the kernel uses only instructions that the rules know",
    "launch plan": "threads and cluster size are those of the config; the kernel takes tensor maps, and address and "
    "row stride of an operand only where it loads or stores it without TMA",
    "barrier init": "each mbarrier of each ring is initialised once, with the arrivals that the config implies",
    "register pool": "setmaxnreg grants all warpgroups together no more registers than the CTA was launched with",
    "init fence": "fence.mbarrier_init stands between mbarrier.init and the barrier that publishes it",
    "init barrier": "a cluster barrier (CTA barrier without cluster) stands before the first use of an mbarrier",
    "exit barrier": "threads of a cluster leave through a cluster barrier after their last use of an mbarrier",
    "barrier phase": "the n-th wait on a slot is for the parity of the n-th use",
    "arrival count": "a slot gets as many arrivals for each use as it was initialised for",
    "transaction bytes": "expect_tx announces the bytes of the loads that land on that slot",
    "multicast mask": "the shared operand is multicast to the whole cluster, the other one is not multicast",
    "stage bounds": "loads stay inside their stage, and MMAs read what loads fill",
    "empty wait": "a stage is filled once for each wait on mma2tma",
    "full wait": "a stage is read only after a wait on tma2mma and before its release",
    "copy wait": "copied values are read after cp.async.wait_group has covered them and a warp barrier",
    "move barrier": "values are written over after a warp barrier has said that all lanes have read them",
    "fill fence": "a stage is handed over after its values were moved, fenced for the async proxy, and a warp barrier",
    "wgmma fence": "a wgmma batch opens with wgmma.fence",
    "wgmma commit": "a wgmma batch closes with wgmma.commit_group before the next wait",
    "stage release": "a stage is released when no wgmma group that reads it is in flight, and before its next fill",
    "accumulator read": "accumulators are read when no wgmma group, or no tcgen05.ld, is in flight",
    "staging reuse": "a staging buffer is written after its store has read it and a named barrier has said so",
    "proxy fence": "fence.proxy.async stands between staging and the TMA store",
    "staging barrier": "a named barrier stands between the fence and the TMA store of a freshly staged buffer",
    "store commit": "each group of TMA stores is closed by cp.async.bulk.commit_group at once",
    "exit store wait": "cp.async.bulk.wait_group 0 before exit",
    "turn": "consumers that take turns wait for theirs before the stages of a tile, and pass it on after the last",
    "parts wait": "parts of K are sent only after a wait on sum2parts",
    "parts place": "each part lands where its owner reads it, once for each tile",
    "sum wait": "parts are added up only after a wait on parts2sum that acquires in the cluster",
    "sum release": "sum2parts is signalled after the parts were read and a named barrier has said so",
    "part place": "a part of a shared tile is written where the other parts of the tile are added, and counted there",
    "part count": "a part is counted once, after all threads have written theirs and a named barrier has said so",
    "part fence": "a counter is counted up with release and acquire, and read with acquire, in the scope of the GPU",
    "part sum": "parts are added only where all others have arrived, in the order of K, and D only stored with the sum",
    "count reset": "whoever adds the parts of a tile sets its counter back to zero",
    "warpgroup": "warpgroup-wide instructions are executed by all threads alike, each group with its own named barrier",
    "tcgen05 fence": "tcgen05.fence::after_thread_sync after each wait, ::before_thread_sync before each release",
    "accumulator wait": "an accumulator is written only after a wait on ld2mma",
    "result wait": "an accumulator is read only after a wait on mma2ld",
    "accumulator release": "ld2mma is signalled in the leader CTA, after tcgen05.wait::ld",
    "mma commit": "every MMA batch is committed to mma2tma, and every tile to mma2ld",
    "commit mask": "a commit reaches every CTA of the cluster",
    "mma issuer": "MMAs and their commits are issued by one thread, of the leader CTA",
    "accumulator start": "the first MMA of a tile overwrites the accumulator, the others add to it",
    "cta group": "every tcgen05 instruction that names a cta_group names that of the config",
    "stage drain": "a producer waits for the last release of each stage before it leaves",
    "request": "one thread of the leader CTA asks for the next tile, for every CTA of the cluster",
    "one question": "the next tile is asked for only when the answer before it was read, and the last answer is read",
    "answer place": "an answer is asked for only after a wait on roles2next",
    "answer wait": "an answer is read only after a wait on next2roles",
    "answer release": "roles2next is signalled in the leader CTA, after the answer was read and a proxy fence",
    "tensor memory": "one warp allocates, relinquishes and deallocates; barriers stand between that and any use",
}
# Rules of the reader, not of the kernel: a template may have learnt something that the reader has not.
OPEN = frozenset({"not understood", "unknown instruction"})
# Instructions that every thread of a warpgroup executes together.
_WARPGROUP_WIDE = frozenset(
    {"setmaxnreg", "wgmma_fence", "wgmma", "wgmma_commit", "wgmma_wait", "named_barrier", "shared_write", "proxy_fence",
     "remote_write", "lane_transpose", "tcgen05_ld", "tcgen05_wait_ld", "fence_before_sync", "part_write",
     "part_read"}
)  # fmt: skip
_WARP_WIDE = frozenset({"shared_write", "proxy_fence"})
_CTA_WIDE = frozenset({"cta_barrier", "cluster_arrive", "cluster_wait"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    rule: key of RULES
    message: for people, with the line of the generated source and the instruction found or missing
    line: in the generated source, 0 where none applies
    """

    rule: str
    message: str
    line: int

    @property
    def is_open(self) -> bool:
        """Whether this says that the rules cannot judge, and not that one is broken."""
        return self.rule in OPEN

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.rule}: {self.message}"


class _Findings:
    """Keeps the first finding of each rule and line: loops repeat them."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], Finding] = {}

    def report(self, rule: str, line: int, message: str) -> None:
        assert rule in RULES, rule
        where = f"line {line}: " if line else ""
        self.found.setdefault((rule, line), Finding(rule, f"{where}{message}", line))


def structural_findings(lowered: LoweredKernel, problem: GemmProblem, config: GemmConfig) -> tuple[Finding, ...]:
    """Broken rules of a lowered kernel, in the order of the source; empty when all hold."""
    findings = _Findings()
    try:
        kernel = read_kernel(lowered.source, lowered.launch.symbol)
        shared = shared_of(problem, config, lowered.launch)
        walk = _walk(problem, config)
        maps, parameters = _maps(lowered, problem, config, kernel, findings), _parameters(lowered, problem, kernel)
        for one in shared.walks(walk) if shared else (walk,):
            followed = traces(
                kernel, threads=lowered.launch.threads, ranks=config.cluster_size, walk=one, parameters=parameters
            )
            barriers = barrier_slots(config, followed, findings.report)
            _check(Facts(config, one, maps, barriers, dict(BASES)), followed, findings, shared)
    except SourceError as error:
        findings.report("not understood", error.line, str(error))
    return tuple(sorted(findings.found.values(), key=lambda f: f.line))


def _walk(problem: GemmProblem, config: GemmConfig) -> Walk:
    """Enough tiles that every staging buffer meets every chunk position, and both accumulator slots both phases."""
    lap = 2 * config.pipe_depth
    k_blocks, uneven = divmod(config.k_blocks(problem), config.cluster_size // config.cta_group)
    turns = config.num_consumers if takes_turns(config) else 1
    return Walk(
        tiles=max(4, config.epi_stages + 2), k_blocks=k_blocks, lap=lap, kept=lap, uneven=uneven > 0, turns=turns
    )


def _check(facts: Facts, followed: tuple[Trace, ...], findings: _Findings, shared: Shared | None) -> None:
    config = facts.config
    for trace in followed:
        for event in trace.events:
            if event.kind == UNKNOWN or event.kind not in _KNOWN:
                findings.report("unknown instruction", event.line, f"{event.text} has no place in this kernel")
    learn_regions(facts, followed, findings.report)
    checks: list[type[Check]] = [Lifetime, Phases, Producer, Staging, Exchange]
    checks += [Tmem, Answers] if isinstance(config, Sm100GemmConfig) else [Wgmma, Turns, Copies, WarpStaging]
    learn_answers(facts, followed)
    for trace in followed:
        states = [check(facts, trace, findings.report) for check in checks]
        if shared is not None:
            states.append(Parts(facts, trace, findings.report, shared))
        for event in trace.events:
            slot = facts.slot(event, trace.rank)
            for state in states:
                state.see(event, slot)
        for state in states:
            state.end(trace.events[-1].line if trace.events else 0)
    if isinstance(config, Sm90GemmConfig):
        check_registers(config, followed, findings.report)
    check_bytes(facts, followed, findings.report)
    check_arrivals(facts, followed, findings.report)
    _check_together(followed, findings)
    check_parts(followed, findings.report)
    if isinstance(config, Sm90GemmConfig):
        check_multicast(facts, followed, findings.report)
    if isinstance(config, Sm100GemmConfig):
        check_tensor_memory(config, followed, findings.report)
        check_issuers(config, followed, findings.report)
        check_requests(config, followed, findings.report)


_KNOWN = _WARPGROUP_WIDE | _CTA_WIDE | {
    "mbarrier_init", "init_fence", "mbarrier_wait", "expect_tx", "arrive", "tma_load", "tma_store", "bulk_commit",
    "bulk_wait", "bulk_wait_read", "row_copy", "copy_commit", "copy_wait", "convert", "register_read", "shared_read",
    "global_write", "warp_barrier", "tmem_alloc", "tmem_dealloc", "tmem_relinquish", "tcgen05_mma", "tcgen05_commit",
    "fence_after_sync", "try_cancel", "answer_read", "count_read", "count_up", "count_reset",
}  # fmt: skip


# What the followed kernel is given as addresses: apart, and not aligned.
BASES = {"A": (1 << 40) + 6, "B": (2 << 40) + 10, "D": 3 << 40}


def _parameters(lowered: LoweredKernel, problem: GemmProblem, kernel: Kernel) -> dict[str, int]:
    """Values of the parameters that are no tensor maps: of contiguous operands."""
    strides = {"A": problem.k, "B": problem.k, "D": problem.n}
    values = {}
    for name, plan in zip(kernel.parameters, lowered.launch.parameters, strict=False):
        if isinstance(plan, PointerPlan):
            values[name] = BASES[plan.operand]
        elif isinstance(plan, RowsPlan):
            values[name] = problem.m
        elif isinstance(plan, StridePlan):
            values[name] = strides[plan.operand]
        elif isinstance(plan, WorkspacePlan):
            values[name] = WORKSPACE_BASE
    return values


def _addressed(problem: GemmProblem, config: GemmConfig) -> str:
    """Operands that the kernel reaches by address and stride instead of a tensor map."""
    if not isinstance(config, Sm90GemmConfig):
        return ""
    return ("AB" if config.load == "cp_async" else "") + ("D" if config.swap_ab or problem.n % 8 else "")


def _maps(
    lowered: LoweredKernel, problem: GemmProblem, config: GemmConfig, kernel: Kernel, findings: _Findings
) -> dict[str, TensorMapPlan]:
    launch = lowered.launch
    addressed = _addressed(problem, config)
    kinds = {
        PointerPlan: addressed,
        StridePlan: addressed,
        TensorMapPlan: "".join(c for c in "ABD" if c not in addressed),
    }
    found = {kind: "".join(p.operand for p in launch.parameters if isinstance(p, kind)) for kind in kinds}
    if len(launch.parameters) != len(kernel.parameters) or found != kinds:
        findings.report(
            "launch plan", 0,
            f"the kernel takes {kernel.parameters}, the launch plan has {len(launch.parameters)} parameters"
        )  # fmt: skip
    if launch.cluster != (config.cluster_size, 1, 1) or launch.threads != config.threads:
        findings.report(
            "launch plan",
            0,
            f"launched with {launch.threads} threads and cluster {launch.cluster}, the config implies "
            f"{config.threads} and ({config.cluster_size}, 1, 1)",
        )
    named = zip(kernel.parameters, launch.parameters, strict=False)
    return {name: plan.called_with(problem.m) for name, plan in named if isinstance(plan, TensorMapPlan)}


def _check_together(followed: tuple[Trace, ...], findings: _Findings) -> None:
    """Threads that must execute an instruction together execute the same ones in the same order."""
    barrier_of: dict[int, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    ctas: dict[int, list[int]] = {}
    for trace in followed:
        # The warps of a producer that copies work on their own.
        copies = any(e.kind == "row_copy" for e in trace.events)
        together = _WARPGROUP_WIDE - (_WARP_WIDE if copies else frozenset())
        collective = trace.events and [e for e in trace.events if e.kind in together]
        works = any(e.kind in ("wgmma", "tcgen05_ld") for e in trace.events)
        # a proxy fence also stands where single threads read an answer, in the other warpgroup
        single = () if works else ("proxy_fence",)
        lines = [
            e.line
            for e in trace.events
            if (e.kind in together and e.kind not in single)
            or (works and e.kind in ("mbarrier_wait", "fence_after_sync"))
        ]
        _same(groups.setdefault((trace.rank, trace.warpgroup), lines), lines, "warpgroup", findings)
        wide = [e.line for e in trace.events if e.kind in _CTA_WIDE]
        _same(ctas.setdefault(trace.rank, wide), wide, "CTA", findings)
        for event in collective or ():
            if event.kind == "named_barrier":
                number = event.values["name_bar_id"]
                if number == 0 or barrier_of.setdefault(number, trace.warpgroup) != trace.warpgroup:
                    findings.report("warpgroup", event.line, f"named barrier {number} is not this warpgroup's own")


def _same(first: list[int], other: list[int], scope: str, findings: _Findings) -> None:
    if first == other:
        return
    line = next((a for a, b in zip(first, other, strict=False) if a != b), max(first + other))
    findings.report("warpgroup", line, f"not all threads of the {scope} execute this instruction")
