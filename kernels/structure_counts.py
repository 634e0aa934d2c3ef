"""Rules that add up what all threads do: initialisations, bytes and arrivals of each mbarrier, bounds of each stage."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.gemm_names import ANSWER_SLOTS
from kernels.gemm_sm90_plan import PRODUCER_WARPS
from kernels.problem import ELEMENT_BYTES
from kernels.structure_clc import answer_bytes
from kernels.structure_facts import PART_BYTES, Facts, Region, Report, Slot, leader_of

if TYPE_CHECKING:
    from kernels.cuda_trace import Event, Trace


def takes_turns(config: GemmConfig) -> bool:
    return isinstance(config, Sm90GemmConfig) and config.schedule == "pingpong"


def ring_counts(config: GemmConfig) -> tuple[tuple[str, int, int], ...]:
    """Every ring of mbarriers in the order in which it is initialised: name, slots, arrivals that end a phase."""
    if isinstance(config, Sm100GemmConfig):
        accumulators = config.num_consumers * config.acc_stages
        rings = (
            ("tma2mma", config.pipe_depth, 1),
            ("mma2tma", config.pipe_depth, config.num_consumers),
            ("mma2ld", accumulators, 1),
            ("ld2mma", accumulators, 128 * config.cta_group),
        )
        return rings + _exchange_rings(config) + _answer_rings(config)
    assert isinstance(config, Sm90GemmConfig)
    consumers = 1 if takes_turns(config) else config.num_consumers
    fills = PRODUCER_WARPS if config.load == "cp_async" else 1
    stages = (("tma2mma", config.pipe_depth, fills), ("mma2tma", config.pipe_depth, consumers * config.cta_group))
    if takes_turns(config):
        return (*stages, ("turn", config.num_consumers, 1))
    return stages + _exchange_rings(config)


def _exchange_rings(config: Sm90GemmConfig | Sm100GemmConfig) -> tuple[tuple[str, int, int], ...]:
    if config.split_k == 1:
        return ()
    # On Blackwell only CTAs that own a chunk have something to say.
    readers = min(config.split_k, config.chunks) if isinstance(config, Sm100GemmConfig) else config.split_k
    return (("parts2sum", config.num_consumers, 1), ("sum2parts", config.num_consumers, readers))


def _answer_rings(config: Sm100GemmConfig) -> tuple[tuple[str, int, int], ...]:
    if config.scheduler == "static":
        return ()
    return (("next2roles", ANSWER_SLOTS, 1), ("roles2next", ANSWER_SLOTS, config.answer_readers))


def barrier_slots(config: GemmConfig, followed: tuple[Trace, ...], report: Report) -> dict[int, tuple[str, int]]:
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
            report("barrier init", line, f"{len(inits)} mbarriers are initialised, the config implies {len(expected)}")
        for (event, threads), (ring, slot, count) in zip(inits, expected, strict=False):
            address, found = int(event.values["addr"]), event.values["count"]
            if address % 8 or threads != 1 or barriers.get(address, (ring, slot)) != (ring, slot):
                report("barrier init", event.line, f"{ring}[{slot}] at {address} is initialised by {threads} threads")
            if found != count:
                report(
                    "barrier init", event.line, f"{ring}[{slot}] expects {found} arrivals, the config implies {count}"
                )
            barriers[address] = (ring, slot)
    return barriers


def landing(facts: Facts, event: Event, slot: Slot) -> tuple[int, ...]:
    """CTAs into which a load writes and on whose barrier it counts."""
    mask = event.values.get("cta_mask")
    if mask is None:
        return (slot.rank,)
    return tuple(rank for rank in range(facts.config.cluster_size) if mask >> rank & 1)


def loads(facts: Facts, followed: tuple[Trace, ...]) -> list[tuple[Trace, Event, Slot]]:
    found = []
    for trace in followed:
        for event in trace.events:
            slot = facts.slot(event, trace.rank) if event.kind == "tma_load" else None
            if slot is not None:
                found.append((trace, event, slot))
    return found


def learn_regions(facts: Facts, followed: tuple[Trace, ...], report: Report) -> None:
    """A stage starts at the lowest address that a load fills for its slot, and is as large as the config says."""
    config = facts.config
    starts: dict[tuple[int, str, int], int] = {}
    places = []
    for trace, event, slot in loads(facts, followed):
        operand = facts.maps[event.values["tmap"]].operand
        ranks = (trace.rank,) if "cta_mask" not in event.values else landing(facts, event, slot)
        for rank in ranks:
            key, low = (rank, operand, slot.number), int(event.values["dst_mem"])
            starts[key] = min(starts.get(key, low), low)
            places.append((key, low, low + facts.box_bytes(event), event))
    for (rank, stage), operand, low in copy_places(facts, followed):
        starts[rank, operand, stage] = min(starts.get((rank, operand, stage), low), low)
        places.append(((rank, operand, stage), low, low + PART_BYTES, followed[0].events[0]))
    rows = {"A": config.cta_rows, "B": config.cta_cols}
    for (rank, operand, stage), low in starts.items():
        size = ELEMENT_BYTES * config.blk_k * rows.get(operand, 0)
        facts.regions.append(Region(rank, operand, stage, low, low + size))
    for key, _low, high, event in places:
        if high > starts[key] + ELEMENT_BYTES * config.blk_k * rows.get(key[1], 0):
            report("stage bounds", event.line, f"{event.text} writes up to {high}, past the end of its stage")
    ordered = sorted(facts.regions, key=lambda r: (r.rank, r.low))
    for one, two in pairwise(ordered):
        if one.rank == two.rank and two.low < one.high:
            message = (
                f"stage {one.stage} of {one.operand} overlaps stage {two.stage} of {two.operand} at byte {two.low}"
            )
            report("stage bounds", 0, message)


def copy_places(facts: Facts, followed: tuple[Trace, ...]) -> list[tuple[tuple[int, int], str, int]]:
    """CTA and stage, operand and address of every piece that cp.async brings into a stage; tails are left out."""
    found = []
    for trace in followed:
        stage = -1
        for event in trace.events:
            if event.kind == "mbarrier_wait" and (slot := facts.slot(event, trace.rank)) and slot.ring == "mma2tma":
                stage = slot.number
            elif event.kind == "row_copy" and event.values["dst_mem"] < facts.first_tail:
                found.append(((trace.rank, stage), facts.operand_at(event.values["src_mem"]), event.values["dst_mem"]))
    return found


def check_bytes(facts: Facts, followed: tuple[Trace, ...], report: Report) -> None:
    landed = _landed_bytes(facts, followed)
    announced: dict[Slot, list[Event]] = defaultdict(list)
    for trace in followed:
        for event in trace.events:
            slot_or_none = facts.slot(event, trace.rank) if event.kind == "expect_tx" else None
            if slot_or_none is not None:
                announced[slot_or_none].append(event)
    for slot in sorted(landed.keys() | announced.keys(), key=lambda s: (s.rank, s.ring, s.number)):
        events = announced.get(slot, [])
        if not events:
            report("transaction bytes", 0, f"loads land on {slot} of CTA {slot.rank}, which no expect_tx announces")
            continue
        share = landed[slot] / len(events)
        for event in events:
            if event.values["tx_count"] != share:
                found = event.values["tx_count"]
                message = f"{event.text} announces {found} bytes, the loads that land on {slot} bring {share:g}"
                report("transaction bytes", event.line, message)


def _landed_bytes(facts: Facts, followed: tuple[Trace, ...]) -> Counter[Slot]:
    """Bytes that copies, parts of K and answers of cluster launch control bring to each mbarrier."""
    landed: Counter[Slot] = Counter()
    for _trace, event, slot in loads(facts, followed):
        for rank in landing(facts, event, slot):
            landed[Slot(slot.ring, slot.number, rank)] += facts.box_bytes(event)
    for trace in followed:
        for event in trace.events:
            place = facts.slot(event, trace.rank) if event.kind in ("remote_write", "try_cancel") else None
            if place is not None and event.kind == "remote_write":
                landed[place] += len(trace.threads) * PART_BYTES
            elif place is not None:
                landed.update(answer_bytes(event, place, facts.config.cluster_size))
    return landed


def check_arrivals(facts: Facts, followed: tuple[Trace, ...], report: Report) -> None:
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
    use = {"mma2tma": "tma2mma", "ld2mma": "mma2ld", "sum2parts": "parts2sum", "roles2next": "next2roles"}
    counts = {ring: count for ring, _slots, count in ring_counts(config)}
    for ring, slots, count in ring_counts(config):
        for place in (Slot(ring, n, rank) for n in range(slots) for rank in range(config.cluster_size)):
            leader = 0 if ring == "sum2parts" else leader_of(config, place.rank)
            uses = arrivals[Slot(use.get(ring, ring), place.number, leader)] // counts[use.get(ring, ring)]
            at_leader_only = leader != place.rank and ring in ("tma2mma", "ld2mma", "roles2next")
            expected = 0 if at_leader_only else uses * count
            if arrivals[place] != expected:
                message = (
                    f"{place} of CTA {place.rank} gets {arrivals[place]} arrivals in {uses} uses, needs {expected}"
                )
                report("arrival count", lines.get(place, 0), message)
