"""The fixed choices of each knob, and the legal configs among their combinations.

The product holds billions of points for Hopper; nobody may walk it. A template has a few forms, each with its own
choices; what decides legality is settled first (the tile, then the epilogue), always by `kernels.rules` itself on the
cheapest config of a branch, so a branch that cannot fit is cut once. Within a branch shared memory grows by one stage
at a time, so the depths that fit are a prefix; the order in which tiles are walked is always legal. Hence the legal
configs are a short list of branches times plain factors: counted without listing, drawn uniformly in microseconds, and
yielded one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import ceil, prod
from typing import TYPE_CHECKING

from kernels.arch import Arch, arch_named
from kernels.config import CONFIG_CLASSES, GemmConfig, Loads, Rasters, Schedulers, Schedules, Sm90GemmConfig
from kernels.resources import resources_of
from kernels.rules import (
    config_violation,
    epilogue_violation,
    fit_violation,
    problem_violation,
    violation,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Mapping

    from kernels.devices import DeviceProfile
    from kernels.problem import GemmProblem

type Choice = int | str | bool
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
        # multiples of 8 are for swap_ab, where they are rows of a short A
        "blk_n": (*range(8, 65, 8), *range(80, 257, 16)),
        "epi_n": (8, *range(16, 129, 16)),
        "share": ("A", "B"),
        "schedule": Schedules,
        "swap_ab": (False, True),
        # above 8 a cluster fills most of a GPC by itself, so there is little between 12 and 16
        "split_k": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
        "load": Loads,
        "scheduler": Schedulers["sm_90a"],
    },
    "sm_100a": {
        **_EVERYWHERE,
        "pipe_depth": tuple(range(2, 9)),
        "num_consumers": (1, 2),
        "blk_m": (64, 128),
        "epi_n": (16, 32, 64, 128),
        "acc_stages": (1, 2),
        "swap_ab": (False, True),
        "split_k": (1, 2, 3, 4, 5, 6, 7, 8),
        "scheduler": Schedulers["sm_100a"],
    },
}

_HOPPER_FORMS: tuple[Choices, ...] = (
    {"swap_ab": (False,), "split_k": (1,), "schedule": ("cooperative",)},
    {
        "swap_ab": (False,),
        "split_k": (1,),
        "schedule": ("pingpong",),
        "num_consumers": (2,),
        "blk_m": (64, 128),
        "blk_k": (64, 128),
    },
    {
        "swap_ab": (False,),
        "split_k": (2, 3, 4, 5, 6, 7, 8, 12, 16),
        "schedule": ("cooperative",),
        "cta_group": (1,),
        "num_consumers": (1, 2),
        "blk_k": (64, 128),
        "epi_stages": (1, 2),
    },
    {
        "swap_ab": (True,),
        "schedule": ("cooperative",),
        "cta_group": (1,),
        "num_consumers": (1, 2),
        "blk_m": (64, 128),
        "blk_k": (64, 128),
        "epi_stages": (1,),
    },
)
# What shares out the last waves of tiles. Right on an H200 and slower than static tiles on all of eight shapes
# (docs/decisions/0013), so it is not searched. `verify` takes it.
STREAM_K_SEARCHED = False
STREAM_K_FORMS: tuple[Choices, ...] = (
    {
        "swap_ab": (False,),
        "split_k": (1,),
        "schedule": ("cooperative",),
        "num_consumers": (1, 2),
        "blk_k": (64, 128),
        "epi_stages": (1, 2),
        "load": ("tma",),
        "scheduler": ("stream_k",),
    },
)
# Only TMA multicasts to a pair of CTAs.
_ALONE: Choices = {"cta_group": (1,), "share": ("B",), "blk_k": (64, 128), "epi_stages": (1, 2)}

# The forms of a template: parts of the product without overlap that are searched. What lies between them is legal too,
# but combines things that leave each other no use, such as a pair that shares a short operand.
_FORMS: dict[str, tuple[Choices, ...]] = {
    "sm_90a": (
        *(form | {"load": ("tma",), "scheduler": ("static",)} for form in _HOPPER_FORMS),
        *(_ALONE | form | {"load": ("cp_async",), "scheduler": ("static",)} for form in _HOPPER_FORMS),
        *(STREAM_K_FORMS if STREAM_K_SEARCHED else ()),
    ),
    "sm_100a": (
        {"swap_ab": (False,), "split_k": (1,)},
        # few tiles: one for each cluster, so nothing runs beside an epilogue
        {
            "swap_ab": (False,),
            "split_k": (2, 3, 4, 5, 6, 7, 8),
            "scheduler": ("static",),
            "cta_group": (1,),
            "num_consumers": (1,),
            "blk_k": (64, 128),
            "epi_stages": (1, 2),
            "acc_stages": (1,),
        },
        {
            "swap_ab": (True,),
            "scheduler": ("static",),
            "cta_group": (1,),
            "num_consumers": (1, 2),
            "blk_k": (64, 128),
            "epi_stages": (1, 2),
            "acc_stages": (1,),
        },
    ),
}

ORDER_KNOBS = ("l2_group_size", "raster")  # order of the tiles only: every value is legal with every config
EPILOGUE_KNOBS = ("epi_n", "epi_stages")
SMALLEST_EPI_N = (8, 16)  # one of them divides every blk_n, so it is legal wherever any epi_n is


class NoLegalConfigError(ValueError):
    """No config of the space can serve the problem on this device; the message is the rule that forbids it."""


def _name(arch: Arch | str) -> str:
    return arch_named(arch if isinstance(arch, str) else arch.name).name


def choices(arch: Arch | str) -> Choices:
    """The values of each knob that a study may take, in the order of the config class. Raises ConfigError."""
    name = _name(arch)
    return {knob: _CHOICES[name][knob] for knob in CONFIG_CLASSES[name].knobs()}


def forms(name: str, values: Mapping[str, tuple[Choice, ...]]) -> Iterator[Choices]:
    """The choices of each form of an architecture's template among these, where each knob has one left."""
    for form in _FORMS[name]:
        kept = {knob: tuple(v for v in each if v in form.get(knob, each)) for knob, each in values.items()}
        if all(kept.values()):
            yield kept


def is_searched(config: GemmConfig) -> bool:
    """Whether a config belongs to a form."""
    return any(
        all(getattr(config, knob) in allowed for knob, allowed in form.items()) for form in _FORMS[config.arch.name]
    )


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
    least |= {knob: min(map(int, values[knob])) for knob in ("pipe_depth", "epi_stages")}
    for tile in product(*(values[knob] for knob in knobs)):
        setting = least | dict(zip(knobs, tile, strict=True))
        probes = (CONFIG_CLASSES[name].from_dict(setting | {"epi_n": width}) for width in SMALLEST_EPI_N)
        if (legal := next((probe for probe in probes if config_violation(probe) is None), None)) is not None:
            yield legal


def _branches(tiles: Iterable[GemmConfig], values: Mapping[str, tuple[Choice, ...]]) -> Iterator[Branch]:
    depths, stages = (tuple(sorted(map(int, values[knob]))) for knob in ("pipe_depth", "epi_stages"))
    for tile, epi_n in product(tiles, map(int, values["epi_n"])):
        if tile.epilogue_cols % epi_n:
            continue  # as the rules say, at less cost
        for epi_stages in stages:
            shallowest = replace(tile, epi_n=epi_n, epi_stages=epi_stages)
            if epilogue_violation(shallowest):
                break  # a wrong width stays wrong, and more stages need more shared memory
            yield Branch(shallowest=shallowest, depths=fitting_depths(shallowest, depths))


def branches_of(name: str, values: Mapping[str, tuple[Choice, ...]]) -> Iterator[Branch]:
    """The branches of a space with these choices of each knob, lazily, in a fixed order."""
    for form in forms(name, values):
        yield from _branches(_tiles(name, form), form)


@cache
def tiles(name: str) -> tuple[GemmConfig, ...]:
    """The legal tiles of an architecture, each with its cheapest pipeline and epilogue, in a fixed order."""
    return tuple(tile for form in forms(name, choices(name)) for tile in _tiles(name, form))


@cache
def branches(name: str) -> tuple[Branch, ...]:
    """All branches of an architecture's space, in a fixed order. About a second the first time, kept after."""
    return tuple(branches_of(name, choices(name)))


def _orders(values: Mapping[str, tuple[Choice, ...]]) -> list[tuple[int, str]]:
    return [(int(group), str(raster)) for group in values["l2_group_size"] for raster in values["raster"]]


def enumerate_configs(arch: Arch | str, values: Mapping[str, tuple[Choice, ...]] | None = None) -> Iterator[GemmConfig]:
    """Every config of the searched forms that an SM of the architecture can run, lazily, in a fixed order.

    values: choices of each knob, when a smaller space than the architecture's own is wanted
    """
    name = _name(arch)
    orders = _orders(values or choices(name))
    for branch in branches(name) if values is None else branches_of(name, values):
        for depth in branch.depths:
            config = branch.at(depth)
            for group, raster in orders:
                yield replace(config, l2_group_size=group, raster=raster)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Legal:
    """Branches whose members can serve a problem on a device, and the running count of the members."""

    branches: tuple[Branch, ...]
    ends: tuple[int, ...]

    @property
    def members(self) -> int:
        return self.ends[-1] if self.ends else 0


_LEGAL: dict[tuple[object, ...], _Legal] = {}


def _legal(problem: GemmProblem, profile: DeviceProfile) -> _Legal:
    """Raises NoLegalConfigError with the rule broken. Kept for problems that the rules see alike."""
    if reason := problem_violation(problem, profile.arch):
        raise NoLegalConfigError(reason)
    if profile.sm_count < 1:
        raise NoLegalConfigError(f"{profile.name} reports {profile.sm_count} SMs: a cluster needs at least one")
    name, values = profile.arch.name, choices(profile.arch)
    largest = max(int(group) for group in values["cta_group"]) * max(int(s) for s in values.get("split_k", (1,)))
    blocks = tuple(min(largest, ceil(problem.k / int(blk_k))) for blk_k in values["blk_k"])
    key = (name, min(profile.sm_count, largest), blocks, problem.k % 8 == 0)
    if key not in _LEGAL:
        kept = tuple(
            branch
            for branch in branches(name)
            if branch.shallowest.cluster_size <= profile.sm_count
            and fit_violation(problem, branch.shallowest) is None
            and loads_plainly(problem, branch.shallowest)
        )
        _LEGAL[key] = _Legal(branches=kept, ends=tuple(accumulate(len(branch.depths) for branch in kept)))
    return _LEGAL[key]


def loads_plainly(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether the config loads by TMA wherever TMA can: what cp_async does more it does for rows that TMA cannot."""
    return not isinstance(config, Sm90GemmConfig) or problem.k % 8 != 0 or config.load == "tma"


def legal_branches(problem: GemmProblem, profile: DeviceProfile) -> tuple[Branch, ...]:
    """Branches whose members can serve the problem on the device. Raises NoLegalConfigError."""
    return _legal(problem, profile).branches


def legal_configs(problem: GemmProblem, profile: DeviceProfile) -> Iterator[GemmConfig]:
    """Every config of the searched forms without a violation for this problem on this device, in a fixed order.

    Those that load plainly, that is.
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
        return _legal(problem, profile).members * len(_orders(choices(profile.arch)))
    except NoLegalConfigError:
        return 0


def random_legal(problem: GemmProblem, profile: DeviceProfile, rng: random.Random) -> GemmConfig:
    """A config drawn uniformly from the legal ones; equal generators give equal draws. Raises NoLegalConfigError."""
    legal = _legal(problem, profile)
    at = rng.randrange(legal.members)
    which = bisect_right(legal.ends, at)
    branch = legal.branches[which]
    depth = branch.depths[at - legal.ends[which]]  # a negative index counts back from the branch's last depth
    group, raster = rng.choice(_orders(choices(profile.arch)))
    return replace(branch.at(depth), l2_group_size=group, raster=raster)


def is_legal(problem: GemmProblem, config: GemmConfig, profile: DeviceProfile) -> bool:
    """Whether the config is of the device's architecture and breaks no rule for the problem."""
    return config.arch.name == profile.arch.name and violation(problem, config, profile.sm_count) is None
