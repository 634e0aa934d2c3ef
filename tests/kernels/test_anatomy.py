"""What `explain` says a kernel is made of, held against the rings, addresses and sizes of the real one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kernels.anatomy import anatomy_of
from kernels.config import GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from kernels.cuda_source import read_kernel
from kernels.cuda_trace import traces
from kernels.devices import profile_named
from kernels.lowering import lower
from kernels.problem import GemmProblem
from kernels.resources import resources_of
from kernels.structure import _parameters, _walk
from kernels.structure_counts import ring_counts
from search_space.space import random_legal
from search_space.starting import PRESETS

SQUARE = GemmProblem(m=4096, n=4096, k=4096)
ODD = GemmProblem(m=4096, n=4096, k=4095)


def _configs(device: str, count: int) -> list[GemmConfig]:
    """Some of them with cp_async, where the template has it."""
    rng, profile = random.Random(11), profile_named(device)
    problems = (SQUARE, SQUARE, ODD) if profile.arch.name == "sm_90a" else (SQUARE,)
    return [random_legal(problems[number % len(problems)], profile, rng) for number in range(count)]


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_rings_are_those_that_the_structural_rules_expect(device: str) -> None:
    """Which in turn are held against the initialisations in every generated source."""
    for config in _configs(device, 200):
        barriers = anatomy_of(config).barriers
        rings = [(ring.name, ring.slots, ring.arrivals) for ring in barriers if ring.kind == "mbarrier"]
        assert tuple(rings) == ring_counts(config), config.key


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_regions_cover_the_shared_memory_without_gap_or_overlap(device: str) -> None:
    """From the header to the last byte that the kernel asks for."""
    for config in _configs(device, 200):
        at = 0
        for region in anatomy_of(config).shared_memory:
            assert region.start == at, (region, config.key)
            at += region.size_bytes
        assert at == resources_of(config).smem_bytes, config.key


@pytest.mark.parametrize(
    "config",
    [
        Sm100GemmConfig(num_consumers=2, blk_n=64, epi_n=32, epi_stages=2, acc_stages=2, pipe_depth=3),
        Sm100GemmConfig(cta_group=1, num_consumers=1, blk_m=64, blk_n=48, blk_k=32, epi_n=16, pipe_depth=3),
        Sm100GemmConfig(cta_group=1, num_consumers=1, swap_ab=True, split_k=2, blk_n=32, epi_n=16, pipe_depth=3),
        Sm100GemmConfig(scheduler="clc", num_consumers=1, blk_n=64, epi_n=32, pipe_depth=3),
        Sm90GemmConfig(cta_group=2, num_consumers=2, blk_n=64, epi_n=32, pipe_depth=3),
        Sm90GemmConfig(swap_ab=True, num_consumers=1, blk_n=16, epi_n=8, epi_stages=1, blk_k=128, pipe_depth=3),
    ],
    ids=lambda config: config.key,
)
def test_rings_of_operands_lie_where_the_kernel_loads_them(config: GemmConfig) -> None:
    """Read from the generated source: every load lands in the region of its operand, and fills both to the end."""
    problem = GemmProblem(m=512, n=512, k=1024)
    lowered = lower(problem, config, 8)
    kernel = read_kernel(lowered.source, lowered.launch.symbol)
    boxes = dict(zip(kernel.parameters, lowered.launch.parameters, strict=False))
    followed = traces(
        kernel,
        threads=lowered.launch.threads,
        ranks=config.cluster_size,
        walk=_walk(problem, config),
        parameters=_parameters(lowered, problem, kernel),
    )
    regions = {region.name: region for region in anatomy_of(config).shared_memory}
    filled: Counter[str] = Counter()
    seen = set()
    for trace in followed:
        for event in trace.events:
            if event.kind != "tma_load" or trace.rank:
                continue
            plan = boxes[event.values["tmap"]]
            low = int(event.values["dst_mem"])
            high = low + 2 * plan.box[0] * plan.box[1]  # type: ignore[union-attr]
            region = regions[f"{plan.operand} ring"]
            assert region.start <= low < high <= region.start + region.size_bytes
            if low not in seen:
                seen.add(low)
                filled[plan.operand] += high - low
    share = 2 if isinstance(config, Sm90GemmConfig) and config.cta_group == 2 else 1  # half of B comes from the peer
    assert filled["A"] == regions["A ring"].size_bytes
    assert filled["B"] == regions["B ring"].size_bytes // share


def test_accumulator_columns_are_disjoint_and_fill_tensor_memory() -> None:
    """All 512 columns are allocated; what no accumulator uses is said to be unused."""
    for config in _configs("b200", 100):
        at = 0
        for columns in anatomy_of(config).tensor_memory:
            assert columns.start == at
            at += columns.count
        assert at == 512


def test_roles_wait_and_signal_on_barriers_that_exist() -> None:
    """And every mbarrier has a role on each side."""
    for config in (*PRESETS.values(), *_configs("h200", 100), *_configs("b200", 50)):
        parts = anatomy_of(config)
        names = {barrier.name for barrier in parts.barriers}
        waits = {name for role in parts.roles for name in role.waits}
        signals = {name for role in parts.roles for name in role.signals}
        assert waits | signals <= names, config.key
        rings = {barrier.name for barrier in parts.barriers if barrier.kind == "mbarrier"}
        assert rings <= waits, config.key
        assert rings <= signals, config.key
