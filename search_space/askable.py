"""The configs that no check turns away, as a sequence that holds none of them.

A brute-force search walks it, a random one draws from it: `rng.choice(askable_configs(problem, profile))` is uniform
and takes microseconds. Building it checks each branch of the space once, not each config.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

from kernels.rules import fit_violation
from search_space.checks import depth_rejection, memory_rejection, tile_rejection
from search_space.space import Branch, NoLegalConfigError, legal_branches
from search_space.walk import Walk, plain_orders, walk_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernels.config import GemmConfig
    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class AskablePart:
    """Configs of one branch that are worth asking.

    branch: the branch
    depths: its depths that are
    orders: (raster, l2_group_size) of the distinct orders of its tiles
    """

    branch: Branch
    depths: tuple[int, ...]
    orders: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.depths) * len(self.orders)

    def at(self, index: int) -> GemmConfig:
        depth, order = divmod(index, len(self.orders))
        return self.member(self.depths[depth], self.orders[order])

    def member(self, depth: int, order: tuple[str, int]) -> GemmConfig:
        """The config with this depth and this order of tiles."""
        raster, group = order
        moved = {"pipe_depth": depth, "raster": raster, "l2_group_size": group}
        return self.branch.shallowest.with_choices(moved)


class AskableConfigs(Sequence["GemmConfig"]):
    """Every config worth asking for a problem on a device, in a fixed order. Build it with `askable_configs`."""

    def __init__(self, parts: Sequence[AskablePart]) -> None:
        self.parts = tuple(parts)
        self._ends = tuple(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> GemmConfig: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[GemmConfig]: ...
    def __getitem__(self, index: int | slice) -> GemmConfig | Sequence[GemmConfig]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"config {index} of {len(self)}")
        which = bisect_right(self._ends, at)
        part = self.parts[which]
        return part.at(at - self._ends[which] + len(part))

    def values(self, index: int, names: Sequence[str]) -> list[Any]:
        """Values of these knobs of the config at a place, without making the config, which takes 20 times as long."""
        which = bisect_right(self._ends, index)
        part = self.parts[which]
        depth, order = divmod(index - self._ends[which] + len(part), len(part.orders))
        raster, group = part.orders[order]
        moved = {"pipe_depth": part.depths[depth], "raster": raster, "l2_group_size": group}
        return [moved[name] if name in moved else getattr(part.branch.shallowest, name) for name in names]


def askable_configs(problem: GemmProblem, profile: DeviceProfile) -> AskableConfigs:
    """All configs of the searched forms whose `rejection` is None; empty when the problem cannot be served at all."""
    if memory_rejection(problem, profile):
        return AskableConfigs([])
    try:
        return askable_among(problem, profile, legal_branches(problem, profile))
    except NoLegalConfigError:
        return AskableConfigs([])


def askable_among(problem: GemmProblem, profile: DeviceProfile, branches: Iterable[Branch]) -> AskableConfigs:
    """The members of branches that are legal on the device, in every order of tiles, that no check turns away."""
    parts = []
    for branch in branches:
        if fit_violation(problem, branch.shallowest):
            continue
        walk = walk_of(problem, branch.shallowest, profile.sm_count)
        if tile_rejection(problem, branch.shallowest, profile, walk):
            continue
        if depths := _askable_depths(branch, walk):
            orders = plain_orders(profile.arch.name, walk.tiles_m, walk.tiles_n)
            parts.append(AskablePart(branch=branch, depths=depths, orders=orders))
    return AskableConfigs(parts)


def _askable_depths(branch: Branch, walk: Walk) -> tuple[int, ...]:
    """Checks turn away the shallowest (too little in flight) and the deepest (never filled), so an interval is left."""
    depths = branch.depths
    first, last = 0, len(depths)
    while first < last and depth_rejection(branch.shallowest, depths[first], walk):
        first += 1
    while last > first and depth_rejection(branch.shallowest, depths[last - 1], walk):
        last -= 1
    return depths[first:last]
