"""Rules on parts of tiles that meet in the workspace (`gemm_sm90_stream_k`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.config import Sm90GemmConfig
from kernels.problem import FLOAT_BYTES
from kernels.stream_k import COUNTER_BYTES, Piece, StreamK, Workspace
from kernels.structure_facts import Check

if TYPE_CHECKING:
    from kernels.config import GemmConfig
    from kernels.cuda_trace import Event, Trace, Walk
    from kernels.launch import LaunchPlan
    from kernels.problem import GemmProblem
    from kernels.structure_facts import Facts, Report, Slot

WORKSPACE_BASE = 4 << 40  # address that the followed kernel is given
# What a consumer finds at its votes: the others not there at first and there after its count, there at once, not there.
_VOTES = ((0, 1, 1), (1,), (0,))
_STORES = frozenset({"convert", "tma_store", "global_write"})
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shared:
    """Who computes what in the kernel at hand, and where parts of tiles meet.

    workspace: of one launch
    clusters: those to follow
    """

    workspace: Workspace
    clusters: tuple[int, ...]

    def walks(self, walk: Walk) -> tuple[Walk, ...]:
        """With each outcome of the votes."""
        tiles = walk.tiles + max(len(self.workspace.split.pieces(cluster)) for cluster in self.clusters)
        tiles = min(tiles, walk.tiles + 3)
        walk = replace(walk, tiles=tiles, pieces=True)
        return tuple(replace(walk, cluster=cluster, votes=votes) for cluster in self.clusters for votes in _VOTES)


def shared_of(problem: GemmProblem, config: GemmConfig, launch: LaunchPlan) -> Shared | None:
    """None for kernels whose clusters compute whole tiles only."""
    if not isinstance(config, Sm90GemmConfig) or config.scheduler == "static":
        return None
    tiles_m, tiles_n = config.cluster_tiles(problem)
    split = StreamK(
        tiles=tiles_m * tiles_n, k_blocks=config.k_blocks(problem), clusters=launch.grid // config.cluster_size
    )
    part_bytes = FLOAT_BYTES * config.blk_m * config.blk_n
    workspace = Workspace(split=split, ctas=config.cluster_size, consumers=config.num_consumers, part_bytes=part_bytes)
    return Shared(workspace, _telling(split))


def _telling(split: StreamK) -> tuple[int, ...]:
    """A cluster that has most kinds of pieces: it begins a tile, ends one, or is in the midst of one."""

    def kinds(cluster: int) -> int:
        pieces = split.pieces(cluster)
        return len({(piece.first == 0, piece.first + piece.count == split.k_blocks) for piece in pieces})

    return (max(range(split.clusters), key=lambda cluster: (kinds(cluster), -cluster)),)


class Parts(Check):
    """One thread of a consumer: when it writes its part, counts it, adds the others, and stores D."""

    def __init__(self, facts: Facts, trace: Trace, report: Report, shared: Shared) -> None:
        super().__init__(facts, trace, report)
        self.workspace, self.split = shared.workspace, shared.workspace.split
        self.cluster = facts.walk.cluster
        self.consumes = any(event.kind == "wgmma" for event in trace.events)
        self.counts = trace.threads[0] % 128 == 0  # the thread that counts for its warpgroup
        self.pieces = iter(self.split.pieces(self.cluster))
        self.multiplying = False
        self.begin(None)

    def begin(self, piece: Piece | None) -> None:
        """A piece whose accumulators are complete."""
        self.piece = piece
        self.unannounced = self.counted = self.looked = self.voted = self.complete = self.must_reset = False
        self.written: list[int] = []
        self.read: list[int] = []

    @property
    def partial(self) -> bool:
        return self.piece is not None and self.piece.count < self.split.k_blocks

    def see(self, event: Event, slot: Slot | None) -> None:
        if not self.consumes:
            return
        if event.kind == "wgmma" and not self.multiplying:
            self.multiplying = True
            self.settled(event.line)
            self.begin(next(self.pieces, None))
        elif event.kind == "part_write":
            self.write(event)
        elif event.kind == "named_barrier":
            self.barrier(event)
        elif event.kind in ("count_read", "count_up"):
            self.count(event)
        elif event.kind == "part_read":
            self.add(event)
        elif event.kind == "count_reset":
            self.reset(event)
        elif event.kind in _STORES and self.partial and not self.complete:
            self.report("part sum", event.line, f"{event.text} stores a tile of which other parts are still to come")
        if event.kind != "wgmma" and event.kind in (*_STORES, "part_write", "count_read", "count_up", "part_read"):
            self.multiplying = False

    # ------------------------------------------------------------------ places

    def part(self, cluster: int, *, begins_tile: bool) -> list[int]:
        """Addresses of this thread's vectors of a part."""
        space, thread = self.workspace, self.trace.threads[0] % 128
        place = self.split.slot(cluster, begins_tile=begins_tile) * space.lanes
        place += self.trace.rank * space.consumers + self.trace.warpgroup
        first = WORKSPACE_BASE + space.counters_bytes + place * space.part_bytes + thread * _VECTOR_BYTES
        return list(range(first, first + space.part_bytes, 128 * _VECTOR_BYTES))

    def counter(self) -> int:
        assert self.piece is not None
        place = self.piece.tile * self.workspace.lanes + self.trace.rank * self.workspace.consumers
        return WORKSPACE_BASE + (place + self.trace.warpgroup) * COUNTER_BYTES

    def sources(self) -> list[int]:
        """What is to be read of the other parts, in the order of K."""
        assert self.piece is not None
        clusters = self.split.parts(self.piece.tile)
        if self.split.at_most_two_parts:
            clusters = tuple(cluster for cluster in clusters if cluster != self.cluster)
        first = self.split.parts(self.piece.tile)[0]
        return [a for cluster in clusters for a in self.part(cluster, begins_tile=cluster == first)]

    # ------------------------------------------------------------------ steps

    def write(self, event: Event) -> None:
        if not self.partial:
            self.report("part place", event.line, f"{event.text} writes a part of a tile that has no other")
        self.unannounced, self.counted = True, False
        self.written.append(int(event.values["addr"]))

    def barrier(self, event: Event) -> None:
        self.unannounced = False
        if (found := event.values.get("vote")) is None:
            return
        if self.counts and (not self.looked or event.values["ayes"] is not None):
            self.report("part count", event.line, f"{event.text} does not tell what the counter says")
        if not self.counts and event.values["ayes"] != 0:
            self.report("part count", event.line, f"a thread that has not looked at the counter votes at {event.text}")
        self.voted, self.complete, self.looked = True, bool(found), False
        self.must_reset = self.complete

    def count(self, event: Event) -> None:
        self.looked = True
        wanted = ".acq_rel.gpu" if event.kind == "count_up" else ".acquire.gpu"
        if wanted not in event.text:
            self.report("part fence", event.line, f"{event.text} must be {wanted[1:]}: others read what was written")
        if self.partial and event.values["addr"] != self.counter():
            self.report("part place", event.line, f"{event.text} is not of the counter of this consumer's tile")
        if event.kind == "count_read":
            return
        if self.unannounced or not self.written:
            self.report("part count", event.line, f"{event.text} counts before a named barrier since its stores")
        if self.counted:
            self.report("part count", event.line, f"{event.text} counts a part twice")
        self.counted = True

    def add(self, event: Event) -> None:
        if not self.partial or not self.complete:
            self.report("part sum", event.line, f"{event.text} reads a part that may not have arrived")
        self.read.append(int(event.values["addr"]))

    def reset(self, event: Event) -> None:
        if not self.must_reset or (self.partial and event.values["addr"] != self.counter()):
            self.report("count reset", event.line, f"{event.text} resets a counter that others may still count")
        self.must_reset = False

    def settled(self, line: int) -> None:
        """The piece before is done with: was everything done that had to be?"""
        if not self.partial:
            return
        assert self.piece is not None
        if not self.voted:
            self.report("part count", line, f"a piece of {self.piece.count} blocks of K is neither counted nor added")
            return
        if self.counts and self.complete and self.must_reset:
            self.report("count reset", line, "the counter of a tile whose parts were added is not set back to zero")
        if self.complete and self.read != self.sources():
            self.report("part place", line, "parts are not read where others write them, in the order of K")
        if not self.complete and not self.written:
            self.report("part count", line, "a part of a tile is not written for whoever adds it")
        if self.written and self.written != self.part(self.cluster, begins_tile=self.piece.first == 0):
            self.report("part place", line, "a part is not written where it is read")

    def end(self, line: int) -> None:
        if self.consumes:
            self.settled(line)
