"""The pipeline of one CTA over time, as the performance model sees it: an estimate to look at, not a measurement.

Each stage is loaded into a slot of the ring, multiplied, and its slot given back; each tile ends with an epilogue that
drains its accumulator. The durations are those of `search_space.model`; what waits for what follows the templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from search_space.model import LAUNCH_US, LOAD_LATENCY_US, StageTimes, stage_times
from search_space.walk import walk_of

if TYPE_CHECKING:
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

TILES = 3
K_BLOCKS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that lasts, in us since the launch.

    lane: where it is drawn: "slot 0" of the ring, "MMA", "accumulator 0" or "writeback"
    kind: "load", "full", "multiply", "held", "accumulate" or "drain"
    start_us, end_us: when
    tile: which tile of the CTA, from 0
    block: which block of K of the tile; -1 where it is about all of them
    """

    lane: str
    kind: str
    start_us: float
    end_us: float
    tile: int
    block: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The first tiles of one CTA.

    spans: in the order in which they begin within their lane
    tiles: tiles that are shown
    k_blocks: blocks of K that are shown for each tile
    whole_k_blocks: blocks of K that a tile has
    stage: durations that were used
    """

    spans: tuple[Span, ...]
    tiles: int
    k_blocks: int
    whole_k_blocks: int
    stage: StageTimes

    @property
    def end_us(self) -> float:
        """When the last span ends."""
        return max(span.end_us for span in self.spans)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Ring slots first, then the MMA, accumulators and writeback."""
        order = ("slot", "MMA", "accumulator", "writeback")

        def place(lane: str) -> tuple[int, int]:
            name, _, number = lane.partition(" ")
            return order.index(name), int(number or 0)

        return tuple(sorted({span.lane for span in self.spans}, key=place))

    def busy(self, lane: str) -> float:
        """Share of the time from the first to the last span of a lane that is covered."""
        spans = [span for span in self.spans if span.lane == lane]
        whole = max(span.end_us for span in spans) - min(span.start_us for span in spans)
        return sum(span.end_us - span.start_us for span in spans) / whole if whole else 1.0


def timeline(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> Timeline:
    """The first tiles of a CTA; of a long K only the first blocks, for a tile in its middle repeats itself.

    The config must break no rule on the device.
    """
    walk = walk_of(problem, config, profile.sm_count)
    tiles, k_blocks = min(TILES, walk.waves), min(K_BLOCKS, walk.k_blocks)
    stage = stage_times(problem, config, profile)
    pipeline = _Pipeline(config, stage)
    for tile in range(tiles):
        pipeline.run_tile(tile, k_blocks)
    return Timeline(
        spans=tuple(pipeline.spans), tiles=tiles, k_blocks=k_blocks, whole_k_blocks=walk.k_blocks, stage=stage
    )


class _Pipeline:
    """When each part is free again."""

    def __init__(self, config: GemmConfig, stage: StageTimes) -> None:
        self.config, self.stage = config, stage
        self.depth = config.pipe_depth
        self.accumulators = _accumulators(config)
        self.spans: list[Span] = []
        self.slot_free = [LAUNCH_US] * self.depth
        self.arrived = self.multiplied = LAUNCH_US
        self.drained = [LAUNCH_US] * self.accumulators
        self.writeback_free = LAUNCH_US
        self.stages = 0
        self.held: tuple[int, float] | None = None  # Hopper: a slot that waits for the next stage's wgmmas

    def run_tile(self, tile: int, k_blocks: int) -> None:
        """Mainloop and epilogue of one tile."""
        accumulator = tile % self.accumulators
        may_start, began = self.drained[accumulator], 0.0
        for block in range(k_blocks):
            start = self.run_stage(tile, block, may_start)
            began = began if block else start
        if self.held is not None:
            self.release(*self.held)
            self.held = None
        start = max(self.multiplied, self.writeback_free)
        end = start + self.stage.epilogue_us
        self.drained[accumulator] = self.writeback_free = end
        lane = f"accumulator {accumulator}"
        self.spans += (
            Span(lane=lane, kind="accumulate", start_us=began, end_us=self.multiplied, tile=tile),
            Span(lane=lane, kind="drain", start_us=start, end_us=end, tile=tile),
            Span(lane="writeback", kind="drain", start_us=start, end_us=end, tile=tile),
        )

    def run_stage(self, tile: int, block: int, may_start: float) -> float:
        """Load and multiply one block of K; returns when its MMAs began."""
        slot = self.stages % self.depth
        issued = self.slot_free[slot]
        rate_us = max(self.stage.port_us, self.stage.memory_us)
        self.arrived = max(issued + LOAD_LATENCY_US + self.stage.port_us, self.arrived + rate_us)
        start = max(self.arrived, self.multiplied, may_start)
        self.multiplied = start + self.stage.compute_us
        lane = f"slot {slot}"
        self.spans += (
            Span(lane=lane, kind="load", start_us=issued, end_us=self.arrived, tile=tile, block=block),
            Span(lane=lane, kind="full", start_us=self.arrived, end_us=start, tile=tile, block=block),
            Span(lane=lane, kind="multiply", start_us=start, end_us=self.multiplied, tile=tile, block=block),
            Span(lane="MMA", kind="multiply", start_us=start, end_us=self.multiplied, tile=tile, block=block),
        )
        if isinstance(self.config, Sm90GemmConfig):
            if self.held is not None:
                self.release(self.held[0], max(self.held[1], start))
            self.held = (slot, self.multiplied)
        else:
            self.release(slot, self.multiplied)
        self.stages += 1
        return start

    def release(self, slot: int, when: float) -> None:
        """Give a slot back to the producer; a Hopper consumer holds it until the next stage's wgmmas are issued."""
        self.slot_free[slot] = when
        last = next(span for span in reversed(self.spans) if span.lane == f"slot {slot}")
        if when > last.end_us:
            held = Span(
                lane=last.lane, kind="held", start_us=last.end_us, end_us=when, tile=last.tile, block=last.block
            )
            self.spans.append(held)


def _accumulators(config: GemmConfig) -> int:
    """Accumulators of a CTA that take turns: tiles that may be between their first MMA and their last read."""
    if isinstance(config, Sm100GemmConfig):
        return config.acc_stages
    assert isinstance(config, Sm90GemmConfig)
    return config.num_consumers if config.schedule == "pingpong" else 1
