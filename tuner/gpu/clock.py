"""The clock: bursts of launches in CUDA graphs, timed by CUDA events.

Protocol `burst`: one graph of about `burst_ms` of launches over rotating buffers, and an idle gap before each burst,
so that the card stays below its power limit and at its highest clock (an H200 under steady load falls from 1980 to
1400 MHz within 0.1 s). Protocol `sustained`: a graph that is replayed without a gap, at the clocks that the power limit
leaves. tuner.gpu.rounds decides who is timed when.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from search_space.request import MeasureProtocol
    from tuner.gpu.referee import Kernel

MAX_LAUNCHES = 1000  # capturing one launch costs 5 to 25 us of host time
COVER_CYCLES = 400_000  # 0.2 ms: longer than the host needs to launch a graph
SUSTAINED_GRAPH_MS = 10.0  # the few microseconds between two graphs are then no part of the time
AHEAD = 3  # graphs queued behind the one that runs
LOOK_PAUSE_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A captured graph of launches of one implementation.

    name: of the implementation
    graph: torch.cuda.CUDAGraph
    launches: in the graph
    subject: index of the candidate, None for a baseline
    """

    name: str
    graph: Any
    launches: int
    subject: int | None = None

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()

    def time_us(self) -> float:
        """Time of one launch. A short spin first: it covers the time that the host needs to launch the graph."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(COVER_CYCLES)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000.0 / self.launches

    def sustained_us(self, *, settle_ms: float, timed_ms: float, look: Callable[[], None]) -> float:
        """Time of one launch without a gap in the load: see tuner.gpu.rounds.Timed.

        The next implementation's work is queued while the tail of this one still runs.
        """
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._replay_for(settle_ms, lambda: None)
        begin.record()
        replays = self._replay_for(timed_ms, look)
        end.record()
        for _ in range(AHEAD):
            self.graph.replay()
        while not end.query():
            look()
            time.sleep(LOOK_PAUSE_S)
        return float(begin.elapsed_time(end)) * 1000.0 / (self.launches * replays)

    def _replay_for(self, duration_ms: float, look: Callable[[], None]) -> int:
        """Queue the graph for some time, a few ahead of the card: a full queue blocks the host, and nobody looks."""
        until_s, replays = time.monotonic() + duration_ms / 1000.0, 0
        queued: deque[Any] = deque()
        while time.monotonic() < until_s or not replays:
            self.graph.replay()
            replays += 1
            done = torch.cuda.Event()
            done.record()
            queued.append(done)
            while len(queued) > AHEAD and not queued[0].query():
                look()
                time.sleep(LOOK_PAUSE_S)
            while queued and queued[0].query():
                queued.popleft()
        return replays


def graph_ms(protocol: MeasureProtocol) -> float:
    """How long the graph of a burst should be under a protocol."""
    return SUSTAINED_GRAPH_MS if protocol.is_sustained else protocol.burst_ms


def capture(name: str, kernel: Kernel, sets: Sequence[Any], *, burst_ms: float, subject: int | None = None) -> Burst:
    """A graph that takes about `burst_ms`. May raise what the kernel raises.

    The number of launches comes from a first estimate with launches from the host, which for short kernels measures the
    host; a graph that turns out too short is captured again.
    """
    stream = _capture_stream()

    def captured(launches: int) -> Burst:
        graph = _captured(kernel, sets, launches, stream)
        burst = Burst(name=name, graph=graph, launches=launches, subject=subject)
        burst.replay()
        return burst

    burst = captured(_launches(_eager_us(kernel, sets, stream), burst_ms, len(sets)))
    wanted = _launches(burst.time_us(), burst_ms, len(sets))
    if wanted > 1.3 * burst.launches:
        burst = captured(wanted)
        torch.cuda.synchronize()
    return burst


_STREAMS: dict[int, Any] = {}


def _capture_stream() -> Any:
    # One stream for warming up and capturing: a library's workspace belongs to the stream that it was first used on.
    return _STREAMS.setdefault(torch.cuda.current_device(), torch.cuda.Stream())


def _eager_us(kernel: Kernel, sets: Sequence[Any], stream: Any) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel(*sets[0])
        begin.record()
        for number in range(2):
            kernel(*sets[(1 + number) % len(sets)])
        end.record()
    end.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return float(begin.elapsed_time(end)) * 1000.0 / 2


def _launches(time_us: float, burst_ms: float, sets: int) -> int:
    """Whole walks over few sets, so that each implementation uses each set equally often."""
    wanted = max(1, min(MAX_LAUNCHES, round(burst_ms * 1000.0 / max(time_us, 0.5))))
    if 1 < sets <= 8 and wanted > 1:
        wanted = min(MAX_LAUNCHES // sets * sets, math.ceil(wanted / sets) * sets)
    return wanted


def _captured(kernel: Kernel, sets: Sequence[Any], launches: int, stream: Any) -> Any:
    # Not torch.cuda.graph(): it collects garbage and empties the allocator each time, up to 0.1 s a graph.
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for number in range(launches):
                kernel(*sets[number % len(sets)])
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a broken capture cannot be ended cleanly; the cause matters
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
