"""cp_async: the producer of a generated kernel is run, lane by lane, on numbers; what it hands over must be the tile.

The reader of the structural rules follows the control flow; here the four kinds of instructions that touch data are
carried out as well. Copies arrive as late as `cp.async.wait_group` lets them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernels.config import Sm90GemmConfig
from kernels.cuda_source import Kernel, Statement, read_kernel
from kernels.cuda_trace import Walk, _Thread
from kernels.gemm_sm90_plan import Plan
from kernels.lowering import lower
from kernels.problem import GemmProblem
from kernels.resources import HEADER_BYTES, resources_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("tvm")

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Place:
    """An operand in global memory.

    base: address of its first element, not aligned
    stride: elements from row to row
    """

    base: int
    stride: int


@dataclass
class Machine:
    """Memory of one CTA and of the device, and what one warp has handed over."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    shared: np.ndarray[Any, np.dtype[np.uint8]]
    barrier: threading.Barrier
    handed_over: list[np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=list)


class Lane(_Thread):
    """A thread whose copies, moves and barriers are carried out."""

    machine: Machine

    def begin(self, machine: Machine) -> None:
        self.machine = machine
        self.groups: list[list[Callable[[], None]]] = []
        self.open: list[Callable[[], None]] = []

    def call(self, statement: Statement) -> None:
        helper = statement.helper
        assert helper is not None
        named = dict(zip(helper.parameters, statement.arguments, strict=False))
        value = lambda name: self.kernel.scope.expression(named[name]).evaluate(self)  # noqa: E731
        if helper.kind == "row_copy":
            if value("pred"):
                target, source, size = value("dst_mem"), value("src_mem"), value("src_size")
                assert source % 16 == 0
                assert target % 16 == 0
                self.open.append(lambda: self.arrive(target, source, size))
        elif helper.kind == "copy_commit":
            self.groups.append(self.open)
            self.open = []
        elif helper.kind == "copy_wait":
            while len(self.groups) > helper.immediate:
                for copy in self.groups.pop(0):
                    copy()
        elif helper.kind == "warp_barrier":
            self.machine.barrier.wait()
        elif helper.kind == "shared_read":
            words = self.machine.shared[value("addr") : value("addr") + 16].view(np.uint32)
            for number, word in enumerate(words):
                self.variables[self.element_of(named[f"d{number}"])] = int(word)
        elif helper.kind == "shared_write":
            words = np.array([value(f"value{number}") for number in range(4)], np.uint32)
            self.machine.shared[value("addr") : value("addr") + 16] = words.view(np.uint8)
        elif helper.kind == "shift":
            both = value("b") << 32 | value("a")
            self.variables[self.element_of(named["d"])] = both >> (value("c") & 31) & WORD
        elif helper.kind == "arrive":
            self.machine.handed_over.append(self.machine.shared.copy())

    def arrive(self, target: int, source: int, size: int) -> None:
        """One copy; what lies behind its size becomes zero."""
        piece = np.zeros(16, np.uint8)
        piece[:size] = self.machine.memory[source : source + size]
        self.machine.shared[target : target + 16] = piece


def run_warp(kernel: Kernel, warp: int, machine: Machine, walk: Walk, parameters: dict[str, int]) -> None:
    """The producer's warp from the kernel's first statement to its last, its lanes side by side."""
    failed: list[BaseException] = []

    def run(index: int) -> None:
        try:
            lane = Lane(kernel, index, 0, 1, walk, dict(parameters))
            lane.begin(machine)
            lane.run(kernel.body)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # handed to the test
            failed.append(error)
            machine.barrier.abort()

    lanes = [threading.Thread(target=run, args=(warp * 32 + lane,)) for lane in range(32)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    if failed:
        raise failed[0]


def unswizzled(shared: np.ndarray[Any, Any], start: int, tile_rows: int, row: int, blk_k: int) -> np.ndarray[Any, Any]:
    """One row of a stage as wgmma reads it."""
    pieces = []
    for slab in range(blk_k // 64):
        first = start + slab * tile_rows * 128 + row * 128
        pieces += [shared[first + ((piece ^ row & 7) << 4) :][:16] for piece in range(8)]
    return np.concatenate(pieces).view(np.uint16)


CASES = (
    # odd K, so rows start at every alignment; four stages
    (
        GemmProblem(m=70, n=18, k=137),
        Sm90GemmConfig(num_consumers=1, blk_n=32, epi_n=16, epi_stages=1, load="cp_async"),
        0,
        (3,),
    ),
    # two slabs a stage, rows 8 bytes apart in alignment, three stages
    (
        GemmProblem(m=20, n=100, k=260),
        Sm90GemmConfig(
            num_consumers=1, blk_n=24, blk_k=128, epi_n=8, epi_stages=1, swap_ab=True, load="cp_async", pipe_depth=3
        ),
        0,
        (1,),
    ),
    # aligned rows that start off by 6 bytes, farther apart than they are long; two stages, none under way
    (
        GemmProblem(m=5, n=64, k=64),
        Sm90GemmConfig(
            num_consumers=1, blk_n=8, epi_n=8, epi_stages=1, swap_ab=True, load="cp_async", pipe_depth=2
        ),
        24,
        (0, 2),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "config", "apart", "warps"), CASES, ids=lambda value: getattr(value, "shape", None)
)
def test_stage_holds_the_tile_whatever_the_alignment_of_rows(
    problem: GemmProblem, config: Sm90GemmConfig, apart: int, warps: tuple[int, ...]
) -> None:
    """Every element of every stage of every tile, with zeros behind the end of K."""
    lowered = lower(problem, config, 1)  # one SM: the CTA walks all tiles
    kernel = read_kernel(lowered.source, lowered.launch.symbol)
    a, b = Place(base=0x106, stride=problem.k + apart), Place(base=0x8000A, stride=problem.k + apart)
    memory = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    parameters = {"A_ptr": a.base, "B_ptr": b.base, "D_ptr": 0}
    parameters |= {"a_stride": a.stride, "b_stride": b.stride, "d_stride": problem.n}
    tiles_m, tiles_n = config.cluster_tiles(problem)
    walk = Walk(tiles=tiles_m * tiles_n, k_blocks=config.k_blocks(problem), lap=1, kept=1 << 20)
    plan = Plan(problem=problem, config=config, sm_count=1)
    wide, narrow = (plan.b, plan.a) if config.swap_ab else (plan.a, plan.b)
    narrow_ring = HEADER_BYTES + config.pipe_depth * wide.tile_rows * config.blk_k * 2
    starts = {wide.name: (HEADER_BYTES, wide), narrow.name: (narrow_ring, narrow)}
    for warp in warps:
        shared = np.random.default_rng(2).integers(0, 256, resources_of(config).smem_bytes, np.uint8)
        machine = Machine(memory=memory, shared=shared, barrier=threading.Barrier(32))
        run_warp(kernel, 4 + warp, machine, walk, parameters)
        assert len(machine.handed_over) == walk.tiles * walk.k_blocks
        for number, shown in enumerate(machine.handed_over):
            tile, block = divmod(number, walk.k_blocks)
            corner = {"A": tile % tiles_m * config.cta_rows, "B": tile // tiles_m * config.cta_cols}  # one group
            for name, place in (("A", a), ("B", b)):
                ring, operand = starts[name]
                start = ring + number % config.pipe_depth * operand.tile_rows * config.blk_k * 2
                for row in range(operand.tile_rows):
                    whole = corner[name] + row
                    if row % 16 // 4 != warp or whole >= operand.rows:
                        continue
                    first = place.base + 2 * (whole * place.stride + block * config.blk_k)
                    expected = np.zeros(config.blk_k, np.uint16)
                    count = min(config.blk_k, problem.k - block * config.blk_k)
                    expected[:count] = memory[first : first + 2 * count].view(np.uint16)
                    found = unswizzled(shown, start, operand.tile_rows, row, config.blk_k)
                    assert (found == expected).all(), (name, tile, block, row)
