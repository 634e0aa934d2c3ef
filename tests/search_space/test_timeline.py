"""The pipeline as it is drawn: what waits for what, and that it agrees with the model it is drawn from."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import pytest

from kernels.config import Sm90GemmConfig, Sm100GemmConfig
from kernels.devices import default_profile, profile_named
from kernels.problem import GemmProblem
from search_space.model import predict
from search_space.space import random_legal
from search_space.starting import PRESETS, preset
from search_space.timeline import Span, Timeline, timeline
from search_space.walk import walk_of

SQUARE = GemmProblem(m=4096, n=4096, k=4096)
PAIR = Sm100GemmConfig(num_consumers=2, blk_n=64, epi_n=32, epi_stages=2)


def _of(line: Timeline, kind: str, lane: str = "") -> list[Span]:
    return [span for span in line.spans if span.kind == kind and span.lane.startswith(lane)]


@pytest.mark.parametrize("name", PRESETS)
def test_spans_of_one_lane_follow_one_another(name: str) -> None:
    """No slot is filled while it is read, no accumulator overwritten while it is drained."""
    line = timeline(SQUARE, preset(name), default_profile(preset(name).arch))
    lanes = defaultdict(list)
    for span in line.spans:
        lanes[span.lane].append(span)
    for spans in lanes.values():
        ordered = sorted(spans, key=lambda span: span.start_us)
        for one, two in itertools.pairwise(ordered):
            assert one.end_us <= two.start_us + 1e-9, (one, two)
    assert len([lane for lane in line.lanes if lane.startswith("slot")]) == preset(name).pipe_depth


def test_lanes_are_in_the_order_of_their_numbers() -> None:
    """Slot 10 comes after slot 9, not after slot 1."""
    lanes = timeline(SQUARE, Sm90GemmConfig(pipe_depth=12, num_consumers=1, blk_n=64), profile_named("h200")).lanes
    assert lanes == (*(f"slot {number}" for number in range(12)), "MMA", "accumulator 0", "writeback")


def test_a_second_accumulator_slot_keeps_the_tensor_core_busy_across_tiles() -> None:
    """With one slot the next tile waits for the epilogue, with two it starts at once."""
    gaps = []
    for stages in (1, 2):
        line = timeline(SQUARE, replace(PAIR, acc_stages=stages), profile_named("b200"))
        multiplied = _of(line, "multiply", "MMA")
        first_of_next = next(span for span in multiplied if span.tile == 1)
        last = [span for span in multiplied if span.tile == 0][-1]
        gaps.append(first_of_next.start_us - last.end_us)
    epilogue_us = line.stage.epilogue_us
    assert gaps[0] == pytest.approx(epilogue_us)
    assert gaps[1] < 0.1 * epilogue_us


def test_hopper_consumers_hold_a_stage_until_the_next_one_is_issued() -> None:
    """So one slot of the ring is never under way; on Blackwell a commit frees it at once."""
    shallow = Sm90GemmConfig(num_consumers=2, pipe_depth=2)
    assert _of(timeline(SQUARE, shallow, profile_named("h200")), "held")
    assert not _of(timeline(SQUARE, preset("step7"), profile_named("b200")), "held")


def test_long_k_is_shortened_and_said_to_be() -> None:
    """A picture of 2048 blocks of K would show nothing."""
    line = timeline(GemmProblem(m=512, n=512, k=131072), PAIR, profile_named("b200"))
    assert (line.k_blocks, line.whole_k_blocks) == (24, 2048)


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_rate_of_the_picture_is_that_of_the_model(device: str) -> None:
    """Over random configs, a tile in the picture takes within a third of what the model says of as many blocks."""
    rng, profile = random.Random(3), profile_named(device)
    for _ in range(60):
        config = random_legal(SQUARE, profile, rng)
        line = timeline(SQUARE, config, profile)
        parts = config.cluster_size // config.cta_group
        short = GemmProblem(m=SQUARE.m, n=SQUARE.n, k=line.k_blocks * config.blk_k * parts)
        if walk_of(short, config, profile.sm_count).waves < 2 or line.tiles < 2:
            continue
        expected = predict(short, config, profile)
        a_tile = (expected.time_us - expected.overhead_us) / expected.waves
        shown = (line.end_us - 2.0) / line.tiles
        assert shown == pytest.approx(a_tile, rel=0.35), config.key
