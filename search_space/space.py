"""The fixed choices of each knob, and the legal configs among their combinations.

The product holds 20 million points for Hopper; nobody may walk it. What decides legality is settled first (the tile,
then the epilogue), always by `kernels.rules` itself on the cheapest config of a branch, so a branch that cannot fit is
cut once. Within a branch shared memory grows by one stage at a time, so the depths that fit are a prefix; the order in
which tiles are walked is always legal. Hence the legal configs are a short list of branches times plain factors:
counted without listing, drawn uniformly in microseconds, and yielded one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING

from kernels.arch import Arch, arch_named
from kernels.config import CONFIG_CLASSES, GemmConfig, Rasters
from kernels.resources import resources_of
from kernels.rules import config_violation, problem_violation, violation

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Mapping

    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

type Choice = int | str
type Choices = dict[str, tuple[Choice, ...]]

_EVERYWHERE: Choices = {
    "cta_group": (1, 2),
    "blk_n": tuple(range(16, 257, 16)),
    "blk_k": (32, 64, 128),
    "l2_group_size": (1, 2, 4, 8, 16, 32),
    "raster": Rasters,
    "epi_stages": (1, 2, 3, 4),
}
_CHOICES: dict[str, Choices] = {
    "sm_90a": {
        **_EVERYWHERE,
        "pipe_depth": tuple(range(2, 17)),
        "num_consumers": (1, 2, 3),
        "blk_m": (64, 128, 192),
        "epi_n": tuple(range(16, 129, 16)),
        "share": ("A", "B"),
    },
    "sm_100a": {
        **_EVERYWHERE,
        "pipe_depth": tuple(range(2, 9)),
        "num_consumers": (1, 2),
        "blk_m": (64, 128),
        "epi_n": (16, 32, 64, 128),
        "acc_stages": (1, 2),
    },
}

ORDER_KNOBS = ("l2_group_size", "raster")  # order of the tiles only: every value is legal with every config
EPILOGUE_KNOBS = ("epi_n", "epi_stages")
SMALLEST_EPI_N = 16  # divides every blk_n, so it is legal wherever any epi_n is


class NoLegalConfigError(ValueError):
    """No config of the space can serve the problem on this device; the message is the rule that forbids it."""


def _name(arch: Arch | str) -> str:
    return arch_named(arch if isinstance(arch, str) else arch.name).name


def choices(arch: Arch | str) -> Choices:
    """The values of each knob that a study may take, in the order of the config class. Raises ConfigError."""
    name = _name(arch)
    return {knob: _CHOICES[name][knob] for knob in CONFIG_CLASSES[name].knobs()}


def size(arch: Arch | str) -> int:
    """Points of the full product, legal or not."""
    return prod(len(values) for values in choices(arch).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Legal configs that differ in pipeline depth alone.

    shallowest: the member with the fewest stages
    depths: stages that fit, ascending
    """

    shallowest: GemmConfig
    depths: tuple[int, ...]

    def at(self, depth: int) -> GemmConfig:
        """The member with this many stages."""
        return replace(self.shallowest, pipe_depth=depth)


def fitting_depths(shallowest: GemmConfig, depths: tuple[int, ...]) -> tuple[int, ...]:
    """The depths whose ring fits beside the epilogue: shared memory is linear in depth, no other rule reads it."""
    room = shallowest.arch.smem_bytes - resources_of(shallowest).smem_bytes
    deepest = shallowest.pipe_depth + room // shallowest.stage_bytes
    return tuple(depth for depth in depths if depth <= deepest)


def _tiles(name: str, values: Mapping[str, tuple[Choice, ...]]) -> Iterator[GemmConfig]:
    """One config for each legal setting of the knobs that shape a tile, with the least shared memory it can have."""
    apart = (*ORDER_KNOBS, *EPILOGUE_KNOBS, "pipe_depth")
    knobs = [knob for knob in values if knob not in apart]
    least: dict[str, Choice] = {knob: values[knob][0] for knob in ORDER_KNOBS}
    least |= {knob: min(map(int, values[knob])) for knob in ("pipe_depth", "epi_stages")} | {"epi_n": SMALLEST_EPI_N}
    for tile in product(*(values[knob] for knob in knobs)):
        probe = CONFIG_CLASSES[name].from_dict(least | dict(zip(knobs, tile, strict=True)))
        if config_violation(probe) is None:
            yield probe


def _branches(tiles: Iterable[GemmConfig], values: Mapping[str, tuple[Choice, ...]]) -> Iterator[Branch]:
    depths, stages = (tuple(sorted(map(int, values[knob]))) for knob in ("pipe_depth", "epi_stages"))
    for tile, epi_n in product(tiles, map(int, values["epi_n"])):
        for epi_stages in stages:
            shallowest = replace(tile, epi_n=epi_n, epi_stages=epi_stages)
            if config_violation(shallowest):
                break  # a wrong width stays wrong, and more stages need more shared memory
            yield Branch(shallowest=shallowest, depths=fitting_depths(shallowest, depths))


def branches_of(name: str, values: Mapping[str, tuple[Choice, ...]]) -> Iterator[Branch]:
    """The branches of a space with these choices of each knob, lazily, in a fixed order."""
    return _branches(_tiles(name, values), values)


@cache
def tiles(name: str) -> tuple[GemmConfig, ...]:
    """The legal tiles of an architecture, each with its cheapest pipeline and epilogue, in a fixed order."""
    return tuple(_tiles(name, choices(name)))


@cache
def branches(name: str) -> tuple[Branch, ...]:
    """All branches of an architecture's space, in a fixed order. About half a second the first time, kept after."""
    return tuple(_branches(tiles(name), choices(name)))


@cache
def _ends(name: str, cta_groups: tuple[int, ...]) -> tuple[tuple[Branch, ...], tuple[int, ...]]:
    """Branches of these cluster sizes, and the running count of their members."""
    kept = tuple(branch for branch in branches(name) if branch.shallowest.cta_group in cta_groups)
    return kept, tuple(accumulate(len(branch.depths) for branch in kept))


def _orders(values: Mapping[str, tuple[Choice, ...]]) -> list[tuple[int, str]]:
    return [(int(group), str(raster)) for group in values["l2_group_size"] for raster in values["raster"]]


def enumerate_configs(arch: Arch | str, values: Mapping[str, tuple[Choice, ...]] | None = None) -> Iterator[GemmConfig]:
    """Every config of the space that an SM of the architecture can run, lazily, in a fixed order.

    values: choices of each knob, when a smaller space than the architecture's own is wanted
    """
    name = _name(arch)
    orders = _orders(values or choices(name))
    for branch in branches(name) if values is None else branches_of(name, values):
        for depth in branch.depths:
            config = branch.at(depth)
            for group, raster in orders:
                yield replace(config, l2_group_size=group, raster=raster)


def servable(problem: GemmProblem, profile: DeviceProfile) -> tuple[int, ...]:
    """Cluster sizes that the device can launch for the problem. Raises NoLegalConfigError with the rule broken."""
    if reason := problem_violation(problem, profile.arch):
        raise NoLegalConfigError(reason)
    groups = tuple(int(group) for group in choices(profile.arch)["cta_group"] if profile.sm_count >= int(group))
    if not groups:
        raise NoLegalConfigError(f"{profile.name} reports {profile.sm_count} SMs: a cluster needs at least one")
    return groups


def legal_branches(problem: GemmProblem, profile: DeviceProfile) -> tuple[Branch, ...]:
    """Branches whose members can serve the problem on the device. Raises NoLegalConfigError."""
    return _ends(profile.arch.name, servable(problem, profile))[0]


def legal_configs(problem: GemmProblem, profile: DeviceProfile) -> Iterator[GemmConfig]:
    """Every config without a violation for this problem on this device, lazily, in a fixed order.

    Raises NoLegalConfigError, on the first step, when the rules forbid the problem itself.
    """
    orders = _orders(choices(profile.arch))
    for branch in legal_branches(problem, profile):
        for depth in branch.depths:
            config = branch.at(depth)
            for group, raster in orders:
                yield replace(config, l2_group_size=group, raster=raster)


def count_legal(problem: GemmProblem, profile: DeviceProfile) -> int:
    """How many configs `legal_configs` yields, without listing them. Zero when the problem cannot be served."""
    try:
        groups = servable(problem, profile)
    except NoLegalConfigError:
        return 0
    ends = _ends(profile.arch.name, groups)[1]
    return (ends[-1] if ends else 0) * len(_orders(choices(profile.arch)))


def random_legal(problem: GemmProblem, profile: DeviceProfile, rng: random.Random) -> GemmConfig:
    """A config drawn uniformly from the legal ones; equal generators give equal draws. Raises NoLegalConfigError."""
    kept, ends = _ends(profile.arch.name, servable(problem, profile))
    at = rng.randrange(ends[-1])
    which = bisect_right(ends, at)
    branch = kept[which]
    depth = branch.depths[at - ends[which]]  # a negative index counts back from the branch's last depth
    group, raster = rng.choice(_orders(choices(profile.arch)))
    return replace(branch.at(depth), l2_group_size=group, raster=raster)


def is_legal(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> bool:
    """Whether the config is of the device's architecture and breaks no rule for the problem."""
    return config.arch.name == profile.arch.name and violation(problem, config, profile.sm_count) is None
