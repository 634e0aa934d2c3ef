"""Which configs a landscape holds: a bounded part of a problem's space, fixed by arithmetic before anything is timed.

The whole space of a problem holds up to a million configs worth asking; a landscape holds some 400 of them, so that all
can be timed. It is a grid over tiles: every tile of a coarse choice of knobs that no check turns away, each with its
deepest pipeline, the usual epilogue and the usual order of tiles. While the grid holds fewer configs than wanted it is
refined, always in the same order (`REFINEMENTS`). From a grid that holds more, a seeded draw takes as many as wanted.

No estimate and no measurement decides what is drawn. The published winner of the problem and the configs that a study
would start with are in it always: what is known to be good must not be missing from what is called the best.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kernels.config import GemmConfig, Sm90GemmConfig
from search_space.askable import AskablePart, askable_among
from search_space.checks import rejection
from search_space.space import Branch, branches_of, choices
from search_space.walk import plain_order, walk_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

RULE = 1  # raised whenever another set of configs would come out
SIZE = 408
USUAL_GROUP = 8
USUAL_EPI_N = 64

COARSE: dict[str, dict[str, tuple[Any, ...]]] = {
    "sm_90a": {
        "blk_n": (8, 16, 32, 64, 96, 128, 192, 256),
        "blk_k": (64, 128),
        "share": ("B",),
        "split_k": (1, 2, 4, 8),
    },
    "sm_100a": {"blk_n": (16, 32, 64, 96, 128, 192, 256), "blk_k": (64, 128)},
}
FINE: dict[str, dict[str, tuple[Any, ...]]] = {
    "sm_90a": {
        "blk_n": (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 224, 256),
        "blk_k": (64, 128),
        "share": ("B",),
        "split_k": (1, 2, 3, 4, 6, 8, 12, 16),
    },
    "sm_100a": {"blk_n": tuple(range(16, 257, 16)), "blk_k": (32, 64, 128)},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """How finely a grid is laid.

    fine: the fine choices of the tile's knobs in place of the coarse ones
    depths: pipeline depths of each tile: 1 the deepest, 2 the middle one too, 3 the shallowest too
    orders: orders of tiles: 1 the usual one, 2 the one along N too
    epilogues: 1 the usual one, 2 another one too
    """

    fine: bool = False
    depths: int = 1
    orders: int = 1
    epilogues: int = 1

    def text(self) -> str:
        """For people."""
        return (
            f"{'fine' if self.fine else 'coarse'} tiles x {self.depths} depths x {self.orders} orders "
            f"x {self.epilogues} epilogues"
        )


# Each holds the one before it.
REFINEMENTS = (
    _Grid(),
    _Grid(depths=2),
    _Grid(depths=2, fine=True),
    _Grid(depths=3, fine=True),
    _Grid(depths=3, fine=True, epilogues=2),
    _Grid(depths=3, fine=True, epilogues=2, orders=2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedSpace:
    """The configs of one landscape.

    configs: in the order of their keys
    known: those that are in it whatever the grid says
    grid: how the grid was laid, in words
    grid_size: configs of the grid, before drawing
    """

    configs: tuple[GemmConfig, ...]
    known: tuple[GemmConfig, ...]
    grid: str
    grid_size: int

    @property
    def digest(self) -> str:
        """Of the keys of all configs: two spaces are the same when it is."""
        return hashlib.sha256("\n".join(config.key for config in self.configs).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """What the file of a landscape says of it."""
        return {
            "rule": RULE,
            "grid": self.grid,
            "grid_size": self.grid_size,
            "size": len(self.configs),
            "known": len(self.known),
            "digest": self.digest,
        }


def bounded_space(
    problem: GemmProblem, profile: DeviceProfile, known: Iterable[GemmConfig] = (), *, size: int = SIZE
) -> BoundedSpace:
    """The space of a problem: the same in every run.

    known: configs that must be in it; those that no study would ask are left out
    size: configs wanted; fewer only where the finest grid holds fewer
    """
    kept = {config.key: config for config in known if rejection(problem, config, profile) is None}
    grid, members = _grid_of(problem, profile, size)
    others = [config for config in members if config.key not in kept]
    drawn = random.Random(f"landscape:{problem.key}").sample(others, min(len(others), max(0, size - len(kept))))
    chosen = kept | {config.key: config for config in drawn}
    return BoundedSpace(
        configs=tuple(chosen[key] for key in sorted(chosen)),
        known=tuple(kept.values()),
        grid=grid.text(),
        grid_size=len(members),
    )


def measuring_order(space: BoundedSpace, problem: GemmProblem) -> list[GemmConfig]:
    """The known ones first, so that the others race against something good; then at random.

    What a recording that is cut short holds is then a fair sample.
    """
    others = [config for config in space.configs if config not in space.known]
    random.Random(f"order:{problem.key}").shuffle(others)
    return [*space.known, *others]


def _grid_of(problem: GemmProblem, profile: DeviceProfile, size: int) -> tuple[_Grid, list[GemmConfig]]:
    """The coarsest grid with enough configs, or the finest."""
    members: list[GemmConfig] = []
    for grid in REFINEMENTS:
        members = list(_members(problem, profile, grid))
        if len(members) >= size:
            return grid, members
    return REFINEMENTS[-1], members


@cache
def _branches(arch: str, fine: bool) -> tuple[Branch, ...]:
    return tuple(branches_of(arch, {**choices(arch), **(FINE if fine else COARSE)[arch]}))


def _members(problem: GemmProblem, profile: DeviceProfile, grid: _Grid) -> Iterator[GemmConfig]:
    arch = profile.arch.name
    tiles: dict[tuple[Any, ...], list[AskablePart]] = {}
    for part in askable_among(problem, profile, _branches(arch, grid.fine)).parts:
        tiles.setdefault(_tile(part.branch.shallowest), []).append(part)
    for parts in tiles.values():
        for part in _epilogues(parts)[: grid.epilogues]:
            orders = _orders(problem, part.branch.shallowest, profile)[: grid.orders]
            for depth in _depths(part.depths)[: grid.depths]:
                yield from (part.member(depth, order) for order in orders)


def _tile(config: GemmConfig) -> tuple[Any, ...]:
    apart = ("pipe_depth", "epi_n", "epi_stages", "l2_group_size", "raster")
    return tuple(getattr(config, knob) for knob in config.knobs() if knob not in apart)


def _epilogues(parts: list[AskablePart]) -> list[AskablePart]:
    """The usual one first: chunks of 64 columns or the next narrower, two buffers where its form can use them."""

    def unusual(part: AskablePart) -> tuple[int, int, int]:
        config = part.branch.shallowest
        wide = config.epi_n > USUAL_EPI_N
        return wide, abs(USUAL_EPI_N - config.epi_n), abs(_usual_stages(config) - config.epi_stages)

    return sorted(parts, key=unusual)


def _usual_stages(config: GemmConfig) -> int:
    if isinstance(config, Sm90GemmConfig) and (config.swap_ab or config.split_k > 1 or config.schedule == "pingpong"):
        return 1
    return 2


def _depths(depths: Sequence[int]) -> list[int]:
    """The deepest, the middle one, the shallowest; those that there are."""
    wanted = (depths[-1], depths[(len(depths) - 1) // 2], depths[0])
    return list(dict.fromkeys(wanted))


def _orders(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> list[tuple[str, int]]:
    walk = walk_of(problem, config, profile.sm_count)
    arch = config.arch.name
    along = (plain_order(arch, walk.tiles_m, walk.tiles_n, raster, USUAL_GROUP) for raster in ("m", "n"))
    return list(dict.fromkeys(along))
