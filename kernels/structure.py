"""Structural rules: does the code that TVM generated keep the protocol of its template?

A kernel with a missing wait or fence often passes every comparison, because timing hides the race. The rules read the
generated CUDA source instead of running it: each thread is followed (`kernels.cuda_trace`) and must keep the order of
waits, fences and hand-overs that RULES lists. They see what the source orders, not what the numbers mean: a wrong
coordinate or a wrong descriptor layout is the business of the comparison.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.cuda_source import CLUSTER_WINDOW, UNKNOWN, Kernel, SourceError, read_kernel
from kernels.cuda_trace import Event, Trace, Walk, traces
from kernels.launch import TensorMapPlan
from kernels.problem import ELEMENT_BYTES, GemmProblem
from kernels.structure_checks import (
    PART_BYTES,
    Check,
    Exchange,
    Facts,
    Lifetime,
    Phases,
    Producer,
    Region,
    Slot,
    Staging,
    Tmem,
    Turns,
    Wgmma,
)

if TYPE_CHECKING:
    from kernels.lowering import LoweredKernel

RULES: dict[str, str] = {
    "not understood": "the reader can follow every statement that steers a thread",
    "unknown instruction": "the kernel uses only instructions that the rules know",
    "launch plan": "threads and cluster size are those of the config; the kernel takes tensor maps, and D's address "
    "only where it stores from registers",
    "barrier init": "each mbarrier of each ring is initialised once, with the arrivals that the config implies",
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
    "tensor memory": "one warp allocates, relinquishes and deallocates; barriers stand between that and any use",
}
# Rules of the reader, not of the kernel: a template may have learnt something that the reader has not.
OPEN = frozenset({"not understood", "unknown instruction"})
# Instructions that every thread of a warpgroup executes together.
_WARPGROUP_WIDE = frozenset(
    {"setmaxnreg", "wgmma_fence", "wgmma", "wgmma_commit", "wgmma_wait", "named_barrier", "shared_write", "proxy_fence",
     "remote_write", "lane_transpose", "tcgen05_ld", "tcgen05_wait_ld", "fence_before_sync"}
)  # fmt: skip
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
        walk = _walk(problem, config)
        followed = traces(kernel, threads=lowered.launch.threads, ranks=config.cluster_size, walk=walk)
        maps, barriers = _maps(lowered, config, kernel, findings), _barriers(config, followed, findings)
        _check(Facts(config, walk, maps, barriers), followed, findings)
    except SourceError as error:
        findings.report("not understood", error.line, str(error))
    return tuple(sorted(findings.found.values(), key=lambda f: f.line))


def _walk(problem: GemmProblem, config: GemmConfig) -> Walk:
    """Enough tiles that every staging buffer meets every chunk position, and both accumulator slots both phases."""
    lap = 2 * config.pipe_depth
    parts = config.split_k if isinstance(config, Sm90GemmConfig) else 1
    k_blocks, uneven = divmod(config.k_blocks(problem), parts)
    turns = config.num_consumers if _takes_turns(config) else 1
    return Walk(
        tiles=max(4, config.epi_stages + 2), k_blocks=k_blocks, lap=lap, kept=lap, uneven=uneven > 0, turns=turns
    )


def _takes_turns(config: GemmConfig) -> bool:
    return isinstance(config, Sm90GemmConfig) and config.schedule == "pingpong"


def _check(facts: Facts, followed: tuple[Trace, ...], findings: _Findings) -> None:
    config = facts.config
    for trace in followed:
        for event in trace.events:
            if event.kind == UNKNOWN or event.kind not in _KNOWN:
                findings.report("unknown instruction", event.line, f"{event.text} has no place in this kernel")
    _learn_regions(facts, followed, findings)
    checks: list[type[Check]] = [Lifetime, Phases, Producer, Staging]
    checks += [Tmem] if isinstance(config, Sm100GemmConfig) else [Wgmma, Exchange, Turns]
    for trace in followed:
        states = [check(facts, trace, findings.report) for check in checks]
        for event in trace.events:
            slot = facts.slot(event, trace.rank)
            for state in states:
                state.see(event, slot)
        for state in states:
            state.end(trace.events[-1].line if trace.events else 0)
    _check_bytes(facts, followed, findings)
    _check_arrivals(facts, followed, findings)
    _check_together(followed, findings)
    if isinstance(config, Sm90GemmConfig):
        _check_multicast(facts, followed, findings)
        _check_parts(followed, findings)
    if isinstance(config, Sm100GemmConfig):
        _check_tensor_memory(config, followed, findings)
        _check_issuers(config, followed, findings)


_KNOWN = _WARPGROUP_WIDE | _CTA_WIDE | {
    "mbarrier_init", "init_fence", "mbarrier_wait", "expect_tx", "arrive", "tma_load", "tma_store", "bulk_commit",
    "bulk_wait", "bulk_wait_read", "convert", "register_read", "shared_read", "global_write", "warp_barrier",
    "tmem_alloc", "tmem_dealloc", "tmem_relinquish", "tcgen05_mma", "tcgen05_commit", "fence_after_sync",
}  # fmt: skip


def _maps(lowered: LoweredKernel, config: GemmConfig, kernel: Kernel, findings: _Findings) -> dict[str, TensorMapPlan]:
    launch = lowered.launch
    stores_directly = isinstance(config, Sm90GemmConfig) and config.swap_ab
    pointers = [plan.operand for plan in launch.parameters if not isinstance(plan, TensorMapPlan)]
    if len(launch.parameters) != len(kernel.maps) or pointers != ["D"] * stores_directly:
        findings.report(
            "launch plan", 0, f"the kernel takes {kernel.maps}, the launch plan has {len(launch.parameters)} parameters"
        )
    if launch.cluster != (config.cluster_size, 1, 1) or launch.threads != config.threads:
        findings.report(
            "launch plan",
            0,
            f"launched with {launch.threads} threads and cluster {launch.cluster}, the config implies "
            f"{config.threads} and ({config.cluster_size}, 1, 1)",
        )
    named = zip(kernel.maps, launch.parameters, strict=False)
    return {name: plan for name, plan in named if isinstance(plan, TensorMapPlan)}


def ring_counts(config: GemmConfig) -> tuple[tuple[str, int, int], ...]:
    """Every ring of mbarriers in the order in which it is initialised: name, slots, arrivals that end a phase."""
    if isinstance(config, Sm100GemmConfig):
        accumulators = config.num_consumers * config.acc_stages
        return (
            ("tma2mma", config.pipe_depth, 1),
            ("mma2tma", config.pipe_depth, config.num_consumers),
            ("mma2ld", accumulators, 1),
            ("ld2mma", accumulators, 128 * config.cta_group),
        )
    assert isinstance(config, Sm90GemmConfig)
    consumers = 1 if _takes_turns(config) else config.num_consumers
    stages = (("tma2mma", config.pipe_depth, 1), ("mma2tma", config.pipe_depth, consumers * config.cta_group))
    if _takes_turns(config):
        return (*stages, ("turn", config.num_consumers, 1))
    if config.split_k == 1:
        return stages
    return (*stages, ("parts2sum", config.num_consumers, 1), ("sum2parts", config.num_consumers, config.split_k))


def _barriers(config: GemmConfig, followed: tuple[Trace, ...], findings: _Findings) -> dict[int, tuple[str, int]]:
    """Ring and slot by address. Reports initialisations that the config does not imply."""
    expected = [(ring, slot, count) for ring, slots, count in ring_counts(config) for slot in range(slots)]
    barriers: dict[int, tuple[str, int]] = {}
    for rank in range(config.cluster_size):
        inits = [
            (event, len(trace.threads))
            for trace in followed
            if trace.rank == rank
            for event in trace.events
            if event.kind == "mbarrier_init"
        ]
        if len(inits) != len(expected):
            line = inits[-1][0].line if inits else 0
            findings.report(
                "barrier init", line, f"{len(inits)} mbarriers are initialised, the config implies {len(expected)}"
            )
        for (event, threads), (ring, slot, count) in zip(inits, expected, strict=False):
            address, found = int(event.values["addr"]), event.values["count"]
            if address % 8 or threads != 1 or barriers.get(address, (ring, slot)) != (ring, slot):
                findings.report(
                    "barrier init", event.line, f"{ring}[{slot}] at {address} is initialised by {threads} threads"
                )
            if found != count:
                findings.report(
                    "barrier init", event.line, f"{ring}[{slot}] expects {found} arrivals, the config implies {count}"
                )
            barriers[address] = (ring, slot)
    return barriers


def _landing(facts: Facts, event: Event, slot: Slot) -> tuple[int, ...]:
    """CTAs into which a load writes and on whose barrier it counts."""
    mask = event.values.get("cta_mask")
    if mask is None:
        return (slot.rank,)
    return tuple(rank for rank in range(facts.config.cluster_size) if mask >> rank & 1)


def _loads(facts: Facts, followed: tuple[Trace, ...]) -> list[tuple[Trace, Event, Slot]]:
    found = []
    for trace in followed:
        for event in trace.events:
            slot = facts.slot(event, trace.rank) if event.kind == "tma_load" else None
            if slot is not None:
                found.append((trace, event, slot))
    return found


def _learn_regions(facts: Facts, followed: tuple[Trace, ...], findings: _Findings) -> None:
    """A stage starts at the lowest address that a load fills for its slot, and is as large as the config says."""
    config = facts.config
    starts: dict[tuple[int, str, int], int] = {}
    places = []
    for trace, event, slot in _loads(facts, followed):
        operand = facts.maps[event.values["tmap"]].operand
        ranks = (trace.rank,) if "cta_mask" not in event.values else _landing(facts, event, slot)
        for rank in ranks:
            key, low = (rank, operand, slot.number), int(event.values["dst_mem"])
            starts[key] = min(starts.get(key, low), low)
            places.append((key, low, low + facts.box_bytes(event), event))
    rows = {"A": config.cta_rows, "B": config.cta_cols}
    for (rank, operand, stage), low in starts.items():
        size = ELEMENT_BYTES * config.blk_k * rows.get(operand, 0)
        facts.regions.append(Region(rank, operand, stage, low, low + size))
    for key, _low, high, event in places:
        if high > starts[key] + ELEMENT_BYTES * config.blk_k * rows.get(key[1], 0):
            findings.report("stage bounds", event.line, f"{event.text} writes up to {high}, past the end of its stage")
    ordered = sorted(facts.regions, key=lambda r: (r.rank, r.low))
    for one, two in pairwise(ordered):
        if one.rank == two.rank and two.low < one.high:
            message = (
                f"stage {one.stage} of {one.operand} overlaps stage {two.stage} of {two.operand} at byte {two.low}"
            )
            findings.report("stage bounds", 0, message)


def _check_bytes(facts: Facts, followed: tuple[Trace, ...], findings: _Findings) -> None:
    landed: Counter[Slot] = Counter()
    for _trace, event, slot in _loads(facts, followed):
        for rank in _landing(facts, event, slot):
            landed[Slot(slot.ring, slot.number, rank)] += facts.box_bytes(event)
    for trace in followed:
        for event in trace.events:
            part = facts.slot(event, trace.rank) if event.kind == "remote_write" else None
            if part is not None:
                landed[part] += len(trace.threads) * PART_BYTES
    announced: dict[Slot, list[Event]] = defaultdict(list)
    for trace in followed:
        for event in trace.events:
            slot_or_none = facts.slot(event, trace.rank) if event.kind == "expect_tx" else None
            if slot_or_none is not None:
                announced[slot_or_none].append(event)
    for slot in sorted(landed.keys() | announced.keys(), key=lambda s: (s.rank, s.ring, s.number)):
        events = announced.get(slot, [])
        if not events:
            findings.report(
                "transaction bytes", 0, f"loads land on {slot} of CTA {slot.rank}, which no expect_tx announces"
            )
            continue
        share = landed[slot] / len(events)
        for event in events:
            if event.values["tx_count"] != share:
                found = event.values["tx_count"]
                message = f"{event.text} announces {found} bytes, the loads that land on {slot} bring {share:g}"
                findings.report("transaction bytes", event.line, message)


def _check_arrivals(facts: Facts, followed: tuple[Trace, ...], findings: _Findings) -> None:
    """Arrivals of all threads on a slot = uses of the slot x arrivals that the config implies."""
    config = facts.config
    arrivals: Counter[Slot] = Counter()
    lines: dict[Slot, int] = {}
    for trace in followed:
        for event in trace.events:
            slot = facts.slot(event, trace.rank)
            if slot is None or event.kind not in ("arrive", "expect_tx", "tcgen05_commit"):
                continue
            mask = event.values.get("mask", 1 << slot.rank)
            for rank in (r for r in range(config.cluster_size) if mask >> r & 1):
                place = Slot(slot.ring, slot.number, rank)
                arrivals[place] += len(trace.threads) * int(event.values.get("count", 1))
                lines[place] = event.line
    # An expect_tx uses a stage, a commit to mma2ld an accumulator. On Blackwell the leader's count for the pair. The
    # first CTA of a cluster owns a chunk of every tile, so its parts2sum counts the tiles for all.
    use = {"mma2tma": "tma2mma", "ld2mma": "mma2ld", "sum2parts": "parts2sum"}
    for ring, slots, count in ring_counts(config):
        for place in (Slot(ring, n, rank) for n in range(slots) for rank in range(config.cluster_size)):
            leader = 0 if isinstance(config, Sm100GemmConfig) or ring == "sum2parts" else place.rank
            uses = arrivals[Slot(use.get(ring, ring), place.number, leader)]
            at_leader_only = leader != place.rank and ring in ("tma2mma", "ld2mma")
            expected = 0 if at_leader_only else uses * count
            if arrivals[place] != expected:
                message = (
                    f"{place} of CTA {place.rank} gets {arrivals[place]} arrivals in {uses} uses, needs {expected}"
                )
                findings.report("arrival count", lines.get(place, 0), message)


def _check_together(followed: tuple[Trace, ...], findings: _Findings) -> None:
    """Threads that must execute an instruction together execute the same ones in the same order."""
    barrier_of: dict[int, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    ctas: dict[int, list[int]] = {}
    for trace in followed:
        collective = trace.events and [e for e in trace.events if e.kind in _WARPGROUP_WIDE]
        works = any(e.kind in ("wgmma", "tcgen05_ld") for e in trace.events)
        lines = [
            e.line
            for e in trace.events
            if e.kind in _WARPGROUP_WIDE or (works and e.kind in ("mbarrier_wait", "fence_after_sync"))
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


def _check_multicast(facts: Facts, followed: tuple[Trace, ...], findings: _Findings) -> None:
    config = facts.config
    assert isinstance(config, Sm90GemmConfig)
    every = (1 << config.cta_group) - 1
    for _trace, event, _slot in _loads(facts, followed):
        operand = facts.maps[event.values["tmap"]].operand
        shared = config.cta_group > 1 and operand == config.share
        mask = event.values.get("cta_mask")
        if mask != (every if shared else None):
            need = f"a multicast to mask {every}" if shared else "no multicast"
            findings.report(
                "multicast mask", event.line, f"{event.text} loads {operand} with mask {mask}, needs {need}"
            )


def _check_parts(followed: tuple[Trace, ...], findings: _Findings) -> None:
    """What is sent to each CTA, and what it reads: the same addresses, equally often, by threads of one number."""
    sent: Counter[tuple[int, int, int]] = Counter()
    read: Counter[tuple[int, int, int]] = Counter()
    lines = {}
    for trace in followed:
        for event in trace.events:
            if event.kind not in ("remote_write", "shared_read"):
                continue
            window, address = divmod(int(event.values["addr"]), CLUSTER_WINDOW)
            owner = window - 1 if window else trace.rank
            place = (owner, trace.threads[0], address)
            (sent if event.kind == "remote_write" else read)[place] += 1
            lines[place] = event.line
    for place in sorted(sent.keys() | read.keys()):
        if sent[place] != read[place]:
            owner, _thread, address = place
            message = f"address {address} of CTA {owner} is written {sent[place]} and read {read[place]} times"
            findings.report("parts place", lines[place], message)


def _check_tensor_memory(config: Sm100GemmConfig, followed: tuple[Trace, ...], findings: _Findings) -> None:
    for rank in range(config.cta_group):
        mine = [trace for trace in followed if trace.rank == rank]
        _check_owner(mine, findings)
        columns: set[Any] = set()
        for kind in ("tmem_alloc", "tmem_relinquish", "tmem_dealloc"):
            threads = sum(len(t.threads) * sum(e.kind == kind for e in t.events) for t in mine)
            events = [e for t in mine for e in t.events if e.kind == kind]
            columns.update(e.values["ncols"] for e in events if "ncols" in e.values)
            if threads != 32:
                name = kind.replace("tmem_", "tcgen05.")
                message = f"{name} is executed by {threads} threads of CTA {rank}, must be one warp once"
                findings.report("tensor memory", events[0].line if events else 0, message)
        if len(columns) != 1 or not config.tmem_columns <= max(columns, default=0) <= config.arch.tmem_columns:
            message = (
                f"{sorted(columns)} columns are allocated and deallocated, accumulators need {config.tmem_columns}"
            )
            findings.report("tensor memory", 0, message)
        for trace in mine:
            _check_tensor_memory_order(config, trace, findings)


def _check_owner(traces_of_cta: list[Trace], findings: _Findings) -> None:
    """The warp that allocates gives the right to allocate up, and then the memory back: once each, in this order."""
    kinds = ("tmem_alloc", "tmem_relinquish", "tmem_dealloc")
    for trace in traces_of_cta:
        events = [event for event in trace.events if event.kind in kinds]
        if events and [event.kind for event in events] != list(kinds):
            done = ", ".join(event.kind.replace("tmem_", "") for event in events)
            message = f"warp {trace.threads[0] // 32} does {done}: one warp must do alloc, relinquish, dealloc"
            findings.report("tensor memory", events[-1].line, message)


def _check_issuers(config: Sm100GemmConfig, followed: tuple[Trace, ...], findings: _Findings) -> None:
    """Each thread that executes tcgen05.mma or tcgen05.commit issues one of its own; the leader's acts for the pair."""
    for trace in followed:
        issued = next((event for event in trace.events if event.kind in ("tcgen05_mma", "tcgen05_commit")), None)
        if issued is not None and (len(trace.threads) != 1 or trace.rank != 0):
            message = (
                f"{issued.text} is issued by {len(trace.threads)} threads of CTA {trace.rank}, must be one of CTA 0"
            )
            findings.report("mma issuer", issued.line, message)
        for event in trace.events:
            group = re.search(r"\bcta_group::(\d)", event.text)
            if group is not None and event.kind != "tma_load" and int(group[1]) != config.cta_group:
                findings.report("cta group", event.line, f"{event.text} in a kernel of cta_group {config.cta_group}")


def _check_tensor_memory_order(config: Sm100GemmConfig, trace: Trace, findings: _Findings) -> None:
    """One barrier after the allocation, one before deallocation, every use of tensor memory in between."""
    barrier = "cluster_wait" if config.cta_group > 1 else "cta_barrier"
    passed = 0
    for event in trace.events:
        passed += event.kind == barrier
        wanted = {"tmem_alloc": 0, "shared_read": 1, "tcgen05_mma": 1, "tcgen05_ld": 1, "tcgen05_commit": 1,
                  "tmem_dealloc": 2}.get(event.kind)  # fmt: skip
        if wanted is not None and passed != wanted:
            name = barrier.replace("_wait", "").replace("_barrier", "")
            message = f"{event.text} stands after {passed} barriers of the {name}, must be after {wanted}"
            findings.report("tensor memory", event.line, message)
